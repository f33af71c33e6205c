"""The published baseline as plans that ranks can carry out."""

from __future__ import annotations

from typing import get_args

from hypothesis import given, settings
from hypothesis import strategies as st

from plait.core.reshard.layouts import Reshard
from plait.core.reshard.plan import messages
from plait.plan.reshard import Fabric
from plait.plan.reshard_unicast import Unicast, unicast_plan
from tests.plan.test_reshard import check_tiles, layout_pair, moves


def test_alpa_shares_a_box_where_its_receivers_are_in_one_host_alone() -> None:
    """Two holders on two hosts: each share has a sender of its own. With receivers on two hosts each gets a
    copy."""
    source, destination = layout_pair("(2,1) R", "(1,2) R")
    plan = unicast_plan(Reshard(source, destination, (8,), 4), Fabric(hosts=(0, 1, 2, 2), rate=1e6), way="alpa")
    assert [(step.task.box, step.chains) for step in plan.steps] == [
        (((0,), (4,)), ((0, (2, 3)),)), (((4,), (8,)), ((1, (3, 2)),)),
    ]  # fmt: skip
    assert [(one.src, one.dst) for one in messages(plan)] == [(0, 2), (2, 3), (1, 3), (3, 2)]
    apart = unicast_plan(Reshard(source, destination, (8,), 4), Fabric(hosts=(0, 1, 2, 3), rate=1e6), way="alpa")
    assert [(step.way, step.task.box.elements, step.chains) for step in apart.steps] == [
        ("send_recv", 8, ((0, (2,)),)), ("send_recv", 8, ((1, (3,)),)),
    ]  # fmt: skip


@settings(max_examples=80)
@given(moves(), st.sampled_from(get_args(Unicast)), st.integers(1, 5))
def test_the_messages_of_a_baseline_bring_every_rank_its_tile(move, way, window) -> None:  # type: ignore[no-untyped-def]
    source, destination, shape, fabric = move
    plan = unicast_plan(Reshard(source, destination, shape, 2), fabric, way=way)
    check_tiles(plan, window)
