"""The heat map's matrices: statistics, orders of ranks, excess over equals, rows pooled for a screen."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.core.layout import Layout
from plait.diagnose.heat import (
    STATISTICS,
    Heat,
    Segment,
    Statistic,
    by_segment,
    excess_of,
    heat_of_segments,
    heat_of_steps,
    orders,
    pooled,
    ranks_in,
    unlike,
)  # fmt: skip
from plait.diagnose.reading import read_run
from plait.diagnose.recording import ROLLUP, grid_of
from tests.diagnose.made import At, Job, write_run

GRID = grid_of(Layout.of(pp=2, dp=2, tp=2))


def rollup(rows: list[tuple[int, int, str, str, str, int, float]]) -> pl.DataFrame:
    """(step, rank, kind, site, direction, n, seconds)."""
    columns = ["step", "rank", "kind", "site", "direction", "n", "seconds"]
    table = pl.DataFrame(rows, schema=columns, orient="row").with_columns(axis=pl.lit(""))
    return table.select(list(ROLLUP)).cast(ROLLUP)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("statistic", "expected"),
    [("mean", 2.0), ("median", 2.0), ("largest", 3.0), ("least", 1.0), ("sum", 4.0), ("mean of an op", 1.0),
     ("spread", 2**0.5)],
)  # fmt: skip
def test_statistics(statistic: Statistic, expected: float) -> None:
    sums = rollup([(0, 0, "compute", "mlp", "forward", 2, 1.0), (1, 0, "compute", "mlp", "forward", 2, 3.0)])
    assert by_segment(sums, statistic)["seconds"].to_list() == pytest.approx([expected])
    assert set(STATISTICS) >= {statistic}


def test_only_the_steps_that_are_asked_for() -> None:
    sums = rollup([(step, 0, "compute", "mlp", "forward", 1, float(step)) for step in range(10)])
    assert by_segment(sums, "mean", (8, 9))["seconds"].to_list() == [8.5]
    assert by_segment(sums, "mean", (50, 60)).is_empty()


def test_ranks_in_every_order() -> None:
    found = orders(GRID)
    assert len(found) == 6, "pp, dp and tp in any order; cp is one, hosts are not known"
    for order in found:
        assert sorted(ranks_in(GRID, order)) == list(range(8))
    assert list(ranks_in(GRID, ("tp", "dp", "pp"))) == [0, 4, 2, 6, 1, 5, 3, 7]
    with_hosts = grid_of(Layout.of(dp=4), ["b", "a", "b", "a"])
    assert list(ranks_in(with_hosts, ("host",))) == [1, 3, 0, 2]
    assert ("host",) in orders(with_hosts)


def test_excess_is_over_the_stage() -> None:
    seconds = np.array([[1.0], [1.2], [1.0], [5.0], [5.0], [np.nan]])
    assert excess_of(seconds, [0, 0, 0, 1, 1, 1])[:5].ravel() == pytest.approx([0, 0.2, 0, 0, 0])
    assert np.isnan(excess_of(seconds[:1], [0])).all(), "with nobody to be compared with, nothing is said"


def slow(at: At) -> float:
    return (0.1 if at.way == "forward" else 0.2) * (1.5 if (at.dp, at.stage, at.step >= 10) == (1, 0, True) else 1.0)


def test_a_slow_rank_is_the_first_of_those_unlike_the_others(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", Job(dp=4, pp=2, compute=slow))).recording
    heat = heat_of_segments(by_segment(run.rollup, "mean", (10, 19)), run.grid)
    first = unlike(heat)[0]
    assert (first.rank, first.share) == (1, pytest.approx(0.5, abs=0.02))
    own = [n for n, column in enumerate(heat.columns) if isinstance(column, Segment) and column.own]
    assert own == list(range(len(own))), "own work stands before waiting"
    steps = heat_of_steps(run.rollup, run.grid)
    assert steps.columns == tuple(range(20))
    assert steps.excess[1, 10:].min() > 0.3
    assert abs(steps.excess[1, :10]).max() < 0.3
    one = heat_of_steps(run.rollup, run.grid, segment=Segment("compute", "mlp", "backward"))
    assert one.seconds[0, 0] == pytest.approx(8 * 0.2, rel=0.1)


@given(rows=st.integers(1, 700), most=st.integers(1, 300), at=st.integers(0, 699))
def test_a_rank_that_stands_out_is_seen_however_many_share_its_cell(rows: int, most: int, at: int) -> None:
    at %= rows
    excess = np.zeros((rows, 2))
    excess[at, 1] = 3.0
    heat = Heat(ranks=np.arange(rows) + 10, columns=(0, 1), seconds=excess + 1, excess=excess)
    shown = pooled(heat, most)
    assert shown.seconds.shape[0] <= most
    cell = at // shown.size
    assert (shown.rank[cell, 1], shown.excess[cell, 1], shown.seconds[cell, 1]) == (at + 10, 3.0, 4.0)
    window = pooled(heat, most, (at, at + 1))
    assert (window.first, window.size, window.rank[0, 1]) == (at, 1, at + 10)


def test_nothing_recorded_is_no_error() -> None:
    heat = heat_of_segments(by_segment(rollup([])), GRID)
    assert (heat.columns, unlike(heat)) == ((), [])
    assert heat_of_steps(rollup([]), GRID).columns == ()
