"""Who sums the gradient of tied embeddings with whom, and how much of it.

The first and the last stage each hold the embedding and see a part of its gradient. When each has summed its
own part over its replicas, every rank has the range that its optimizer updates; only that range is to be
summed with the other stage's, with the ranks there that hold a part of it. A range is contiguous in the
embedding [vocabulary, hidden], flattened: tensor-parallel ranks share the vocabulary out in runs of rows, and
sharding cuts a run further. Equal places have equal ranges, so that two ranks sum each. Places that differ
sum what their ranges, overlapping, are a part of.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from plait.core.model.spec import ModelSpec
from plait.core.parallel.layout import Layout, Mesh
from plait.core.parallel.sharding import Sharding
from plait.core.step.schedule import Schedule


class Tie(NamedTuple):
    """ranks: who sums, in ascending order. start, stop: the numbers of the flattened embedding that they sum.
    counts: whether this rank's part does; else another holds the same."""

    ranks: tuple[int, ...]
    start: int
    stop: int
    counts: bool

    @property
    def numbers(self) -> int:
        """How many are summed."""
        return self.stop - self.start


class _End(NamedTuple):
    """A place that holds the embedding."""

    mesh: Mesh
    sharding: Sharding
    model: ModelSpec

    @property
    def copies(self) -> int:
        """How many ranks hold the same range."""
        return self.mesh.replicas // self.sharding.optim

    def held(self, number: int, of: int) -> Iterator[tuple[int, int, int]]:
        """(first, last + 1, rank) of those whose copy has this number modulo ``of``."""
        mesh, sharding, vocab, hidden = self.mesh, self.sharding, self.model.vocab, self.model.hidden
        size = -(-vocab // mesh.tp) * hidden  # of a tensor-parallel rank's rows, padding included
        for copy in range(number, self.copies, of):
            for replica in range(copy * sharding.optim, (copy + 1) * sharding.optim):
                low, high = sharding.shard(replica, "optim", sharding.padded(size))
                for tp in range(mesh.tp):
                    first, last = (min(tp * size + min(at, size), vocab * hidden) for at in (low, high))
                    yield first, last, mesh.first + replica * mesh.tp + tp


def tie_of(rank: int, *, model: ModelSpec, layout: Layout, shardings: Sequence[Sharding], schedule: Schedule) -> Tie:
    """A rank's. Alone, with nothing to sum, where the embedding is not tied or its place does not hold it."""
    places = {schedule.rank_of[0], schedule.rank_of[schedule.num_stages - 1]}
    ends = [_End(layout.meshes[place], shardings[place], model) for place in sorted(places)]
    own = next((end for end in ends if rank in end.mesh.ranks), None)
    if own is None or not model.tied_embeddings or schedule.num_stages == 1:
        return Tie((rank,), 0, 0, True)
    classes, copy = min(end.copies for end in ends), own.mesh.replica(rank) // own.sharding.optim
    held = sorted(found for end in ends for found in end.held(copy % classes, classes))
    start, stop = next((first, last) for first, last, one in held if one == rank)
    if start == stop:  # padding only
        return Tie((rank,), start, stop, True)
    members, reach = list[int](), -1
    for first, last, one in held:
        if first == last:
            continue
        if first >= reach:  # nothing before it goes on to here
            if rank in members:
                break
            members, start = [], first
        members, reach = [*members, one], max(reach, last)
    return Tie(tuple(sorted(members)), start, reach, copy < classes)
