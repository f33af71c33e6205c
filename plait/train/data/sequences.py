"""Read a split of a corpus as training sequences, in shuffled order: windows of the token stream,
or documents packed whole.

Both give sequence number i as tokens and targets [S] and, if attention stops at document ends, the
start of each token's document (``plait.train.model.documents``). A target that does not count is
-100:

- in windows with ``documents = "mask"``, the target of a document's last token: the next document's
first; - in packed documents, tokens that are no answer, the token after a document, and padding
behind the last.

The loss is the mean over the targets that count, of the whole global batch, so every view gives
their number without reading tokens.

The order has no state. An epoch is one pseudo-random order of all sequences; number g of the stream
is ``order(g // count)[g % count]``. So a resume position is one integer, the number of sequences
consumed, and the order of the data does not depend on the number of ranks: each computes its rows
of the same batch.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from plait.core.base.errors import DataError
from plait.train.data.chats import MARK, unmarked
from plait.train.data.corpus import Corpus, SplitName

if TYPE_CHECKING:
    from torch import Tensor

IGNORED = -100
ROUNDS = 8  # of the Feistel network below: even with four windows all orders are equally frequent within 2 %
BLOCK = 1 << 24
"""Number of tokens that are read at once to count the answer tokens of a split."""


class Sequences(NamedTuple):
    """A batch of sequences. tokens, targets: int64 [n, S]; target -100 does not count. starts: [n,
    S], for each token the position of its document's first token; None if attention crosses
    documents."""

    tokens: Tensor
    targets: Tensor
    starts: Tensor | None


class TokenSequence(NamedTuple):
    """One sequence; int64 [S] each. targets: -100 does not count. starts: for each token the
    position of its document's first token."""

    tokens: np.ndarray
    targets: np.ndarray
    starts: np.ndarray


@dataclass(frozen=True)
class Windows:
    """Windows of S + 1 tokens at a stride of S: the last token of a window is only a target, and
    the first input of the next window."""

    corpus: Corpus
    split: SplitName
    sequence: int
    masks: bool = False

    @property
    def count(self) -> int:
        """The number of windows that the split fills; at most S tokens at its end are never
        read."""
        return (self.corpus.num_tokens(self.split) - 1) // self.sequence

    @property
    def kind(self) -> tuple[object, ...]:
        """The treatment of documents, as part of the stream's identity."""
        return ("mask",) if self.masks else ()

    def row(self, number: int) -> TokenSequence:
        """Return window number ``number`` of the split as a sequence."""
        size = self.sequence
        both = self.corpus.read(self.split, number * size, size + 1)
        tokens, targets, starts = both[:-1], both[1:], np.zeros(size, np.int64)
        if self.masks:
            ends = self._ends(number)
            targets = targets.copy()
            targets[ends - 1] = IGNORED
            starts[ends[ends < size]] = ends[ends < size]
            starts = np.maximum.accumulate(starts)
        return TokenSequence(tokens, targets, starts)

    def _ends(self, number: int) -> np.ndarray:
        """Return the document ends in a window, each in 1..S: the position after a document's last
        token."""
        return self.corpus.ends(self.split, number * self.sequence, self.sequence)

    def targets(self, numbers: np.ndarray) -> int:
        """Return the number of targets that count: all, except those of documents' last tokens."""
        ended = sum(len(self._ends(int(number))) for number in numbers) if self.masks else 0
        return len(numbers) * self.sequence - ended


class Packing(NamedTuple):
    """Documents packed into sequences, none cut. documents: their numbers, sequence after sequence,
    [n]. bounds: begin of each sequence in ``documents``, [sequences + 1]."""

    documents: np.ndarray
    bounds: np.ndarray

    def __len__(self) -> int:
        """Return the number of sequences."""
        return len(self.bounds) - 1

    def of(self, sequence: int) -> np.ndarray:
        """Return the numbers of a sequence's documents."""
        return self.documents[self.bounds[sequence] : self.bounds[sequence + 1]]


def pack(lengths: np.ndarray, size: int) -> Packing:
    """Pack documents of ``lengths`` tokens, 1 to ``size`` each, into few sequences of ``size``
    tokens by best-fit decreasing: longest first, each into the fullest sequence that has room (at
    most 11/9 of the fewest possible; Johnson 1973). A pure function of the lengths, so that every
    rank packs the same.

    >>> found = pack(np.array([3, 5, 2, 1]), 6)
    >>> [found.of(number).tolist() for number in range(len(found))]
    [[1], [0, 2, 3]]
    """
    assert not len(lengths) or 1 <= lengths.min() <= lengths.max() <= size, f"lengths of 1 to {size}"
    with_room: list[list[int]] = [[] for _ in range(size)]  # sequences by remaining tokens
    some = count = 0  # bit r of some: a sequence has r remaining tokens
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


class Packed:
    """Documents of a marked corpus (``plait.train.data.chats``), packed whole; a document longer
    than a sequence is truncated. The end-of-text after each document is left out, and so are
    documents without an answer. cut: the number of truncated documents. dropped: those of them that
    lost every answer."""

    def __init__(self, corpus: Corpus, split: SplitName, sequence: int, *, masks: bool = True) -> None:
        self.corpus, self.sequence, self.masks = corpus, sequence, masks
        self.split: SplitName = split
        total = corpus.num_tokens(split)
        ends = corpus.ends(split, 0, total)
        begins = np.concatenate(([0], ends[:-1])) if len(ends) else ends
        inputs = np.minimum(ends - begins - 2, sequence)  # without end-of-text; the last token is only a target
        counts = self._answers(begins + 1, inputs)
        whole = ends - begins - 2 <= sequence
        self.cut, self.dropped = int((~whole).sum()), int((~whole & (counts == 0)).sum())
        kept = (inputs > 0) & (counts > 0)
        self._begins, self._inputs, self._counts = begins[kept], inputs[kept], counts[kept]
        self.packing: Packing = pack(self._inputs, sequence)
        self.count = len(self.packing)

    @property
    def kind(self) -> tuple[object, ...]:
        """The treatment of documents, as part of the stream's identity."""
        return ("packed", self.masks)

    @property
    def summary(self) -> str:
        """A line with statistics of the packing."""
        inputs, answers = int(self._inputs.sum()), int(self._counts.sum())
        full = inputs / (self.count * self.sequence)
        found = (
            f"{len(self._inputs):,} text(s) packed into {self.count:,} sequence(s) of {self.sequence} "
            f"({full:.0%} full); {answers / inputs:.0%} of their tokens are answers"
        )
        if self.cut:
            found += (
                f"; {self.cut:,} longer than a sequence were cut, of these {self.dropped:,} left out without an answer"
            )
        return found

    def _answers(self, begins: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        """Return, for each range of the token stream, its number of answer tokens, int64. begins,
        sizes: first token and length of each range."""
        total = self.corpus.num_tokens(self.split)
        before = np.zeros(total + 1, np.int32 if total < 1 << 31 else np.int64)
        for first in range(0, total, BLOCK):
            part = self.corpus.read(self.split, first, min(BLOCK, total - first))
            np.cumsum(part >= MARK, out=before[first + 1 : first + 1 + len(part)])
            before[first + 1 : first + 1 + len(part)] += before[first]
        first = np.minimum(begins, total)
        return (before[np.clip(first + sizes, 0, total)] - before[first]).astype(np.int64)

    def row(self, number: int) -> TokenSequence:
        """Return packed sequence number ``number`` of the split."""
        size = self.sequence
        tokens, targets = np.full(size, self.corpus.index.end_of_text), np.full(size, IGNORED)
        starts, at = np.zeros(size, np.int64), 0
        for document in self.packing.of(number):
            inputs = int(self._inputs[document])
            ids = self.corpus.read(self.split, int(self._begins[document]), inputs + 1)
            plain, here = unmarked(ids), slice(at, at + inputs)
            tokens[here], starts[here] = plain[:-1], at
            targets[here] = np.where(ids[1:] >= MARK, plain[1:], IGNORED)
            at += inputs
        starts[at:] = at
        return TokenSequence(tokens, targets, starts)

    def targets(self, numbers: np.ndarray) -> int:
        """Return the number of targets that count in packed sequences: their answer tokens.
        numbers: of the sequences."""
        return sum(int(self._counts[self.packing.of(int(number))].sum()) for number in numbers)


View = Windows | Packed
"""A split of a corpus as a numbered list of training sequences: windows of its token stream, or
documents packed whole."""


def view_of(corpus: Corpus, split: SplitName, sequence: int, *, masks: bool) -> View:
    """Return the sequences of a split. Raises DataError if there are none."""
    packed = corpus.index.vocab > MARK
    view = (Packed if packed else Windows)(corpus, split, sequence, masks=masks)
    if view.count < 1 and packed:
        where = "a larger data.eval_fraction, or train.eval_every = 0" if split == "eval" else "other chats or pairs"
        raise DataError(
            f"{corpus.folder}: in the {split} split no answer begins within the first {sequence} tokens of its text; "
            f"use a larger data.sequence_length, {where}"
        )
    if view.count < 1:
        more = " or a larger data.eval_fraction, or turn evaluation off (train.eval_every = 0)"
        tokens = corpus.num_tokens(split)
        raise DataError(
            f"{corpus.folder}: the {split} split has {tokens} tokens and one sequence of {sequence} needs "
            f"{sequence + 1}; use more text, a smaller data.sequence_length{more if split == 'eval' else ''}"
        )
    return view


# ---- order of the sequences ----


class Batches:
    """An endless stream of shuffled training sequences that is a pure function of the position.

    The same corpus, split, ``sequence`` (tokens) and ``seed`` give the same stream on any machine,
    whatever the batch size and the shard size. ``identity`` names that stream, to be saved with a
    position. Raises DataError if the split is shorter than one sequence.
    """

    def __init__(self, corpus: Corpus, split: SplitName, *, sequence: int, seed: int = 0, masks: bool = False) -> None:
        self.corpus, self.seed = corpus, seed
        self.split: SplitName = split
        self.view = view_of(corpus, split, sequence, masks=masks)
        self.windows = self.view.count
        """The number of sequences in one epoch."""

    @cached_property
    def identity(self) -> str:
        """A hash of everything that decides the stream; a position is meaningless under another
        identity."""
        digest = self.corpus.index.splits[self.split].digest
        parts = (digest, self.split, self.view.sequence, self.seed, *self.view.kind)
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]

    def windows_of(self, numbers: np.ndarray) -> np.ndarray:
        """Return the index in the view of each sequence number of the stream: int64, same shape
        [n]."""
        epochs, positions = np.divmod(numbers, self.windows)
        result = np.empty(len(numbers), np.int64)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            result[here] = _permute(positions[here], self.windows, f"{self.seed}/{epoch}")
        return result

    def gather(self, numbers: np.ndarray) -> Sequences:
        """Return windows as tensors."""
        import torch  # here, since importing torch takes seconds, and preparing a corpus does not need it

        found = np.empty((3, len(numbers), self.view.sequence), np.int64)
        for at, number in enumerate(numbers):
            found[:, at] = self.view.row(int(number))
        tokens, targets, starts = torch.from_numpy(found)
        return Sequences(tokens, targets, starts if self.view.masks else None)


def _permute(positions: np.ndarray, size: int, key: str) -> np.ndarray:
    """Return the images of ``positions`` under the permutation of ``range(size)`` named by ``key``:
    int64, same shape [n].

    A Feistel network on the smallest even number of bits that holds ``size``, walked until the
    value falls back inside (fewer than four walks on average). It needs no memory for any size.
    Unlike ``numpy.random`` it does not depend on a library's version: an upgrade cannot change
    where a resumed run continues.
    """
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half) - np.uint64(1)
    keys = np.frombuffer(hashlib.blake2b(key.encode(), digest_size=8 * ROUNDS).digest(), "<u8")

    def walk(values: np.ndarray) -> np.ndarray:
        left, right = values >> half, values & mask
        for number in range(ROUNDS):
            left, right = right, left ^ (_mix(right + keys[number]) & mask)
        return (left << half) | right

    result = walk(positions.astype(np.uint64))
    while (outside := result >= np.uint64(size)).any():
        result[outside] = walk(result[outside])
    return result.astype(np.int64)


def _mix(values: np.ndarray) -> np.ndarray:
    """Return the finaliser of splitmix64: every input bit changes every output bit with probability
    one half."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
