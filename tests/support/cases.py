"""Which of a large product of cases the suite runs; the mark ``contract`` has the rest."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import combinations, product
from typing import Any

import pytest


def each_other(*lists: Sequence[Any]) -> list[Any]:
    """Every combination; every other one in the suite, so that neighbours differ in one value and
    each value occurs."""
    return [
        pytest.param(
            *(each[at] for each, at in zip(lists, places, strict=True)),
            marks=() if sum(places) % 2 == 0 else pytest.mark.contract,
        )
        for places in product(*(range(len(each)) for each in lists))
    ]


def pairwise(*lists: Sequence[Any], allowed: Callable[..., bool] = lambda *_: True, more: int = 100) -> list[Any]:
    """Combinations that have every two values of two lists together, if any that is allowed does.

    The contract has ``more``, drawn from all.
    """
    chance, places = random.Random(0), list(product(*(range(len(each)) for each in lists)))
    every = [at for at in places if allowed(*(each[one] for each, one in zip(lists, at, strict=True)))]
    missing = {pair for at in every for pair in combinations(enumerate(at), 2)}
    found: list[Any] = []
    while missing or more:
        some = chance.sample(every, min(100, len(every))) if missing else [chance.choice(every)]
        best = max(some, key=lambda at: sum(pair in missing for pair in combinations(enumerate(at), 2)))
        covered = missing & set(combinations(enumerate(best), 2))
        if covered or not missing:
            more -= not missing
            marks = () if missing else pytest.mark.contract
            found.append(pytest.param(*(each[at] for each, at in zip(lists, best, strict=True)), marks=marks))
        missing -= covered
    return found


def first(count: int, of: int) -> list[Any]:
    """Numbers of drawn cases, the first of them in the suite."""
    return [pytest.param(number, marks=() if number < count else pytest.mark.contract) for number in range(of)]
