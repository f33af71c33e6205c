"""Links that are tested before a run: the order of the tests, and which links are slow."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from typing import TypeVar

Key = TypeVar("Key")
LEAST_RATES = 3
"""Least number of measured rates of one kind of link from which a median is taken."""


def rounds(places: int, apart: Iterable[int]) -> list[list[tuple[int, int]]]:
    """Return rounds of pairs of places (hosts, by index); links of one round are tested at the same
    time, and no place is twice in a round. apart: distances of the two places of a pair around the
    ring of places, in order of testing.

    >>> rounds(4, (1, 2))
    [[(0, 1), (2, 3)], [(1, 2), (0, 3)], [(0, 2), (1, 3)]]
    """
    all_pairs = ((place, (place + step) % places) for step in apart for place in range(places))
    left = dict.fromkeys((min(pair), max(pair)) for pair in all_pairs if pair[0] != pair[1])
    found: list[list[tuple[int, int]]] = []
    while left:
        busy: set[int] = set()
        now = [pair for pair in left if not busy.intersection(pair) and not busy.update(pair)]
        found.append(now)
        for pair in now:
            del left[pair]
    return found


def kind_of(first: int, second: int, places: int) -> str:
    """Return the kind of the link between two places: ``neighbours`` if they are adjacent on the
    ring of ``places`` places, else ``across``."""
    return "neighbours" if abs(first - second) in (1, places - 1) else "across"


def slower(rates: Mapping[Key, float], share: float) -> dict[Key, float]:
    """Return the keys whose rate is less than ``share`` of the median, each with the median; empty
    if there are too few rates. rates: of links that should be equally fast.

    >>> slower({"a": 9.0, "b": 1.0, "c": 10.0}, 1 / 4)
    {'b': 9.0}
    """
    usual = statistics.median(rates.values()) if len(rates) >= LEAST_RATES else 0.0
    return {key: usual for key, rate in rates.items() if rate < usual * share}
