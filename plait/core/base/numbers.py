"""Numbers that a file may say, checked: it may have anything anywhere."""

from __future__ import annotations

import math
import re
from typing import Any, TypeGuard

from plait.core.base.errors import JobError

LARGEST = 2**31 - 1
"""Of every size: more than any model has, and little enough for all that is computed from it."""
MOST_RANKS = 2**17
"""A job has fewer: where ranks are counted up to the highest, a larger number would fill a memory."""

MOST_SEED = 2**63 - 1
"""The largest seed: seeds are TOML's whole numbers, which torch's generators and Plait's own take."""
MOST_SECONDS = 1e9
"""Thirty years: more than any timer takes is no time to wait."""

_QUOTED = re.compile(r"-?\d{1,20}(\.\d{1,15})?([eE][+-]?\d{1,2})?", re.ASCII)
MOST_TRIED = 100_000
"""Sizes of a micro-batch that are looked at for one that would do."""


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether a value that a file says is a number; true and false are none.

    >>> [is_number(value) for value in (3, -0.5, True, "3", None)]
    [True, True, False, False, False]
    """
    return isinstance(value, int | float) and not isinstance(value, bool)


def counted(text: str) -> int | None:
    """The number that a text of digits says, below 2**63; None for any other text.

    >>> [counted(text) for text in ("007", "-1", "²", "9" * 5000, "")]
    [7, None, None, None, None]
    """
    small = text.isascii() and text.isdigit() and len(text) < 20
    return number if small and (number := int(text)) < 2**63 else None


def as_number(value: Any) -> Any:
    """A number that stands in quotes, as a number; any other value as it is.

    >>> as_number("12.5"), as_number("-3"), as_number(7), as_number("soon"), as_number("1_0")
    (12.5, -3, 7, 'soon', '1_0')
    """
    if type(value) is not str or not _QUOTED.fullmatch(value):
        return value
    return float(value) if "." in value or "e" in value.lower() else int(value)


def check_number(value: Any, key: str, *, whole: bool) -> None:
    """Refuse what is no number, not finite or, where ``whole``, not a whole number of a possible size."""
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
        raise JobError(f"{shown(value)} is not {'a whole number' if whole else 'a number'}", key=key,
                       fix=f"Give {'a whole number' if whole else 'a number'}")  # fmt: skip
    if isinstance(value, float) and not math.isfinite(value):
        raise JobError(f"{value} is not finite", key=key, fix="Give a number that is")
    limit = LARGEST if whole else 2**53
    if isinstance(value, int) and abs(value) > limit:
        raise JobError(f"{shown(value)} is out of range", key=key, fix=f"Use at most {limit}")


def shown(value: Any) -> str:
    """A value for a message, however large it is."""
    try:
        text = f"a number of {value.bit_length()} bits" if isinstance(value, int) and abs(value) >> 64 else repr(value)
    except ValueError:  # Python writes no number of thousands of digits
        text = f"a {type(value).__name__} with a number that is too long to be shown"
    return text if len(text) <= 60 else f"{text[:57]}..."


MOST_OFFERED = 12
"""Values that a message offers."""


def divisors(number: int, near: int) -> list[int]:
    """The divisors of a number, at most ``MOST_OFFERED`` of them, those nearest to ``near``.

    >>> divisors(12, 5)
    [1, 2, 3, 4, 6, 12]
    """
    found = [one for one in range(1, min(number, MOST_TRIED) + 1) if number % one == 0]
    return sorted(sorted(found, key=lambda one: abs(one - near))[:MOST_OFFERED])


def multiples(of: int, near: int, most: int = LARGEST) -> list[int]:
    """The multiples of a number around ``near``, from one on, up to ``most``.

    >>> multiples(4, 10), multiples(4, 3), multiples(4, 10, 11)
    ([8, 12], [4], [8])
    """
    below = near // of * of
    return [one for one in (below, below + of) if 0 < one <= most]


def nearest_batch(batch: int, size: int, dp: int) -> list[dict[str, int]]:
    """What would do in place of a global batch that micro-batches of ``size`` on ``dp`` replicas do not fill,
    as changes.

    >>> [list(change.values()) for change in nearest_batch(8, 3, 1)]
    [[6], [9], [2]]
    """
    most = min(size, batch // dp, MOST_TRIED)
    fitting = next((one for one in range(most, 0, -1) if batch % (one * dp) == 0), None)
    found = [{"train.global_batch_size": one} for one in multiples(size * dp, batch)]
    return [*found, {"train.micro_batch_size": fitting}] if fitting else found
