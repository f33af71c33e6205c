"""Constraints: what can be asked, what holds, and what each mistake is answered with."""

from __future__ import annotations

import operator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.core.base.errors import JobError
from plait.core.job.constraint import COUNTS, WORDS, Constraint

SIGNS = {"<=": operator.le, ">=": operator.ge, "==": operator.eq, "=": operator.eq, "!=": operator.ne,
         "<": operator.lt, ">": operator.gt}  # fmt: skip


@given(st.sampled_from(COUNTS), st.sampled_from(sorted(SIGNS)), st.integers(-1, 50), st.lists(st.integers(-1, 50)))
def test_counts_are_compared(quantity: str, sign: str, value: int, column: list[int]) -> None:
    one = Constraint.parse(f" {quantity} {sign}{value} ")
    expected = [SIGNS[sign](each, value) for each in column]
    assert [one.holds(each) for each in column] == expected
    assert one.holds(np.array(column, dtype=np.int64)).tolist() == expected


@given(st.lists(st.integers(0, 9), min_size=1, max_size=4), st.lists(st.integers(0, 9)))
def test_in_is_one_of_several(values: list[int], column: list[int]) -> None:
    one = Constraint.parse(f"pp in {', '.join(map(str, values))}")
    assert one.holds(np.array(column, dtype=np.int64)).tolist() == [each in values for each in column]


@pytest.mark.parametrize("quantity", sorted(WORDS))
def test_words_are_their_numbers(quantity: str) -> None:
    for number, word in enumerate(WORDS[quantity]):
        one = Constraint.parse(f"{quantity} != '{word}'")
        assert [bool(one.holds(at)) for at in range(len(WORDS[quantity]))] == [
            at != number for at in range(len(WORDS[quantity]))
        ]


def test_sizes_have_units() -> None:
    assert Constraint.parse("memory <= 1.5 GiB").values == (1.5 * 2**30,)
    assert Constraint.parse("memory < 70GB").values == (70e9,)


def test_shard_factors_may_be_written_as_in_the_job() -> None:
    assert Constraint.parse("shard.params == 4").quantity == "params"
    assert Constraint.parse("sequence_parallel = true").values == (1.0,)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tp", "is no constraint"),
        ("tp 8", "is no constraint"),
        ("<= 8", "is no constraint"),
        ("tpp <= 8", "unknown quantity 'tpp' (did you mean 'tp'?)"),
        ("tp <= 8, 4", "has several values"),
        ("tp <= some", "is no whole number"),
        ("tp <= 1.5", "is no whole number"),
        ("schedule <= 1f1b", "compares words"),
        ("schedule = 1fb1", "did you mean '1f1b'"),
        ("memory <= lots", "is no size"),
        ("memory <= 70 Gib", "is no size"),
        ("memory <= 1.2.3", "is no size"),
    ],
)
def test_mistakes_are_named(text: str, words: str) -> None:
    with pytest.raises(JobError) as caught:
        Constraint.parse(text)
    assert words in str(caught.value)
    assert caught.value.key == "plan.constraints"


def test_memory_needs_a_unit() -> None:
    with pytest.raises(JobError, match=r"'memory <= 70' has no unit.*memory <= 70 GiB"):
        Constraint.parse("memory <= 70")
    assert Constraint.parse("memory <= 70000000000").values == (7e10,)


@pytest.mark.parametrize(
    ("size", "number"),
    [
        ("3e0", None), ("2000000", 2e6), ("2000000 B", 2e6), ("5 KB", 5e3), ("5MB", 5e6), ("5 GB", 5e9), ("5 TB", 5e12),
        ("5 KiB", 5 * 2**10), ("5 MiB", 5 * 2**20), ("5 GiB", 5 * 2**30), ("5 TiB", 5 * 2**40), (".5 GB", 5e8),
        ("1048576", 2**20), ("1048575", None), ("7 B", 7),
    ],
)  # fmt: skip
def test_every_unit_of_a_size(size: str, number: float | None) -> None:
    if number is None:
        with pytest.raises(JobError):
            Constraint.parse(f"memory <= {size}")
    else:
        assert Constraint.parse(f"memory <= {size}").values == (number,)


def test_sequence_parallelism_is_true_or_false() -> None:
    assert Constraint.parse("sequence_parallel = true").values == (1,)
    assert Constraint.parse("sequence_parallel = false").values == (0,)
    for text in ("sequence_parallel = on", "sequence_parallel = maybe", "tp = true", "pp = false"):
        with pytest.raises(JobError, match="is no whole number"):
            Constraint.parse(text)
