"""The sequences of a job: its corpus, prepared once and opened by every rank, and what is trained and
evaluated on.

The stream has no state. A split is a number of *windows* (``plait.train.data.sequences``). An epoch is one
pseudo-random order of all windows. Sequence number g of the stream is window
``order(g // windows)[g % windows]``.

So a resume position is one integer, the number of sequences consumed, and the order of the data does not
depend on the number of ranks: each rank computes its rows of the same batch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from plait.core.base.errors import JobError
from plait.core.job.rampup import BatchSizes
from plait.core.job.settings import SourceSection
from plait.core.job.spec import Job
from plait.train.data.corpus import Corpus, SplitName
from plait.train.data.mixture import Mixture, whole_weights
from plait.train.data.sequences import Packed, Sequences, gathered, view_of
from plait.train.data.sets import evaluation_sets, training_sets

Phase = tuple[int, dict[str, int]]
"""From which sequence on a mixture holds, and its weights by the identities of sources."""
ROUNDS = 8  # of the Feistel network below: even over four windows every order then comes equally often within 2 %


class Batches:
    """An endless stream of shuffled training sequences that is a pure function of the position.

    The same corpus, split, ``sequence`` (tokens) and ``seed`` give the same stream on any machine, whatever
    the batch size and the shard size. ``identity`` names that stream, to be kept beside a position. ``batch``
    is the global batch, in sequences. Raises ``DataError`` when the split is shorter than one sequence.
    """

    def __init__(
        self, corpus: Corpus, split: SplitName, *, sequence: int, batch: int, seed: int = 0, masks: bool = False
    ) -> None:
        assert sequence >= 1 and batch >= 1, f"{batch} sequences of {sequence} tokens"
        self.corpus, self.sequence, self.batch, self.seed = corpus, sequence, batch, seed
        self.split: SplitName = split
        self.view = view_of(corpus, split, sequence, masks=masks)
        self.windows = self.view.count
        """Sequences in one epoch."""

    @cached_property
    def identity(self) -> str:
        """A hash of all that decides the stream; a position means nothing under another identity."""
        digest = self.corpus.index.splits[self.split].digest
        parts = (digest, self.split, self.sequence, self.seed, *self.view.kind)
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]

    def window_ids(self, start: int, count: int) -> np.ndarray:
        """The window that each of the sequences ``start .. start + count`` shows: int64 [count]."""
        assert start >= 0, f"the stream begins at 0, not at {start}"
        return self.windows_of(np.arange(start, start + count, dtype=np.int64))

    def windows_of(self, numbers: np.ndarray) -> np.ndarray:
        """The window that each sequence of these numbers shows: int64, same shape [n]."""
        epochs, places = np.divmod(numbers, self.windows)
        result = np.empty(len(numbers), np.int64)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            result[here] = _permute(places[here], self.windows, f"{self.seed}/{epoch}")
        return result

    def take(self, start: int, count: int) -> Sequences:
        """Sequences ``start .. start + count`` of the stream."""
        return self.gather(self.window_ids(start, count))

    def gather(self, window_ids: np.ndarray) -> Sequences:
        """Windows as tensors."""
        return gathered(self.view, window_ids)


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


class Mixed:
    """An endless stream of sequences of several sources: which source comes at which number is a pure
    function of the number (``plait.train.data.mixture``), and each source goes on as its own ``Batches`` do.

    history: the mixtures of a run from its first start on, the last of them this one; from which sequence
    each holds, and weights by the identity of a source.
    """

    def __init__(self, parts: Sequence[Batches], names: Sequence[str], history: Sequence[Phase]) -> None:
        self.parts, self.names, self.history = tuple(parts), tuple(names), tuple(history)
        first = parts[0]
        self.batch, self.sequence = first.batch, first.sequence
        keys = keys_of(parts)
        self._order = sorted(range(len(parts)), key=keys.__getitem__)  # however the job lists them
        phases = [(start, [weights.get(keys[at], 0) for at in self._order]) for start, weights in history]
        self.mixture = Mixture(phases)

    @property
    def identity(self) -> str | list[Phase]:
        """What decides the stream, to be kept beside a position: of one source its own."""
        return self.parts[0].identity if len(self.parts) == 1 else list(self.history)

    def take(self, start: int, count: int) -> Sequences:
        """Sequences ``start .. start + count`` of the stream."""
        import torch

        found = torch.zeros((3, count, self.sequence), dtype=torch.int64)
        for part, here, windows in self._parts(start, count):
            for into, given in zip(found, part.gather(windows), strict=True):
                if given is not None:
                    into[here] = given
        tokens, targets, starts = found
        return Sequences(tokens, targets, starts if self.parts[0].view.masks else None)

    def targets(self, start: int, count: int) -> int:
        """How many of their targets count."""
        return sum(part.view.targets(windows) for part, _, windows in self._parts(start, count))

    def _parts(self, start: int, count: int) -> Iterator[tuple[Batches, np.ndarray, np.ndarray]]:
        """Sources that have some of so many sequences, which of them, and their windows."""
        sources, items = self.mixture.items(start, count)
        for number, at in enumerate(self._order):
            if len(here := np.flatnonzero(sources == number)):
                yield self.parts[at], here, self.parts[at].windows_of(items[here])

    def told(self, sequences: int) -> list[str]:
        """What was packed of each source, and the shares of a run of so many sequences, in lines; of one
        source no shares."""
        packed = [
            f"{name}: {part.view.told}" if len(self.parts) > 1 else part.view.told
            for name, part in zip(self.names, self.parts, strict=True)
            if isinstance(part.view, Packed)
        ]
        if len(self.parts) == 1:
            return packed
        return packed + [
            f"{one.name}: {one.tokens:,} tokens, {one.share:.2%} of the sequences, read {one.epochs:.2f} times"
            for one in self.shares(sequences)
        ]

    def check_epochs(self, sources: Sequence[SourceSection], steps: int, sizes: BatchSizes) -> None:
        """Raise JobError where a run of so many steps reads a source more often than it may."""
        for source, one in zip(sources, self.shares(sizes.before(steps)), strict=True):
            if source.weight is not None and source.epochs is not None and one.sequences > one.windows * source.epochs:
                most = sizes.within(int(one.windows * source.epochs / one.share))
                raise JobError(
                    f"{one.name} would be read {one.epochs:.2f} times, and its epochs are {source.epochs:g}",
                    key="data.sources", fix=f"Give it a lower weight, or train at most {most} steps",
                )  # fmt: skip

    def shares(self, sequences: int) -> list[SourceShare]:
        """What the first so many sequences are made of."""
        before = self.mixture.before(sequences).tolist()
        read = [before[self._order.index(at)] for at in range(len(self.parts))]
        return [
            SourceShare(name, part.corpus.num_tokens(part.split), part.windows, count, count / max(1, sequences))
            for name, part, count in zip(self.names, self.parts, read, strict=True)
        ]


class SourceShare(NamedTuple):
    """Of a source: its tokens and windows, how many sequences a run reads of it, which share of all that
    is."""

    name: str
    tokens: int
    windows: int
    sequences: int
    share: float

    @property
    def epochs(self) -> float:
        """How often a run reads it."""
        return self.sequences / self.windows


def weights_of(sources: Sequence[SourceSection], parts: Sequence[Batches]) -> dict[str, int]:
    """Whole weights by the identities of sources: as the job says, or as many as each has, times its
    epochs."""
    given = [
        source.weight if source.weight is not None else part.windows * (source.epochs or 1.0)
        for source, part in zip(sources, parts, strict=True)
    ]
    return dict(zip(keys_of(parts), whole_weights(given), strict=True))


def keys_of(parts: Sequence[Batches]) -> list[str]:
    """What names each source of a mixture: its identity, numbered where several hold the same tokens."""
    found: list[str] = []
    for part in parts:
        again = sum(key.partition("#")[0] == part.identity for key in found)
        found.append(f"{part.identity}#{again}" if again else part.identity)
    return found


@dataclass(frozen=True)
class EvalSet:
    """Sequences of an evaluation: the first ``count`` of a split. name: empty for the only one."""

    name: str
    batches: Batches
    count: int

    @cached_property
    def targets(self) -> int:
        """How many of its targets count."""
        return self.batches.view.targets(np.arange(self.count))


@dataclass(frozen=True)
class Stream:
    """train: sequences of optimizer steps. evaluation: sets that are evaluated; none if the job evaluates
    nothing."""

    train: Mixed
    evaluation: tuple[EvalSet, ...]

    @staticmethod
    def open(job: Job, folder: Path) -> Stream:
        """From prepared corpora in ``folder``. Raises DataError for one that gives no sequence."""
        data, batch = job.data, job.train.global_batch_size
        how: dict[str, Any] = {"batch": batch, "sequence": data.sequence_length, "seed": data.seed, "masks": data.masks}
        corpora = [Corpus.open(one.folder) for one in training_sets(data, folder)]
        parts = [Batches(corpus, "train", **how) for corpus in corpora]
        train = Mixed(parts, [source.called for source in data.train], [(0, weights_of(data.train, parts))])
        train.check_epochs(data.train, job.train.steps, job.train.batches)
        if not job.train.eval_every:
            return Stream(train, ())
        if data.eval:
            held = [Batches(Corpus.open(one.folder), "train", **how) for one in evaluation_sets(data, folder)]
            names = [source.called for source in data.eval]
        else:
            held = [Batches(corpus, "eval", **how) for corpus in corpora]
            names = [source.called for source in data.train]
        most = job.train.eval_batches * batch
        if len(held) == 1:
            names = [""]
        found = (EvalSet(name, one, min(most, one.windows)) for name, one in zip(names, held, strict=True))
        return Stream(train, tuple(found))

    def resumed(self, state: object, sequences: int) -> Stream | None:
        """The stream of a run that goes on after so many sequences, with what its checkpoint has kept of the
        mixture. None where that is of other data: a source is no longer there."""
        now = self.train.history[-1][1]
        kept = [(0, {state: 1})] if isinstance(state, str) else _history(state)
        if not kept or any(one not in now for _, weights in kept for one in weights):
            return None
        if kept[-1][1] != now and not (len(now) == len(kept[-1][1]) == 1):
            kept = [*(phase for phase in kept if phase[0] < sequences), (sequences, now)]
        if kept[0][0] != 0:
            kept = [(0, now)]
        return replace(self, train=Mixed(self.train.parts, self.train.names, kept))


def _history(state: object) -> list[Phase]:
    """Mixtures of a checkpoint; none, if it is of something else."""
    try:
        found = [(int(start), {str(one): int(weight) for one, weight in weights.items()}) for start, weights in state]  # type: ignore[union-attr]
    except (TypeError, ValueError, AttributeError):
        return []
    return found
