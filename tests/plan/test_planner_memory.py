"""The benchmark of memory: what rows say of a device, and how right the whole is where the data is
there."""

from __future__ import annotations

import numpy as np
import planner_memory as memory
import pytest
from planner_rows import DATA, read_rows

TABLE = DATA / "measurements" / "measurements.csv"


@pytest.mark.skipif(not TABLE.is_file(), reason="no measurements beside the project")
def test_published_memory() -> None:
    rows = read_rows([TABLE]).rows
    judged = memory.judge(rows)
    found = memory.summary(judged)
    assert found["median_abs_rel_error"] < 0.08
    assert found["fit_right"] > 0.95
    assert found["oom_right"] > 0.95
    bytes_, fits = memory.row_memory(rows[:5])
    assert fits.tolist() == [float(one.fits) for one in judged[:5]]
    assert bytes_.tolist() == [one.bytes for one in judged[:5]]


@pytest.mark.skipif(not TABLE.is_file(), reason="no measurements beside the project")
def test_a_device_is_as_large_as_its_name_says() -> None:
    rows = [row for row in read_rows([TABLE]).rows if row.source == "bigscience-tr3m"]
    small, large = (next(row for row in rows if row.told["gpu"].endswith(name)) for name in ("16GB", "32GB"))
    assert memory.room(large) == 2 * memory.room(small)


def test_least_squares_without_negative_unknowns() -> None:
    matrix = np.array([[1.0, 0.0], [1.0, 1.0], [1.0, 2.0]])
    assert memory.nonnegative(matrix, np.array([1.0, 2.0, 3.0])).tolist() == pytest.approx([1.0, 1.0])
    assert memory.nonnegative(matrix, np.array([3.0, 2.0, 1.0])).tolist() == pytest.approx([2.0, 0.0])
