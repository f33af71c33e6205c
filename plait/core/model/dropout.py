"""Memory of dropout: the buffers for drawing a mask, and the blocks in which attention with dropout
is computed. The runtime and the models of memory both use it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

HASH_BYTES = 16
"""Bytes of an element while its mask is drawn: two 64-bit integers."""
SUM_BYTES = 4
"""Bytes of an element of sums, unless the model itself has a wider type."""
LEAST, MOST = 16, 256
"""Least and most queries of a block, if the sequence has as many: enough for a matrix product; few
enough that keys which they cannot see yet are left out of most blocks."""
ON_CPU, ON_GPU = 1 << 17, 1 << 22
"""Approximate number of attention weights of a block: as many as a core's cache holds; as many as
keep a GPU busy."""


class Block(NamedTuple):
    """Range of attention weights. rows: first and last + 1 of (sample, key/value head). queries:
    first and last + 1 query of the sequence; they see keys before the last + 1."""

    rows: tuple[int, int]
    queries: tuple[int, int]


@dataclass(frozen=True)
class Blocks:
    """Attention weights [rows, group, sequence, sequence] in blocks that are computed one after the
    other: blocks share the same memory, and the backward recomputes them from the log-sum-exp.

    rows: samples times key/value heads. group: query heads of a key/value head.
    """

    rows: int
    group: int
    sequence: int
    gpu: bool

    @property
    def queries(self) -> int:
        """Number of queries of a block."""
        most = (ON_GPU if self.gpu else ON_CPU) // (self.group * self.sequence)
        return min(self.sequence, MOST, max(LEAST, most))

    @property
    def rows_at_once(self) -> int:
        """Number of rows of a block."""
        most = (ON_GPU if self.gpu else ON_CPU) // (self.group * self.queries * self.sequence)
        return max(1, min(self.rows, most))

    @property
    def weights(self) -> int:
        """Number of attention weights of the largest block, for the keys that its queries see."""
        whole = self.sequence // self.queries * self.queries
        largest = max(self.queries * whole, (self.sequence - whole) * self.sequence)
        return self.rows_at_once * self.group * largest

    def forward(self, size: int, itemsize: int) -> int:
        """Return the most bytes of the forward, besides attention's inputs and output. size:
        elements of a head."""
        queries = self.rows_at_once * self.group * self.queries * size
        return self.weights * (_each(itemsize) + HASH_BYTES) + queries * itemsize

    def backward(self, size: int, itemsize: int) -> int:
        """Return the most bytes of the backward, besides attention's inputs and outputs: it adds
        the weights' gradient, and sums of keys and values. size: elements of a head."""
        queries, keys = (self.rows_at_once * n * size for n in (self.group * self.queries, self.sequence))
        sums = 2 * keys * max(itemsize, SUM_BYTES)
        return self.weights * (_each(itemsize) + itemsize + HASH_BYTES) + 3 * queries * itemsize + sums

    def __iter__(self) -> Iterator[Block]:
        """Yield all blocks: blocks of the same rows follow each other, with ascending queries."""
        for row in range(0, self.rows, self.rows_at_once):
            for query in range(0, self.sequence, self.queries):
                rows = row, min(self.rows, row + self.rows_at_once)
                yield Block(rows, (query, min(self.sequence, query + self.queries)))


def _each(itemsize: int) -> int:
    """Return the bytes of a weight, whose softmax is in fp32 at least, and of the product from
    which it is made."""
    return itemsize if itemsize >= SUM_BYTES else itemsize + SUM_BYTES
