"""Counts of tokens as people write and read them: ``15T``, ``300B``."""

from __future__ import annotations

import math
import re

from plait.core.base.errors import JobError

KEY = "plan.tokens"
UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
"""Of counts; a billion is 10**9."""
MOST = 1e18
"""Tokens: more is a slip."""
_AMOUNT = re.compile(r"(\d[\d_,]*(?:\.\d+)?(?:e\+?\d+)?)\s*([KMBT]?)", re.IGNORECASE)


def tokens_of(said: float | str, key: str = KEY) -> int:
    """Tokens, of ``plan.tokens`` or another key; 0 where none are asked about. Raises JobError for what is no
    count.

    >>> tokens_of("15T"), tokens_of("1.4 b"), tokens_of(3e11), tokens_of("300_000")
    (15000000000000, 1400000000, 300000000000, 300000)
    """
    match = _AMOUNT.fullmatch(str(said).strip())
    count = float(match[1].replace("_", "").replace(",", "")) * UNITS[match[2].upper()] if match else math.nan
    if not 0 <= count <= MOST or count != int(count):
        shown = f"'{said}'" if isinstance(said, str) else f"{said:g}"
        fix = f'Write a whole number of at most {MOST:g}, as in 15e12 or "15T" (K, M, B, T)'
        raise JobError(f"{shown} is no count of tokens", key=key, fix=fix)
    return int(count)


def in_tokens(count: float) -> str:
    """A count of tokens as people read it.

    >>> in_tokens(15e12), in_tokens(61_234_567_890), in_tokens(999.6), in_tokens(999_999)
    ('15T', '61.2B', '1K', '1M')
    """
    for unit, size in UNITS.items():
        if float(f"{count / size:.3g}") < 1000 or unit == "T":
            scaled = count / size
            return f"{scaled:.3g}{unit}" if scaled < 999.5 else f"{scaled:,.0f}{unit}"
    raise AssertionError
