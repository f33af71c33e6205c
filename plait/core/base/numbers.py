"""Checks and types of numbers that are read from files, which may hold any value anywhere."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, TypeGuard

from annotated_types import Ge, Gt, Le

from plait.core.base.errors import JobError

LARGEST = 2**31 - 1
"""The largest value of any size: larger than in any model, and small enough for all arithmetic on
it."""
MOST_RANKS = 2**17
"""An upper bound of a job's ranks. Arrays as long as the highest rank number would not fit in
memory for much larger numbers."""

MOST_SEED = 2**63 - 1
"""The largest seed: a seed is a whole number of TOML, which torch's and Plait's random generators
accept."""
MOST_SECONDS = 1e9
"""The longest time to wait in seconds, about thirty years: timers accept no more."""

_QUOTED = re.compile(r"-?\d{1,20}(\.\d{1,15})?([eE][+-]?\d{1,2})?", re.ASCII)
MOST_TRIED = 100_000
"""The most sizes of a micro-batch that are tried in search of one that divides the global batch."""


def is_number(value: object) -> TypeGuard[int | float]:
    """True if a value from a file is a number; true and false are none.

    >>> [is_number(value) for value in (3, -0.5, True, "3", None)]
    [True, True, False, False, False]
    """
    return isinstance(value, int | float) and not isinstance(value, bool)


def counted(text: str) -> int | None:
    """Return the number that a text of digits denotes, if it is below 2**63; None for any other
    text.

    >>> [counted(text) for text in ("007", "-1", "²", "9" * 5000, "")]
    [7, None, None, None, None]
    """
    small = text.isascii() and text.isdigit() and len(text) < 20
    return number if small and (number := int(text)) < 2**63 else None


def as_number(value: Any) -> Any:
    """Return a text that is a number as that number; any other value unchanged.

    >>> as_number("12.5"), as_number("-3"), as_number(7), as_number("soon"), as_number("1_0")
    (12.5, -3, 7, 'soon', '1_0')
    """
    if type(value) is not str or not _QUOTED.fullmatch(value):
        return value
    return float(value) if "." in value or "e" in value.lower() else int(value)


def check_number(value: Any, key: str, *, whole: bool) -> None:
    """Raise JobError, naming the key, if a value is no number, not finite, or out of range: beyond
    ``LARGEST`` if ``whole``, else beyond 2**53. whole: True to refuse fractions, too."""
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
        raise JobError(f"{shown(value)} is not {'a whole number' if whole else 'a number'}", key=key,
                       fix=f"Give {'a whole number' if whole else 'a number'}")  # fmt: skip
    if isinstance(value, float) and not math.isfinite(value):
        raise JobError(f"{value} is not finite", key=key, fix="Give a finite number")
    limit = LARGEST if whole else 2**53
    if isinstance(value, int) and abs(value) > limit:
        raise JobError(f"{shown(value)} is out of range", key=key, fix=f"Use at most {limit}")


def shown(value: Any) -> str:
    """Return a value as text for a message, shortened if it is large."""
    try:
        text = f"a number of {value.bit_length()} bits" if isinstance(value, int) and abs(value) >> 64 else repr(value)
    except ValueError:  # Python formats no number of thousands of digits
        text = f"a {type(value).__name__} with a number that is too long to be shown"
    return text if len(text) <= 60 else f"{text[:57]}..."


MOST_OFFERED = 12
"""The most values that a message suggests."""


def divisors(number: int, near: int) -> list[int]:
    """Return the divisors of a number, sorted; at most ``MOST_OFFERED``, the nearest to ``near``.

    >>> divisors(12, 5)
    [1, 2, 3, 4, 6, 12]
    """
    found = [one for one in range(1, min(number, MOST_TRIED) + 1) if number % one == 0]
    return sorted(sorted(found, key=lambda one: abs(one - near))[:MOST_OFFERED])


def multiples(of: int, near: int, most: int = LARGEST) -> list[int]:
    """Return the positive multiples of ``of`` next to ``near``, below and above, up to ``most``.

    >>> multiples(4, 10), multiples(4, 3), multiples(4, 10, 11)
    ([8, 12], [4], [8])
    """
    below = near // of * of
    return [one for one in (below, below + of) if 0 < one <= most]


def nearest_batch(batch: int, size: int, dp: int) -> list[dict[str, int]]:
    """Return the changes of the job file that would help if micro-batches of ``size`` on ``dp``
    replicas do not divide the global batch.

    >>> [list(change.values()) for change in nearest_batch(8, 3, 1)]
    [[6], [9], [2]]
    """
    most = min(size, batch // dp, MOST_TRIED)
    fitting = next((one for one in range(most, 0, -1) if batch % (one * dp) == 0), None)
    found = [{"train.global_batch_size": one} for one in multiples(size * dp, batch)]
    return [*found, {"train.micro_batch_size": fitting}] if fitting else found


Count = Annotated[int, Ge(1), Le(LARGEST)]
Natural = Annotated[int, Ge(0), Le(LARGEST)]
Whole = Annotated[int, Ge(-LARGEST), Le(LARGEST)]
Nanoseconds = Annotated[int, Ge(0)]
Positive = Annotated[float, Gt(0)]
NotNegative = Annotated[float, Ge(0)]
