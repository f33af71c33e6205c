"""JSON and packed files of others."""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from plait.core.codec import parse_json, parse_table, read_json, read_unpacked, unpacked

PACKERS = pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress])


@PACKERS
def test_packed_and_plain_are_the_same(pack: Callable[[bytes], bytes]) -> None:
    assert unpacked(pack(b"rank 0")) == unpacked(b"rank 0") == b"rank 0"


@PACKERS
def test_what_unpacks_to_more_than_the_limit_is_refused_early(pack: Callable[[bytes], bytes]) -> None:
    with pytest.raises(ValueError, match="stream holds more than 1000 bytes"):
        unpacked(pack(bytes(1 << 24)), limit=1000)
    assert unpacked(pack(bytes(1000)), limit=1000) == bytes(1000)


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
