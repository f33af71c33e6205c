"""Numbers that a file may say, checked: it may have anything anywhere."""

from __future__ import annotations

import math
from typing import Any, TypeGuard

from plait.core.errors import JobError

LARGEST = 2**31 - 1
"""Of every size: more than any model has, and little enough for all that is computed from it."""
MOST_RANKS = 2**17
"""A job has fewer: where ranks are counted up to the highest, a larger number would fill a memory."""

MOST_SEED = 2**63 - 1
"""The largest seed: seeds are TOML's whole numbers, which torch's generators and Plait's own take."""
MOST_SECONDS = 1e9
"""Thirty years: more than any timer takes is no time to wait."""

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


def check_number(value: Any, key: str, *, whole: bool) -> None:
    """Refuse what is no number, not finite or, where ``whole``, not a whole number of a possible size."""
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
        raise JobError(f"{shown(value)} is not {'a whole number' if whole else 'a number'}", key=key)
    if isinstance(value, float) and not math.isfinite(value):
        raise JobError(f"{value} is not finite", key=key)
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


def nearest_batch(batch: int, size: int, dp: int) -> str:
    """What would do in place of a global batch that micro-batches of ``size`` on ``dp`` replicas do not fill.

    >>> nearest_batch(8, 3, 1)
    'Use 6 or 9, or train.micro_batch_size=2'
    """
    fewer = batch // (size * dp) * size * dp
    batches = " or ".join(str(one) for one in (fewer, fewer + size * dp) if one)
    most = min(size, batch // dp, MOST_TRIED)
    fitting = next((one for one in range(most, 0, -1) if batch % (one * dp) == 0), None)
    return f"Use {batches}" + (f", or train.micro_batch_size={fitting}" if fitting else "")
