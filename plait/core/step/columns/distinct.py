"""Rows of columns that are alike, so that what depends on them is computed once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

_ROOM = 8
"""Values are counted in a table of at most so many times as many places as there are rows: that is several
times as fast as sorting them."""
_LEAST = 1 << 12
"""Places that such a table may always have."""


def distinct(columns: Sequence[NDArray[Any]]) -> tuple[Ints, Ints]:
    """The first row of every kind, and the kind of every row.

    >>> distinct([np.array([7, 7, 5]), np.array([1, 1, 1])])
    (array([2, 0]), array([1, 1, 0]))
    """
    code, size = np.zeros(len(columns[0]), np.int64), 1
    for column in columns:
        numbers, count = _numbered(column)
        if count < 2:
            continue
        if size * count > _places(code):
            code, size = _numbered(code)
        code, size = code * count + numbers, size * count
    kind, count = _numbered(code)
    first = np.empty(count, np.int64)
    first[kind[::-1]] = np.arange(len(kind) - 1, -1, -1)  # of several rows of a kind the last written remains
    return first, kind


def groups(kind: Ints) -> Iterator[Ints]:
    """The rows of every kind, kind by kind."""
    order = np.argsort(kind, kind="stable")
    yield from np.split(order, np.cumsum(np.bincount(kind))[:-1]) if len(kind) else ()


def _places(values: Ints) -> int:
    """That a table for these may have."""
    return max(_LEAST, _ROOM * len(values))


def _numbered(column: NDArray[Any]) -> tuple[Ints, int]:
    """Numbers from 0 for the values of a column, and how many there are."""
    values = column.astype(np.int64, copy=False)
    if not len(values):
        return values, 0
    low, high = int(values.min()), int(values.max())
    if low == high:
        return values - low, 1
    if high - low < _places(values):
        there = np.zeros(high - low + 1, np.int64)
        there[values - low] = 1
        return (np.cumsum(there) - 1)[values - low], int(there.sum())
    found, numbers = np.unique(values, return_inverse=True)
    return numbers.reshape(-1), len(found)
