"""What a schedule does under given costs, as a picture shows it."""

from __future__ import annotations

from typing import Any

import pytest

from plait.core.base.errors import ScheduleError
from plait.core.base.pictures import Bar
from plait.core.step.clock.pipeline_clock import PipelineCosts, dry_run, peak_activations, rank_peaks
from plait.core.step.schedules import parse_schedule, whole_steps


def test_bars_are_computations_by_rank_and_transfers_that_take_time() -> None:
    schedule = parse_schedule("rank 0: 0F0 0B0\nrank 1: 1F0 1B0")
    quick = dry_run(schedule, PipelineCosts.uniform(2, 1.0, 1.0, 0.5))
    assert [(bar.row, bar.start, bar.end, bar.label, bar.kind) for bar in quick.bars()] == [
        ("rank 0", 0.0, 1.0, "F0", "forward"), ("rank 0", 3.5, 5.0, "B0", "backward"),
        ("rank 1", 1.0, 2.0, "F0", "forward"), ("rank 1", 2.0, 3.5, "B0", "backward"),
    ]  # fmt: skip
    slow = dry_run(schedule, PipelineCosts.uniform(2, 1.0, 1.0, 0.5, transfer=0.25))
    assert slow.bars()[4:] == [
        Bar("0 > 1", 1.0, 1.25, "0", "transfer F"), Bar("1 > 0", 3.75, 4.0, "0", "transfer B")
    ]  # fmt: skip
    assert slow.makespan == 5.5
    assert slow.idle() == [3.0, 0.0]
    assert slow.bubble() == 3.0


def test_a_ranks_later_stages_have_small_letters() -> None:
    schedule = parse_schedule("rank 0: 0F0 1F0 1B0 0B0")
    assert [bar.label for bar in dry_run(schedule, PipelineCosts.uniform(2)).bars()] == ["F0", "f0", "b0", "B0"]


def test_who_waits_for_a_circle_is_no_part_of_it() -> None:
    schedule = parse_schedule("rank 0: 0F0 0F1 0B0 0B1\nrank 1: 1F0 1B0 1F1 1B1\nrank 2: 2F1 2B1 2F0 2B0")
    with pytest.raises(ScheduleError) as caught:
        dry_run(schedule)
    assert str(caught.value) == (
        "deadlock: rank 1 waits at 1B0 for 2SEND_B0 of rank 2; rank 2 waits at 2F1 for 1SEND_F1 of rank 1"
    )


def test_a_rank_without_ops_waits_for_nobody() -> None:
    for text in ("rank 0: 0F0 0B0\nrank 1:", "rank 0:\nrank 1: 0F0 0B0"):
        assert dry_run(parse_schedule(text), PipelineCosts.uniform(1, 1.0, 1.0, 0.5)).makespan == 2.5


LATE = """
rank 0: 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1
rank 1: 1RECV_F0 1F0 1RECV_F1 1F1 1B0 1SEND_B0 1B1 1SEND_B1
"""


@pytest.mark.parametrize(("transfers", "start"), [("buffered", 2.0), ("rendezvous", 11.5)])
def test_a_transfer_waits_for_who_receives_it_unless_there_is_a_buffer(transfers: Any, start: float) -> None:
    """The second is sent at 2, and its receive posted when the first forward of 10 s is done."""
    costs = PipelineCosts((1.0, 10.0), (1.0, 1.0), (0.0, 0.0), {(0, 1): 0.5})
    placed = dry_run(parse_schedule(LATE), costs, transfers=transfers).placed
    assert [one.start for one in placed if str(one.op) == "0SEND_F1"] == [start]


def test_a_sender_that_blocks_goes_on_when_its_transfer_has_arrived() -> None:
    costs = PipelineCosts((1.0, 10.0), (1.0, 1.0), (0.0, 0.0), {(0, 1): 0.5})
    placed = dry_run(parse_schedule(LATE), costs, transfers="blocking").placed
    starts = {str(one.op): one.start for one in placed}
    assert (starts["0F1"], starts["0SEND_F1"]) == (1.5, 11.5)


def test_bars_of_transfers_stand_by_who_sends_to_whom_and_when() -> None:
    schedule = parse_schedule("rank 0: 0F0 0F1 0B0 0B1\nrank 1: 1F0 1F1 1B0 1B1\nrank 2: 2F0 2F1 2B0 2B1")
    bars = dry_run(schedule, PipelineCosts.uniform(3, 1.0, 1.0, 0.5, transfer=0.25)).bars()
    moves = [(bar.row, bar.start) for bar in bars if ">" in bar.row]
    rows = ["0 > 1", "1 > 0", "1 > 2", "2 > 1"]
    assert [row for row, _ in moves] == [row for row in rows for _ in range(2)]
    assert moves == sorted(moves)


def test_a_whole_step_takes_all_its_parts_and_keeps_one_micro_batch_alive() -> None:
    schedule = whole_steps(3)
    run = dry_run(schedule, PipelineCosts.uniform(1, 1.0, 2.0, 0.5))
    assert [(one.start, one.end) for one in run.placed] == [(0.0, 3.5), (3.5, 7.0), (7.0, 10.5)]
    assert {bar.kind for bar in run.bars()} == {"step"}
    assert rank_peaks(schedule) == [1]


def test_activations_are_alive_until_weight_gradients_are_done() -> None:
    schedule = parse_schedule("rank 0: 0F0 0F1 0I0 0I1 0W0 0F2 0W1 0B2")
    assert rank_peaks(schedule) == [2]
    assert peak_activations(schedule) == {0: 2}
