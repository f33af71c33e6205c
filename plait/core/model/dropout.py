"""Dropout as far as memory depends on it: what drawing a mask takes, and the blocks in which attention with
dropout is computed. The runtime goes by it, and so do the models of memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

HASHED = 16
"""Bytes of an element while its mask is drawn: two 64-bit integers."""
WIDE = 4
"""Bytes of a number in which sums are made, unless the model itself computes in more."""
LEAST, MOST = 16, 256
"""Queries of a block, if there are as many: enough for a matrix product; few enough that what they cannot see
yet is left out of most blocks."""
ON_CPU, ON_GPU = 1 << 17, 1 << 22
"""Attention weights of a block, about: as many as a core's cache holds; as many as keep a GPU busy."""


class Block(NamedTuple):
    """rows: first and last + 1 of (sample, key/value head). queries: likewise, of the sequence; those see
    keys before the last + 1."""

    rows: tuple[int, int]
    queries: tuple[int, int]


@dataclass(frozen=True)
class Blocks:
    """Attention weights [rows, group, sequence, sequence] in blocks that are computed one after the other:
    their memory is used again, and the backward computes them again from the log-sum-exp.

    rows: samples times key/value heads. group: query heads of a key/value head.
    """

    rows: int
    group: int
    sequence: int
    gpu: bool

    @property
    def queries(self) -> int:
        """Queries of a block."""
        most = (ON_GPU if self.gpu else ON_CPU) // (self.group * self.sequence)
        return min(self.sequence, MOST, max(LEAST, most))

    @property
    def rows_at_once(self) -> int:
        """Rows of a block."""
        most = (ON_GPU if self.gpu else ON_CPU) // (self.group * self.queries * self.sequence)
        return max(1, min(self.rows, most))

    @property
    def weights(self) -> int:
        """Attention weights of the largest block: those that its queries see."""
        whole = self.sequence // self.queries * self.queries
        largest = max(self.queries * whole, (self.sequence - whole) * self.sequence)
        return self.rows_at_once * self.group * largest

    def forward(self, size: int, itemsize: int) -> int:
        """Bytes beside what attention is given and gives, at most. size: numbers of a head."""
        queries = self.rows_at_once * self.group * self.queries * size
        return self.weights * (_each(itemsize) + HASHED) + queries * itemsize

    def backward(self, size: int, itemsize: int) -> int:
        """Likewise; the weights' gradient, and sums of keys' and values', come to it."""
        queries, keys = (self.rows_at_once * n * size for n in (self.group * self.queries, self.sequence))
        sums = 2 * keys * max(itemsize, WIDE)
        return self.weights * (_each(itemsize) + itemsize + HASHED) + 3 * queries * itemsize + sums

    def __iter__(self) -> Iterator[Block]:
        """All of them: those of the same rows stand together, queries ascend."""
        for row in range(0, self.rows, self.rows_at_once):
            for query in range(0, self.sequence, self.queries):
                rows = row, min(self.rows, row + self.rows_at_once)
                yield Block(rows, (query, min(self.sequence, query + self.queries)))


def _each(itemsize: int) -> int:
    """Bytes of a weight, whose softmax is in fp32 at least, and of the product that it is made of."""
    return itemsize if itemsize >= WIDE else itemsize + WIDE
