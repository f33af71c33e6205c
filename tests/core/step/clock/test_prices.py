"""What a simulated step asks of a machine: a described cluster's seconds, or a plan's own
proportions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from plait.core.job.plan import Plan
from plait.core.model.spec import ModelSpec
from plait.core.parallel.layout import Layout
from plait.core.step.clock.prices import ClusterPrices
from plait.core.step.orders.overlap import Load
from plait.core.step.schedules import Shape, find_schedule
from plait.core.step.seconds import rates
from plait.core.step.seconds.costs import cluster_costs
from plait.core.step.stages import crossings
from tests.plan.machines import SPEC, cluster, pipelined, plan_of

A100 = cluster(step=0.5, jitter=0.02, slow_computation=1.3, slow_communication=1.2)
WIDE = ModelSpec(family="gpt", num_layers=4, hidden=64, num_heads=16, vocab=100, max_sequence=32)
U = ModelSpec(family="utransformer", levels=1, num_layers=6, hidden=64, num_heads=4, vocab=100, max_sequence=32)


def placed(*degrees: tuple[int, int], cp: int = 1, micro: int = 4, model: ModelSpec = SPEC, **strategy: Any) -> Plan:
    """A plan of pp ranks with these (dp, tp)."""
    schedule = find_schedule("1f1b", Shape(ranks=len(degrees), micro_batches=4))[0]
    return plan_of(schedule, Layout(degrees, cp=cp), model, micro=micro, tp=degrees[0][1], **strategy)


def test_computation_may_be_at_another_pace_but_no_collective() -> None:
    plan = placed((2, 2), (1, 4), micro=3, precision="bf16-mixed")
    for pp_rank, (tp, share) in enumerate(((2, 2), (4, 3))):
        strategy, load = replace(plan.strategy, tp=tp), Load(share, 32)
        told = cluster_costs(SPEC, strategy, load, A100, precision="bf16-mixed")
        assert ClusterPrices(plan, A100).costs(pp_rank) == told
        slow = ClusterPrices(plan, A100, 2.0).costs(pp_rank)
        assert slow.compute == {key: 2 * seconds for key, seconds in told.compute.items()}
        assert (slow.collective, slow.latency) == (told.collective, told.latency)


def send(nbytes: float, stride: int) -> float:
    return float(rates.collective(A100, "send", nbytes, 2, stride))


def gather(nbytes: float, ranks: int) -> float:
    return float(rates.collective(A100, "all_gather", nbytes, ranks, 1))


TILE = 32 * 64 * 4
"""Bytes of a sequence's stream in fp32."""


@pytest.mark.parametrize(
    ("degrees", "strategy", "told"),
    [
        ([(1, 1), (1, 1)], {}, send(4 * TILE, 1)),
        ([(1, 4), (1, 4)], {}, send(4 * TILE, 4)),  # within a node every rank sends its own
        ([(4, 4), (4, 4)], {}, send(TILE / 4, 16) + gather(TILE, 4)),  # between nodes a part, shared out inside
        ([(4, 4), (4, 4)], {"sequence_parallel": True}, send(TILE / 4, 16)),
        ([(1, 16), (1, 16)], {}, send(4 * TILE / 8, 16) + gather(4 * TILE, 8)),
        ([(2, 4), (4, 2)], {}, send(2 * TILE / 2, 8) + gather(2 * TILE, 2)),  # the larger share, the fewer ranks
        ([(1, 2), (2, 1)], {}, send(4 * TILE, 2)),
    ],
)
def test_a_transfer_between_nodes_is_cut_and_shared_out(
    degrees: list[tuple[int, int]], strategy: dict[str, Any], told: float
) -> None:
    prices = ClusterPrices(placed(*degrees, model=WIDE, **strategy), A100)
    assert prices.travel(0, 1) == pytest.approx(told)
    assert prices.travel(1, 0) == pytest.approx(told)
    assert prices.way(0, 1) == int(sum(dp * tp for dp, tp in degrees[:1]) * 2 > 8)


def test_bytes_of_what_crosses() -> None:
    assert placed((2, 2), (1, 4)).crossing_bytes(0, (0, 1), 3) == 3 * TILE
    assert placed((1, 2), (1, 4), sequence_parallel=True).crossing_bytes(1, (1, 0), 4) == 4 * TILE // 4
    assert placed((1, 1), (1, 1), cp=2).crossing_bytes(1, (0, 1), 1) == TILE // 2
    plan = pipelined("1f1b", 3, 3, U, precision="bf16-mixed")
    levels = {edge: [one.level for one in found] for edge, found in crossings(U, plan.stages).items()}
    assert max(map(len, levels.values())) > 1 < 1 + max(map(max, levels.values()))
    for edge in plan.schedule.edges:
        assert plan.crossing_bytes(1, edge, 1) == sum((32 >> level) * 64 * 2 for level in levels[edge])
