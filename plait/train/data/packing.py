"""Documents packed into sequences: which go together, none cut, as few sequences as best fit needs.

Longest first, each into the fullest sequence that has room (best fit decreasing, which takes at most 11/9 of
the fewest possible; Johnson 1973). A pure function of the lengths, so that every rank packs the same.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Packing(NamedTuple):
    """documents: their numbers, sequence after sequence, [n]. bounds: where sequences begin in these,
    [sequences + 1]."""

    documents: np.ndarray
    bounds: np.ndarray

    def __len__(self) -> int:
        """Sequences."""
        return len(self.bounds) - 1

    def of(self, sequence: int) -> np.ndarray:
        """The documents of a sequence."""
        return self.documents[self.bounds[sequence] : self.bounds[sequence + 1]]


def pack(lengths: np.ndarray, size: int) -> Packing:
    """Documents of so many tokens, 1 to ``size`` each, in sequences of ``size`` tokens.

    >>> found = pack(np.array([3, 5, 2, 1]), 6)
    >>> [found.of(number).tolist() for number in range(len(found))]
    [[1], [0, 2, 3]]
    """
    assert not len(lengths) or 1 <= lengths.min() <= lengths.max() <= size, f"lengths of 1 to {size}"
    with_room: list[list[int]] = [[] for _ in range(size)]  # sequences by tokens that are left
    some = count = 0  # bit r of some: a sequence has r tokens left
    where = np.empty(len(lengths), np.int64)
    order = np.argsort(-lengths, kind="stable")
    for number, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        if fitting := some >> length:
            room = length + (fitting & -fitting).bit_length() - 1
            sequence = with_room[room].pop()
            if not with_room[room]:
                some ^= 1 << room
        else:
            room, sequence, count = size, count, count + 1
        where[number] = sequence
        if left := room - length:
            with_room[left].append(sequence)
            some |= 1 << left
    documents = np.argsort(where, kind="stable")
    return Packing(documents, np.searchsorted(where[documents], np.arange(count + 1)))
