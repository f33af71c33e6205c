"""Planned reshards as data: messages of each way and when they start, and files that are none."""

from __future__ import annotations

from typing import Any

import pytest

from plait.core.base.errors import JobError
from plait.core.reshard.layouts import Box, TensorLayout, UnitTask
from plait.core.reshard.plan import Chain, Message, ReshardPlan, ReshardStep, TransferMethod, messages


def plan(*steps: ReshardStep, hosts: tuple[int, ...] = (0, 1, 1, 2, 2)) -> ReshardPlan:
    """These steps, whatever the layouts say."""
    layout = TensorLayout.parse("(1) R")
    return ReshardPlan(
        source=layout, destination=layout, shape=(8,), itemsize=1, hosts=hosts, steps=steps, order="by hand",
        lower_bound=5,
    )  # fmt: skip


def step(
    way: TransferMethod, receivers: tuple[int, ...], *, size: int = 8, chunks: int = 1, start: int = 0, stripes: int = 1
) -> ReshardStep:
    """One box from rank 0, in 1000 ns."""
    task = UnitTask(Box((0,), (size,)), (0,), receivers)
    return ReshardStep(task, way, (Chain(0, receivers),) * stripes, chunks, start, 1000)


def hops(listed: list[Message]) -> list[tuple[int, int, int, int]]:
    return [(one.src, one.dst, one.start, one.stop) for one in listed]


def test_copies_go_one_after_the_other() -> None:
    assert hops(messages(plan(step("send_recv", (1, 2), chunks=2)))) == [
        (0, 1, 0, 4), (0, 1, 4, 8), (0, 2, 0, 4), (0, 2, 4, 8)
    ]  # fmt: skip


def test_a_broadcast_is_passed_on_as_it_comes() -> None:
    assert hops(messages(plan(step("broadcast", (1, 2, 3), chunks=2)))) == [
        (0, 1, 0, 4), (1, 3, 0, 4), (1, 2, 0, 4), (0, 1, 4, 8), (1, 3, 4, 8), (1, 2, 4, 8)
    ]  # fmt: skip


def test_a_host_shares_what_it_gets() -> None:
    assert hops(messages(plan(step("local_all_gather", (1, 2, 3, 4))))) == [
        (0, 1, 0, 4), (1, 2, 0, 4), (0, 2, 4, 8), (2, 1, 4, 8), (0, 3, 0, 4), (3, 4, 0, 4), (0, 4, 4, 8), (4, 3, 4, 8)
    ]  # fmt: skip
    assert hops(messages(plan(step("local_all_gather", (1, 2), chunks=3, size=8)))) == [
        (0, 1, 0, 2), (1, 2, 0, 2), (0, 2, 4, 6), (2, 1, 4, 6), (0, 1, 2, 4), (1, 2, 2, 4), (0, 2, 6, 8), (2, 1, 6, 8)
    ]  # fmt: skip


def test_shares_go_round_a_ring_of_all_receivers() -> None:
    assert hops(messages(plan(step("global_all_gather", (1, 2, 3), size=6)))) == [
        (0, 1, 0, 2), (0, 2, 2, 4), (0, 3, 4, 6),
        (1, 2, 0, 2), (2, 3, 2, 4), (3, 1, 4, 6), (1, 2, 4, 6), (2, 3, 0, 2), (3, 1, 2, 4),
    ]  # fmt: skip
    assert hops(messages(plan(step("global_all_gather", (1,), chunks=2)))) == [(0, 1, 0, 4), (0, 1, 4, 8)]


@pytest.mark.parametrize(
    ("way", "chunks", "receivers", "times"),
    [
        ("send_recv", 2, (1, 2), [0, 250, 500, 750]),
        ("broadcast", 2, (1, 3), [0, 250, 250, 500]),
        ("broadcast", 1, (1, 2), [0, 500]),
        ("local_all_gather", 1, (1, 2), [0, 500, 500, 1000]),
        ("local_all_gather", 1, (1, 2, 3, 4), [0, 250, 250, 500, 500, 750, 750, 1000]),
        ("local_all_gather", 3, (1, 2), [0, 250, 250, 500, 500, 750, 750, 1000]),
        ("global_all_gather", 1, (1, 2), [0, 250, 500, 500]),
        ("global_all_gather", 1, (1, 2, 3), [0, 166, 333, 500, 500, 500, 666, 666, 666]),
        ("global_all_gather", 4, (1, 2, 3),
         [0, 83, 166, 250, 333, 416, *[500] * 3, *[583] * 3, *[750] * 3, *[833] * 3]),
    ],
)  # fmt: skip
def test_when_messages_start(way: TransferMethod, chunks: int, receivers: tuple[int, ...], times: list[int]) -> None:
    """Told by how messages of a second task, of which one starts at every nanosecond, stand among
    them."""
    clock = ReshardStep(UnitTask(Box((0,), (1001,)), (3,), (4,)), "send_recv", (Chain(3, (4,)),), 1001, 0, 1001)
    found = list[int]()
    now = 0
    for one in messages(plan(step(way, receivers, size=12, chunks=chunks), clock)):
        if one.step:
            now += 1
        else:
            found.append(now)
    assert found == times


def test_a_box_is_cut_in_equal_stripes() -> None:
    assert hops(messages(plan(step("send_recv", (1,), stripes=3)))) == [(0, 1, 0, 3), (0, 1, 3, 6), (0, 1, 6, 8)]


def test_empty_pieces_are_no_messages() -> None:
    assert hops(messages(plan(step("send_recv", (1,), size=2, chunks=4)))) == [(0, 1, 0, 1), (0, 1, 1, 2)]


def test_a_plan_lasts_until_the_last_end() -> None:
    assert plan().predicted == 0
    assert plan(step("send_recv", (1,), start=700), step("send_recv", (1,), start=20)).predicted == 1700


def test_a_plan_between_other_ranks() -> None:
    first = plan(step("broadcast", (1, 2)))
    assert first.shifted(0) is first
    moved = first.shifted(4)
    assert (moved.source.ranks, moved.destination.ranks) == ((4,), (4,))
    assert moved.steps[0].chains == (Chain(4, (5, 6)),)
    assert (moved.steps[0].task.holders, moved.steps[0].task.receivers) == ((4,), (5, 6))
    assert moved.key != first.key
    assert moved.steps[0].task.box == first.steps[0].task.box


@pytest.mark.parametrize("key", ["source", "shape", "hosts", "order", "lower_bound", "steps"])
def test_a_missing_key_is_named(key: str) -> None:
    values = plan(step("broadcast", (1, 2))).to_dict()
    del values[key]
    with pytest.raises(JobError, match=f"{key}: is missing"):
        ReshardPlan.from_dict(values)


def test_an_unknown_way_is_named() -> None:
    values: dict[str, Any] = plan(step("broadcast", (1, 2))).to_dict()
    values["steps"][0]["way"] = "by mail"
    with pytest.raises(JobError, match=r'steps\[0\].way: "by mail" is not .* "send_recv" or .*"broadcast"'):
        ReshardPlan.from_dict(values)
