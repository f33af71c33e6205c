"""JSON documents read a member at a time: what is read, what is mended and counted, what is
refused."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
from pathlib import Path
from typing import Any

import pytest

from plait.core.base.codec import json_stream
from plait.core.base.codec.json_stream import read_stream
from plait.core.base.ignored_input import IgnoredInput


def read(path: Path, data: bytes | str) -> tuple[list[Any], dict[str, Any], IgnoredInput]:
    """Elements of ``events``, the other members, what was counted."""
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    over, elements = IgnoredInput(), list[Any]()
    rest = read_stream(path, {"events": elements.append}, over)
    assert rest.pop("events", 0) == len(elements)
    return elements, rest, over


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("packed", [bytes, gzip.compress, bz2.compress, lzma.compress])
def test_a_document_is_read_as_it_is(tmp_path: Path, packed: Any, indent: int | None) -> None:
    document = {"a": [1, {"b": None}], "events": [{"x": ']}\\"', "n": [[], {}]}, 2, "three", []], "é": 1.5, "last": {}}
    elements, rest, over = read(tmp_path / "file", packed(json.dumps(document, indent=indent).encode()))
    assert elements == document.pop("events")
    assert rest == document
    assert not over


def test_documents_longer_than_a_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever a chunk ends: within a number, a string, a character of several bytes."""
    monkeypatch.setattr(json_stream, "CHUNK", 7)
    monkeypatch.setattr(json_stream, "AHEAD", 5)
    events = [{"name": f"kérnel {n}", "dur": n * 1.25, "args": {"a": [n]}} for n in range(50)]
    elements, rest, _ = read(tmp_path / "file", json.dumps({"events": events, "n": 12345678}, ensure_ascii=False))
    assert elements == events
    assert rest == {"n": 12345678}


@pytest.mark.parametrize("word", ["NaN", "Infinity", "-Infinity", "inf", "-inf", "nan", "-nan", "-nan(ind)"])
def test_what_is_no_number_is_unknown_and_counted(tmp_path: Path, word: str) -> None:
    text = f'{{"events": [{{"a": {word}, "b": "inf nan"}}, {{"a": [1, {word}]}}], "c": {word}}}'
    elements, rest, over = read(tmp_path / "file", text)
    assert elements == [{"a": None, "b": "inf nan"}, {"a": [1, None]}]
    assert rest == {"c": None}
    assert over.counts == {"numbers that JSON does not have, taken as unknown": 3}


def test_backslashes_and_bytes_that_json_does_not_have(tmp_path: Path) -> None:
    elements, _, over = read(
        tmp_path / "file", b'{"events": [{"a": "C:\\users\\new"}, {"b": "x\xffy"}, {"c": "t\tab"}]}'
    )
    assert elements == [{"a": "C:\\users\new"}, {"b": "x\\xffy"}, {"c": "t\tab"}]
    assert sum(over.counts.values()) == 2


def test_an_array_is_a_document_where_one_is_allowed(tmp_path: Path) -> None:
    file, taken = tmp_path / "x.json", list[Any]()
    file.write_text(" [1, [2], 3] ")
    assert read_stream(file, {"events": taken.append}, IgnoredInput(), bare="events") == {"events": 3}
    assert taken == [1, [2], 3]
    file.write_text("[1] 2")
    with pytest.raises(ValueError, match="data after the end"):
        read_stream(file, {"events": taken.append}, IgnoredInput(), bare="events")
    with pytest.raises(ValueError, match="no JSON object"):
        read_stream(file, {"events": taken.append}, IgnoredInput())


def test_a_byte_order_mark_is_no_part_of_a_document(tmp_path: Path) -> None:
    elements, rest, over = read(tmp_path / "file", b'\xef\xbb\xbf{"events": [1], "a": 2}')
    assert (elements, rest, over.counts) == ([1], {"a": 2}, {})


def test_an_element_that_is_no_json_costs_no_other(tmp_path: Path) -> None:
    elements, rest, over = read(tmp_path / "file", '{"events": [{"a": 1}, {"b": oops}, {"c" 3}, {"d": 4}], "e": 5}')
    assert elements == [{"a": 1}, {"d": 4}]
    assert rest == {"e": 5}
    assert over.counts == {"elements that are no JSON": 2}


REFUSED = {
    "empty": (b"", "no JSON object"), "list": (b"[1]", "no JSON object"), "text": (b"abc", "no JSON object"),
    "cut in a header": (b'{"a": [1, 2', "cut off"), "cut in an element": (b'{"events": [{"a": 1}, {"b": ', "cut off"),
    "cut between": (b'{"events": [{"a": 1},', "cut off"), "cut after": (b'{"events": [{"a": 1}]', "cut off"),
    "brackets crossed": (b'{"events": [{"a": 1}}', "cut off, or no JSON"),
    "a bare word": (b'{"a": yes}', "value of its key 'a' is no JSON"),
    "two documents": (b'{"a": 1}{"b": 2}', "data after the end"), "no value": (b'{"a"}', "no value follows"),
    "a number as a key": (b"{5: 1}", "no JSON|no text"), "a list as a key": (b'{[1]: 1}', "a key in it is no text"),
    "deep": (b'{"a": ' + b"[" * 200_000, "nested too deeply"),
    "deep element": (b'{"events": [' + b"[" * 200_000, "nested too deeply"),
    "deep and mended": (b'{"events": [["\\q", ' + b"[" * 20_000 + b"]" * 20_000 + b"]]}", "nested too deeply"),
    "cut gzip": (gzip.compress(b'{"events": []}')[:-9], "damaged"),
    "cut xz": (lzma.compress(b'{"events": []}' * 99)[:-20], "damaged"),
    "many keys": (b"{" + b",".join(b'"%d":1' % n for n in range(10_001)) + b"}", "more than 10000 keys"),
    "long element": (b'{"events": [{"a": "' + b"x" * (2 * json_stream.LONGEST) + b'", oops}]}', "more than"),
}  # fmt: skip


@pytest.mark.parametrize(("data", "said"), REFUSED.values(), ids=REFUSED)
def test_what_is_no_document_is_refused_in_a_sentence(tmp_path: Path, data: bytes, said: str) -> None:
    with pytest.raises(ValueError, match=said) as refused:
        read(tmp_path / "file", data)
    assert len(str(refused.value)) < 200


def test_a_packed_file_unpacks_to_so_many_times_its_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_stream, "LEAST_UNPACKED", 1 << 20)
    with pytest.raises(ValueError, match="holds more than"):
        read(tmp_path / "file", gzip.compress(b'{"events": [' + b"1," * 5_000_000))
    with pytest.raises(ValueError, match="holds more than"):
        read(tmp_path / "file", gzip.compress(b" " * 10_000_000))


def test_pipes_and_devices_are_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero"), tmp_path, tmp_path / "missing"):
        with pytest.raises(OSError):
            read_stream(path, {}, IgnoredInput())


def test_a_word_that_json_does_not_have_ends_where_it_ends(tmp_path: Path) -> None:
    """However much follows it."""
    elements, rest, over = read(tmp_path / "file", '{"events": [inf, -nan, ' + "1, " * 500_000 + '2], "last": inf}')
    assert (elements[:3], len(elements), rest) == ([None, None, 1], 500_003, {"last": None})
    assert sum(over.counts.values()) == 3


def test_a_small_file_may_unpack_to_many_times_its_size(tmp_path: Path) -> None:
    packed = gzip.compress(b'{"events": [1, ' + b" " * 4_000_000 + b"2]}")
    assert len(packed) * json_stream.TIMES < 4_000_000
    assert read(tmp_path / "file", packed)[0] == [1, 2]


def test_numbers_may_be_cut_by_the_end_of_a_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for ahead, chunk in ((12, 16), (10, 7), (16, 3)):
        monkeypatch.setattr(json_stream, "CHUNK", chunk)
        monkeypatch.setattr(json_stream, "AHEAD", ahead)
        numbers = [12345678 + 7 * n for n in range(60)]
        assert read(tmp_path / "file", json.dumps({"events": numbers}))[0] == numbers
