"""Conditions that the user sets for every strategy: constraints, as in ``tp <= 8`` or ``memory <=
70 GiB``, and the memory that a plan must leave free, since predicted memory may be too low:

=============  =====================================================================================
setting        free memory
=============  =====================================================================================
``"auto"``     enough that the plan fits with probability ``SURE``, by the uncertainty of its memory
``"safest"``   the same; among plans hardly slower than the fastest, the most likely to fit wins
``"fastest"``  nothing: 0
0.05           this share of the memory that a plan may fill
``"4 GiB"``    this many bytes
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
from plait.core.parallel import strategy
from plait.core.step.schedules import GENERATORS

WORDS = {"schedule": tuple(GENERATORS), **strategy.WORDS}
"""Settings of a strategy whose values are words, with these words."""
COUNTS = (
    "pp", "dp", "cp", "ring", "ulysses", "tp", "ep", "micro_batch_size", "num_micro_batches", "virtual_stages",
    "recompute_layers", "sequence_parallel", "params", "grads", "optim", "secondary", "batch_slices", "column_slices",
)  # fmt: skip
"""Quantities that are whole numbers."""
SIZES = ("memory",)
"""Quantities in bytes of one rank."""
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
"""Bytes below which a size without a unit is refused as a slip: nobody means bytes."""
_SIZE = re.compile(r"([0-9.]+)\s*([A-Za-z]*)")


@dataclass(frozen=True)
class Constraint:
    """A condition on a strategy. quantity: a quantity of the strategy. values: one, or several for
    ``in``. text: as the user wrote it."""

    quantity: str
    sign: str
    values: tuple[float, ...]
    text: str

    @staticmethod
    def parse(text: str) -> Constraint:
        """Return the constraint in ``text``. Raises JobError if the text is not a constraint."""
        match = _FORM.fullmatch(text)
        key = "plan.constraints"
        if not match:
            raise JobError(
                f"'{text}' is no constraint", key=key, fix='Write QUANTITY SIGN VALUE, as in "tp <= 8" or "pp in 1, 2"'
            )
        quantity, sign, given = match[1], match[2], match[3]
        known = (*WORDS, *COUNTS, *SIZES)
        if quantity not in known:
            problem = f"'{text}': unknown quantity '{quantity}'{nearest(quantity, known)}"
            raise JobError(problem, key=key, fix=f"Known: {', '.join(known)}")
        words = [word.strip().strip("\"'") for word in given.split(",")]
        if sign != "in" and len(words) > 1:
            raise JobError(f"'{text}' has several values", key=key, fix=f"Write {quantity} in {given}")
        if quantity in WORDS and sign not in ("=", "==", "!=", "in"):
            raise JobError(f"'{text}' compares words by size", key=key, fix=f"Write {quantity} in {given}")
        return Constraint(quantity, sign, tuple(_value(quantity, word, text) for word in words), text.strip())

    def holds(self, measured: Any) -> Any:
        """Return True if the quantity ``measured`` meets the constraint; for an array, element by
        element."""
        if self.sign != "in":
            return SIGNS[self.sign](measured, self.values[0])
        result = measured == self.values[0]
        for value in self.values[1:]:
            result = result | (measured == value)
        return result


def size_of(word: str) -> float | None:
    """Return the bytes that a number with or without a unit means; None if the text is not a size.

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
"""Probability with which a plan is to fit, unless a job sets another margin."""
MARGINS = ("auto", "safest", "fastest")
MARGIN_KEY = "plan.memory_margin"


@dataclass(frozen=True)
class Margin:
    """Memory that a plan leaves free: enough to fit with probability ``confidence`` (0: no
    allowance for uncertainty), plus a share of usable memory, plus bytes. safest: more free memory
    is worth a little more time."""

    confidence: float = 0.0
    share: float = 0.0
    size: float = 0.0
    safest: bool = False

    @staticmethod
    def parse(setting: float | str) -> Margin:
        """Return the margin of the setting ``plan.memory_margin``. Raises JobError for a value that
        is not allowed.

        >>> Margin.parse("4 GiB"), Margin.parse(0.05), Margin.parse("fastest")
        (Margin(confidence=0.0, share=0.0, size=4294967296.0, safest=False), \
Margin(confidence=0.0, share=0.05, size=0.0, safest=False), \
Margin(confidence=0.0, share=0.0, size=0.0, safest=False))
        """
        if setting in ("auto", "safest"):
            return Margin(confidence=SURE, safest=setting == "safest")
        if setting == "fastest":
            return Margin()
        if isinstance(setting, str) and setting.strip()[-1:].isalpha() and (size := size_of(setting)) is not None:
            return Margin(size=size)
        if not isinstance(setting, str) and 0 <= setting < 1:
            return Margin(share=float(setting))
        shown = f"'{setting}'" if isinstance(setting, str) else f"{setting:g}"
        words = ", ".join(f'"{word}"' for word in MARGINS)
        raise JobError(
            f"{shown} is not allowed",
            key=MARGIN_KEY,
            fix=f'Allowed: {words}, a share from 0 to below 1, or bytes as "4 GiB"',
        )

    def reserved_bytes(self, deviation: Any, usable: float) -> Any:
        """Return the bytes that stay free. deviation: standard deviation of the plan's memory in
        bytes, or an array of them. usable: bytes that a plan may fill."""
        quantile = NormalDist().inv_cdf(self.confidence) if self.confidence else 0.0
        return quantile * deviation + (self.share * usable + self.size)

    @property
    def reason(self) -> str:
        """Reason for the margin, as a phrase for messages.

        >>> Margin(confidence=0.9).reason, Margin(share=0.05).reason
        ('to be 90% sure that it fits', 'as plan.memory_margin = 0.05 says')
        """
        if self.confidence:
            return f"to be {self.confidence:.0%} sure that it fits"
        return f"as {MARGIN_KEY} = {in_bytes(int(self.size)) if self.size else f'{self.share:g}'} says"


NO_MARGIN = Margin()
"""A margin that leaves no memory free."""
