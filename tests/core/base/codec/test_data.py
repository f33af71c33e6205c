"""Values of a file that are, or are not, what a dataclass says."""

from __future__ import annotations

import math
import sys
import tracemalloc
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal, NamedTuple, cast

import pytest
from annotated_types import Ge, Lt
from hypothesis import given
from hypothesis import strategies as st

from plait.core.base.codec.data import check_limits, decode
from plait.core.base.errors import JobError


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


class Pair(NamedTuple):
    share: Annotated[float, Ge(0), Lt(1)]
    count: Annotated[int, Ge(1)]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_said_to_be_so(value: float) -> None:
    for kind in (Pair, Made):
        with pytest.raises(JobError, match=rf"^at\.share: {value} is not finite\. Allowed: a number( of at|\.)"):
            decode(cast("type[Any]", kind), {"share": value, "count": 1}, "at", ignore_unknown=True)
    with pytest.raises(JobError, match=rf"^count: {value} is not finite\. Allowed: a whole number of at least 1\.$"):
        decode(Pair, {"share": 0.5, "count": value})
    with pytest.raises(JobError, match=rf"{value} is not finite"):
        decode(dict[str, float], {"any": value})


def test_numbers_that_code_makes_are_within_limits() -> None:
    check_limits(Pair(0.5, 1), "at")
    with pytest.raises(JobError, match=r"^at\.share: 1\.0 is not allowed\. Allowed: a number of at least 0 and"):
        check_limits(Pair(1.0, 1), "at")
    with pytest.raises(JobError, match=r"^at\.share: nan is not finite"):
        check_limits(Pair(math.nan, 1), "at")


def test_a_key_that_is_like_a_missing_one_is_named_before_it() -> None:
    with pytest.raises(JobError, match=r"^cuont: unknown key \(did you mean 'count'\?\)\. Known here: count, share\.$"):
        decode(Pair, {"cuont": 1})
    with pytest.raises(JobError, match=r"^share: is missing\. Give a number of at least 0 and below 1\.$"):
        decode(Pair, {"word": 1})


@given(st.builds(Made, ranks=st.lists(st.integers()).map(tuple), where=st.none() | st.tuples(st.text(), st.integers()),
                 share=st.floats(allow_nan=False, allow_infinity=False), word=st.sampled_from(["a", "b"])))  # fmt: skip
def test_what_it_is_itself_is_taken(made: Made) -> None:
    assert decode(Made, asdict(made)) == made
    assert decode(Made, {"share": 1, "ranks": [1, 2], "unknown": object()}, ignore_unknown=True) == Made(
        share=1, ranks=(1, 2)
    )


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
