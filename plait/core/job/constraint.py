"""Constraints: what a user asks of every strategy, as in ``tp <= 8`` or ``memory <= 70 GiB``."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from plait.core.base.errors import JobError, nearest
from plait.core.job.renamed import QUANTITIES

WORDS: Mapping[str, tuple[str, ...]] = {
    "schedule": ("gpipe", "1f1b", "eager-1f1b", "slack-1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v"),
    "recompute": ("none", "selective", "full"),
    "overlap": ("sync", "async", "domino", "no-communication"),
    "shard_overlap": ("none", "forward", "backward", "both"),
}
"""Quantities that are words, and which."""
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


def _value(quantity: str, word: str, text: str) -> float:
    if quantity in WORDS:
        if word not in WORDS[quantity]:
            problem = f"'{text}': '{word}' is no {quantity}{nearest(word, WORDS[quantity])}"
            raise JobError(problem, key="plan.constraints", fix=f"Use {', '.join(WORDS[quantity])}")
        return WORDS[quantity].index(word)
    if quantity == "sequence_parallel" and word in ("true", "false"):
        return int(word == "true")
    if quantity in SIZES:
        size = _SIZE.fullmatch(word)
        if size and size[2] in _UNITS and size[1].count(".") <= 1 and size[1] != ".":
            if not size[2] and float(size[1]) < WITHOUT_UNIT:
                fix = f"Write its unit, as in {quantity} <= {word} GiB"
                problem = f"'{text}' has no unit, and {word} bytes are next to nothing"
                raise JobError(problem, key="plan.constraints", fix=fix)
            return float(size[1]) * _UNITS[size[2]]
        problem = f"'{text}': '{word}' is no size"
        raise JobError(problem, key="plan.constraints", fix=f"Write it as in {quantity} <= 70 GiB")
    if not re.fullmatch(r"-?\d{1,18}", word):
        fix = f"Write a whole number, as in {quantity} <= 8"
        raise JobError(f"'{text}': '{word}' is no whole number", key="plan.constraints", fix=fix)
    return int(word)
