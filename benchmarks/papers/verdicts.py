"""The verdict of every quantity that a page prints beside a published one, by the rules of ``rules.toml``.

What is published is a number, a range, or words. Plait's ``value`` is the same quantity under the same
conditions, unless ``differs`` of the published row names another; ``reading`` is what a reading of the
paper's words or another choice gives; ``over`` has the values over what the paper does not print.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from benchmarks.papers.found import HERE
from plait.core.base.codec.toml_text import read_toml

RULES = read_toml(HERE / "rules.toml")
WORDS: tuple[str, ...] = tuple(RULES["verdicts"])
"""From the best to the worst."""
AS_PUBLISHED, DIRECTION, BY_A_READING, NOT_DETERMINED, NOT_REPRODUCED = WORDS
NOISE: float = RULES["noise"]["computed"]
MEASURED: float = RULES["noise"]["measured"]
BASES = {"x": 1.0, "+%": 0.0}
"""Where nothing is gained, by unit."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """word: of ``WORDS``. plain: the word without the reading, where a reading decides."""

    word: str
    plain: str = ""

    def __str__(self) -> str:
        return f"{self.word} ({self.plain})" if self.plain else self.word


def worst(words: Iterable[str]) -> str:
    """The last of them in ``WORDS``.

    >>> worst(["direction", "as published"])
    'direction'
    """
    return max(words, key=WORDS.index)


def judge(row: Mapping[str, Any], result: Mapping[str, Any] | None, *, emulated: bool = False) -> Verdict:
    """A published row with its unit, by what was found of it; None: nothing was.

    >>> row = {"published": [1.1, 1.2], "unit": "x"}
    >>> [str(judge(row, {"value": value})) for value in (1.25, [1.08, 1.3], 1.0, None)]
    ['as published', 'direction', 'not reproduced', 'not reproduced']
    >>> str(judge(row, {"value": 1.0, "reading": 1.15})), str(judge(row, {"over": [1.0, 1.15]}))
    ('by a reading (not reproduced)', 'not determined')
    """
    result = result or {}
    noise = MEASURED if emulated else NOISE

    def word(value: Any) -> str:
        return _word(row["published"], value, row["unit"], noise)

    every = list(result.get("over") or ()) + ([result["value"]] if result.get("value") is not None else [])
    words = {word(one) for one in every} or {NOT_REPRODUCED}
    if len(words) > 1:
        return Verdict(word=NOT_DETERMINED)
    (plain,) = words
    readings = [result["reading"]] if result.get("reading") is not None else []
    if row.get("differs"):
        readings, plain = readings + every, NOT_REPRODUCED
    if plain == NOT_REPRODUCED and any(word(one) != NOT_REPRODUCED for one in readings):
        return Verdict(word=BY_A_READING, plain=plain)
    return Verdict(word=plain)


def widened(published: Sequence[float], unit: str) -> tuple[float, float]:
    """The published range with the tolerance.

    >>> widened([1.2, 1.4], "x"), widened([0.5, 0.5], "%"), widened([0, 0], "%")
    ((1.15, 1.5), (0.45, 0.55), (-0.005, 0.005))
    """
    share = RULES["tolerance"]["gain" if unit in BASES else "value"]
    low, high = ((max(share * abs(end - BASES.get(unit, 0.0)), NOISE) if abs(end) < inf else 0.0)
                 for end in published)  # fmt: skip
    return round(published[0] - low, 9), round(published[1] + high, 9)


def _word(published: Any, value: Any, unit: str, noise: float) -> str:
    """Of one value, or of the ends of a range of values, which have to be so all."""
    if isinstance(published, str):
        if isinstance(value, bool):
            return DIRECTION if value else NOT_REPRODUCED
        return AS_PUBLISHED if value == published else NOT_REPRODUCED
    if value is None or isinstance(value, (str, bool)):
        return NOT_REPRODUCED
    ends = published if isinstance(published, Sequence) else (published, published)
    low, high = widened(ends, unit)
    base = BASES.get(unit)
    side = 0 if base is None else (ends[0] > base) - (ends[1] < base)
    values = value if isinstance(value, Sequence) else [value]
    return worst(
        AS_PUBLISHED if low <= one <= high
        else DIRECTION if side * (one - (base or 0.0)) > noise
        else NOT_REPRODUCED
        for one in values
    )  # fmt: skip
