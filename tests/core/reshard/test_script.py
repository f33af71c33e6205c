"""Lists of messages that do not carry out their plan, and what one rank does for them."""

from __future__ import annotations

import pytest

from plait.core.base.errors import ReshardError
from plait.core.reshard.layouts import Box, TensorLayout, UnitTask
from plait.core.reshard.plan import WINDOW, Act, Chain, Message, ReshardPlan, ReshardStep, TransferMethod, script
from tests.support import reshard_check
from tests.support.reshard_check import check, unfinished


def plan(size: int = 8, *, receivers: tuple[int, ...] = (1, 2), way: TransferMethod = "send_recv") -> ReshardPlan:
    """Rank 0 holds all, the receivers need all."""
    task = UnitTask(Box((0,), (size,)), (0,), receivers)
    return ReshardPlan(
        source=TensorLayout.parse("(1) R"),
        destination=TensorLayout.parse("(2)@1,2 R"),
        shape=(size,),
        itemsize=1,
        hosts=(0, 1, 1),
        steps=(ReshardStep(task, way, (Chain(0, receivers),), 1, 0, 100),),
        order="by hand",
        lower_bound=0,
    )


WHOLE = [Message(0, 1, 0, 0, 8), Message(0, 2, 0, 0, 8)]


@pytest.mark.parametrize(
    "listed",
    [
        WHOLE,
        [Message(0, 1, 0, 0, 8), Message(1, 2, 0, 0, 8)],
        [Message(0, 1, 0, 0, 3), Message(0, 1, 0, 3, 8), Message(1, 2, 0, 2, 7), Message(0, 2, 0, 0, 2),
         Message(1, 2, 0, 7, 8)],
        [Message(0, 1, 0, 4, 8), Message(0, 1, 0, 0, 2), Message(0, 1, 0, 2, 4), Message(0, 2, 0, 0, 8)],
    ],
)  # fmt: skip
def test_what_carries_out_a_plan(listed: list[Message]) -> None:
    check(plan(), listed)


@pytest.mark.parametrize(
    ("listed", "says"),
    [
        ([Message(0, 1, 0, -1, 8), *WHOLE], "leaves its box of 8"),
        ([Message(0, 1, 0, 0, 9), *WHOLE], "leaves its box of 8"),
        ([*WHOLE, Message(0, 1, 0, 8, 8)], "leaves its box of 8"),
        ([*WHOLE, Message(0, 1, 0, 5, 4)], "leaves its box of 8"),
        ([Message(2, 1, 0, 0, 8), *WHOLE], "rank 2 sends what it has not got yet"),
        ([Message(0, 1, 0, 0, 4), Message(1, 2, 0, 0, 5)], "rank 1 sends what it has not got yet"),
        ([Message(0, 1, 0, 4, 8), Message(1, 2, 0, 3, 8)], "rank 1 sends what it has not got yet"),
        ([Message(0, 3, 0, 0, 8), *WHOLE], "rank 3 needs no such elements"),
        ([Message(0, 1, 0, 0, 4), Message(0, 1, 0, 3, 8)], "rank 1 needs no such elements, or has them already"),
        ([Message(0, 1, 0, 4, 8), Message(0, 1, 0, 0, 5)], "rank 1 needs no such elements, or has them already"),
        (WHOLE[:1], "Rank 2 does not get all"),
        ([WHOLE[0], Message(0, 2, 0, 0, 7)], "Rank 2 does not get all"),
        ([WHOLE[0], Message(0, 2, 0, 1, 8)], "Rank 2 does not get all"),
    ],
)
def test_what_does_not(listed: list[Message], says: str) -> None:
    with pytest.raises(ReshardError, match=says):
        check(plan(), listed)


def test_a_list_that_does_not_end_is_a_deadlock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reshard_check, "script", lambda *_: [Act("wait", 0)])
    with pytest.raises(ReshardError, match=r"Deadlock: 2 messages never end, the first is Message\(src=0, dst=1"):
        check(plan(), WHOLE)


def test_so_many_receives_are_posted_ahead() -> None:
    listed = [Message(0, 1, 0, at, at + 1) for at in range(6)]
    for window in (1, 2, WINDOW):
        acts = script(listed, 1, window)
        under_way = most = 0
        for act in acts:
            under_way += {"receive": 1, "wait": -1}[act.verb]
            most = max(most, under_way)
        assert most == window
        assert [act.number for act in acts if act.verb == "wait"] == list(range(6))
    assert script(listed, 1) == script(listed, 1, WINDOW)


def test_so_many_sends_are_under_way() -> None:
    listed = [Message(0, 1, 0, at, at + 1) for at in range(3)]
    assert script(listed, 0, 2) == [
        Act("send", 0), Act("send", 1), Act("wait", 0), Act("send", 2), Act("wait", 1), Act("wait", 2)
    ]  # fmt: skip


def test_a_rank_passes_on_as_soon_as_it_has_what_it_passes_on() -> None:
    """Not only when all that it receives has come."""
    listed = [Message(0, 1, 0, 0, 2), Message(0, 1, 0, 2, 4), Message(1, 2, 0, 0, 2), Message(1, 2, 0, 2, 4)]
    assert script(listed, 1) == [
        Act("receive", 0), Act("receive", 1), Act("wait", 0), Act("send", 2), Act("wait", 1), Act("send", 3),
        Act("wait", 2), Act("wait", 3),
    ]  # fmt: skip


@pytest.mark.parametrize(("start", "stop", "needed"), [(0, 2, 1), (1, 3, 2), (2, 4, 2), (0, 4, 2)])
def test_what_is_passed_on_in_other_pieces_waits_for_all_of_them(start: int, stop: int, needed: int) -> None:
    listed = [Message(0, 1, 0, 0, 2), Message(0, 1, 0, 2, 4), Message(1, 2, 0, start, stop)]
    acts = script(listed, 1)
    assert acts.index(Act("send", 2)) - acts.index(Act("wait", 0)) == needed
    assert unfinished(listed) == []


def test_what_another_task_brings_is_not_waited_for() -> None:
    listed = [Message(0, 1, 0, 0, 2), Message(1, 2, 1, 0, 2)]
    assert script(listed, 1)[:2] == [Act("receive", 0), Act("send", 1)]


def test_who_can_do_no_more_waits_for_what_stands_earlier_in_the_list() -> None:
    receives = Message(2, 1, 1, 0, 1)
    sends = Message(1, 0, 0, 0, 1)
    both = Message(1, 0, 2, 0, 1)
    assert script([receives, sends, both], 1, 1)[2:4] == [Act("wait", 0), Act("wait", 1)]
    assert script([sends, receives, both], 1, 1)[2:4] == [Act("wait", 0), Act("send", 2)]


def test_pieces_that_only_lie_near_are_not_waited_for() -> None:
    listed = [Message(0, 1, 0, 2, 4), Message(0, 1, 0, 0, 2), Message(1, 2, 0, 2, 3)]
    assert script(listed, 1)[2:4] == [Act("wait", 0), Act("send", 2)]
    listed = [Message(0, 1, 0, 0, 2), Message(0, 1, 0, 2, 4), Message(1, 2, 0, 0, 1)]
    assert script(listed, 1)[2:4] == [Act("wait", 0), Act("send", 2)]


def test_in_order_all_sends_are_made_after_the_last_receive() -> None:
    listed = [Message(0, 1, 0, 0, 1), Message(1, 2, 0, 0, 1), Message(0, 1, 1, 0, 1), Message(1, 2, 1, 0, 1)]
    assert script(listed, 1, in_order=True) == [
        Act("receive", 0), Act("wait", 0), Act("send", 1), Act("receive", 2), Act("wait", 2), Act("send", 3),
        Act("wait", 1), Act("wait", 3),
    ]  # fmt: skip


def test_a_rank_that_could_send_waits_for_what_it_would_send() -> None:
    """Not for an earlier send of its own, which holds nobody up."""
    listed = [Message(1, 0, 1, 0, 1), Message(2, 1, 0, 0, 1), Message(1, 3, 0, 0, 1)]
    assert script(listed, 1) == [
        Act("receive", 1), Act("send", 0), Act("wait", 1), Act("send", 2), Act("wait", 0), Act("wait", 2)
    ]  # fmt: skip
    assert script(listed, 1, window=1) == [
        Act("receive", 1), Act("send", 0), Act("wait", 0), Act("wait", 1), Act("send", 2), Act("wait", 2)
    ]  # fmt: skip
