"""JSON and packed files of others."""

from __future__ import annotations

import bz2
import gc
import gzip
import lzma
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from plait.core.base.codec.json_text import (
    Most,
    open_unpacked,
    parse_json,
    parse_table,
    read_json,
    read_table,
    read_unpacked,
    unpacked,
)

PACKERS = pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress])


@pytest.mark.parametrize("on", [True, False])
def test_after_reading_cycles_are_searched_for_as_before(monkeypatch: pytest.MonkeyPatch, on: bool) -> None:
    seen: list[str] = []
    for name in ("enable", "disable"):
        monkeypatch.setattr(gc, name, lambda name=name: seen.append(name))
    monkeypatch.setattr(gc, "isenabled", lambda: on)
    with pytest.raises(ValueError, match="Expecting value"):
        parse_json("")
    assert seen == (["disable", "enable"] if on else ["disable"])


@PACKERS
def test_packed_and_plain_are_the_same(pack: Callable[[bytes], bytes]) -> None:
    assert unpacked(pack(b"rank 0")) == unpacked(b"rank 0") == b"rank 0"


@PACKERS
def test_a_stream_that_is_cut_off_is_damaged(pack: Callable[[bytes], bytes]) -> None:
    packed = pack(os.urandom(4000))
    with pytest.raises(ValueError, match="damaged"):
        unpacked(packed[: len(packed) // 2])


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[" * 200_000, "nested too deeply"),
        ('{"a":' * 200_000, "nested too deeply"),
        ("[1, NaN]", "NaN is no number"),
        ("[-Infinity]", "-Infinity is no number"),
        ("[" + "[]," * 1000 + "[]]", "may hold 2002 values; at most 2000"),
        ("", "Expecting value"),
        ("1" * 5000, "digits"),
        (b"\xff\xfe\xfa", "decode"),
    ],
)
def test_what_is_no_document_is_one_kind_of_error(text: str | bytes, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse_json(text, most=2000 if "most" in why else 4_000_000)


@pytest.mark.parametrize(("text", "kind"), [("null", "null"), ("[]", "a list"), ("5", "a number"), ("true", "true")])
def test_a_table_is_asked_for(text: str, kind: str) -> None:
    with pytest.raises(ValueError, match=f"it is {kind}.*, no table"):
        parse_table(text)


def test_files_have_limits_and_are_regular(tmp_path: Path) -> None:
    long = tmp_path / "long.json"
    long.write_text("[" + " " * 2000 + "]")
    with pytest.raises(ValueError, match="it has 2002 bytes; at most 1000 are read"):
        read_json(long, limit=1000)
    assert read_json(long) == []
    os.mkfifo(tmp_path / "pipe")
    for odd in (tmp_path / "pipe", Path("/dev/zero"), tmp_path / "missing"):
        with pytest.raises(OSError, match=r"pipe|device|No such"):
            read_unpacked(odd)


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress, bytes])
def test_a_stream_is_read_line_by_line_whatever_packed_it(pack: Callable[[bytes], bytes], tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(pack(b"rank 0\nrank 1\nrank 2"))
    with open_unpacked(tmp_path / "text", Most()) as stream:
        assert list(stream) == [b"rank 0\n", b"rank 1\n", b"rank 2"]


@pytest.mark.parametrize(
    ("most", "why"),
    [
        (Most(size=10), None),
        (Most(size=9), "it holds more than 9 bytes"),
        (Most(lines=3), None),
        (Most(lines=2), "it holds more than 2 lines"),
        (Most(line=4), None),
        (Most(line=3), "it has a line of more than 3 bytes"),
    ],
)
def test_a_stream_has_limits(most: Most, why: str | None, tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"a\nb\nc\ndddd")
    with open_unpacked(tmp_path / "text", most) as stream:
        if why is None:
            assert len(stream.read()) == 10
        else:
            with pytest.raises(ValueError, match=why):
                stream.read()


def test_a_line_is_as_long_as_its_parts(tmp_path: Path) -> None:
    """A stream comes in pieces; a line may begin in one and end in another."""
    piece = 1 << 20
    (tmp_path / "text").write_bytes(b"\n" + b"a" * piece + b"a" * piece + b"\n")
    with open_unpacked(tmp_path / "text", Most(line=2 * piece)) as stream:
        assert len(stream.read()) == 2 * piece + 2
    with open_unpacked(tmp_path / "text", Most(line=piece)) as stream, pytest.raises(ValueError, match="a line of"):
        stream.read()


@PACKERS
def test_a_stream_that_ends_too_early_is_damaged(pack: Callable[[bytes], bytes], tmp_path: Path) -> None:
    packed = pack(os.urandom(4000))
    (tmp_path / "text").write_bytes(packed[: len(packed) // 2])
    with open_unpacked(tmp_path / "text", Most()) as stream, pytest.raises(ValueError, match="it is damaged"):
        stream.read()


def test_a_stream_is_of_a_regular_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for odd in (tmp_path / "pipe", Path("/dev/zero"), tmp_path):
        with pytest.raises(OSError, match="no regular file"):
            open_unpacked(odd, Most())
    with pytest.raises(OSError, match="No such file"):
        open_unpacked(tmp_path / "missing", Most())


def test_a_key_may_stand_twice_only_where_nobody_minds(tmp_path: Path) -> None:
    text = '{"a": 1, "b": {"c": 2, "d": 3, "c": 4}}'
    (tmp_path / "table.json").write_text(text)
    assert parse_table(text)["b"]["c"] == read_table(tmp_path / "table.json")["b"]["c"] == 4
    for read in (lambda: parse_table(text, unique=True), lambda: read_table(tmp_path / "table.json", unique=True)):
        with pytest.raises(ValueError, match="the key 'c' occurs twice"):
            read()
    assert parse_table('{"a": 1, "b": {"a": 2}}', unique=True) == {"a": 1, "b": {"a": 2}}


def test_as_many_values_are_read_as_may_be() -> None:
    assert parse_json("[1, 2, {}]", most=4) == [1, 2, {}]  # as counted: brackets, braces and commas
    for text in ("[1, 2, {}]", b"[1, 2, {}]"):
        with pytest.raises(ValueError, match="it may hold 4 values; at most 3"):
            parse_json(text, most=3)


@PACKERS
def test_a_stream_that_fills_the_limit_with_its_first_part_may_hold_no_more(pack: Callable[[bytes], bytes]) -> None:
    piece = 1 << 20
    assert len(unpacked(pack(bytes(piece)), limit=piece)) == piece
    for size in (piece + 1, 2 * piece):
        with pytest.raises(ValueError, match="stream holds more than 1048576 bytes"):
            unpacked(pack(bytes(size)), limit=piece)


@PACKERS
def test_no_more_of_a_stream_is_looked_at_than_may_be_read(pack: Callable[[bytes], bytes]) -> None:
    """Its damaged end is not come to."""
    packed = pack(os.urandom(1 << 21))[:-20]
    with pytest.raises(ValueError, match="holds more than 1000 bytes"):
        unpacked(packed, limit=1000)
    with pytest.raises(ValueError, match="damaged"):
        unpacked(packed, limit=1 << 22)


@pytest.mark.parametrize("text", ['{"count": 1e999}', "[-1e999]", "[[0.5, 9" + "0" * 400 + ".0]]"])
def test_a_number_larger_than_any_that_can_be_computed_with_is_refused(text: str) -> None:
    """It would be infinity, which stands in no document of JSON."""
    with pytest.raises(ValueError, match="is too large"):
        parse_json(text)
    assert parse_json("[1e308, -1e308, 1e-999]") == [1e308, -1e308, 0.0]
