"""Pickles of plain data: the value that Python would make of them, and of all others one sentence."""

from __future__ import annotations

import gzip
import json
import pickle
import pickletools
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.core.base.passed_over import PassedOver
from plait.diagnose import plain_pickle
from plait.diagnose.plain_pickle import parse_plain, read_plain

BEGIN = b"\x80\x02"
LEAVES = st.none() | st.booleans() | st.integers(-(2**63), 2**64) | st.floats(allow_nan=False, allow_infinity=False)
PLAIN = st.recursive(
    LEAVES | st.text(max_size=300),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner),
)


def parsed(data: bytes) -> Any:
    over = PassedOver()
    value, _ = parse_plain(data, over)
    assert not over
    return value


def as_lists(value: Any) -> Any:
    """With lists in place of tuples."""
    if isinstance(value, dict):
        return {key: as_lists(one) for key, one in value.items()}
    return [as_lists(one) for one in value] if isinstance(value, list | tuple) else value


@given(PLAIN, st.integers(2, 5), st.booleans())
def test_plain_data_is_what_python_makes_of_it(value: Any, protocol: int, optimized: bool) -> None:
    data = pickle.dumps(value, protocol)
    found = parsed(pickletools.optimize(data) if optimized else data)
    assert repr(found) == repr(as_lists(value)), "types and zeros' signs too"


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_many_values_are_numbered_beyond_a_byte_and_what_comes_again_is_one(protocol: int) -> None:
    shared = {"name": "frame"}
    value = [[f"text {number}" for number in range(700)], shared, "a long text " * 40, [shared] * 400]
    found = parsed(pickle.dumps(value, protocol))
    assert found == value
    assert found[1] is found[3][399]


def test_a_value_may_be_kept_again_under_a_number_of_before() -> None:
    assert parsed(BEGIN + b"(K\1q\0K\2q\0h\0t.") == [1, 2, 2]
    kept = b"(K\1q\0K\2q\1K\3q\2"
    assert parsed(BEGIN + kept + b"K\4q\1h\0h\1h\2t.") == [1, 2, 3, 4, 1, 4, 3]


def test_what_is_not_finite_or_no_utf_8_is_counted() -> None:
    over = PassedOver()
    data = BEGIN + b"(G\x7f\xf8\0\0\0\0\0\0G\xff\xf0\0\0\0\0\0\0X\2\0\0\0\xffat."
    assert parse_plain(data, over)[0] == [None, None, "\\xffa"]
    assert over.counts == {
        "numbers that are not finite, taken as unknown": 2,
        "texts with bytes that are no UTF-8, taken as they stand": 1,
    }


class Calls:
    """Is called for when it is unpickled."""

    def __reduce__(self) -> Any:
        return pytest.fail, ("it was called",)


def laughs(step: Any, times: int = 40) -> Any:
    value: Any = ["ha"]
    for _ in range(times):
        value = step(value)
    return value


def endless() -> list[Any]:
    value: list[Any] = []
    value.append({"a": [value]})
    return value


ONE_OF_A_TUPLE = b"".join(b"h%ch%c\x86q%c" % (n, n, n + 1) for n in range(40))


@pytest.mark.parametrize(("data", "says"), [
    *((pickle.dumps({"version": Calls()}, protocol), r"class, function or call \((STACK_)?GLOBAL at byte \d+\), which "
       "is not run") for protocol in (2, 3, 4, 5)),
    *((pickle.dumps(value, 4), "class, function or call") for value in (Counter("ab"), Path("a"), complex(1, 2))),
    *((BEGIN + code + b"x\n.", "class, function or call") for code in
      (b"i", b"o", b"b", b"P", b"Q", b"R", b"\x81", b"\x82", b"\x83", b"\x84", b"\x92", b"\x93")),
    *((pickle.dumps(value, 4), "none that makes plain data") for value in ({1, 2}, frozenset({1}), b"ab")),
    (pickle.dumps(bytearray(b"ab"), 5), "none that makes plain data"),
    (BEGIN + b"]0.", "its instruction 0x30 at byte 3 is none"),
    (pickle.dumps({1: 2}), "a key in it is no text"), (pickle.dumps({"a": 1, 2: 3}), "a key in it is no text"),
    (BEGIN + b"})q\0" + ONE_OF_A_TUPLE + b"K\1s.", "damaged pickle: keys are set in what is no dict"),
    (BEGIN + b"}(]K\1u.", "a key in it is no text"),
    (pickle.dumps(laughs(lambda value: [value, value])), "take more than 134217728 characters"),
    (pickle.dumps(laughs(lambda value: (value, value)), 2), "take more than 134217728 characters"),
    (pickle.dumps(laughs(lambda value: {"a": value, "b": value})), "take more than 134217728 characters"),
    (pickle.dumps(["a" * (1 << 20)] * 129), "take more than 134217728 characters"),
    (pickle.dumps([{"a" * (1 << 20): 1}] * 129), "take more than 134217728 characters"),
    (pickle.dumps(endless()), "a value in it holds itself"),
    (BEGIN + b"]" * 101 + b"a" * 100 + b"N.", "values are left"),
    (BEGIN + b"]" * 101 + b"N" + b"a" * 101 + b".", "nested too deeply"),
    (BEGIN + b"]" * 200_000 + b"N" + b"a" * 200_000 + b".", "nested too deeply"),
    (BEGIN + b"(]Naq\0" + b"".join(b"(h%ctq%c" % (n, n + 1) for n in range(110)) + b"t.", "nested too deeply"),
    (BEGIN + b"\x8a\x11" + b"\1" * 17 + b".", "a number of 17 bytes; read are at most 16"),
    (BEGIN + b"\x8b\0\0\0\1" + b"\1" * 99, "its instruction 0x8b"),
    (BEGIN + b"X\xff\xff\xff\xffab", "cut off"), (BEGIN + b"\x8d" + b"\xff" * 8 + b"ab", "cut off"),
    (BEGIN + b"X\2\0\0", "cut off"), (BEGIN + b"(K\1K", "cut off"), (BEGIN, "cut off"), (b"", "cut off"),
    (BEGIN + b"]r\xff\xff\xff\xff.", "under a number that is not the next"), (BEGIN + b"(q\0.", "is not the next"),
    (BEGIN + b"]q\0h\1.", "takes a value that is not there"),
    *((BEGIN + code + b".", "takes a value that is not there") for code in
      (b"", b"(", b"e", b"(e", b"(u", b"a", b"Na", b"Ns", b"t", b"\x85", b"N\x86", b"(N\x86", b"NN\x87", b"q\0",
       b"\x94")),
    (BEGIN + b"NNa.", "added to what is no list"), (BEGIN + b"}Na.", "added to what is no list"),
    (BEGIN + b"N(Ne.", "added to what is no list"), (BEGIN + b"](NNu.", "keys are set in what is no dict"),
    (BEGIN + b"}(Nu.", "keys are set in what is no dict"), (BEGIN + b"]NNs.", "keys are set in what is no dict"),
    (BEGIN + b"NN.", "values are left at its end"), (BEGIN + b"N.N", "something follows the end"),
    (b"\x80\1N.", "protocol 1; read are 2 to 5"), (b"\x80\6N.", "protocol 6; read are 2 to 5"),
    (BEGIN + b"X\1\0\x10\0" + b"\xff" * ((1 << 20) + 1) + b".", "more than 1048576 bytes of text that is no UTF-8"),
], ids=lambda value: value[:40] if isinstance(value, str) else f"{len(value)} bytes")  # fmt: skip
def test_all_else_is_refused_in_a_sentence(data: bytes, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse_plain(data, PassedOver())


def test_the_deepest_and_the_largest_number_that_are_read() -> None:
    value: Any = None
    for _ in range(100):
        value = [value]
    assert parsed(pickle.dumps(value)) == value
    assert parsed(pickle.dumps(-(2**127))) == -(2**127)


def test_there_is_an_end_to_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_pickle, "MOST_VALUES", 10)
    assert parsed(BEGIN + b"(" + b"N" * 6 + b"t.") == [None] * 6
    with pytest.raises(ValueError, match="more than 10 instructions, the most that are read"):
        parse_plain(BEGIN + b"(" + b"N" * 7 + b"t.", PassedOver())


@given(st.binary(max_size=40), st.integers(0, 60))
def test_any_bytes_are_a_value_or_a_sentence(noise: bytes, at: int) -> None:
    whole = pickle.dumps({"entries": [{"a": (1, 2.5)}, "text", {"a": None}], "version": "2.10"}, 2)
    for data in (BEGIN + noise, whole[:at] + noise + whole[at:], whole[:at] + noise):
        with suppress(ValueError):
            json.dumps(parse_plain(data, PassedOver())[0])


# ---- files ----


def read(path: Path, value: Any) -> tuple[list[Any], dict[str, Any]]:
    path.write_bytes(value if isinstance(value, bytes) else pickle.dumps(value))
    elements: list[Any] = []
    rest = read_plain(path, {"entries": elements.append}, PassedOver())
    return elements, rest


def test_a_file_is_read_a_member_at_a_time(tmp_path: Path) -> None:
    value = {"version": "2.10", "entries": [{"a": 1}, [], 3], "pg": {"0": [1]}}
    for data in (pickle.dumps(value), gzip.compress(pickle.dumps(value, 2))):
        assert read(tmp_path / "file", data) == ([{"a": 1}, [], 3], {"version": "2.10", "entries": 3, "pg": {"0": [1]}})
    assert read(tmp_path / "file", {"entries": {"a": 1}}) == ([], {"entries": {"a": 1}})


@pytest.mark.parametrize(("value", "says"), [
    ([1], "a pickle of something else than a dict"),
    ({"entries": ["a" * (1 << 20)]}, "an element of its 'entries' has more than 1048576 characters"),
    ({"entries": [], "pg": ["a" * (4 << 20)]}, "the value of its key 'pg' has more than 4194304 characters"),
])  # fmt: skip
def test_a_file_of_other_values_is_refused(tmp_path: Path, value: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        read(tmp_path / "file", value)


def test_a_file_that_is_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_pickle, "SIZE", 100)
    for data in (pickle.dumps({"a": "b" * 100}), gzip.compress(pickle.dumps({"a": "b" * 100}))):
        with pytest.raises(ValueError, match="100"):
            read(tmp_path / "file", data)
