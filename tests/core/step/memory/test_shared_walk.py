"""What single ops of shared attention take of memory, by hand: the most beyond what was there; what stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from plait.core.model.spec import ModelSpec
from plait.core.parallel.strategy import Strategy
from plait.core.step.memory.segment_sizes import Shared, Sizes
from plait.core.step.memory.shared_walk import SharedWalk
from plait.core.step.segments import SegmentGraph, SegmentOp
from plait.core.step.stages import Stage

LLAMA = ModelSpec(
    family="llama", num_layers=2, hidden=32, num_heads=8, num_kv_heads=4, vocab=101, max_sequence=64, ffn_hidden=96
)
Formula = Callable[[Shared], int]


class One(SharedWalk):
    """Runs single ops on a slice of attention."""

    def op(self, kind: Any, part: int = 0) -> SegmentOp:
        return SegmentOp("attn", 0, kind, 0, part)

    def told(self, what: str, part: int = 0) -> tuple[int, int]:
        """The most during an op beyond what was there before it, and what it leaves beyond that."""
        before = self.peak = self.now
        self._rises = False
        op = self.op(what if len(what) == 1 else "F", part)
        getattr(self, f"_{what}")(op)
        self._top()
        return self.peak - before, self.now - before

    def has(self, **sizes: int) -> One:
        """Tensors that are there."""
        for name, size in sizes.items():
            self._hold(self.op("F"), name, size)
        return self

    def names(self) -> set[str]:
        return {name for *_, name in self._live}


def walk(ulysses: int, ring: int, itemsize: int = 2, recompute: Any = "none", gpu: bool = True) -> tuple[One, Shared]:
    strategy = Strategy(cp=ulysses * ring, ring=ring, recompute=recompute)
    graph = SegmentGraph.of(LLAMA, strategy, Stage(0, 1, 0, 2))
    sizes = Sizes(LLAMA, strategy, graph, 5, 32, itemsize, gpu)
    one = One(sizes)
    return one, sizes.shared(one.op("F"))


def test_sizes_that_tests_tell_apart() -> None:
    """Of 4 ranks in a ring, none is another."""
    _, each = walk(1, 4, 2)
    assert len({each.first, each.query, each.lse, each.turned, each.turning, each.tables}) == 6
    assert each.block == each.query
    _, each = walk(2, 2, 2)
    assert each.there == each.query + each.block


LEAVE: list[tuple[int, int, Formula, Formula]] = [
    (1, 2, lambda s: max(s.turning, s.turned + s.query + s.block), lambda s: s.query + s.block),
    (2, 1, lambda s: max(s.turning, s.turned + 2 * s.there), lambda s: s.there),
    (2, 2, lambda s: max(s.turning, s.turned + 2 * s.there), lambda s: s.there),
]


@pytest.mark.parametrize(("ulysses", "ring", "most", "stays"), LEAVE)
def test_what_leaves_is_packed_once_more_for_an_exchange_of_heads(
    ulysses: int, ring: int, most: Formula, stays: Formula
) -> None:
    one, each = walk(ulysses, ring)
    assert one.told("leave") == (most(each), stays(each))
    one, each = walk(ulysses, ring)
    one.has(z0=each.first)
    assert one.told("leave") == (most(each), stays(each) - each.first)


@pytest.mark.parametrize(
    ("kind", "part", "name"),
    [("T", 0, "block1"), ("T", 2, "block3"), ("S", 0, "block1"), ("S", 1, "block2"), ("H", 0, "g_come0"),
     ("H", 2, "g_come2")],
)  # fmt: skip
def test_blocks_that_come_round_a_ring(kind: Any, part: int, name: str) -> None:
    one, each = walk(1, 4)
    one._sent(one.op(kind, part))  # pyright: ignore[reportPrivateUsage]
    assert (one.now, one.names()) == (each.block, {name})


@pytest.mark.parametrize(
    ("kind", "size"),
    [("F", "there"), ("A", "there"), ("G", "there"), ("E", "there"), ("K", "query"), ("X", "query"), ("D", "query")],
)
def test_what_comes_of_an_exchange_of_heads(kind: Any, size: str) -> None:
    one, each = walk(2, 2)
    one._sent(one.op(kind))  # pyright: ignore[reportPrivateUsage]
    assert (one.now, one.names()) == (getattr(each, size), {"come"})


def test_the_first_block_is_unpacked_before_it_is_sent_on() -> None:
    one, each = walk(2, 2)
    one.has(going=each.there, come=each.there)
    assert one.told("T") == (each.there, -each.there)
    assert one.names() == {"q", "block0"}
    one, each = walk(1, 4)
    one.has(block1=each.block, block2=each.block)
    assert one.told("T", 2) == (0, -each.block)
    assert one.names() == {"block2"}


@pytest.mark.parametrize("ulysses", [1, 2])
@pytest.mark.parametrize(("itemsize", "gpu"), [(2, True), (2, False), (4, True)])
def test_blocks_of_a_ring_are_attended_to_one_after_the_other(ulysses: int, itemsize: int, gpu: bool) -> None:
    """Sums are made in fp32; of a later block half of the queries or of the keys; last, they are rounded."""
    one, each = walk(ulysses, 4, itemsize, gpu=gpu)
    sums = each.query * 4 // itemsize
    one.has(q=each.query, block0=each.block, block1=each.block)
    first = each.query + each.lse + max(each.expanded, sums + each.lse)
    assert one.told("K") == (first, sums + each.lse)
    later = (each.query + each.lse) // 2 + max(each.expanded, sums // 2)
    assert one.told("K", 1) == (later, 0)
    one.has(block2=each.block)
    assert one.told("K", 2) == (max(later - each.block, 0), -each.block)
    one.has(block3=each.block)
    most, stays = one.told("K", 3)
    assert stays == 2 * each.query - sums - 2 * each.block
    assert most == max(later, each.query) - each.block
    assert one.names() == {"q", "block0", "found", "going" if ulysses > 1 else "o0"}


def test_a_ring_that_is_recomputed_keeps_neither_queries_nor_its_own_block() -> None:
    one, each = walk(1, 2, recompute="full")
    one.has(q=each.query, block0=each.block, block1=each.block)
    one.told("K")
    one.told("K", 1)
    assert one.names() == {"found", "o0"}


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_one_kernel_over_all_tokens(recompute: str) -> None:
    one, each = walk(2, 1, recompute=recompute)
    one.has(going=each.there, come=each.there)
    most, stays = one.told("K")
    if recompute == "none":
        assert one.names() == {"kernel", "given", "leaf"}
        assert stays == each.lse + each.expanded + each.query + each.there - 2 * each.there
        assert most == max(0, each.lse + each.expanded + each.query + each.forward - each.there)
        return
    assert one.names() == {"given"}
    assert stays == each.query - 2 * each.there
    made = each.lse + each.expanded + each.query
    assert most == max(0, made + each.forward - each.there, made + each.there - 2 * each.there)


@pytest.mark.parametrize("ulysses", [1, 2])
def test_what_attention_gave_has_all_heads_after_an_exchange(ulysses: int) -> None:
    one, each = walk(ulysses, 2)
    one.has(going=each.query, come=each.query)
    if ulysses == 1:
        assert one.told("arrive") == (0, 0)
        return
    assert one.told("arrive") == (each.query, -each.query)
    assert one.names() == {"o0"}


@pytest.mark.parametrize(("ulysses", "times", "name"), [(1, 1, "g_o"), (2, 2, "going")])
def test_the_outputs_gradient_is_packed_once_more_for_an_exchange(ulysses: int, times: int, name: str) -> None:
    one, each = walk(ulysses, 2)
    assert one.told("back") == (times * each.query, each.query)
    assert one.names() == {name}


def test_one_kernels_gradients() -> None:
    one, each = walk(2, 1, 4)
    one.has(leaf=each.there, kernel=each.lse, come=each.query, going=each.query)
    most = max(2 * each.there + each.expanded, each.there + each.backward) - each.query
    assert each.expanded > 0
    assert one.told("G") == (most, each.there - each.there - each.lse - 2 * each.query)
    assert one.names() == {"going"}


@pytest.mark.parametrize("itemsize", [2, 4])
def test_gradients_of_a_ring_are_summed_in_fp32(itemsize: int) -> None:
    """Of all blocks but the last half of the queries' gradients; the last is the rank's own, kept in fp32."""
    one, each = walk(1, 3, itemsize)
    times = 4 // itemsize
    keys = max(each.block, each.expanded) + each.expanded
    one.has(q=each.query, found=each.query, g_o=each.query, block0=each.block, block1=each.block)
    half = each.query + times * each.query
    made = times * each.query + each.block
    assert one.told("G") == (made + keys + half // 2, made)
    assert {"g_q", "g_block0"} <= one.names()
    assert one.told("G", 1)[0] == each.block + keys + half // 2 - each.block
    assert "block1" not in one.names()
    most, stays = one.told("G", 2)
    assert most == times * each.block + keys + half
    assert stays == times * each.block - 3 * each.query - each.block
    assert one.names() == {"g_q", "g_block0", "g_block1", "g_own"}


def come_home(ulysses: int, ring: int, itemsize: int) -> tuple[One, Shared, int]:
    """A ring whose sums have come home, and what rounding them takes."""
    one, each = walk(ulysses, ring, itemsize)
    one.has(g_come0=each.block, g_own=each.block, g_q=each.query, g_other=3)
    one.has(**{"g_block0" if ring == 2 else "g_come1": each.block})
    return one, each, 2 * each.query + each.block if itemsize == 2 else 0


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("ring", [2, 3])
def test_sums_that_came_home_are_rounded_and_turned_back(ring: int, itemsize: int) -> None:
    one, each, rounded = come_home(1, ring, itemsize)
    last = max(each.turning, each.turned + each.first + each.tables) - 2 * each.block
    assert one.told("Z") == (max(rounded, last), each.first - 3 * each.block - each.query)
    assert one.names() == {"g_other", "g_z0"}


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("ring", [2, 3])
def test_sums_that_came_home_are_rounded_and_exchanged(ring: int, itemsize: int) -> None:
    one, each, rounded = come_home(2, ring, itemsize)
    most = max(rounded, each.there - 2 * each.block, 0)
    assert one.told("E") == (most, each.there - 3 * each.block - each.query)
    assert one.names() == {"g_other", "going"}


def test_gradients_that_came_of_an_exchange_are_unpacked() -> None:
    one, each = walk(2, 2)
    one.has(going=each.there, come=each.there)
    last = max(each.turning, each.turned + each.first + each.tables) - each.there
    assert one.told("Z") == (max(each.there, last), each.first - 2 * each.there)
    assert one.names() == {"g_z0"}


@pytest.mark.parametrize(("part", "left"), [(0, {"g_block0", "g_block1", "g_block2", "g_come0", "g_come1"}),
                                            (1, {"g_block2", "g_come0", "g_come1"}),
                                            (2, {"g_block0", "g_block1", "g_come1"})])  # fmt: skip
def test_a_sum_goes_on_in_the_place_of_what_has_come(part: int, left: set[str]) -> None:
    one, _ = walk(1, 4)
    one.has(g_block0=1, g_block1=1, g_block2=1, g_come0=1, g_come1=1)
    one.told("H", part)
    assert one.names() == left
