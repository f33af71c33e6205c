"""Numbers that files say: what is one, what is in range, how it is shown, what is offered
instead."""

from __future__ import annotations

from math import inf, nan
from typing import Any

import pytest

from plait.core.base.errors import JobError
from plait.core.base.numbers import (
    LARGEST,
    check_number,
    counted,
    divisors,
    is_number,
    multiples,
    nearest_batch,
    shown,
)


@pytest.mark.parametrize(
    ("value", "is_one"),
    [(3, True), (-0.5, True), (nan, True), (True, False), (False, False), ("3", False), (None, False), ([3], False)],
)
def test_truth_values_are_no_numbers(value: object, is_one: bool) -> None:
    assert is_number(value) == is_one


@pytest.mark.parametrize(
    ("text", "number"),
    [("0", 0), ("007", 7), (str(2**63 - 1), 2**63 - 1), (str(2**63), None), ("0" * 18 + "7", 7), ("0" * 19 + "7", None),
     ("-1", None), ("+1", None), (" 1", None), ("1_0", None), ("²", None), ("٣", None), ("", None), ("9" * 5000, None)],
)  # fmt: skip
def test_digits_alone_are_counted(text: str, number: int | None) -> None:
    assert counted(text) == number


@pytest.mark.parametrize(
    ("value", "whole"),
    [(3, True), (-3, True), (LARGEST, True), (-LARGEST, True), (3, False), (0.5, False), (2**53, False),
     (-(2**53), False), (1e300, False)],
)  # fmt: skip
def test_a_number_that_may_be(value: Any, whole: bool) -> None:
    check_number(value, "k", whole=whole)


@pytest.mark.parametrize(
    ("value", "whole", "says"),
    [
        (True, True, "True is not a whole number. Give a whole number"),
        (False, False, "False is not a number. Give a number"),
        (0.5, True, "0.5 is not a whole number"),
        ("3", True, "'3' is not a whole number"),
        ("3", False, "'3' is not a number"),
        (None, False, "None is not a number"),
        (nan, False, "nan is not finite"),
        (inf, False, "inf is not finite"),
        (LARGEST + 1, True, f"2147483648 is out of range. Use at most {LARGEST}"),
        (-LARGEST - 1, True, "-2147483648 is out of range"),
        (2**53 + 1, False, f"9007199254740993 is out of range. Use at most {2**53}"),
        (10**400, False, "a number of 1329 bits is out of range"),
    ],
)
def test_a_number_that_may_not_be(value: Any, whole: bool, says: str) -> None:
    with pytest.raises(JobError) as caught:
        check_number(value, "k", whole=whole)
    assert str(caught.value).startswith(f"k: {says}")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (3, "3"), ("a", "'a'"), (2**64 - 1, str(2**64 - 1)), (2**64, "a number of 65 bits"),
        (-(2**64), "a number of 65 bits"), (10**5000, "a number of 16610 bits"),
        ([10**5000], "a list with a number that is too long to be shown"),
        ("x" * 58, "'" + "x" * 58 + "'"), ("x" * 59, "'" + "x" * 56 + "..."),
    ],
    ids=range(9),
)  # fmt: skip
def test_a_value_is_shown_however_large_it_is(value: Any, text: str) -> None:
    assert shown(value) == text


def test_divisors_near_a_number() -> None:
    assert divisors(12, 5) == [1, 2, 3, 4, 6, 12]
    assert divisors(720, 1) == [1, 2, 3, 4, 5, 6, 8, 9, 10, 12, 15, 16]
    assert divisors(720, 720) == [45, 48, 60, 72, 80, 90, 120, 144, 180, 240, 360, 720]
    assert divisors(100_000, 10**5)[-1] == 100_000
    assert divisors(100_003, 10**6) == [1]  # a prime above what is looked at


def test_multiples_around_a_number() -> None:
    assert multiples(4, 10) == [8, 12]
    assert multiples(4, 8) == [8, 12]
    assert multiples(4, 3) == [4]
    assert multiples(4, 10, 12) == [8, 12]
    assert multiples(4, 10, 11) == [8]
    assert multiples(4, 10, 7) == []


def test_batches_that_would_do() -> None:
    def offered(batch: int, size: int, dp: int) -> list[tuple[str, int]]:
        return [item for change in nearest_batch(batch, size, dp) for item in change.items()]

    whole, part = "train.global_batch_size", "train.micro_batch_size"
    assert offered(8, 3, 1) == [(whole, 6), (whole, 9), (part, 2)]
    assert offered(12, 5, 2) == [(whole, 10), (whole, 20), (part, 3)]
    assert offered(7, 4, 2) == [(whole, 8)]  # no micro-batch of two replicas divides 7
    assert offered(6, 9, 2) == [(whole, 18), (part, 3)]  # what a replica has at most
