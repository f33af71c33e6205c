"""Domino's own interleaving: legal under every slicing, and slices take turns."""

from __future__ import annotations

import pytest

from plait.core.step.orders.segment_lists import check, fixed_order
from plait.core.step.segments import SegmentGraph


@pytest.mark.parametrize("p1", [1, 2, 4])
@pytest.mark.parametrize("p2", [1, 2])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_it_is_legal(p1: int, p2: int, sequence_parallel: bool) -> None:
    graph = SegmentGraph(num_layers=3, p1=p1, p2=p2, sequence_parallel=sequence_parallel)
    check(graph, fixed_order(graph))


def test_the_other_slice_computes_between_a_collectives_start_and_its_end() -> None:
    """The first slice's reduction of attention in the forward (figure 7): started, then the second slice's
    attention, then awaited."""
    words = [str(one) for one in fixed_order(SegmentGraph(num_layers=1, p1=2))]
    started = next(at for at, word in enumerate(words) if word.startswith(">attn0"))
    name = words[started][1:]
    other = name[: name.index(".") + 2] + "1"
    assert started < words.index(other) < words.index(f"<{name}")
