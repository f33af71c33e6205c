"""The tree over all ranks: everybody once, few neighbours, small depth, neighbours stay
together."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plait.train.comm.tree import FAN, Tree, TreeWire, node_of
from tests.support.threads import threads


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


RANKS = [1, 2, 4, 10]
"""Alone, few, and so many that one of them has children of its own, with and without a fan of
two."""


@pytest.mark.parametrize("fan", [2, FAN])
@pytest.mark.parametrize("size", RANKS)
def test_a_sum_is_the_same_on_all_ranks(size: int, fan: int) -> None:
    def work(rank: int) -> list[float]:
        value = torch.tensor([1.0, float(rank)])
        Tree(fan=fan).reduce(value)
        return value.tolist()

    assert threads(size).run(work) == [[float(size), float(sum(range(size)))]] * size


def test_what_is_no_sum_is_added_up_as_it_is_told() -> None:
    def work(rank: int) -> list[float]:
        value = torch.tensor([float(rank), float(-rank)])
        Tree(fan=2).reduce(value, lambda own, other: torch.maximum(own, other, out=own))
        return value.tolist()

    assert threads(7).run(work) == [[6.0, 0.0]] * 7


@pytest.mark.parametrize("fan", [2, FAN])
@pytest.mark.parametrize("size", RANKS)
def test_texts_are_gathered_in_the_order_of_ranks_and_the_first_is_everybodys(size: int, fan: int) -> None:
    def work(rank: int) -> tuple[bytes, bytes]:
        tree = Tree(fan=fan)
        return tree.gather(b"abcdefghij"[rank : rank + 1] * (rank + 1)), tree.broadcast(b"%d" % (rank + 5))

    texts = b",".join(b"abcdefghij"[rank : rank + 1] * (rank + 1) for rank in range(size))
    assert threads(size).run(work) == [(texts, b"5")] * size


@pytest.mark.parametrize("last", [0, 3, 9])
def test_ranks_meet_when_the_last_has_come(last: int) -> None:
    come, here, others = list[int](), list[int](), threading.Semaphore(0)

    def work(rank: int) -> None:
        tree = Tree(fan=2)
        if rank == last:
            for _ in range(9):
                others.acquire()
        come.append(rank)
        others.release()
        tree.barrier()
        here.append(len(come))

    threads(10).run(work)
    assert here == [10] * 10


def test_a_group_has_a_tree_of_its_own() -> None:
    def work(rank: int) -> list[float]:
        group: Any = torch.distributed.new_group([1, 3, 2])
        value = torch.tensor([float(rank)])
        tree = Tree(group)
        tree.reduce(value)
        return [tree.rank, tree.size, *value.tolist()]

    def some(rank: int) -> list[float]:
        return work(rank) if rank else []

    assert threads(4).run(some) == [[], [0, 3, 6.0], [2, 3, 6.0], [1, 3, 6.0]]


def test_sums_of_a_step_travel_while_they_are_waited_for_and_once() -> None:
    def work(rank: int) -> tuple[object, ...]:
        wire = TreeWire()
        value = torch.tensor([float(rank + 1)])
        handle = wire.start("all_reduce", value, value)
        before = (value.item(), handle.is_completed(), handle.get_future().done())
        handle.wait()
        handle.wait()
        return (wire.rank, wire.size, *before, value.item(), handle.is_completed(), handle.get_future().done())

    assert threads(3).run(work) == [(rank, 3, rank + 1.0, False, False, 6.0, True, True) for rank in range(3)]


def test_a_tree_carries_sums_of_one_tensor_only() -> None:
    def work(rank: int) -> None:
        value, wire = torch.zeros(1), TreeWire()
        with pytest.raises(AssertionError, match="all_gather over a tree"):
            wire.start("all_gather", value, value)
        with pytest.raises(AssertionError, match="all_reduce over a tree"):
            wire.start("all_reduce", value, value.clone())

    threads(2).run(work)
