"""A tree over the ranks of a group, for small data that all ranks need.

A rank communicates with its parent and at most ``FAN`` children, however many ranks there are. The
number of successive messages is twice the tree's depth: ten in a world of 16,384. gloo's own sum
and gather go around a ring, with a message per rank. A subtree is a run of neighbouring ranks, so
most edges stay inside a host.

Every rank of the group calls the same function at the same point. The group's timeout bounds the
wait. Python values are sent as JSON (``gather``, ``broadcast``), so that nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from plait.core.step.segments import Collective

FAN = 8
"""The most children of a rank. A group of at most ``FAN`` + 1 ranks is a star."""


class TreeNeighbours(NamedTuple):
    """A rank's neighbours in the tree. parent: None for rank 0."""

    parent: int | None
    children: tuple[int, ...]


def node_of(rank: int, size: int, fan: int = FAN) -> TreeNeighbours:
    """Return the neighbours of a rank of ``size``. The subtree of a child is the ranks up to the
    next child.

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
    """Split ``ranks`` into at most ``count`` runs of nearly equal length, the longer first; none is
    empty."""
    each, more = divmod(len(ranks), count)
    bounds = [ranks.start + i * each + min(i, more) for i in range(count + 1)]
    return [range(a, b) for a, b in pairwise(bounds) if a < b]


class Tree:
    """The tree of a torch process group for tensors in host memory; None: of all ranks."""

    def __init__(self, group: dist.ProcessGroup | None = None, fan: int = FAN) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.parent, self.children = node_of(self.rank, self.size, fan)

    def reduce(self, value: Tensor, add: Callable[[Tensor, Tensor], object] = Tensor.add_) -> None:
        """Replace ``value``, contiguous in host memory, by its sum over all ranks, added up in the
        order of the tree. add: combines a child's value into this rank's, if not by a sum."""
        heard = [torch.empty_like(value) for _ in self.children]
        self._receive(heard, self.children)
        for one in heard:
            add(value, one)
        if self.parent is not None:
            self._send(value, [self.parent])
            self._receive([value], [self.parent])
        self._send(value, self.children)

    def barrier(self) -> None:
        """Wait until every rank has called this (a barrier)."""
        self.reduce(torch.zeros(1, dtype=torch.uint8))

    def gather(self, text: bytes) -> bytes:
        """Return every rank's text, in the order of ranks, separated by commas; on all ranks."""
        text = b",".join([text, *self._receive_texts(self.children)])
        if self.parent is not None:
            self._send_text(text, [self.parent])
        return self.broadcast(text)

    def broadcast(self, text: bytes) -> bytes:
        """Return rank 0's text on all ranks; the text of other ranks is ignored."""
        if self.parent is not None:
            text = self._receive_texts([self.parent])[0]
        self._send_text(text, self.children)
        return text

    # ---- messages ----

    def _send_text(self, text: bytes, ranks: Sequence[int]) -> None:
        if ranks:
            self._send(torch.tensor([len(text)]), ranks)
            self._send(torch.frombuffer(bytearray(text), dtype=torch.uint8), ranks)

    def _receive_texts(self, ranks: Sequence[int]) -> list[bytes]:
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
    """Start all works, then wait for all."""
    for work in list(works):
        work.wait()


class TreeWire:
    """A wire for the few sums of a step over all ranks, by the tree; a gloo group of all ranks
    would connect every pair."""

    def __init__(self, tree: Tree | None = None) -> None:
        self.tree = tree or Tree()
        self.size, self.rank = self.tree.size, self.tree.rank

    def start(self, kind: Collective, result: Tensor, source: Tensor) -> Summing:
        """Return a sum all-reduce of ``result``; the only collective of this wire."""
        assert kind == "all_reduce" and result is source, (
            f"{kind} over a tree, which supports only an in-place all_reduce"
        )
        return Summing(self.tree, result)


class Summing:
    """A sum over the tree that runs in ``wait``."""

    def __init__(self, tree: Tree, value: Tensor) -> None:
        self._tree, self._value = tree, value
        self._future: Future[object] = Future()

    def wait(self) -> None:
        """Take part in the sum, if not done yet."""
        if not self._future.done():
            self._tree.reduce(self._value)
            self._future.set_result(None)

    def get_future(self) -> Future[object]:
        """Return the future, done when the sum is complete."""
        return self._future

    def is_completed(self) -> bool:
        """Return True if the sum is complete."""
        return self._future.done()


def gather(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the value of every rank, by rank, on all ranks. group: None for all ranks. Without
    torch.distributed, the list has this process's value only.

    >>> gather({"rank": 0})
    [{'rank': 0}]
    """
    mine = _encoded(value)
    if not dist.is_initialized():
        return [json.loads(mine)]
    return json.loads(b"[" + Tree(group).gather(mine) + b"]")


def broadcast(value: Any, source: int = 0, group: dist.ProcessGroup | None = None) -> Any:
    """Return the value of rank ``source`` of the group on all of its ranks; the values of other
    ranks are ignored."""
    if not dist.is_initialized():
        return json.loads(_encoded(value))
    if source:  # the tree's root is rank 0
        return gather(value if dist.get_rank(group) == source else None, group)[source]
    return json.loads(Tree(group).broadcast(_encoded(value) if dist.get_rank(group) == 0 else b""))


def largest(values: Sequence[float]) -> list[float]:
    """Return each value's maximum over all ranks, on all ranks."""
    found = torch.tensor(values, dtype=torch.float64)
    if dist.is_initialized():
        Tree().reduce(found, lambda own, other: torch.maximum(own, other, out=own))
    return found.tolist()


def barrier() -> None:
    """Wait until every rank has called this (a barrier)."""
    if dist.is_initialized():
        Tree().barrier()


_opened: Counter[tuple[int, ...]] = Counter()
"""Number of groups that this rank has opened, by their ranks."""


def group_name(ranks: Sequence[int]) -> str:
    """Return a new name in the store for a group. Its ranks open the groups that they share in the
    same order. So they give it the same name, whatever other groups each of them opens."""
    ranks = tuple(ranks)
    _opened[ranks] += 1
    digest = hashlib.sha256(" ".join(map(str, ranks)).encode()).hexdigest()[:16]
    return f"plait/{len(ranks)}-{digest}/{_opened[ranks]}"


def differing_ranks(value: str, ranks: Sequence[int]) -> list[int]:
    """Return the ranks whose value differs from that of ``ranks[0]``; equal on all of ``ranks``,
    which call this together.

    The values go through the store. While they agree, the number of its operations per rank does
    not grow with the ranks. Groups of an accelerator take no host values, and a host group for so
    little data would connect every pair.
    """
    name, me = group_name(ranks), dist.get_rank()
    store: Any = dist.distributed_c10d._get_default_store()
    if me == ranks[0]:
        store.set(f"{name}/first", value)
    elif store.get(f"{name}/first").decode() != value:
        store.append(f"{name}/odd", f" {me}")
        store.add(f"{name}/differ", 1)
    if store.add(f"{name}/said", 1) == len(ranks):
        store.set(f"{name}/any", str(store.add(f"{name}/differ", 0)))
    if store.get(f"{name}/any") == b"0":
        return []
    return sorted(map(int, store.get(f"{name}/odd").decode().split()))


def _encoded(value: Any) -> bytes:
    return json.dumps(value).encode()
