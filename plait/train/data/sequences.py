"""A split of a corpus as training sequences: windows of a stream of text, or documents packed whole.

Both give sequence number i as tokens and targets [S] and, where attention is to stop at document ends, the
start of each token's document (``plait.train.model.documents``). A target that does not count is -100:

- of windows with ``documents = "mask"``, what follows a document's last token: the next document's first;
- of packed documents, what is no answer, what follows a document, and padding behind the last.

The loss is a mean over the targets that count, of the whole global batch, so every view can say how many
there are without reading tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from plait.core.base.errors import DataError
from plait.train.data.chats import MARK, unmarked
from plait.train.data.corpus import Corpus, SplitName
from plait.train.data.packing import Packing, pack

if TYPE_CHECKING:
    from torch import Tensor

IGNORED = -100
BLOCK = 1 << 24
"""Tokens of which answers are counted at once."""


class Sequences(NamedTuple):
    """tokens, targets: int64 [n, S]. starts: [n, S], or None where attention crosses documents."""

    tokens: Tensor
    targets: Tensor
    starts: Tensor | None


class TokenSequence(NamedTuple):
    """One sequence: tokens, targets, and starts of documents; int64 [S] each."""

    tokens: np.ndarray
    targets: np.ndarray
    starts: np.ndarray


class View(Protocol):
    """A split as so many sequences."""

    @property
    def count(self) -> int:
        """Sequences."""
        ...

    @property
    def sequence(self) -> int:
        """Tokens of one."""
        ...

    @property
    def masks(self) -> bool:
        """Whether attention stops at document ends."""
        ...

    @property
    def kind(self) -> tuple[object, ...]:
        """What decides, beside the tokens, which sequences there are."""
        ...

    def row(self, number: int) -> TokenSequence:
        """One of them."""
        ...

    def targets(self, numbers: np.ndarray) -> int:
        """How many targets of these sequences count."""
        ...


@dataclass(frozen=True)
class Windows:
    """Windows of S + 1 tokens at a stride of S: the last token of one is only a target, and the first input
    of the next."""

    corpus: Corpus
    split: SplitName
    sequence: int
    masks: bool = False

    @property
    def count(self) -> int:
        """Windows that the split fills; at most S tokens at its very end are never read."""
        return (self.corpus.num_tokens(self.split) - 1) // self.sequence

    @property
    def kind(self) -> tuple[object, ...]:
        """How documents are taken."""
        return ("mask",) if self.masks else ()

    def row(self, number: int) -> TokenSequence:
        """A window."""
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
        """Where documents end in a window, 1 to S: behind their last tokens."""
        return self.corpus.ends(self.split, number * self.sequence, self.sequence)

    def targets(self, numbers: np.ndarray) -> int:
        """All, but for those of documents' last tokens."""
        ended = sum(len(self._ends(int(number))) for number in numbers) if self.masks else 0
        return len(numbers) * self.sequence - ended


class Packed:
    """Documents of a marked corpus (``plait.train.data.chats``), packed whole; one that is longer than a
    sequence loses its end. A document's last token, end-of-text that stands behind every document, is left
    out, and so are documents without an answer. cut, dropped: how many documents lost their end; and of these
    all that counts."""

    def __init__(self, corpus: Corpus, split: SplitName, sequence: int, *, masks: bool = True) -> None:
        self.corpus, self.sequence, self.masks = corpus, sequence, masks
        self.split: SplitName = split
        total = corpus.num_tokens(split)
        ends = corpus.ends(split, 0, total)
        begins = np.concatenate(([0], ends[:-1])) if len(ends) else ends
        inputs = np.minimum(ends - begins - 2, sequence)  # the last of a document is only a target
        counts = self._answers(begins + 1, inputs)
        whole = ends - begins - 2 <= sequence
        self.cut, self.dropped = int((~whole).sum()), int((~whole & (counts == 0)).sum())
        kept = (inputs > 0) & (counts > 0)
        self._begins, self._inputs, self._counts = begins[kept], inputs[kept], counts[kept]
        self.packing: Packing = pack(self._inputs, sequence)
        self.count = len(self.packing)

    @property
    def kind(self) -> tuple[object, ...]:
        """How documents are taken."""
        return ("packed", self.masks)

    @property
    def told(self) -> str:
        """A line on what was packed."""
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
        """How many tokens of answers there are from each place on, in so many tokens."""
        total = self.corpus.num_tokens(self.split)
        before = np.zeros(total + 1, np.int32 if total < 1 << 31 else np.int64)
        for first in range(0, total, BLOCK):
            part = self.corpus.read(self.split, first, min(BLOCK, total - first))
            np.cumsum(part >= MARK, out=before[first + 1 : first + 1 + len(part)])
            before[first + 1 : first + 1 + len(part)] += before[first]
        first = np.minimum(begins, total)
        return (before[np.clip(first + sizes, 0, total)] - before[first]).astype(np.int64)

    def row(self, number: int) -> TokenSequence:
        """A packed sequence."""
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
        """Tokens of answers."""
        return sum(int(self._counts[self.packing.of(int(number))].sum()) for number in numbers)


def gathered(view: View, numbers: np.ndarray) -> Sequences:
    """Sequences as tensors."""
    import torch  # here, so that preparing a corpus starts without the seconds this import takes

    found = np.empty((3, len(numbers), view.sequence), np.int64)
    for at, number in enumerate(numbers):
        found[:, at] = view.row(int(number))
    tokens, targets, starts = torch.from_numpy(found)
    return Sequences(tokens, targets, starts if view.masks else None)


def view_of(corpus: Corpus, split: SplitName, sequence: int, *, masks: bool) -> View:
    """The sequences of a split. Raises DataError where there is none."""
    packed = corpus.index.vocab > MARK
    view: View = (Packed if packed else Windows)(corpus, split, sequence, masks=masks)
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
