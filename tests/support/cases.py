"""Which of a large product of cases the suite runs; the mark ``contract`` has the rest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import pytest


def each_other(*lists: Sequence[Any]) -> Iterator[Any]:
    """Every combination; every other one in the suite, so that neighbours differ in one value and each value
    occurs."""
    for places in product(*(range(len(each)) for each in lists)):
        values = [each[at] for each, at in zip(lists, places, strict=True)]
        yield pytest.param(*values, marks=() if sum(places) % 2 == 0 else pytest.mark.contract)
