"""Documents packed into one sequence: attention stops at their ends, positions count from their
beginnings.

A sequence of tokens [S] is described by ``starts`` [S]: for every token the position of the first
token of its document. Two tokens see each other only if they have the same start, so that loss and
gradients are those of documents trained separately.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor


class DocumentSpan(NamedTuple):
    """One document of one sequence: the sequence's index in the slice, the position of its first
    token and that after its last."""

    sample: int
    first: int
    last: int


@dataclass(frozen=True)
class Documents:
    """Documents of the b sequences of a slice, all of S tokens.

    ends: for each sequence the positions after its documents' last tokens, ascending; the last is
    S. starts: [b, S], on the device. positions: [S_here, b], position within its document of each
    token whose queries and keys this rank computes. bounds: [documents + 1] int32, the starts of
    documents if the sequences are concatenated (cumulative lengths).
    """

    ends: tuple[tuple[int, ...], ...]
    starts: Tensor
    positions: Tensor
    bounds: Tensor

    @property
    def longest(self) -> int:
        """The length of the longest document, in tokens."""
        return max(one.last - one.first for one in self.stretches())

    def lengths(self, sample: int) -> list[int]:
        """Return the length of each document of a sequence, in tokens."""
        return [last - first for first, last in pairwise((0, *self.ends[sample]))]

    def stretches(self) -> list[DocumentSpan]:
        """Return all documents, sequence after sequence."""
        return [
            DocumentSpan(sample, first, last)
            for sample, ends in enumerate(self.ends)
            for first, last in pairwise((0, *ends))
        ]


def are_starts(starts: Tensor) -> bool:
    """Return True if [b, S], in host memory, is a valid ``starts``.

    >>> [are_starts(torch.tensor([each])) for each in ([0, 0, 2, 2], [0, 0, 1, 2], [1, 1, 1, 1])]
    [True, False, False]
    """
    positions = torch.arange(starts.shape[1]).expand_as(starts)
    begins = torch.where(starts == positions, positions, 0).cummax(dim=1).values
    return bool((starts == begins).all())


def ends_of(starts: Tensor) -> tuple[tuple[int, ...], ...]:
    """Return the documents' ends from their starts [b, S] in host memory.

    >>> ends_of(torch.tensor([[0, 0, 2, 2], [0, 0, 0, 0]]))
    ((2, 4), (4,))
    """
    b, tokens = starts.shape
    samples, firsts = (starts == torch.arange(tokens)).nonzero(as_tuple=True)
    found: list[list[int]] = [[] for _ in range(b)]
    for sample, first in zip(samples.tolist(), firsts.tolist(), strict=True):
        if first:
            found[sample].append(first)
    return tuple((*ends, tokens) for ends in found)


def bounds_of(ends: Sequence[Sequence[int]]) -> Tensor:
    """Return the starts of documents if the sequences are concatenated, int32 [documents + 1]
    (cumulative lengths). ends: each sequence's document ends.

    >>> bounds_of(((2, 4), (4,))).tolist()
    [0, 2, 4, 8]
    """
    tokens = ends[0][-1]
    all_ends = [number * tokens + end for number, each in enumerate(ends) for end in each]
    return torch.tensor([0, *all_ends], dtype=torch.int32)
