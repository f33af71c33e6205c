"""Rows that are alike, found by counting where values are close and by sorting where they are
not."""

from __future__ import annotations

import random

import numpy as np
import pytest

from plait.core.step.columns import points as module
from plait.core.step.columns.points import distinct, groups


def checked(columns: list[list[int]]) -> None:
    """First rows are the first of their kind, and rows are of a kind where all columns agree."""
    first, kind = distinct([np.array(column) for column in columns])
    rows = list(zip(*columns, strict=True))
    seen = dict[tuple[int, ...], int]()
    for at, row in enumerate(rows):
        seen.setdefault(row, at)
    assert sorted(first.tolist()) == sorted(seen.values())
    assert [rows[first[number]] for number in kind.tolist()] == rows
    found = list(groups(kind))
    assert sorted(at for each in found for at in each.tolist()) == list(range(len(rows)))
    for number, each in enumerate(found):
        assert set(kind[each].tolist()) == {number}
        assert each.tolist() == sorted(each.tolist())


@pytest.mark.parametrize("spread", [1, 2, 9, 5000, 10**6, 10**15])
@pytest.mark.parametrize("count", [1, 2, 50, 700])
@pytest.mark.parametrize("columns", [1, 2, 5])
def test_rows_of_any_columns(spread: int, count: int, columns: int) -> None:
    chance = random.Random(f"{spread} {count} {columns}")
    values = [chance.randrange(-spread, spread) for _ in range(7)]
    checked([[chance.choice(values) for _ in range(count)] for _ in range(columns)])


def test_tables_that_are_too_small_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LEAST", 4)
    monkeypatch.setattr(module, "_ROOM", 1)
    chance = random.Random(7)
    for _ in range(30):
        checked([[chance.randrange(chance.choice([2, 5, 9])) for _ in range(12)] for _ in range(4)])


def test_no_rows_have_no_kinds() -> None:
    first, kind = distinct([np.array([], dtype=np.int64), np.array([], dtype=np.int64)])
    assert (first.tolist(), kind.tolist(), list(groups(kind))) == ([], [], [])
