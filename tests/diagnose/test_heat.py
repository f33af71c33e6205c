"""The heat map's matrices: statistics, orders of ranks, excess over equals, rows pooled for a
screen."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.core.parallel.layout import Layout
from plait.diagnose.measured.reading import read_run
from plait.diagnose.measured.recording import ROLLUP, grid_of
from plait.diagnose.rank_map import (
    STATISTICS,
    Heat,
    HeatColumn,
    Statistic,
    by_segment,
    heat_of_segments,
    heat_of_steps,
    orders,
    pooled,
    ranks_in,
)  # fmt: skip
from tests.support.recordings.made import At, Job, write_run

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


@pytest.mark.parametrize(
    ("own", "beyond"),
    [
        ([1.0, 1.2, 1.0, 5.0, 5.0, 5.0], [0.0, 0.2, 0.0, 0.0, 0.0, 0.0]), ([1.0, 1.5], [-0.5, 0.5]),
        ([1.0, 2.0, 1.4, 1.2], [-0.4, 0.8, 0.2, -0.2]), ([1.0], [None]),
    ],
    ids=["of two stages", "of two the other", "of few the others", "of one nobody"],
)  # fmt: skip
def test_excess_is_over_what_equals_have(own: list[float], beyond: list[float | None]) -> None:
    """As verdicts have it: own work of a stage's ranks."""
    grid = grid_of(Layout.of(pp=2, dp=3) if len(own) == 6 else Layout.of(dp=len(own)))
    rows = [(5, rank, "compute", "", "mlp", "forward", 1, seconds) for rank, seconds in enumerate(own)]
    heat = heat_of_segments(by_segment(pl.DataFrame(rows, schema=ROLLUP, orient="row")), grid)
    assert [None if np.isnan(one) else one for one in heat.excess[:, 0].tolist()] == pytest.approx(beyond)


def test_sums_of_whole_steps_are_no_segments() -> None:
    kinds = ("compute", "host", "wait", "step", "processor", "communication", "exposed")
    rows = [(5, 0, kind, "", "x", "", 1, 1.0) for kind in kinds]
    heat = heat_of_segments(by_segment(pl.DataFrame(rows, schema=ROLLUP, orient="row")), grid_of(Layout.of(dp=1)))
    assert [str(column).split()[0] for column in heat.columns] == ["x", "host", "wait"]


def slow(at: At) -> float:
    return (0.1 if at.way == "forward" else 0.2) * (1.5 if (at.dp, at.stage, at.step >= 10) == (1, 0, True) else 1.0)


def test_a_slow_rank_is_red(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", Job(dp=4, pp=2, compute=slow))).recording
    heat = heat_of_segments(by_segment(run.rollup, "mean", (10, 19)), run.grid)
    assert int(heat.ranks[np.nanargmax(heat.excess[:, 0])]) == 1
    own = [n for n, column in enumerate(heat.columns) if isinstance(column, HeatColumn) and column.own]
    assert own == list(range(len(own))), "own work stands before waiting"
    steps = heat_of_steps(run.rollup, run.grid)
    assert steps.columns == tuple(range(20))
    assert steps.excess[1, 10:].min() > 0.3
    assert abs(steps.excess[1, :10]).max() < 0.3
    one = heat_of_steps(run.rollup, run.grid, segment=HeatColumn("compute", "mlp", "backward"))
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
    assert heat.columns == ()
    assert heat_of_steps(rollup([]), GRID).columns == ()


def test_what_is_own_work() -> None:
    kinds = {
        "compute": True,
        "data": True,
        "host": True,
        "own work": True,
        "wait": False,
        "comm": False,
        "optimizer": False,
    }
    assert {kind: HeatColumn(kind, "mlp").own for kind in kinds} == kinds


@pytest.mark.parametrize(
    ("segment", "text"),
    [
        (("compute", "mlp", "forward"), "mlp forward"), (("comm", "mlp", "backward"), "comm mlp backward"),
        (("data", "data", ""), "data"), (("compute", "", ""), "compute"), (("compute", "compute", ""), "compute"),
    ],
)  # fmt: skip
def test_segments_in_words(segment: tuple[str, str, str], text: str) -> None:
    assert str(HeatColumn(*segment)) == text


def test_columns_stand_own_work_first_and_the_longest_first() -> None:
    rows = [
        (0, 0, "transfer", "p", "", 1, 9.0), (0, 0, "odd", "p", "", 1, 99.0), (0, 0, "wait", "p", "", 1, 8.0),
        (0, 0, "compute", "attn", "forward", 1, 1.0), (0, 1, "compute", "attn", "forward", 1, 1.0),
        (0, 0, "compute", "mlp", "forward", 1, 1.5), (0, 0, "compute", "attn", "backward", 1, 1.5),
        (0, 0, "host", "p", "", 1, 50.0), (0, 9, "compute", "mlp", "forward", 1, 7.0),
    ]  # fmt: skip
    heat = heat_of_segments(by_segment(rollup(rows), "sum"), GRID)
    assert [str(one) for one in heat.columns] == [
        "mlp forward", "attn forward", "attn backward", "host p", "wait p", "transfer p", "odd p",
    ]  # fmt: skip
    assert heat.seconds.shape == (8, 7), "rank 9 is none of them"
    assert heat.seconds[0].tolist() == [1.5, 1.0, 1.5, 50.0, 8.0, 9.0, 99.0]
    assert np.isnan(heat.seconds[1, 0]) and np.isnan(heat.seconds[7]).all()
    assert heat.excess[0, 1] == 0.0 and np.isnan(heat.excess[0, 0]), "alone at it"


def test_steps_of_all_own_work_and_of_one_segment() -> None:
    rows = [
        (3, 0, "compute", "mlp", "forward", 1, 1.0), (3, 0, "compute", "mlp", "backward", 1, 2.0),
        (3, 0, "wait", "mlp", "forward", 1, 4.0), (5, 0, "host", "mlp", "forward", 1, 8.0),
        (5, 0, "compute", "attn", "forward", 1, 16.0),
    ]  # fmt: skip
    found = heat_of_steps(rollup(rows), GRID)
    assert (found.columns, found.seconds[0].tolist()) == ((3, 5), [3.0, 24.0])
    assert heat_of_steps(rollup(rows), GRID, segment=HeatColumn("own work", "")).seconds[0].tolist() == [3.0, 24.0]
    one = heat_of_steps(rollup(rows), GRID, segment=HeatColumn("compute", "mlp", "forward"))
    assert (one.columns, one.seconds[0].tolist()) == ((3,), [1.0])


def test_percentiles_and_ops() -> None:
    sums = rollup([(n, 0, "compute", "mlp", "forward", n % 2, float(n)) for n in range(11)])
    assert by_segment(sums, "p90")["seconds"].to_list() == [9.0]
    assert by_segment(sums, "mean of an op")["seconds"].to_list() == [11.0]
    alone = rollup([(0, 0, "compute", "mlp", "forward", 0, 3.0)])
    assert by_segment(alone, "spread")["seconds"].to_list() == [0.0]
    assert by_segment(alone, "mean of an op")["seconds"].to_list() == [3.0]


def test_orders_need_axes_on_which_ranks_differ() -> None:
    assert orders(grid_of(Layout.of(dp=1))) == [("dp",)]
    assert orders(grid_of(Layout.of(dp=2), ["a", "a"])) == [("dp",)], "one host"
    assert orders(grid_of(Layout.of(dp=2), ["a"])) == [("dp",)], "nobody knows the other"
    assert list(ranks_in(grid_of(Layout.of(dp=3)), ("odd",))) == [0, 1, 2]


@pytest.mark.parametrize(
    ("most", "window", "shape"),
    [(512, None, (0, 1, 10)), (10, None, (0, 1, 10)), (9, None, (0, 2, 5)), (4, (2, 7), (2, 2, 3)),
     (4, (9, 9), (9, 1, 1)), (4, (50, 60), (9, 1, 1)), (4, (-5, 3), (0, 1, 3)), (4, (3, 99), (3, 2, 4))],
)  # fmt: skip
def test_rows_of_a_window(most: int, window: tuple[int, int] | None, shape: tuple[int, int, int]) -> None:
    """first, rows of a cell, cells."""
    seconds = np.arange(10.0)[:, None]
    found = pooled(Heat(ranks=np.arange(10) + 5, columns=(0,), seconds=seconds, excess=seconds - 4), most, window)
    first, size, cells = shape
    last = min(10, first + size * cells) if window is None else min(10, max(window[1], first + 1))
    assert (found.first, found.size, len(found.rank)) == shape
    shown = [min(first + size * (n + 1), last) - 1 for n in range(cells)]
    assert found.rank[:, 0].tolist() == [5 + row for row in shown], "the furthest above its equals"
    assert found.seconds[:, 0].tolist() == shown and found.excess[:, 0].tolist() == [row - 4 for row in shown]


def test_of_ranks_without_equals_the_longest_is_shown() -> None:
    seconds = np.array([[1.0], [3.0], [2.0], [np.nan]])
    found = pooled(Heat(ranks=np.arange(4), columns=(0,), seconds=seconds, excess=np.full((4, 1), np.nan)), 1)
    assert (found.rank[0, 0], found.seconds[0, 0]) == (1, 3.0)
