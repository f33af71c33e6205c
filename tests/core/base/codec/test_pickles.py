"""Pickles as values: of plain data what Python makes of them, of all others one sentence; nothing
runs."""

from __future__ import annotations

import gzip
import json
import pickle
import pickletools
from collections import Counter
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.core.base.codec import pickles
from plait.core.base.codec.pickles import Elsewhere, Named, Pairs, PickledObject, read, read_plain
from plait.core.base.ignored_input import IgnoredInput
from tests.support.pickled import write

BEGIN = b"\x80\x02"
LEAVES = st.none() | st.booleans() | st.integers(-(2**63), 2**64) | st.text(max_size=300)
PLAIN = st.recursive(
    LEAVES | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner),
)
NAMES = st.builds(Named, st.just("torch"), st.sampled_from(("Size", "Tensor")))
SYMBOLIC = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.builds(PickledObject, NAMES, st.tuples(inner), inner),
)  # fmt: skip


def plain(data: bytes, over: IgnoredInput | None = None) -> Any:
    """The value of ``data``, a pickle, as the one member of a dict."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "file"
        file.write_bytes(data[:2] + b"}X\5\0\0\0value" + data[2:-1] + b"s." if data[-1:] == b"." else data)
        return read_plain(file, {}, IgnoredInput() if over is None else over)["value"]


def as_lists(value: Any) -> Any:
    """With lists in place of tuples."""
    if isinstance(value, dict):
        return {key: as_lists(one) for key, one in value.items()}
    return [as_lists(one) for one in value] if isinstance(value, list | tuple) else value


@given(PLAIN, st.integers(2, 5), st.booleans())
def test_plain_data_is_what_python_makes_of_it(value: Any, protocol: int, optimized: bool) -> None:
    over, data = IgnoredInput(), pickle.dumps({"value": value}, protocol)
    with TemporaryDirectory() as folder:
        (file := Path(folder) / "file").write_bytes(pickletools.optimize(data) if optimized else data)
        found = read_plain(file, {}, over)
    assert repr(found) == repr({"value": as_lists(value)}), "types and zeros' signs too"
    assert not over


@given(SYMBOLIC)
def test_what_is_written_is_read(value: Any) -> None:
    assert repr(read(write(value))) == repr(value)
    assert repr(read(write({"a": value, Named("a", "b"): 1}))) == repr(Pairs([("a", value), (Named("a", "b"), 1)]))


def test_what_comes_again_is_one_and_may_be_kept_under_a_number_of_before() -> None:
    shared = {"name": "frame"}
    value = [[f"text {number}" for number in range(700)], shared, "a long text " * 40, [shared] * 400]
    found = plain(pickle.dumps(value, 2))
    assert found == value
    assert found[1] is found[3][399]
    kept = b"(K\1q\0K\2q\1K\3q\2"
    assert plain(BEGIN + kept + b"K\4q\1h\0h\1h\2t.") == [1, 2, 3, 4, 1, 4, 3]
    assert read(BEGIN + b"X\1\0\0\0aQ.") == Elsewhere("a")


def test_what_is_not_finite_or_no_utf_8_is_counted() -> None:
    over = IgnoredInput()
    data = BEGIN + b"(G\x7f\xf8\0\0\0\0\0\0G\xff\xf0\0\0\0\0\0\0X\2\0\0\0\xffat."
    assert plain(data, over) == [None, None, "\\xffa"]
    assert over.counts == {
        "numbers that are not finite, taken as unknown": 2,
        "texts with bytes that are no UTF-8, taken as they stand": 1,
    }
    with pytest.raises(ValueError, match="no whole pickle"):
        read(data)


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


def deep(levels: int) -> bytes:
    return BEGIN + b"]" * levels + b"N" + b"a" * levels + b"."


NO_VALUE = "no whole pickle|cut off|remain|not enough data|byte count"
SPREAD = "take more than 134217728 characters"


@pytest.mark.parametrize(("data", "says"), [
    *((pickle.dumps(Calls(), protocol), r"class, function or call \(_pytest.outcomes._Fail\), which is not run")
      for protocol in (2, 3, 4, 5)),
    *((pickle.dumps(value, 4), "class, function or call")
      for value in (Counter("ab"), Path("a"), complex(1, 2), b"ab")),
    *((BEGIN + code + b"x\n.", "is not supported|no whole|cut off") for code in
      (b"i", b"o", b"b", b"P", b"Q", b"R", b"\x81", b"\x82", b"\x83", b"\x84", b"\x92", b"\x93", b"]0")),
    *((pickle.dumps(value, 5), "is not supported") for value in ({1, 2}, frozenset({1}), bytearray(b"ab"))),
    (pickle.dumps({1: 2}), "a key in it is no text"), (BEGIN + b"}(]K\1u.", "a key in it is no text"),
    (pickle.dumps(laughs(lambda value: [value, value])), SPREAD),
    (pickle.dumps(laughs(lambda value: (value, value)), 2), SPREAD),
    (pickle.dumps(laughs(lambda value: {"a": value, "b": value})), SPREAD),
    (pickle.dumps([{"a" * (1 << 20): 1}] * 129), SPREAD),
    (pickle.dumps(endless()), "it contains a value that contains itself"),
    (deep(100), "nested too deeply"), (deep(200_000), "nested too deeply"),
    (BEGIN + b"(]Naq\0" + b"".join(b"(h%ctq%c" % (n, n + 1) for n in range(110)) + b"t.", "nested too deeply"),
    *((BEGIN + data, NO_VALUE) for data in
      (b"X\xff\xff\xff\xffab", b"\x8d" + b"\xff" * 8 + b"ab", b"X\2\0\0", b"(K\1K", b"", b"]q\0h\1.", b"(q\0.", b".",
       b"(.", b"e.", b"(e.", b"(u.", b"a.", b"Na.", b"Ns.", b"t.", b"\x85.", b"(N\x86.", b"NN\x87.", b"q\0.", b"\x94.",
       b"NNa.", b"}Na.", b"N(Ne.", b"](NNu.", b"}(Nu.", b"]NNs.", b"NN.")),
    (BEGIN + b"N.N", "data after the end"),
], ids=lambda value: value[:40] if isinstance(value, str) else f"{len(value)} bytes")  # fmt: skip
def test_all_else_is_refused_in_a_sentence(data: bytes, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        plain(data)


def test_the_deepest_that_is_read() -> None:
    value: Any = None
    for _ in range(99):
        value = [value]
    assert plain(pickle.dumps(value)) == value


def test_there_is_an_end_to_instructions_and_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pickles, "MOST_VALUES", 10)
    assert read(BEGIN + b"(" + b"N" * 6 + b"t.") == (None,) * 6
    with pytest.raises(ValueError, match="more than 10 instructions, the most that are read"):
        read(BEGIN + b"(" + b"N" * 7 + b"t.")
    monkeypatch.setattr(pickles, "SIZE", 100)
    for data in (pickle.dumps({"a": "b" * 100}), gzip.compress(pickle.dumps({"a": "b" * 100}))):
        (tmp_path / "file").write_bytes(data)
        with pytest.raises(ValueError, match="100"):
            read_plain(tmp_path / "file", {}, IgnoredInput())


@given(st.binary(max_size=40), st.integers(0, 60))
def test_any_bytes_are_a_value_or_a_sentence(noise: bytes, at: int) -> None:
    whole = pickle.dumps({"entries": [{"a": (1, 2.5)}, "text", {"a": None}], "version": "2.10"}, 2)
    for data in (BEGIN + noise, whole[:at] + noise + whole[at:], whole[:at] + noise):
        with suppress(ValueError):
            json.dumps(plain(data))
        with suppress(ValueError):
            read(data)


def test_a_file_is_read_a_member_at_a_time(tmp_path: Path) -> None:
    value = {"version": "2.10", "entries": [{"a": 1}, [], 3], "pg": {"0": [1]}}
    for data in (pickle.dumps(value), gzip.compress(pickle.dumps(value, 2))):
        elements: list[Any] = []
        (tmp_path / "file").write_bytes(data)
        rest = read_plain(tmp_path / "file", {"entries": elements.append}, IgnoredInput())
        assert (elements, rest) == ([{"a": 1}, [], 3], {"version": "2.10", "entries": 3, "pg": {"0": [1]}})


@pytest.mark.parametrize(("value", "says"), [
    ([1], "the pickled object is not a dict"),
    ({"entries": ["a" * (1 << 20)]}, "an element of its 'entries' has more than 1048576 characters"),
    ({"entries": {"a": 1}, "pg": ["a" * (4 << 20)]}, "its 'pg' has more than 4194304 characters"),
])  # fmt: skip
def test_a_file_of_other_values_is_refused(tmp_path: Path, value: Any, says: str) -> None:
    (tmp_path / "file").write_bytes(pickle.dumps(value))
    with pytest.raises(ValueError, match=says):
        read_plain(tmp_path / "file", {"entries": lambda _: None}, IgnoredInput())
