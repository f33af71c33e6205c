"""The tree over all ranks: everybody once, few neighbours, small depth, neighbours stay together."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.train.comm.tree import FAN, node_of


@given(st.integers(1, 300), st.integers(1, 9))
def test_every_rank_has_one_way_to_the_first(size: int, fan: int) -> None:
    nodes = [node_of(rank, size, fan) for rank in range(size)]
    assert nodes[0].parent is None
    assert sorted(child for node in nodes for child in node.children) == list(range(1, size))
    for rank, (_, children) in enumerate(nodes):
        assert len(children) <= fan
        assert all(nodes[child].parent == rank for child in children)


@given(st.integers(2, 300), st.integers(1, 9))
def test_what_is_below_a_rank_are_its_next_neighbours(size: int, fan: int) -> None:
    """So texts of subtrees, one after the other, are those of ranks in their order."""

    def below(rank: int) -> list[int]:
        return [rank, *(each for child in node_of(rank, size, fan).children for each in below(child))]

    if fan > 1 or size < 200:
        assert below(0) == list(range(size))


@pytest.mark.parametrize(("size", "depth"), [(9, 1), (64, 2), (1024, 4), (16384, 5)])
def test_neighbours_are_as_few_in_any_world_and_the_way_is_short(size: int, depth: int) -> None:
    for rank in (0, 1, size // 2, size // 3, size - 1):
        node, steps = node_of(rank, size), 0
        assert len(node.children) <= FAN
        while node.parent is not None:
            node, steps = node_of(node.parent, size), steps + 1
        assert steps <= depth
