"""What a recording tells of its meetings: who came last, how late, and how long the transfer
took."""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl
import pytest

from plait.core.parallel.layout import Layout
from plait.diagnose.measured.recording import Recording, grid_of, rank_phrase, unknown_grid
from tests.support.recordings.made import recording_of, spans_of

Came = Sequence[tuple[int, float, float]]


def meeting(came: Came, *, waits: Came = (), axis: str = "dp", agree: bool = True) -> Recording:
    """Of (rank, start, end) of a collective or a transfer, and of the waits for it."""
    kind = "transfer" if axis == "pp" else "comm"
    usual = {"name": "x", "axis": axis, "group": "g", "meeting": 7}
    rows = [usual | {"rank": r, "kind": kind, "lane": axis, "start": a, "end": b, "bytes": 8 + r} for r, a, b in came]
    rows += [usual | {"rank": r, "kind": "idle", "start": a, "end": b, "bytes": 0} for r, a, b in waits]
    return recording_of(spans_of(*rows), Layout.of(dp=4), clocks_agree=agree)


def test_who_came_last_and_what_was_left_to_do_then() -> None:
    """By the starts where clocks agree, else by who was in it for the shortest time."""
    came = [(0, 0.0, 4.0), (1, 3.0, 5.0), (2, 1.0, 5.0)]
    [one] = meeting(came).met.rows(named=True)
    assert (one["members"], one["last"], one["lateness"], one["transfer"], one["waited"]) == (3, 1, 3.0, 1.0, 5.0)
    assert (one["axis"], one["group"], one["bytes"], one["step"]) == ("dp", "g", 10, 1)
    [one] = meeting(came, agree=False).met.rows(named=True)
    assert (one["last"], one["lateness"], one["transfer"], one["waited"]) == (1, 2.0, 2.0, 4.0)
    [crossed] = meeting([(0, 0.0, 1.0), (1, 2.0, 3.0)]).met.rows(named=True)
    assert crossed["transfer"] == 0.0, "it had ended on one before it began on the other"


def test_what_one_rank_did_alone_is_no_meeting_but_a_transfer_is() -> None:
    assert meeting([(0, 0.0, 4.0)]).met.is_empty()
    assert meeting([(0, 0.0, 4.0)], axis="pp").met.height == 1


@pytest.mark.parametrize(
    ("waits", "agree", "took"),
    [
        ([(1, 0.5, 3.0)], True, 2.0), ([(1, 1.0, 3.0)], True, 2.0),  # it waited as the transfer began
        ([(1, 1.5, 3.0)], True, 0.25), ([], True, 0.25), ([(1, 0.2, 0.9)], True, 0.25), ([(1, 0.2, 1.0)], True, 0.25),
        ([(1, 0.5, 1.1)], True, 0.25), ([(1, 0.5, 3.0)], False, 0.25),
    ],
)  # fmt: skip
def test_a_transfer_lasts_until_the_receiver_has_it(waits: Came, agree: bool, took: float) -> None:
    """The sender is done after a quarter of a second, in which it has filled a buffer."""
    [one] = meeting([(0, 1.0, 1.25)], waits=waits, axis="pp", agree=agree).met.rows(named=True)
    assert one["transfer"] == pytest.approx(took)


def test_where_some_receivers_waited_of_others_nobody_knows() -> None:
    usual = {"name": "x", "axis": "pp", "group": "g", "bytes": 8}
    rows = [usual | {"rank": n, "kind": "transfer", "lane": "pp", "meeting": n, "start": 1.0, "end": 1.25}
            for n in range(3)]  # fmt: skip
    rows += [usual | {"rank": 3, "kind": "idle", "meeting": n, "start": since, "end": 3.0, "bytes": 0}
             for n, since in ((0, 0.5), (1, 2.0))]  # fmt: skip
    met = recording_of(spans_of(*rows), Layout.of(dp=4)).met.sort("meeting")
    assert met["transfer"].to_list() == [2.0, None, None]
    other = spans_of(*rows).with_columns(direction=pl.when(meeting=2).then(pl.lit("backward")).otherwise("direction"))
    met = recording_of(other, Layout.of(dp=4)).met.sort("meeting")
    assert met["transfer"].to_list() == [2.0, None, 0.25], "of backward ones all came late"


def test_grids() -> None:
    grid = grid_of(Layout.of(pp=2, dp=2, cp=1, tp=2), ["a", "b"])
    assert grid.select("rank", "pp", "dp", "cp", "tp").rows() == [
        (0, 0, 0, 0, 0), (1, 0, 0, 0, 1), (2, 0, 1, 0, 0), (3, 0, 1, 0, 1),
        (4, 1, 0, 0, 0), (5, 1, 0, 0, 1), (6, 1, 1, 0, 0), (7, 1, 1, 0, 1),
    ]  # fmt: skip
    assert grid["host"].to_list() == ["a", "b", *[None] * 6]
    shared = grid_of(Layout.of(dp=2, cp=2, tp=2))
    assert shared.select("dp", "cp", "tp").rows() == [(a, b, c) for a in (0, 1) for b in (0, 1) for c in (0, 1)]
    alike = unknown_grid([3, 5], {5: "h"})
    assert alike.rows() == [(3, 0, 3, 0, 0, None), (5, 0, 5, 0, 0, "h")]
    assert unknown_grid([3])["host"].to_list() == [None]


@pytest.mark.parametrize(
    ("rank", "words"), [(0, "rank 0 (stage 0, dp 0) on a"), (3, "rank 3 (stage 1, dp 1)"), (4, "rank 4")]
)
def test_the_coordinates_on_which_ranks_differ(rank: int, words: str) -> None:
    assert rank_phrase(grid_of(Layout.of(pp=2, dp=2), ["a"]), rank) == words


def test_all_coordinates_and_none() -> None:
    assert rank_phrase(grid_of(Layout.of(pp=2, dp=2, tp=2)), 7) == "rank 7 (stage 1, dp 1, tp 1)"
    assert rank_phrase(grid_of(Layout.of(dp=1), ["h"]), 0) == "rank 0 on h"
    assert rank_phrase(None, 5) == "rank 5"
    assert rank_phrase(unknown_grid([3, 5], {5: "h"}), 5) == "rank 5 (dp 5) on h"
