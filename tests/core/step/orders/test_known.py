"""Lists that are found once are those that would be found again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plait.core.model.spec import ModelSpec
from plait.core.parallel.strategy import Overlap, Strategy
from plait.core.step.orders.overlap import known_order, segment_order
from plait.core.step.orders.segment_costs import segment_costs
from plait.core.step.segments import SegmentGraph
from plait.core.step.stages import Stage

SPEC = ModelSpec(family="llama", num_layers=8, hidden=64, num_heads=4, ffn_hidden=96, vocab=100, max_sequence=32)
U = replace(SPEC, family="utransformer", ffn_hidden=256, levels=1, num_layers=6)


@pytest.mark.parametrize("overlap", ["domino", "async", "sync"])
@pytest.mark.parametrize("model", [SPEC, U], ids=["llama", "utransformer"])
@pytest.mark.parametrize("first", [0, 4])
@pytest.mark.parametrize("batch", [4, 6])
def test_as_if_found_anew(overlap: Overlap, model: ModelSpec, first: int, batch: int) -> None:
    strategy = Strategy(tp=2, overlap=overlap, p1=4, p2=2)
    graph = replace(SegmentGraph.of(model, strategy, Stage(1, 3, first, 2)), phase="B")
    costs = segment_costs(model, strategy, batch=batch, sequence=32)
    assert list(known_order(graph, overlap, costs, batch)) == segment_order(graph, overlap, costs, batch)
