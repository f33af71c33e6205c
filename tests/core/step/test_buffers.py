"""Units that are gathered or open at once find a buffer each, in lists of drawn strategies whose
attention and MLP have as many numbers."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from plait.core.parallel.sharding import WHOLE, Unit, buffer_counts
from plait.core.step.orders.overlap import known_order
from plait.core.step.step import PipelineRank
from plait.core.step.traffic import UnitAction, with_units
from tests.dist.test_strategies import MOST, SEED
from tests.support import drawn


def most_at_once(pipeline_rank: PipelineRank) -> Counter[int]:
    """How many units of each size are gathered or open at most, one phase after the other."""
    sizes, most = pipeline_rank.unit_sizes, Counter[int]()
    for at, phase in pipeline_rank.phases:
        graph = replace(pipeline_rank.graph(at), phase=phase)
        actions = known_order(
            graph,
            pipeline_rank.strategy.overlap,
            pipeline_rank.step.order_costs(pipeline_rank.index),
            pipeline_rank.share,
        )
        gathered, opened = set[Unit](), set[Unit]()
        for action in with_units(graph, actions, pipeline_rank.held[at], pipeline_rank.strategy):
            if not isinstance(action, UnitAction) or action.op.unit[0] in WHOLE:
                continue
            verb, unit, _ = action.op
            if verb in ("gather", "need") and pipeline_rank.sharding.params > 1:
                gathered.add(unit)
            elif verb == "open" and pipeline_rank.sharding.grads > 1:
                opened.add(unit)
            gathered -= {unit} if verb == "drop" else set()
            opened -= {unit} if verb == "close" else set()
            here = Counter(sizes[one] for one in (*gathered, *opened))
            most |= here
    return most


@pytest.mark.parametrize("number", [182, 1055, 33, 125, 132, 192, 1058, 139, 1087, 1181])
@pytest.mark.parametrize("costs", [False, True])
def test_no_more_units_of_a_size_are_there_at_once_than_buffers(number: int, costs: bool) -> None:
    """In fp64, so that a gathered unit and a gradient can take each other's."""
    chance = drawn.Chance(f"{SEED}/{number}")
    plan = drawn.planned(chance, MOST, levels=number < 1000, strategy={"compile": number % 3 == 1})
    plan = replace(plan, costs=drawn.measured(chance, plan) if costs else None)
    for index in range(len(plan.layout.degrees)):
        pipeline_rank = PipelineRank(plan, index)
        units = [(unit[0], numel) for unit, numel in pipeline_rank.unit_sizes.items() if unit[0] not in WHOLE]
        times = (pipeline_rank.sharding.params > 1) + (pipeline_rank.sharding.grads > 1)
        kept = Counter({size: count * times for size, count in buffer_counts(units).items()})
        assert most_at_once(pipeline_rank) <= kept
