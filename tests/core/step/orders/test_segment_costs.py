"""Costs of segment ops by their shapes, worked out by hand, and how they are spread over slices and
parts."""

from __future__ import annotations

import pytest

from plait.core.model.spec import ModelSpec
from plait.core.parallel.strategy import Strategy
from plait.core.step.orders import segment_costs as module
from plait.core.step.orders.segment_costs import (
    Durations,
    NumberedOps,
    SegmentCosts,
    segment_costs,
)
from plait.core.step.segments import Kind, SegmentGraph, SegmentOp

GPT = ModelSpec(family="gpt", num_layers=2, hidden=16, num_heads=4, ffn_hidden=40, vocab=31, max_sequence=64)


@pytest.fixture(autouse=True)
def ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor of 1 FLOP/s and a link of 1 byte/s, so that seconds are FLOPs and bytes."""
    monkeypatch.setattr(module, "FLOPS", 1.0)
    monkeypatch.setattr(module, "BANDWIDTH", 1.0)


def counted(model: ModelSpec, strategy: Strategy) -> tuple[dict[str, float], dict[str, float]]:
    """FLOPs, and bytes on the link, of 3 sequences of 8 tokens."""
    costs = segment_costs(model, strategy, batch=3, sequence=8)
    return costs.compute, costs.collective


@pytest.mark.parametrize("tp", [2, 4])
def test_ranks_share_products_and_sequence_parallel_ones_the_rest(tp: int) -> None:
    alone, _ = counted(GPT, Strategy())
    whole, _ = counted(GPT, Strategy(tp=tp))
    parallel, _ = counted(GPT, Strategy(tp=tp, sequence_parallel=True))
    for kind in ("attn.F", "attn.R", "attn.C", "mlp.W", "mlp.D"):
        assert whole[kind] == parallel[kind] == pytest.approx(alone[kind] / tp)
    for kind in ("attn.N", "attn.J", "head.N", "embed.R", "mlp.M"):
        assert (whole[kind], parallel[kind]) == (alone[kind], alone[kind] / tp)
    assert whole["head.F"] == 2 * 24 * 16 * 32 / tp  # the vocabulary padded to a multiple of tp
    recomputed, _ = counted(GPT, Strategy(tp=tp, recompute="full"))
    assert recomputed["mlp.A"] == whole["mlp.F"]
    assert recomputed["attn.A"] == whole["attn.F"]


def test_a_slower_link_takes_longer_and_costs_as_much_before() -> None:
    costs = SegmentCosts({"attn.F": 1.0}, {"attn.R": 3.0}, 2.0)
    assert costs.late(3.0) == SegmentCosts({"attn.F": 1.0}, {"attn.R": 9.0}, 2.0)


def test_costs_are_spread_over_slices_and_parts() -> None:
    graph = SegmentGraph(num_layers=1, p1=2, p2=2)
    durations = Durations(graph, SegmentCosts({"attn.R": 6.0}, {"attn.R": 12.0, "attn.C": 3.0}, 0.25), 3)
    first, second = (SegmentOp("attn", 0, Kind.ROW_FORWARD, at, 0) for at in (0, 1))
    assert (durations.compute(first), durations.compute(second)) == (2.0, 1.0)
    assert (durations.collective(first), durations.collective(second)) == (4.25, 2.25)
    assert durations.collective(SegmentOp("attn", 0, Kind.COLUMN_DGRAD, 1, 0)) == 0.75
    assert (
        durations.collective(SegmentOp("attn", 0, Kind.COLUMN_FORWARD, 0, 0)) == 0.0
    )  # nothing is sent, so no latency either
    assert durations.compute(SegmentOp("attn", 0, Kind.COLUMN_FORWARD, 0, 0)) == 0.0


def test_ops_of_one_sort_cost_the_same() -> None:
    graph = SegmentGraph(num_layers=2, p1=2)
    numbered = NumberedOps(graph)
    costs = SegmentCosts({"attn.F": 4.0, "mlp.F": 2.0, "head.F": 8.0}, {"attn.R": 1.0})
    compute, wire = numbered.seconds(costs, 4)
    durations = Durations(graph, costs, 4)
    assert compute == [durations.compute(op) for op in numbered.ops]
    assert wire == [durations.collective(op) for op in numbered.ops]
    by_sort: dict[int, set[tuple[str, str, int, int]]] = {}
    for sort, op in zip(numbered.sorts, numbered.ops, strict=True):
        by_sort.setdefault(sort, set()).add((op.site, op.kind, op.slice, op.part))
    assert all(len(ops) == 1 for ops in by_sort.values())
    assert len(by_sort) < len(numbered.ops)


def test_who_needs_an_op_and_who_follows_it() -> None:
    numbered = NumberedOps(SegmentGraph(num_layers=1, p1=2))
    for i, sources in enumerate(numbered.needs):
        for source, collective in sources:
            assert (i, collective) in numbered.feeds[source]
    assert sum(map(len, numbered.feeds)) == sum(map(len, numbered.needs))
    for i, following in enumerate(numbered.following):
        assert following == [
            j for j, _ in numbered.feeds[i] if numbered.ops[j].kind != "W" and numbered.slices[j] == numbered.slices[i]
        ]
    behind, ahead = numbered.ranks
    assert behind[0] == 0
    assert [numbered.ops[i] for i in sorted(range(len(behind)), key=behind.__getitem__)][:2] == [
        SegmentOp("embed", 0, Kind.ROW_FORWARD, 0, 0), SegmentOp("embed", 0, Kind.ROW_FORWARD, 1, 0)
    ]  # fmt: skip
    last = min(range(len(ahead)), key=ahead.__getitem__)
    assert numbered.slices[last] == 0
    assert behind[last] == max(behind) - 1
