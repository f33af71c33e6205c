"""The sequences of a job: its corpus, prepared once and opened by every rank, and what is trained and
evaluated on.

The stream has no state. A split is cut into *windows* of ``sequence + 1`` tokens at a stride of ``sequence``:
the last token of a window is only a target, and is the first input of the next. An epoch is one pseudo-random
order of all windows. Sequence number g of the stream is window ``order(g // windows)[g % windows]``.

So a resume position is one integer, the number of sequences consumed, and the order of the data does not
depend on the number of ranks: each rank computes its rows of the same batch. Windows cross document
boundaries: end-of-text is a token like any other, and attention is not cut at it. At most ``sequence`` tokens
at the very end of a split fill no window and are never read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from plait.core.base.errors import DataError
from plait.core.job.spec import Job
from plait.train.data.corpus import Corpus, SplitName
from plait.train.data.prepare import CorpusSettings, prepare
from plait.train.data.tokenizer import FileTokenizer, load_tokenizer

if TYPE_CHECKING:
    import torch

ROUNDS = 8  # of the Feistel network below: even over four windows every order then comes equally often within 2 %


class Batches:
    """An endless stream of shuffled training sequences that is a pure function of the position.

    The same corpus, split, ``sequence`` (tokens) and ``seed`` give the same stream on any machine, whatever
    the batch size and the shard size. ``identity`` names that stream, to be kept beside a position. ``batch``
    is the global batch, in sequences. Raises ``DataError`` when the split is shorter than one sequence.
    """

    def __init__(self, corpus: Corpus, split: SplitName, *, sequence: int, batch: int, seed: int = 0) -> None:
        assert sequence >= 1 and batch >= 1, f"{batch} sequences of {sequence} tokens"
        self.corpus, self.sequence, self.batch, self.seed = corpus, sequence, batch, seed
        self.split: SplitName = split
        tokens = corpus.num_tokens(split)
        self.windows = (tokens - 1) // sequence
        """Sequences in one epoch."""
        if self.windows < 1:
            more = " or a larger data.eval_fraction, or turn evaluation off (train.eval_every = 0)"
            raise DataError(
                f"{corpus.folder}: the {split} split has {tokens} tokens and one sequence of {sequence} needs "
                f"{sequence + 1}; use more text, a smaller data.sequence_length{more if split == 'eval' else ''}"
            )

    @cached_property
    def identity(self) -> str:
        """A hash of all that decides the stream; a position means nothing under another identity."""
        parts = (self.corpus.index.splits[self.split].digest, self.split, self.sequence, self.seed)
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]

    def window_ids(self, start: int, count: int) -> np.ndarray:
        """The window that each of the sequences ``start .. start + count`` shows: int64 [count]."""
        assert start >= 0, f"the stream begins at 0, not at {start}"
        epochs, places = np.divmod(np.arange(start, start + count, dtype=np.int64), self.windows)
        result = np.empty(count, np.int64)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            result[here] = _permute(places[here], self.windows, f"{self.seed}/{epoch}")
        return result

    def take(self, start: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Sequences ``start .. start + count`` of the stream: tokens and targets, int64 [count, S] each."""
        return self._gather(self.window_ids(start, count))

    def document_ids(self, start: int, count: int) -> np.ndarray:
        """The document of each token of the sequences ``start .. start + count``: int64 [count, S], from 0
        in each sequence, one more behind each end-of-text."""
        found = np.zeros((count, self.sequence), np.int64)
        for row, window in zip(found, self.window_ids(start, count), strict=True):
            ends = self.corpus.ends(self.split, int(window) * self.sequence, self.sequence - 1)
            row[ends] = 1
        return np.cumsum(found, axis=1)

    def sample_ids(self, step: int) -> np.ndarray:
        """The number in the stream of each sequence of the step's batch: int64 [B]; none repeats in a run."""
        return np.arange(self.batch, dtype=np.int64) + step * self.batch

    def evaluations(self, n: int) -> int:
        """Batches of an evaluation that wants ``n``: fewer rather than show a window twice, and one at
        least."""
        return min(n, max(1, self.windows // self.batch))

    def eval_batches(self, n: int, rows: slice = slice(None)) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The first ``n`` batches of this split in its own order; every batch is full. rows: of each batch.

        Stops early rather than show a window twice; a split of less than one batch gives one batch that
        repeats windows.
        """
        places = np.arange(self.batch, dtype=np.int64)[rows]
        for number in range(self.evaluations(n)):
            yield self._gather((places + number * self.batch) % self.windows)

    def _gather(self, window_ids: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        import torch  # here, so that preparing a corpus starts without the seconds this import takes

        rows = np.empty((len(window_ids), self.sequence + 1), np.int64)
        for row, window in zip(rows, window_ids, strict=True):
            row[:] = self.corpus.read(self.split, int(window) * self.sequence, self.sequence + 1)
        both = torch.from_numpy(rows)
        return both[:, :-1].contiguous(), both[:, 1:].contiguous()


def _permute(places: np.ndarray, size: int, key: str) -> np.ndarray:
    """Where the permutation of ``range(size)`` named by ``key`` sends ``places``: int64, same shape [n].

    A Feistel network on the smallest even number of bits that holds ``size``, walked until the value falls
    back inside (fewer than four walks on average). It needs no memory for any size, and unlike
    ``numpy.random`` its result is ours to keep: an upgrade of a library cannot change where a resumed run
    continues.
    """
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half) - np.uint64(1)
    keys = np.frombuffer(hashlib.blake2b(key.encode(), digest_size=8 * ROUNDS).digest(), "<u8")

    def walk(values: np.ndarray) -> np.ndarray:
        left, right = values >> half, values & mask
        for number in range(ROUNDS):
            left, right = right, left ^ (_mix(right + keys[number]) & mask)
        return (left << half) | right

    result = walk(places.astype(np.uint64))
    while (outside := result >= np.uint64(size)).any():
        result[outside] = walk(result[outside])
    return result.astype(np.int64)


def _mix(values: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64: every input bit changes every output bit with probability one half."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


@dataclass(frozen=True)
class Stream:
    """train: batches of an optimizer step. evaluation: micro-batches; None if the job evaluates nothing."""

    train: Batches
    evaluation: Batches | None

    @staticmethod
    def open(job: Job, folder: Path) -> Stream:
        """From a prepared corpus. Raises DataError for one that gives no batch."""
        corpus, data = Corpus.open(folder), job.data
        train = Batches(
            corpus, "train", batch=job.train.global_batch_size, sequence=data.sequence_length, seed=data.seed
        )
        if not job.train.eval_every:
            return Stream(train, None)
        return Stream(
            train, Batches(corpus, "eval", batch=job.micro_batch, sequence=data.sequence_length, seed=data.seed)
        )


def prepare_corpus(job: Job, folder: Path, say: Callable[[str], None]) -> None:
    """Make the job's corpus in ``folder``, unless it is there."""
    data = job.data
    tokenizer = load_tokenizer(data.tokenizer)
    ends = ""
    if isinstance(tokenizer, FileTokenizer):
        ends = f"; texts end with {tokenizer.token(tokenizer.end_of_text)!r}"
    say(f"preparing {', '.join(data.texts)}{ends}")
    settings = CorpusSettings(pattern=data.pattern, eval_fraction=data.eval_fraction, text_key=data.text_key)
    prepare(data.texts, tokenizer, folder, settings, say=say)
