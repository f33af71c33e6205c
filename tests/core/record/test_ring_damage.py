"""Rings that are torn, cut off, replaced or damaged: what is no record is told, and never a
crash."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.core.base.errors import DataError
from plait.core.record import ring as ring_format
from plait.core.record.ring import DTYPES, HEADER, RECORD, VERBS, Header, RecordKind, read_ring, read_rings
from plait.core.record.ring_progress import read_headers
from plait.core.record.ring_writer import RingWriter
from tests.core.record.rings import fill, steps, writer


@pytest.mark.parametrize(
    "harm", [{"world": 2**31 - 1}, {"world": 0}, {"rank": -1}, {"rank": 4}, {"local_rank": -2}, {"capacity": 1 << 24},
             {"capacity": 3}, {"capacity": -64}],
)  # fmt: skip
def test_a_header_that_cannot_be_is_refused(tmp_path: Path, harm: dict[str, int]) -> None:
    path = tmp_path / "rank-00000.ring"
    header = replace(read_header_of(writer(path), path), **harm)  # type: ignore[arg-type]
    data = path.read_bytes()
    path.write_bytes(header.pack().ljust(HEADER, b"\0") + data[HEADER:])
    with pytest.raises(DataError, match="its header is damaged"):
        read_ring(path)
    found, problems = read_headers(tmp_path)
    assert (found, list(problems)) == ({}, [str(path)])


def read_header_of(ring: RingWriter, path: Path) -> Header:
    ring.close()
    return read_ring(path).header


def test_a_torn_record_is_left_out_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "rank-00000.ring"
    fill(writer(path), range(16))
    data = bytearray(path.read_bytes())
    data[HEADER + 5 * 64 : HEADER + 5 * 64 + 4] = (22).to_bytes(4, "little")  # begun anew, not finished
    path.write_bytes(data)
    ring = read_ring(path)
    assert ring.torn == 1 and steps(ring) == [i for i in range(16) if i != 5]


def test_what_is_no_whole_ring_is_told_and_left_out(tmp_path: Path) -> None:
    path, other = tmp_path / "rank-00000.ring", tmp_path / "rank-00001.ring"
    fill(writer(other, rank=1), range(3))
    whole, none = other.read_bytes(), "it is not a ring file, or its header page is truncated"
    length = f"it has {{}} bytes, but its header requires {len(whole)}"
    for data, says in (
        (b"", none), (b"x" * 9000, none), (b"x" + whole[1:], none), (whole[:7] + b"x" + whole[8:], none),
        (whole[: HEADER - 1], none), (whole[:-1], length.format(len(whole) - 1)),
        (whole + b"x", length.format(len(whole) + 1)), (whole[:HEADER] + b"\0" * 64, ""),
    ):  # fmt: skip
        path.write_bytes(data)
        with pytest.raises(DataError, match=f"cannot be read as a ring: {says}"):
            read_ring(path)
        problems: list[str] = []
        assert [ring.rank for ring in read_rings(tmp_path, problems)] == [1]
        assert len(problems) == 1 and str(path) in problems[0]
    newer = bytearray(whole)
    newer[8] = ring_format.VERSION + 1
    path.write_bytes(newer)
    with pytest.raises(DataError, match="of version 2; this Plait reads version 1"):
        read_ring(path)
    with pytest.raises(DataError, match="No such file"):
        read_ring(tmp_path / "rank-00009.ring")


@given(st.binary(min_size=1, max_size=400), st.integers(0, HEADER + 16 * 64))
@settings(max_examples=60, deadline=None)
def test_damage_is_never_a_crash(tmp_path_factory: pytest.TempPathFactory, damage: bytes, at: int) -> None:
    path = tmp_path_factory.mktemp("rings") / "rank-00000.ring"
    fill(writer(path), range(20))
    data = bytearray(path.read_bytes())
    data[at : at + len(damage)] = damage
    path.write_bytes(data)
    try:
        found = read_ring(path)
    except DataError:
        return
    assert len(found.records()) <= 16


@pytest.mark.parametrize("names", [b"", b"[1]\n", b'{"token": 1}\n', b'{"to', b"\xff\xfe\n", None])
def test_without_names_a_ring_still_says_when_and_how_much(tmp_path: Path, names: bytes | None) -> None:
    path = tmp_path / "rank-00000.ring"
    fill(writer(path), range(3))
    if names is None:
        path.with_suffix(".names").unlink()
    else:
        path.with_suffix(".names").write_bytes(names)
    ring = read_ring(path)
    assert steps(ring) == [0, 1, 2] and ring.records()[0].name.text == "name 1"
    assert "unknown" in ring.problems[0]


def test_a_line_of_names_that_was_cut_off_costs_only_itself(tmp_path: Path) -> None:
    path = tmp_path / "rank-00000.ring"
    fill(writer(path), range(3))
    with open(path.with_suffix(".names"), "ab") as file:
        file.write(b'{"name": 2, "te')
    ring = read_ring(path)
    assert ring.records()[0].name.text == "attn3.F0" and not ring.problems


def test_a_file_that_shrinks_while_it_is_read_is_no_ring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rank-00000.ring"
    fill(writer(path), range(3))

    def longer(descriptor: int) -> os.stat_result:
        found = os.stat(descriptor)
        os.truncate(path, HEADER + 15 * RECORD.size)
        return found

    monkeypatch.setattr(ring_format.os, "fstat", longer)
    with pytest.raises(DataError, match="it was truncated during reading"):
        read_ring(path)


@pytest.mark.parametrize(
    ("field", "value", "whole"),
    [("kind", max(RecordKind), True), ("kind", max(RecordKind) + 1, False), ("kind", 0, False),
     ("call", len(VERBS) - 1, True), ("call", len(VERBS), False),
     ("call", (len(DTYPES) - 1) << 4, True), ("call", len(DTYPES) << 4, False)],
)  # fmt: skip
def test_a_record_that_says_what_there_is_not_is_damaged(tmp_path: Path, field: str, value: int, whole: bool) -> None:
    path = tmp_path / "rank-00000.ring"
    fill(writer(path), range(2))
    data = bytearray(path.read_bytes())
    data[HEADER + 4 + (field == "call")] = value
    path.write_bytes(data)
    ring = read_ring(path)
    assert (steps(ring), ring.torn) == (([0, 1], 0) if whole else ([1], 1))
