"""A tree over the ranks of a group, for what is small and concerns all of them.

A rank speaks with its parent and with at most ``FAN`` children, however many ranks there are: so many
connections, and as many messages one after the other as the tree is deep, up and down, ten in a world of
16,384. gloo's own sum and gather go round a ring, with a message for every rank. A subtree is a run of
neighbouring ranks, so that most edges stay inside a host.

Every rank of the group calls the same function at the same point. The group's timeout bounds the wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from plait.core.step.segments import Collective

FAN = 8
"""Children of a rank, at most. A group of no more ranks than that and one is a star."""


class TreeNeighbours(NamedTuple):
    """A rank's neighbours in the tree. parent: None for rank 0."""

    parent: int | None
    children: tuple[int, ...]


def node_of(rank: int, size: int, fan: int = FAN) -> TreeNeighbours:
    """Where a rank of ``size`` stands. The ranks below a child are those up to the next child.

    >>> [tuple(node_of(rank, 6, fan=2)) for rank in (0, 1, 4)]
    [(None, (1, 4)), (0, (2, 3)), (0, (5,))]
    """
    parent, below = None, range(size)
    while True:
        own, parts = below.start, _parts(below[1:], fan)
        if own == rank:
            return TreeNeighbours(parent, tuple(part.start for part in parts))
        parent, below = own, next(part for part in parts if rank in part)


def _parts(ranks: range, count: int) -> list[range]:
    """Runs of neighbours, as equal as can be, the larger first; none is empty."""
    each, more = divmod(len(ranks), count)
    bounds = [ranks.start + i * each + min(i, more) for i in range(count + 1)]
    return [range(a, b) for a, b in pairwise(bounds) if a < b]


class Tree:
    """Over a group of torch's whose ranks' host memory is reachable; over all ranks if none is given."""

    def __init__(self, group: dist.ProcessGroup | None = None, fan: int = FAN) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.parent, self.children = node_of(self.rank, self.size, fan)

    def reduce(self, value: Tensor, add: Callable[[Tensor, Tensor], object] = Tensor.add_) -> None:
        """Make ``value``, contiguous in host memory, the same sum on every rank, added up in the order of the
        tree. add: takes a child's value into this rank's, where it is not a sum."""
        heard = [torch.empty_like(value) for _ in self.children]
        self._receive(heard, self.children)
        for one in heard:
            add(value, one)
        if self.parent is not None:
            self._send(value, [self.parent])
            self._receive([value], [self.parent])
        self._send(value, self.children)

    def meet(self) -> None:
        """Wait until every rank has come here."""
        self.reduce(torch.zeros(1, dtype=torch.uint8))

    def gather(self, text: bytes) -> bytes:
        """Every rank's text, in the order of ranks, with commas between them; on all ranks."""
        text = b",".join([text, *self._heard(self.children)])
        if self.parent is not None:
            self._tell(text, [self.parent])
        return self.broadcast(text)

    def broadcast(self, text: bytes) -> bytes:
        """Rank 0's text, on all ranks; the others' is not looked at."""
        if self.parent is not None:
            text = self._heard([self.parent])[0]
        self._tell(text, self.children)
        return text

    # ---- messages ----

    def _tell(self, text: bytes, ranks: Sequence[int]) -> None:
        if ranks:
            self._send(torch.tensor([len(text)]), ranks)
            self._send(torch.frombuffer(bytearray(text), dtype=torch.uint8), ranks)

    def _heard(self, ranks: Sequence[int]) -> list[bytes]:
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in ranks]
        self._receive(sizes, ranks)
        texts = [torch.empty(int(size), dtype=torch.uint8) for size in sizes]
        self._receive(texts, ranks)
        return [text.numpy().tobytes() for text in texts]

    def _send(self, value: Tensor, ranks: Sequence[int]) -> None:
        _all(dist.isend(value, group=self.group, group_dst=rank) for rank in ranks)

    def _receive(self, values: Sequence[Tensor], ranks: Sequence[int]) -> None:
        pairs = zip(values, ranks, strict=True)
        _all(dist.irecv(value, group=self.group, group_src=rank) for value, rank in pairs)


def _all(works: Iterable[Any]) -> None:
    """Start all of them, then wait for all."""
    for work in list(works):
        work.wait()


class TreeWire:
    """The few sums of a step that concern all ranks, over the tree of all of them: a wire of their own would
    connect any two."""

    def __init__(self, tree: Tree | None = None) -> None:
        self.tree = tree or Tree()
        self.size, self.rank = self.tree.size, self.tree.rank

    def start(self, kind: Collective, result: Tensor, source: Tensor) -> Summing:
        """A sum all-reduce of ``result``; nothing else is asked of it."""
        assert kind == "all_reduce" and result is source, f"{kind} over a tree"
        return Summing(self.tree, result)


class Summing:
    """A sum that travels while it is waited for."""

    def __init__(self, tree: Tree, value: Tensor) -> None:
        self._tree, self._value = tree, value
        self._future: Future[object] = Future()

    def wait(self) -> None:
        """Take part in it."""
        if not self._future.done():
            self._tree.reduce(self._value)
            self._future.set_result(None)

    def get_future(self) -> Future[object]:
        """Done when it is over."""
        return self._future

    def is_completed(self) -> bool:
        """Whether it is over."""
        return self._future.done()
