"""Which rank orthogonalises which matrix: data of an optimizer that needs matrices whole (Muon).

Ranks that hold parts of the same matrices form a group. Matrices go in rounds of at most one a rank, the most
costly first, so that a round's matrices take about as long as each other and the parts of the next round
travel meanwhile. Replicas of optimizer shards share the work, ``SHARED`` of them at most: the owner of a
matrix sends it to every rank of the group.
"""

from __future__ import annotations

from collections.abc import Mapping

from plait.core.parallel.layout import Mesh
from plait.core.parallel.sharding import Sharding

SHARED = 8
"""Replicas of an optimizer shard that share the work, at most: of more, each would send its matrices to more
ranks than orthogonalising them itself costs."""


def flops(shape: tuple[int, int], iterations: int = 5) -> int:
    """Of orthogonalising a matrix by Newton-Schulz iterations: three products each, on its shorter side.

    >>> flops((8, 4), 1)
    640
    """
    short, long = sorted(shape)
    return iterations * (4 * short * short * long + 2 * short**3)


def rounds(shapes: Mapping[str, tuple[int, int]], ranks: int) -> list[dict[int, str]]:
    """Rounds of matrices, by rank of the group: each matrix in one round, with one rank. Every other round
    goes round backwards, which evens out what ranks have.

    >>> rounds({"a": (2, 2), "b": (4, 4), "c": (2, 4)}, 2)
    [{0: 'b', 1: 'c'}, {1: 'a'}]
    """
    order = sorted(shapes, key=lambda name: (-flops(shapes[name]), name))
    found: list[dict[int, str]] = []
    for at in range(0, len(order), ranks):
        places = range(ranks) if len(found) % 2 == 0 else range(ranks - 1, -1, -1)
        found.append(dict(zip(places, order[at : at + ranks], strict=False)))
    return found


def shared_blocks(blocks: int) -> int:
    """Of so many replicas of an optimizer shard, those that share the work.

    >>> [shared_blocks(blocks) for blocks in (1, 6, 12, 11)]
    [1, 6, 6, 1]
    """
    return next(some for some in range(min(blocks, SHARED), 0, -1) if blocks % some == 0)


def sharing(mesh: Mesh, sharding: Sharding, rank: int) -> tuple[int, ...]:
    """The ranks with which ``rank`` shares the matrices of its stages, in order.

    >>> sharing(Mesh(0, dp=4, tp=2), Sharding(optim=2), 5)
    (0, 1, 2, 3, 4, 5, 6, 7)
    """
    size = sharding.optim * shared_blocks(mesh.replicas // sharding.optim)
    own = mesh.replica(rank) // size
    return tuple(other for other in mesh.ranks if mesh.replica(other) // size == own)


def buffer_numbers(largest: int, blocks: int = 1) -> int:
    """Numbers of the buffers in which matrices travel, two of each of four kinds, as large as a rank's share
    of a round: parts given and taken, and what goes back to ``blocks`` replicas of an optimizer shard, and
    comes. largest: of the largest matrix."""
    return 4 * largest * (1 + min(blocks, SHARED))
