"""What ranks answer when they are asked why a run hangs, as far as it can be read."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from plait.core.runs.evidence import FILE, Thread
from plait.core.runs.rank_reports import (
    RankReport,
    clear_reports,
    forget_hang,
    read_reports,
    request_reports,
    write_report,
)

OWN = RankReport(rank=1, token=7, wall=5, thread=next(iter(Thread.__args__)), doing="step 2", step=1)  # type: ignore[attr-defined]


def test_an_answer_comes_back(tmp_path: Path) -> None:
    request_reports(tmp_path)
    write_report(tmp_path, OWN)
    assert read_reports(tmp_path) == {1: OWN}


@pytest.mark.parametrize(
    "bad",
    [b"", b"null", b"[]", pytest.param(b"[" * 60_000, id="deep"), b"\xff\xfe",
     json.dumps(asdict(OWN) | {"wall": float("inf")}).encode(),
     json.dumps(asdict(OWN) | {"stack": 5}).encode(), json.dumps(asdict(OWN) | {"address": [1]}).encode()],
)  # fmt: skip
def test_one_that_is_damaged_counts_as_none(tmp_path: Path, bad: bytes) -> None:
    request_reports(tmp_path)
    write_report(tmp_path, OWN)
    (tmp_path / "hang" / "rank-00000.json").write_bytes(bad)
    os.mkfifo(tmp_path / "hang" / "rank-00002.json")
    assert read_reports(tmp_path) == {1: OWN}


@pytest.mark.parametrize("damaged", [0, 1])
def test_damaged_ones_hide_no_others(tmp_path: Path, damaged: int) -> None:
    """In whichever order a folder lists them."""
    request_reports(tmp_path)
    good = {rank: replace(OWN, rank=rank) for rank in range(8)}
    for part in good.values():
        write_report(tmp_path, part)
    for rank in range(damaged, 8, 2):
        (tmp_path / "hang" / f"rank-{rank:05d}.json").write_bytes(b"{")
    assert read_reports(tmp_path) == {rank: part for rank, part in good.items() if rank % 2 != damaged}


def test_what_an_earlier_start_has_left_is_removed(tmp_path: Path) -> None:
    forget_hang(tmp_path)
    request_reports(tmp_path)
    write_report(tmp_path, OWN)
    (tmp_path / FILE).write_text("{}")
    clear_reports(tmp_path)
    assert read_reports(tmp_path) == {}
    assert [path.name for path in tmp_path.iterdir()] == [FILE]
    request_reports(tmp_path)
    forget_hang(tmp_path)
    assert list(tmp_path.iterdir()) == []
