"""Slices on compute streams: whatever an op needs has ended, whichever streams run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from plait.core.base.errors import JobError
from plait.core.model.spec import ModelSpec
from plait.core.parallel.strategy import Strategy
from plait.core.step.orders.overlap import async_order, domino_order, sync_order
from plait.core.step.orders.segment_costs import segment_costs
from plait.core.step.segments import Action, SegmentGraph, needs_table
from plait.core.step.stages import Stage
from plait.core.step.traffic import UnitAction, with_units
from plait.train.engine.compute_streams import submissions

GPT = ModelSpec(family="gpt", num_layers=3, hidden=48, num_heads=4, vocab=62, max_sequence=64)
UNITS = [("embedding", 0), *((site, layer) for layer in range(3) for site in ("attn", "mlp"))]
WAYS: list[dict[str, Any]] = [
    {"p1": 2}, {"p1": 3, "p2": 2, "recompute": "full"}, {"p1": 4, "sequence_parallel": True, "recompute": "layer"},
    {"p1": 3, "cp": 2, "ring": 2},
]  # fmt: skip


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("streams", [2, 3])
@pytest.mark.parametrize("units", [False, True])
@pytest.mark.parametrize("order", ["sync", "async", "domino"])
def test_what_an_op_needs_has_ended(way: dict[str, Any], streams: int, units: bool, order: str) -> None:
    """Along streams and waits; and all of a phase ends before the thread's own stream goes on."""
    strategy = Strategy(tp=2, **way)
    graph = replace(SegmentGraph.of(GPT, strategy, Stage(0, 1, 0, 3)), phase="step")
    costs = segment_costs(GPT, strategy, batch=strategy.p1, sequence=32)
    made = {"sync": sync_order, "async": async_order}.get(order, lambda one: domino_order(one, costs, strategy.p1))
    listed: list[Any] = list(made(graph))
    listed = with_units(graph, listed, UNITS, strategy) if units else listed
    told = submissions(graph, listed, streams)
    assert {one.lane for one in told} == {None, *range(min(streams, strategy.p1))}
    before: list[set[int]] = []
    last: dict[int | None, int] = {}
    for number, one in enumerate(told):
        direct = [*one.after, *([last[one.lane]] if one.lane in last else [])]
        assert all(entry == -1 or (entry < number and told[entry].ends) for entry in one.after)
        before.append(set().union(*({entry, *before[entry]} for entry in direct if entry >= 0)))
        last[one.lane] = number
    at, needs = {action: number for number, action in enumerate(listed)}, needs_table(graph)
    for number, action in enumerate(listed):
        if isinstance(action, UnitAction):
            assert before[number] == set(range(number)), "after everything"
        elif action.verb == "run":
            for need in needs[action.op]:
                assert at[Action("wait" if need.collective else "run", need.op)] in before[number]
    assert told[-1].lane is None
    assert before[-1] == set(range(len(listed)))


@pytest.mark.parametrize(
    ("strategy", "said"),
    [(Strategy(streams=2), "2 compute streams for 1 slice of"), (Strategy(p1=2, streams=3), "3 compute streams for 2"),
     (Strategy(p1=2, streams=2, cuda_graphs=True), "captured stretches run on one stream")],
    ids=str,
)  # fmt: skip
def test_streams_that_mean_nothing_are_refused(strategy: Strategy, said: str) -> None:
    with pytest.raises(JobError, match=said) as refused:
        strategy.check(GPT, batch=4, sequence=32)
    assert refused.value.key == "strategy.streams"
