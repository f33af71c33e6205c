"""Domino's own interleaving: legal under every slicing, and slices take turns."""

from __future__ import annotations

from typing import Any

import pytest

from plait.core.step.orders.overlap import check, fixed_order
from plait.core.step.schedule import Phase
from plait.core.step.segments import SegmentGraph, SharedAttention


@pytest.mark.parametrize("p1", [1, 2, 4])
@pytest.mark.parametrize("p2", [1, 2])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(
    "other",
    [
        {},
        {"recompute": "selective"},
        {"recompute": "full", "recomputed": 1},
        {"recompute": "layer"},
        {"parallel_block": True},
        {"attention": SharedAttention(2, 2)},
    ],
)
def test_it_is_legal(p1: int, p2: int, sequence_parallel: bool, other: dict[str, Any]) -> None:
    phases: tuple[Phase, ...] = ("step", "F", "B", "I", "W")
    for phase in phases:
        graph = SegmentGraph(
            num_layers=3, p1=p1, p2=p2, sequence_parallel=sequence_parallel, phase=phase, first_layer=2, **other
        )
        check(graph, fixed_order(graph))


@pytest.mark.parametrize(
    ("reduced", "between"),
    [
        ("attn1.R0", ["attn1.N1", "attn1.F1", "attn1.R1"]),  # figure 7
        ("attn1.R1", ["mlp1.N0", "mlp1.F0", "mlp1.R0"]),
        ("mlp1.R1", ["attn2.N0", "attn2.F0", "attn2.R0"]),  # behind the next block
        ("mlp1.C0", ["mlp1.W0", "mlp1.W0.1", "mlp1.D1", "mlp1.C1", "mlp1.W1", "mlp1.W1.1"]),  # section 4.1.2
        ("mlp1.C1", ["mlp1.W1", "mlp1.W1.1", "mlp1.J0"]),  # its own weight gradients, then the grouped norms
        ("attn1.C0", ["attn1.W0", "attn1.W0.1", "attn1.D1", "attn1.C1", "attn1.W1", "attn1.W1.1"]),
    ],
)
def test_what_computes_between_a_reductions_start_and_its_end(reduced: str, between: list[str]) -> None:
    words = [str(one) for one in fixed_order(SegmentGraph(num_layers=3, p1=2))]
    inside = words[words.index(f">{reduced}") + 1 : words.index(f"<{reduced}")]
    assert [word for word in inside if word[0] not in "<>"] == between
