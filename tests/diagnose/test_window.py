"""Spans in a window of time, as bars: alone, or neighbours together."""

from __future__ import annotations

import polars as pl
import pytest

from plait.core.parallel.layout import Layout
from plait.diagnose.measured.recording import grid_of
from plait.view.time_figures import shifted, together, window


def spans(*rows: tuple[int, str, str, float, float], step: int = 0) -> pl.DataFrame:
    """(rank, lane, kind, start, end), named by their places."""
    told = [(step, rank, lane, kind, f"{n}", n, start, end) for n, (rank, lane, kind, start, end) in enumerate(rows)]
    columns = ["step", "rank", "lane", "kind", "name", "seq", "start", "end"]
    return pl.DataFrame(told, schema=columns, orient="row")


def short(count: int, *, rank: int = 0, lane: str = "processor", kind: str = "compute") -> list[tuple]:  # type: ignore[type-arg]
    """Of 0.1 s each, one after the other, at 0, 1, 2 ... s."""
    return [(rank, lane, kind, float(n), n + 0.1) for n in range(count)]


def test_bars_stand_in_the_order_of_ranks_and_lanes() -> None:
    rows = [(rank, lane, "comm", 0.0, 1.0) for lane in ("x", "other", "pp", "tp", "processor") for rank in (1, 2)]
    found = window(spans(*rows, (2, "processor", "compute", -1.0, 0.0)), [2, 1], (0, 0))
    assert found is not None
    assert found.bars.select("rank", "lane", "start").rows() == [
        (2, "processor", -1.0), (2, "processor", 0.0), (2, "tp", 0.0), (2, "pp", 0.0), (2, "other", 0.0),
        (2, "x", 0.0), (1, "processor", 0.0), (1, "tp", 0.0), (1, "pp", 0.0), (1, "other", 0.0), (1, "x", 0.0),
    ]  # fmt: skip
    assert (found.begin, found.end, found.single) == (-1.0, 1.0, True)
    assert set(found.bars["count"]) == {1} and found.bars["busy"].sum() == 11.0


def test_only_the_ranks_steps_and_times_that_are_asked_for() -> None:
    table = pl.concat([spans(*short(4), (1, "tp", "comm", 0.0, 9.0), step=step) for step in range(4)])
    found = window(table, [0], (1, 2))
    assert found is not None and (found.bars.height, set(found.bars["step"])) == (8, {1, 2})
    near = window(table, [0], (1, 1), between=(1.1, 3.0))
    assert near is not None
    assert near.bars["start"].to_list() == [1.0, 2.0, 3.0], "what ends or begins at an edge is in it"
    assert (near.begin, near.end) == (1.1, 3.0)
    assert window(table, [0], (4, 9)) is None
    assert window(table, [7], (0, 9)) is None


@pytest.mark.parametrize(("most", "single"), [(32, True), (31, False)])
def test_as_many_as_may_be_drawn_stand_alone(most: int, single: bool) -> None:
    found = window(spans(*short(32)), [0], (0, 0), most=most)
    assert found is not None
    assert (found.single, found.bars.height == 32) == (single, single)


def test_neighbours_of_a_kind_are_one_bar() -> None:
    """Sixteen seconds in eight parts of two: each has two spans of 0.1 s."""
    rows = [*short(16), (0, "processor", "data", 15.9, 16.0)]
    found = window(spans(*rows), [0], (0, 0), most=8)
    assert found is not None and not found.single
    bars = found.bars
    assert bars["start"].to_list() == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 14.0]
    assert bars["end"].to_list() == pytest.approx([1.1, 3.1, 5.1, 7.1, 9.1, 11.1, 13.1, 15.1])
    assert bars["count"].to_list() == [2] * 8
    assert bars["busy"].to_list() == pytest.approx([0.2] * 8)
    assert bars["name"].to_list() == ["0", "2", "4", "6", "8", "10", "12", "14"], "that of the first"
    assert set(bars["kind"]) == {"compute"}, "of kinds that share a part the longest stands for all"


def test_a_long_one_stays_alone() -> None:
    """A part is 2 s of 16."""
    rows = [(0, "processor", "compute", 0.0, 2.0), (0, "processor", "compute", 2.0, 3.9), *short(16, lane="tp")[4:]]
    found = window(spans(*rows, (0, "processor", "data", 15.0, 16.0)), [0], (0, 0), most=8)
    assert found is not None
    own = found.bars.filter(lane="processor")
    assert own.select("name", "count", "busy").rows() == [("0", 1, 2.0), ("1", 1, 1.9), ("14", 1, 1.0)]


def test_bars_are_dealt_out_over_lanes() -> None:
    """Of 64, 32 a lane."""
    rows = [*short(64), *short(64, lane="tp", kind="comm")]
    found = window(spans(*rows, (0, "tp", "comm", 63.9, 64.0)), [0], (0, 0), most=64)
    assert found is not None
    assert found.bars.group_by("lane").len().sort("lane").rows() == [("processor", 32), ("tp", 32)]


def test_a_moment_is_no_window_to_be_parted() -> None:
    rows = [(0, "processor", "compute", 1.0, 1.0)] * 20
    found = window(spans(*rows), [0], (0, 0), most=8)
    assert found is not None and not found.single and found.bars.height == 20


@pytest.mark.parametrize(
    ("rank", "group", "ranks"),
    [
        (5, "rank", [5]), (5, "tp", [4, 5]), (5, "dp", [5, 7]), (5, "pp", [1, 5]), (5, "cp", [5]),
        (5, "host", [4, 5]), (7, "host", [7]), (8, "dp", []),
    ],
)  # fmt: skip
def test_the_ranks_of_a_group(rank: int, group: str, ranks: list[int]) -> None:
    grid = grid_of(Layout.of(pp=2, dp=2, tp=2), ["a", "a", "b", "b", "c", "c", None, None])
    assert together(grid, rank, group) == ranks  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rank", "most", "ranks"),
    [
        (0, 4, [0, 1, 2, 3]), (3, 4, [1, 2, 3, 4]), (7, 4, [4, 5, 6, 7]), (4, 3, [3, 4, 5]), (3, 8, list(range(8))),
        (3, 7, [0, 1, 2, 3, 4, 5, 6]), (6, 1, [6]),
    ],
)  # fmt: skip
def test_of_a_large_group_the_nearest(rank: int, most: int, ranks: list[int]) -> None:
    assert together(grid_of(Layout.of(dp=8)), rank, "dp", most) == ranks


def test_times_are_moved_by_rank() -> None:
    table = spans(*short(1), *short(1, rank=1))
    moved = shifted(table, {1: 2.5})
    assert moved.select("start", "end").rows() == [(0.0, 0.1), (2.5, 2.6)]
    assert shifted(table, {0: 0.0}).equals(table)
    assert shifted(table, {0: 0.0, 1: 2.5}).equals(moved), "one of them is enough"
