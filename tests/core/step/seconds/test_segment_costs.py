"""Costs of segment ops by their shapes, worked out by hand, and how they are spread over slices and parts."""

from __future__ import annotations

import pytest

from plait.core.model.spec import ModelSpec
from plait.core.parallel.strategy import Strategy
from plait.core.step.attention_ops import SharedAttention
from plait.core.step.seconds import segment_costs as module
from plait.core.step.seconds.segment_costs import (
    Durations,
    NumberedOps,
    SegmentCosts,
    segment_costs,
)
from plait.core.step.segments import Kind, SegmentGraph, SegmentOp

GPT = ModelSpec(family="gpt", num_layers=2, hidden=16, num_heads=4, ffn_hidden=40, vocab=31, max_sequence=64)
LLAMA = ModelSpec(
    family="llama", num_layers=2, hidden=16, num_heads=4, num_kv_heads=2, ffn_hidden=40, vocab=31, max_sequence=64
)


@pytest.fixture(autouse=True)
def ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor of 1 FLOP/s and a link of 1 byte/s, so that seconds are FLOPs and bytes."""
    monkeypatch.setattr(module, "FLOPS", 1.0)
    monkeypatch.setattr(module, "BANDWIDTH", 1.0)


def counted(model: ModelSpec, strategy: Strategy) -> tuple[dict[str, float], dict[str, float]]:
    """FLOPs, and bytes on the link, of 3 sequences of 8 tokens."""
    costs = segment_costs(model, strategy, batch=3, sequence=8)
    return costs.compute, costs.collective


def test_matrix_products_of_a_gpt() -> None:
    work, wire = counted(GPT, Strategy())
    tokens, qkv, second, core = 24, 2 * 24 * 16 * 48, 2 * 24 * 16 * 16, 4 * 24 * 8 * 16 / 2
    up = 2 * 24 * 16 * 40
    assert (work["attn.F"], work["mlp.F"], work["block.F"]) == (qkv + core, up, qkv + core + up)
    assert (work["attn.R"], work["mlp.R"], work["block.R"]) == (second, up, second + up)
    assert (work["attn.D"], work["mlp.D"]) == (second + 2.5 * core, up)
    assert (work["attn.C"], work["mlp.C"]) == (qkv, up)
    assert (work["attn.W"], work["mlp.W"]) == (qkv + second, 2 * up)
    assert work["head.F"] == work["head.C"] == work["head.W"] == 2 * tokens * 16 * 31
    norm = 4 * 4 * 4 * tokens * 16
    assert work["attn.N"] == work["head.N"] == work["head.J"] == norm
    assert (work["attn.J"], work["attn.M"], work["embed.R"], work["embed.W"]) == (
        2 * norm,
        norm / 2,
        norm / 4,
        norm / 4,
    )
    assert (work["attn.A"], work["mlp.A"]) == (core + norm, norm)  # selective: the core again, and no product
    assert set(wire.values()) == {0.0}  # one rank sends nothing


def test_a_gated_one_has_a_product_more_and_shares_keys_and_values() -> None:
    work, _ = counted(LLAMA, Strategy())
    assert work["mlp.C"] == 2 * 24 * 16 * 80
    assert work["mlp.R"] == 2 * 24 * 16 * 40
    assert work["attn.C"] == 2 * 24 * 16 * (16 + 2 * 8)


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


def test_heads_of_keys_and_values_are_copied_where_ranks_are_more() -> None:
    assert counted(LLAMA, Strategy(tp=4))[0]["attn.C"] == 2 * 24 * 16 * (16 + 2 * 8 * 2) / 4


@pytest.mark.parametrize("tp", [2, 4])
def test_a_ring_sends_twice_what_a_gather_does(tp: int) -> None:
    part = 24 * 16 * (tp - 1) / tp * 4
    for parallel, times in ((False, 2), (True, 1)):
        _, wire = counted(GPT, Strategy(tp=tp, sequence_parallel=parallel))
        for kind in ("attn.R", "mlp.C", "block.N", "head.C", "embed.C", "attn.M", "mlp.J"):
            assert wire[kind] == times * part
        assert wire["embed.R"] == part
        assert wire["head.F"] == 3 * 4 * 24 * (tp - 1)


@pytest.mark.parametrize("ring", [1, 2])
def test_attention_that_is_shared_costs_the_same_in_other_ops(ring: int) -> None:
    alone, _ = counted(GPT, Strategy())
    work, wire = counted(GPT, Strategy(cp=2, ring=ring))
    core, moved = 4 * 12 * 8 * 16 / 2, 16 * 12 * 48
    assert work["attn.K"] == work["block.K"] == core
    assert work["attn.G"] == 2.5 * core
    assert work["attn.X"] == (core if ring == 1 else moved)
    assert work["attn.H"] == work["attn.E"] == work["attn.Z"] == work["block.Z"] == moved
    for kind, times in (("F", 1.0), ("A", 1.0), ("D", 2.5)):
        assert work[f"attn.{kind}"] == pytest.approx(alone[f"attn.{kind}"] / 2 - times * core)
    there, back, block = 12 * 4 * 48, 12 * 4 * 16, 2 * 12 * 4 * 16
    for kind in "TSH":
        assert wire[f"attn.{kind}"] == wire[f"block.{kind}"] == block * (ring - 1)
    for kind in "FAGE":
        assert wire[f"attn.{kind}"] == (there / 2 if ring == 1 else 0.0)
    for kind in "KXD":
        assert wire[f"attn.{kind}"] == (back / 2 if ring == 1 else 0.0)


def test_before_anything_is_measured_a_processor_and_a_link_are_assumed(monkeypatch: pytest.MonkeyPatch) -> None:
    work, wire = counted(GPT, Strategy(tp=2))
    monkeypatch.undo()
    assumed = segment_costs(GPT, Strategy(tp=2), batch=3, sequence=8)
    assert assumed.compute == {op: value / 5e10 for op, value in work.items()}
    assert assumed.collective == pytest.approx({op: value / 1.25e8 for op, value in wire.items()})
    assert assumed.latency == 0.0


def test_a_slower_link_takes_longer_and_costs_as_much_before() -> None:
    costs = SegmentCosts({"attn.F": 1.0}, {"attn.R": 3.0}, 2.0)
    assert costs.late(3.0) == SegmentCosts({"attn.F": 1.0}, {"attn.R": 9.0}, 2.0)


def test_costs_are_spread_over_slices_and_parts() -> None:
    graph = SegmentGraph(num_layers=1, p1=2, p2=2)
    durations = Durations(graph, SegmentCosts({"attn.R": 6.0}, {"attn.R": 12.0, "attn.C": 3.0}, 0.25), 3)
    first, second = (SegmentOp("attn", 0, Kind.SECOND, at, 0) for at in (0, 1))
    assert (durations.compute(first), durations.compute(second)) == (2.0, 1.0)
    assert (durations.collective(first), durations.collective(second)) == (4.25, 2.25)
    assert durations.collective(SegmentOp("attn", 0, Kind.FIRST_GRAD, 1, 0)) == 0.75
    assert durations.collective(SegmentOp("attn", 0, Kind.FIRST, 0, 0)) == 0.0  # nothing is sent, so no latency either
    assert durations.compute(SegmentOp("attn", 0, Kind.FIRST, 0, 0)) == 0.0


def test_what_a_ring_sends_is_spread_over_its_rotations() -> None:
    graph = SegmentGraph(num_layers=1, communicates=False, attention=SharedAttention(2, 3))
    durations = Durations(graph, SegmentCosts({"attn.K": 6.0}, {"attn.T": 8.0, "attn.K": 5.0}, 0.0), 1)
    assert durations.compute(SegmentOp("attn", 0, Kind.CORE, 0, 1)) == 2.0
    assert durations.collective(SegmentOp("attn", 0, Kind.ROTATE, 0, 1)) == 4.0
    assert durations.collective(SegmentOp("attn", 0, Kind.CORE, 0, 2)) == 5.0
    assert durations.collective(SegmentOp("attn", 0, Kind.CORE, 0, 1)) == 0.0


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
        SegmentOp("embed", 0, Kind.SECOND, 0, 0), SegmentOp("embed", 0, Kind.SECOND, 1, 0)
    ]  # fmt: skip
    last = min(range(len(ahead)), key=ahead.__getitem__)
    assert numbered.slices[last] == 0
    assert behind[last] == max(behind) - 1
