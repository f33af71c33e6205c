"""Rows of columns that are alike, so that what depends on them is computed once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

_SMALL = 1 << 22
_LARGEST = 1 << 62


def distinct(columns: Sequence[NDArray[Any]]) -> tuple[Ints, Ints]:
    """One row of every kind, and the kind of every row.

    >>> distinct([np.array([7, 7, 5]), np.array([1, 1, 1])])
    (array([2, 0]), array([1, 1, 0]))
    """
    code, size = np.zeros(len(columns[0]), np.int64), 1
    for column in columns:
        numbers, count = _numbered(column)
        if size * count >= _LARGEST:
            code, size = _numbered(code)
        code, size = code * count + numbers, size * count
    _, first, kind = np.unique(code, return_index=True, return_inverse=True)
    return first, kind.reshape(-1)


def groups(kind: Ints) -> Iterator[Ints]:
    """The rows of every kind, kind by kind."""
    order = np.argsort(kind, kind="stable")
    yield from np.split(order, np.cumsum(np.bincount(kind))[:-1]) if len(kind) else ()


def _numbered(column: NDArray[Any]) -> tuple[Ints, int]:
    """Numbers from 0 for the values of a column, and how many there are."""
    values = column.astype(np.int64, copy=False)
    low, high = (int(values.min()), int(values.max())) if len(values) else (0, 0)
    if high - low < _SMALL:
        there = np.zeros(high - low + 1, np.int64)
        there[values - low] = 1
        return (np.cumsum(there) - 1)[values - low], int(there.sum())
    found, numbers = np.unique(values, return_inverse=True)
    return numbers.reshape(-1), len(found)
