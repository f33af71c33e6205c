"""What a user asks of every strategy: constraints, as in ``tp <= 8`` or ``memory <= 70 GiB``, and the memory
that is to stay free, since predicted memory may be too low:

=============  =====================================================================================
setting        what is left free
=============  =====================================================================================
``"auto"``     so much that the plan fits with a probability of ``SURE``, by the band of its memory
``"safest"``   the same; of the plans that take hardly longer than the fastest, the surest to fit
``"fastest"``  nothing: 0
0.05           this share of what a plan may fill
``"4 GiB"``    so many bytes
=============  =====================================================================================
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

from plait.core.base.errors import JobError, nearest
from plait.core.base.text import in_bytes
from plait.core.job.renamed import QUANTITIES
from plait.core.parallel.strategy import WORDS

COUNTS = (
    "pp", "dp", "cp", "ring", "ulysses", "tp", "ep", "micro_batch_size", "num_micro_batches", "virtual_stages",
    "recompute_layers", "sequence_parallel", "params", "grads", "optim", "secondary", "batch_slices", "column_slices",
)  # fmt: skip
"""Quantities that are whole numbers."""
SIZES = ("memory",)
"""Quantities that are bytes of one rank."""
SIGNS: Mapping[str, Callable[[Any, Any], Any]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "=": operator.eq,
    "<": operator.lt,
    ">": operator.gt,
}
_FORM = re.compile(r"\s*(?:shard\.)?([a-z_0-9]+)\s*(<=|>=|==|!=|=|<|>|\bin\b)\s*(.+?)\s*")
_UNITS = {
    "": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40,
}  # fmt: skip
WITHOUT_UNIT = 1 << 20
"""Below it a size without a unit is a slip: nobody means bytes."""
_SIZE = re.compile(r"([0-9.]+)\s*([A-Za-z]*)")


@dataclass(frozen=True)
class Constraint:
    """quantity: of a strategy. values: one, or several for ``in``. text: as the user wrote it."""

    quantity: str
    sign: str
    values: tuple[float, ...]
    text: str

    @staticmethod
    def parse(text: str) -> Constraint:
        """Raises JobError for what is no constraint."""
        match = _FORM.fullmatch(text)
        key = "plan.constraints"
        if not match:
            raise JobError(
                f"'{text}' is no constraint", key=key, fix='Write QUANTITY SIGN VALUE, as in "tp <= 8" or "pp in 1, 2"'
            )
        quantity, sign, given = match[1], match[2], match[3]
        known = (*WORDS, *COUNTS, *SIZES)
        if quantity in QUANTITIES:
            raise JobError(f"'{text}': {quantity} is called {QUANTITIES[quantity]} now", key=key, fix="Write that")
        if quantity not in known:
            problem = f"'{text}': nothing is called '{quantity}'{nearest(quantity, known)}"
            raise JobError(problem, key=key, fix=f"Known: {', '.join(known)}")
        words = [word.strip().strip("\"'") for word in given.split(",")]
        if sign != "in" and len(words) > 1:
            raise JobError(f"'{text}' has several values", key=key, fix=f"Write {quantity} in {given}")
        if quantity in WORDS and sign not in ("=", "==", "!=", "in"):
            raise JobError(f"'{text}' orders words", key=key, fix=f"Write {quantity} in {given}")
        return Constraint(quantity, sign, tuple(_value(quantity, word, text) for word in words), text.strip())

    def holds(self, found: Any) -> Any:
        """Whether a quantity (or, element by element, a column of it) is as asked."""
        if self.sign != "in":
            return SIGNS[self.sign](found, self.values[0])
        result = found == self.values[0]
        for value in self.values[1:]:
            result = result | (found == value)
        return result


def size_of(word: str) -> float | None:
    """Bytes, of a number with or without a unit; None of what is no size.

    >>> size_of("1.5 KiB"), size_of("1.5 miles")
    (1536.0, None)
    """
    size = _SIZE.fullmatch(word.strip())
    if not size or size[2] not in _UNITS or size[1].count(".") > 1 or size[1] == ".":
        return None
    return float(size[1]) * _UNITS[size[2]]


def _value(quantity: str, word: str, text: str) -> float:
    if quantity in WORDS:
        if word not in WORDS[quantity]:
            problem = f"'{text}': '{word}' is no {quantity}{nearest(word, WORDS[quantity])}"
            raise JobError(problem, key="plan.constraints", fix=f"Use {', '.join(WORDS[quantity])}")
        return WORDS[quantity].index(word)
    if quantity == "sequence_parallel" and word in ("true", "false"):
        return int(word == "true")
    if quantity in SIZES:
        if (size := size_of(word)) is not None:
            if word[-1] in "0123456789." and size < WITHOUT_UNIT:
                fix = f"Write its unit, as in {quantity} <= {word} GiB"
                problem = f"'{text}' has no unit, and {word} bytes are next to nothing"
                raise JobError(problem, key="plan.constraints", fix=fix)
            return size
        problem = f"'{text}': '{word}' is no size"
        raise JobError(problem, key="plan.constraints", fix=f"Write it as in {quantity} <= 70 GiB")
    if not re.fullmatch(r"-?\d{1,18}", word):
        fix = f"Write a whole number, as in {quantity} <= 8"
        raise JobError(f"'{text}': '{word}' is no whole number", key="plan.constraints", fix=fix)
    return int(word)


# ---- memory that stays free ----

SURE = 0.9
"""How likely a plan is to fit, unless a job says otherwise."""
MARGINS = ("auto", "safest", "fastest")
MARGIN_KEY = "plan.memory_margin"


@dataclass(frozen=True)
class Margin:
    """What is left free: so much that a plan is ``sure`` to fit (0: whatever its band), a share of what may
    be filled, and bytes. safest: most room counts for more than a little time."""

    sure: float = 0.0
    share: float = 0.0
    size: float = 0.0
    safest: bool = False

    @staticmethod
    def parse(said: float | str) -> Margin:
        """Of the setting. Raises JobError for what is none.

        >>> Margin.parse("4 GiB"), Margin.parse(0.05), Margin.parse("fastest")
        (Margin(sure=0.0, share=0.0, size=4294967296.0, safest=False), \
Margin(sure=0.0, share=0.05, size=0.0, safest=False), Margin(sure=0.0, share=0.0, size=0.0, safest=False))
        """
        if said in ("auto", "safest"):
            return Margin(sure=SURE, safest=said == "safest")
        if said == "fastest":
            return Margin()
        if isinstance(said, str) and said.strip()[-1:].isalpha() and (size := size_of(said)) is not None:
            return Margin(size=size)
        if not isinstance(said, str) and 0 <= said < 1:
            return Margin(share=float(said))
        shown = f"'{said}'" if isinstance(said, str) else f"{said:g}"
        words = ", ".join(f'"{word}"' for word in MARGINS)
        raise JobError(
            f"{shown} is not allowed",
            key=MARGIN_KEY,
            fix=f'Allowed: {words}, a share from 0 to below 1, or bytes as "4 GiB"',
        )

    def kept(self, deviation: Any, usable: float) -> Any:
        """Bytes that stay free. deviation: standard deviation of the plan's memory, or a column of them.
        usable: bytes that a plan may fill."""
        quantile = NormalDist().inv_cdf(self.sure) if self.sure else 0.0
        return quantile * deviation + (self.share * usable + self.size)

    @property
    def why(self) -> str:
        """What it is for, or who says so.

        >>> Margin(sure=0.9).why, Margin(share=0.05).why
        ('to be 90% sure that it fits', 'as plan.memory_margin = 0.05 says')
        """
        if self.sure:
            return f"to be {self.sure:.0%} sure that it fits"
        return f"as {MARGIN_KEY} = {in_bytes(int(self.size)) if self.size else f'{self.share:g}'} says"


NO_MARGIN = Margin()
"""Nothing stays free."""
