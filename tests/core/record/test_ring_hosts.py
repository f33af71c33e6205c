"""Which host every rank of a run is on."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from plait.core.record.ring import Header
from plait.core.record.ring_progress import host_names, read_headers
from plait.core.record.ring_writer import RingWriter, this_process


def header(rank: int, local: int, host: str) -> Header:
    return replace(this_process(rank=rank, world=8, capacity=16), local_rank=local, host=host)


def test_hosts_are_called_by_their_machines_names() -> None:
    headers = {0: header(0, 0, "b"), 1: header(1, 1, "b"), 2: header(2, 0, "a")}
    assert host_names(headers) == {0: "b", 1: "b", 2: "a"}
    assert host_names({}) == {}


def test_hosts_of_one_name_are_numbered_by_their_first_ranks() -> None:
    headers = {3: header(3, 1, "x"), 0: header(0, 0, "x"), 1: header(1, 1, "x"), 2: header(2, 0, "x")}
    assert host_names(headers) == {0: "host 0", 1: "host 0", 2: "host 1", 3: "host 1"}
    two = {0: header(0, 0, "x"), 1: header(1, 0, "x"), 2: header(2, 0, "y")}
    assert host_names(two) == {0: "host 0", 1: "host 1", 2: "host 2"}


def test_headers_of_a_folder(tmp_path: Path) -> None:
    for rank in (1, 0):
        RingWriter(tmp_path / f"rank-{rank:05}.ring", this_process(rank=rank, world=2, capacity=16))
    (tmp_path / "rank-00002.ring").write_bytes(b"nothing")
    os.mkfifo(tmp_path / "rank-00003.ring")
    (tmp_path / "other.ring").write_bytes(b"nothing")
    headers, problems = read_headers(tmp_path)
    assert {rank: one.rank for rank, one in headers.items()} == {0: 0, 1: 1}
    assert sorted(problems) == [str(tmp_path / f"rank-0000{rank}.ring") for rank in (2, 3)]
    assert all(text.startswith("it cannot be read as a ring: ") for text in problems.values())
    (tmp_path / "rank-00004.ring").mkdir()
    (tmp_path / "rank-00005.ring").symlink_to("nowhere")
    _, problems = read_headers(tmp_path)
    assert "No such file" in problems[str(tmp_path / "rank-00005.ring")]
    assert str(tmp_path / "rank-00004.ring") in problems
