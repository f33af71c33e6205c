"""Spans of a simulated step: what the recorder would call them, when, and how many bytes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from plait.core.parallel.layout import Layout
from plait.core.parallel.sharding import Sharding
from plait.core.record.timeline import Span
from plait.core.step.clock.pipeline import Simulation
from plait.core.step.schedules import whole_steps
from tests.core.step.clock.test_course import Told
from tests.plan.machines import SPEC, pipelined, plan_of

FSDP = Sharding(params=2, grads=2, optim=2)
ONE = replace(SPEC, num_layers=1, tied_embeddings=False)
EMBEDDING, POSITIONS, ATTENTION, MLP, VECTORS = 100 * 64, 32 * 64, 4 * 64 * 64, 8 * 64 * 64, 15 * 64
"""Numbers: of a vocabulary of 100, 32 positions, a hidden size of 64."""


def spans(plan: Any, step: int = 1, rank: int = 0, **given: Any) -> list[Span]:
    each = (1.0,) * len(plan.layout.degrees)
    prices = Told(plan, forward=each, input_gradient=each, weight_gradient=each, **given)
    found = Simulation(plan, prices, None).simulated.timeline((step,), (rank,)).spans
    assert {(one.step, one.rank) for one in found} == {(step, rank)}
    return sorted(found, key=lambda one: (one.start, one.end))


def of(found: list[Span], kind: str) -> list[tuple[str, int, float, float, int]]:
    """Name, micro-batch, begin, end and bytes of collectives of units, or of waits for them."""
    return [(one.name, one.seq, one.start, one.end, one.bytes) for one in found
            if one.kind == kind and "." not in one.name]  # fmt: skip


def test_collectives_of_units_follow_each_other_and_have_the_bytes_of_a_ring() -> None:
    """Of two ranks, half of everything in fp32; each takes a quarter of a second, attention a second."""
    plan = plan_of(whole_steps(1), Layout.of(dp=2), ONE, micro=2, shardings=(FSDP,))
    found = spans(plan, unit=0.25)
    assert of(found, "comm") == [
        ("publish vectors0", 0, 0.0, 0.25, VECTORS * 2),
        ("gather embedding0", 0, 0.25, 0.5, EMBEDDING * 2),
        ("gather positions0", 0, 0.5, 0.75, POSITIONS * 2),
        ("gather attn0", 0, 0.75, 1.0, ATTENTION * 2),
        ("gather mlp0", 0, 1.0, 1.25, MLP * 2),  # beside attention
        ("gather head0", 0, 2.0, 2.25, EMBEDDING * 2),
        ("reduce head0", 0, 2.25, 2.5, EMBEDDING * 2),
        ("reduce mlp0", 0, 2.5, 2.75, MLP * 2),
        ("reduce attn0", 0, 4.25, 4.5, ATTENTION * 2),
        ("reduce positions0", 0, 4.5, 4.75, POSITIONS * 2),
        ("reduce embedding0", 0, 4.75, 5.0, EMBEDDING * 2),
        ("reduce vectors0", 0, 5.0, 5.25, VECTORS * 2),
    ]
    assert of(found, "wait") == [
        ("need vectors0", 0, 0.0, 0.25, 0),
        ("need embedding0", 0, 0.25, 0.5, 0),
        ("need positions0", 0, 0.5, 0.75, 0),
        ("need attn0", 0, 0.75, 1.0, 0),
        ("need mlp0", 0, 2.0, 2.0, 0),
        ("need head0", 0, 2.0, 2.25, 0),
        ("settle vectors0", 0, 4.25, 5.25, 0),
    ]
    first = of(spans(plan, step=0, unit=0.25), "comm")
    assert "publish vectors0" not in [name for name, *_ in first]
    assert first[0] == ("gather embedding0", 0, 0.0, 0.25, EMBEDDING * 2)


def test_what_completes_a_step_is_called_a_reduction_too() -> None:
    plan = plan_of(whole_steps(2), Layout.of(dp=2), ONE, micro=2, shardings=(Sharding(grads=2, optim=2),))
    names = [(name, seq) for name, seq, *_ in of(spans(plan, unit=0.25), "comm") if name.startswith("reduce attn")]
    assert names == [("reduce attn0", 0), ("reduce attn0", 1)]


def test_ranks_have_the_bytes_of_their_own_share() -> None:
    """Of five sequences one rank has three."""
    plan = plan_of(whole_steps(1), Layout.of(dp=2, tp=2), ONE, micro=5, tp=2, overlap="sync", shardings=(FSDP,))
    wires = {"attn.R": 0.5, "mlp.R": 0.5}
    sent = [[one.bytes for one in spans(plan, rank=rank, wire=wires) if one.name == "attn0.R0" and one.kind == "comm"]
            for rank in range(4)]  # fmt: skip
    assert sent == [[3 * 32 * 64 * 4], [3 * 32 * 64 * 4], [2 * 32 * 64 * 4], [2 * 32 * 64 * 4]]


@pytest.mark.parametrize("hop", [0.0, 0.5])
def test_transfers_are_on_their_sender_and_their_receiver_stands_still(hop: float) -> None:
    plan = pipelined("1f1b", 2, 1)
    first, second = (spans(plan, rank=rank, hop=hop) for rank in (0, 1))
    tile = 4 * 32 * 64 * 4
    told = [(one.name, one.start, one.end, one.bytes) for one in first if one.kind in ("transfer", "idle")]
    assert told == [("0SEND_F0", 1.0, 1.0 + hop, tile), ("0RECV_B0", 1.0, 4.0 + 2 * hop, 0)]
    told = [(one.name, one.start, one.end, one.bytes) for one in second if one.kind in ("transfer", "idle")]
    assert told == [("1RECV_F0", 0.0, 1.0 + hop, 0), ("1SEND_B0", 4.0 + hop, 4.0 + 2 * hop, tile)]


def test_a_slow_place_takes_longer_for_everything() -> None:
    plan = plan_of(whole_steps(1), Layout.of(dp=2), ONE, micro=2, shardings=(FSDP,))
    prices = Told(plan, forward=(1.0,), input_gradient=(1.0,), weight_gradient=(1.0,), unit=0.25, jitter=1.0,
                  ranks_per_node=1)  # fmt: skip
    late = Simulation(plan, prices, None)
    (pace,) = late.paces
    assert pace > 1.5
    found = sorted(late.simulated.timeline((0,), (0,)).spans, key=lambda one: one.start)
    even = spans(plan, step=0, unit=0.25)
    for name in ("attn0.F0", "attn0.D0"):
        one, other = (next(each for each in some if each.name == name and each.kind == "compute")
                      for some in (found, even))  # fmt: skip
        assert one.seconds == pytest.approx(other.seconds * pace)
    waits = [of(some, "wait")[3] for some in (found, even)]
    assert waits[0][3] - waits[0][2] == pytest.approx((waits[1][3] - waits[1][2]) * pace)
    gathers = [of(some, "comm")[2] for some in (found, even)]
    assert gathers[0][3] == pytest.approx(gathers[1][3] * pace)
