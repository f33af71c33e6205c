"""Spans of a simulated step: what the recorder would call them, when, and how many bytes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from plait.core.parallel.layout import Layout
from plait.core.parallel.sharding import Sharding
from plait.core.record.timeline import Span
from plait.core.step.clock.pipeline import Simulation
from plait.core.step.schedules import whole_steps
from tests.core.step.clock.test_course import Told
from tests.plan.machines import SPEC, plan_of

FSDP = Sharding(params=2, grads=2, optim=2)
ONE = replace(SPEC, num_layers=1, tied_embeddings=False)


def spans(plan: Any, step: int = 1, rank: int = 0, **given: Any) -> list[Span]:
    each = (1.0,) * len(plan.layout.degrees)
    prices = Told(plan, forward=each, input_gradient=each, weight_gradient=each, **given)
    found = Simulation(plan, prices, None).simulated.timeline((step,), (rank,)).spans
    assert {(one.step, one.rank) for one in found} == {(step, rank)}
    return sorted(found, key=lambda one: (one.start, one.end))


def test_ranks_have_the_bytes_of_their_own_share() -> None:
    """Of five sequences one rank has three."""
    plan = plan_of(whole_steps(1), Layout.of(dp=2, tp=2), ONE, micro=5, tp=2, overlap="sync", shardings=(FSDP,))
    wires = {"attn.R": 0.5, "mlp.R": 0.5}
    sent = [[one.bytes for one in spans(plan, rank=rank, wire=wires) if one.name == "attn0.R0" and one.kind == "comm"]
            for rank in range(4)]  # fmt: skip
    assert sent == [[3 * 32 * 64 * 4], [3 * 32 * 64 * 4], [2 * 32 * 64 * 4], [2 * 32 * 64 * 4]]
