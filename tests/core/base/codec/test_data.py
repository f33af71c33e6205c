"""Values of a file that are, or are not, what a dataclass says."""

from __future__ import annotations

import sys
import tracemalloc
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.core.base.codec.data import decode
from plait.core.base.errors import JobError
from plait.core.runs.attempts import Attempt


@dataclass(frozen=True)
class Made:
    number: int = 1
    share: float = 0.5
    word: Literal["a", "b"] = "a"
    ranks: tuple[int, ...] = ()
    where: tuple[str, int] | None = None
    sure: bool = False


@pytest.mark.parametrize(
    ("name", "value"),
    [("number", True), ("number", 1.0), ("number", None), ("share", "1"), ("share", float("nan")), ("word", "c"),
     ("ranks", (1, "2")), ("ranks", 3), ("where", ("a", 1, 2)), ("where", ["a"]), ("sure", 0)],
)  # fmt: skip
def test_what_is_of_another_type_is_refused(name: str, value: Any) -> None:
    with pytest.raises(JobError):
        decode(Made, {name: value})


@given(st.builds(Made, ranks=st.lists(st.integers()).map(tuple), where=st.none() | st.tuples(st.text(), st.integers()),
                 share=st.floats(allow_nan=False, allow_infinity=False), word=st.sampled_from(["a", "b"])))  # fmt: skip
def test_what_it_is_itself_is_taken(made: Made) -> None:
    assert decode(Made, asdict(made)) == made
    assert decode(Made, {"share": 1, "ranks": [1, 2], "unknown": object()}, others=True) == Made(share=1, ranks=(1, 2))


def test_an_attempt_of_an_earlier_version() -> None:
    one = Attempt(attempt=1, started=2.0)
    values = asdict(replace(one, hosts=("a",), ended=3.0))
    values.pop("writing")
    assert decode(Attempt, values).ended == 3.0


def test_whole_numbers_that_a_float_can_be_are_floats() -> None:
    largest = int(sys.float_info.max)
    for value in (largest, -largest, 0):
        assert decode(Made, {"share": value})
    for value in (largest * 2, -largest * 2):
        with pytest.raises(JobError):
            decode(Made, {"share": value})


@dataclass(frozen=True)
class Listed:
    numbers: list[int]
    words: dict[str, int]


def test_lists_and_tables_are_looked_through() -> None:
    assert decode(Listed, {"numbers": [1, 2], "words": {"a": 1}}) == Listed([1, 2], {"a": 1})
    for numbers, words in (
        ("", {}), ({}, {}), ([1, "2"], {}), ([1, True], {}), (None, {}), ([], {"a": "1"}), ([], {1: 1}),
        ([], []), ([], None),
    ):  # fmt: skip
        with pytest.raises(JobError):
            decode(Listed, {"numbers": numbers, "words": words})


@dataclass(frozen=True)
class Named:
    numbers: dict[str, int]
    inner: tuple[Named, ...] = ()


def test_of_very_many_mistakes_few_are_kept() -> None:
    """Of tables, lists and keys alike, in what is within itself too; what is right is whole."""
    right = {f"n{at}": at for at in range(2_500)}
    assert decode(Named, {"numbers": right, "inner": [{"numbers": right}]}) == Named(right, (Named(right),))
    with pytest.raises(JobError, match=r"inner\[0\]\.numbers\.n2499: \"x\" is not allowed"):
        decode(Named, {"numbers": right, "inner": [{"numbers": right | {"n2499": "x"}}]})
    tracemalloc.start()
    try:
        for wrong in (
            {"numbers": {f"n{at}": "x" for at in range(100_000)}},
            {"numbers": {}} | {f"n{at}": 1 for at in range(100_000)},
            {"numbers": {}, "inner": ["x"] * 100_000},
        ):
            before = tracemalloc.get_traced_memory()[0]
            with pytest.raises(JobError):
                decode(Named, wrong)
            assert tracemalloc.get_traced_memory()[1] - before < 30 << 20
            tracemalloc.reset_peak()
    finally:
        tracemalloc.stop()
