"""Merge a job's sources into one stream of sequences: its corpora, prepared once and opened by
every rank, for training and evaluation. ``plait.train.data.sequences`` gives each source's own
stream; here the order of the sources is decided.

Shares are exact at every number: after n sequences a source of weight w has given more than n w / W
- 1 and fewer than n w / W + 1 of them, where W is the sum of all weights. Sources are ordered by
earliest deadline: item j of a source may come from position floor(j W / w) on and must come before
position ceil((j + 1) W / w), and of the items that may come, the one with the earliest deadline
does. With shares that add up to one, every item then meets its deadline (Baruah, Cohen, Plaxton,
Varvel: Proportionate Progress, Algorithmica 15, 1996, in the case of one processor).

The order repeats after W positions, so W is kept small: weights are taken as exact fractions, or
rounded to multiples of 1 / ``MOST`` if W would exceed ``MOST``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from math import gcd, lcm
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from plait.core.base.errors import JobError
from plait.core.job.data_settings import LEAST_SHARE
from plait.core.job.plan import RunSettings
from plait.core.job.rampup import BatchSizes
from plait.core.job.settings import SourceSection
from plait.train.data.corpus import Corpus
from plait.train.data.sequences import Batches, Packed, Sequences
from plait.train.data.sets import evaluation_sets, training_sets

Phase = tuple[int, dict[str, int]]
"""The first sequence of a mixture, and its weights by the identities of sources."""
MOST = round(1 / LEAST_SHARE)
"""Largest number of sequences after which an order of sources repeats."""
_BLOCK = 1 << 14


def whole_weights(weights: Sequence[float]) -> tuple[int, ...]:
    """Return positive integers in the proportion of ``weights``, without a common factor, with a
    sum up to ``MOST``: exact if the decimal weights allow it, else to one part in ``MOST``.

    >>> whole_weights([0.7, 0.2, 0.1]), whole_weights([3, 1.5]), whole_weights([1e-9, 1])
    ((7, 2, 1), (2, 1), (1, 1048575))
    """
    exact = [Fraction(str(weight)) for weight in weights]
    scale = lcm(*(one.denominator for one in exact))
    found = [int(one * scale) for one in exact]
    if sum(found) // gcd(*found) > MOST:
        total = sum(exact)
        found = [max(1, int(one / total * MOST)) for one in exact]
        found[found.index(max(found))] += MOST - sum(found)
    return tuple(one // gcd(*found) for one in found)


class Order:
    """An endless sequence that says from which source each training sequence comes, in proportion
    to integer weights; computed as far as needed, and kept.

    >>> Order((3, 1)).sources(0, 8).tolist()
    [0, 0, 0, 1, 0, 0, 0, 1]
    >>> Order((3, 1)).before(6).tolist()
    [5, 1]
    """

    def __init__(self, weights: Sequence[int]) -> None:
        assert weights and min(weights) > 0, f"weights {weights}"
        self.weights, self.period = tuple(weights), sum(weights)
        self._sources = np.empty(0, np.int32)
        self._counts = [0] * len(weights)

    def sources(self, start: int, count: int) -> np.ndarray:
        """Return the index of the source at each position ``start .. start + count``: int32
        [count]."""
        positions = np.arange(start, start + count, dtype=np.int64) % self.period
        self._extend(int(positions.max()) + 1 if count else 0)
        return self._sources[positions]

    def before(self, position: int) -> np.ndarray:
        """Return how often each source occurs before ``position`` of the order: int64
        [sources]."""
        rounds, rest = divmod(position, self.period)
        self._extend(rest)
        return np.array(self.weights, np.int64) * rounds + np.bincount(
            self._sources[:rest], minlength=len(self.weights)
        )

    def _extend(self, stop: int) -> None:
        """Compute the order up to ``stop``, in blocks."""
        weights, whole, counts = self.weights, self.period, self._counts
        while len(self._sources) < min(stop, whole):
            begin = len(self._sources)
            found = np.empty(min(_BLOCK, whole - begin), np.int32)
            for position in range(begin, begin + len(found)):
                best, choice = 0, -1
                for source, weight in enumerate(weights):
                    if counts[source] * whole < (position + 1) * weight:
                        deadline = -(-(counts[source] + 1) * whole // weight)
                        if choice < 0 or deadline < best:
                            best, choice = deadline, source
                counts[choice] += 1
                found[position - begin] = choice
            self._sources = np.concatenate([self._sources, found])


class Mixture:
    """An order of sources whose weights changed at certain positions, for example when sources were
    added.

    phases: (first position, weights of all sources; 0 for a source that is not in the mixture yet).

    >>> mixture = Mixture([(0, (1, 0)), (4, (1, 1))])
    >>> [array.tolist() for array in mixture.items(2, 6)]
    [[0, 0, 0, 1, 0, 1], [2, 3, 4, 0, 5, 1]]
    """

    def __init__(self, phases: Sequence[tuple[int, Sequence[int]]]) -> None:
        assert phases and phases[0][0] == 0, f"phases {phases}"
        self.phases = [(start, tuple(weights)) for start, weights in phases]
        self._present = [np.flatnonzero(weights) for _, weights in self.phases]
        self._orders = [Order([weights[at] for at in there]) for (_, weights), there in
                        zip(self.phases, self._present, strict=True)]  # fmt: skip
        self._items_before = [np.zeros(len(self.phases[0][1]), np.int64)]
        """Items of each source before each phase."""
        for number in range(1, len(self.phases)):
            self._items_before.append(self._before(number - 1, self.phases[number][0]))

    def before(self, position: int) -> np.ndarray:
        """Return how often each source occurs before ``position`` of the mixture: int64
        [sources]."""
        return self._before(self._phase(position), position)

    def items(self, start: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return, for the positions ``start .. start + count``, the source of each, and the index
        of its item in that source; int64 [count] each."""
        sources, items = np.empty(count, np.int64), np.empty(count, np.int64)
        done = 0
        while done < count:
            position, number = start + done, self._phase(start + done)
            last = self.phases[number + 1][0] if number + 1 < len(self.phases) else start + count
            here = slice(done, min(count, done + last - position))
            first = self.phases[number][0]
            chosen = self._present[number][self._orders[number].sources(position - first, here.stop - done)]
            sources[here] = chosen
            for source, given in enumerate(self._before(number, position).tolist()):
                mine = chosen == source
                items[here][mine] = given + np.arange(mine.sum())
            done = here.stop
        return sources, items

    def _phase(self, position: int) -> int:
        return max(number for number, (start, _) in enumerate(self.phases) if start <= position)

    def _before(self, number: int, position: int) -> np.ndarray:
        found = self._items_before[number].copy()
        found[self._present[number]] += self._orders[number].before(position - self.phases[number][0])
        return found


class Mixed:
    """An endless stream of sequences of several sources. The source at each number is a pure
    function of the number, and each source is read in the order of its own ``Batches``.

    history: the mixtures since the first start of the run, the last of them the present one; each
    with its first sequence, and weights by the identity of a source.
    """

    def __init__(self, parts: Sequence[Batches], names: Sequence[str], history: Sequence[Phase]) -> None:
        self.parts, self.names, self.history = tuple(parts), tuple(names), tuple(history)
        keys = keys_of(parts)
        self._order = sorted(range(len(parts)), key=keys.__getitem__)  # independent of the order in the job
        phases = [(start, [weights.get(keys[at], 0) for at in self._order]) for start, weights in history]
        self.mixture = Mixture(phases)

    @property
    def identity(self) -> str | list[Phase]:
        """Everything that decides the stream, to be saved with a position; for a single source, its
        own identity."""
        return self.parts[0].identity if len(self.parts) == 1 else list(self.history)

    def take(self, start: int, count: int) -> Sequences:
        """Return sequences ``start .. start + count`` of the stream."""
        import torch

        found = torch.zeros((3, count, self.parts[0].view.sequence), dtype=torch.int64)
        for part, here, windows in self._parts(start, count):
            for into, given in zip(found, part.gather(windows), strict=True):
                if given is not None:
                    into[here] = given
        tokens, targets, starts = found
        return Sequences(tokens, targets, starts if self.parts[0].view.masks else None)

    def targets(self, start: int, count: int) -> int:
        """Return the number of targets that count in these sequences."""
        return sum(part.view.targets(windows) for part, _, windows in self._parts(start, count))

    def _parts(self, start: int, count: int) -> Iterator[tuple[Batches, np.ndarray, np.ndarray]]:
        """Yield, for each source with sequences in the range, its ``Batches``, the positions of its
        sequences in the range, and their windows."""
        sources, items = self.mixture.items(start, count)
        for number, at in enumerate(self._order):
            if len(here := np.flatnonzero(sources == number)):
                yield self.parts[at], here, self.parts[at].windows_of(items[here])

    def summary_lines(self, sequences: int) -> list[str]:
        """Return lines with each source's packing, and, for several sources, their shares of a run
        of ``sequences`` sequences."""
        packed = [
            f"{name}: {part.view.summary}" if len(self.parts) > 1 else part.view.summary
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
        """Raise JobError if a run of ``steps`` steps reads a source more often than its
        ``epochs``."""
        for source, one in zip(sources, self.shares(sizes.before(steps)), strict=True):
            if source.weight is not None and source.epochs is not None and one.sequences > one.windows * source.epochs:
                most = sizes.within(int(one.windows * source.epochs / one.share))
                raise JobError(
                    f"{one.name} would be read {one.epochs:.2f} times, and its epochs are {source.epochs:g}",
                    key="data.sources", fix=f"Give it a lower weight, or train at most {most} steps",
                )  # fmt: skip

    def shares(self, sequences: int) -> list[SourceShare]:
        """Return each source's share of the first ``sequences`` sequences."""
        before = self.mixture.before(sequences).tolist()
        read = [before[self._order.index(at)] for at in range(len(self.parts))]
        return [
            SourceShare(name, part.corpus.num_tokens(part.split), part.windows, count, count / max(1, sequences))
            for name, part, count in zip(self.names, self.parts, read, strict=True)
        ]


class SourceShare(NamedTuple):
    """A source's tokens and windows, the number of sequences that a run reads of it, and their
    share of all sequences."""

    name: str
    tokens: int
    windows: int
    sequences: int
    share: float

    @property
    def epochs(self) -> float:
        """The number of times that a run reads the source."""
        return self.sequences / self.windows


def weights_of(sources: Sequence[SourceSection], parts: Sequence[Batches]) -> dict[str, int]:
    """Return integer weights by the identities of sources: the job's weights, or a source's number
    of sequences times its epochs."""
    given = [
        source.weight if source.weight is not None else part.windows * (source.epochs or 1.0)
        for source, part in zip(sources, parts, strict=True)
    ]
    return dict(zip(keys_of(parts), whole_weights(given), strict=True))


def keys_of(parts: Sequence[Batches]) -> list[str]:
    """Return a unique key for each source of a mixture: its identity, numbered if several sources
    hold the same tokens."""
    found: list[str] = []
    for part in parts:
        again = sum(key.partition("#")[0] == part.identity for key in found)
        found.append(f"{part.identity}#{again}" if again else part.identity)
    return found


@dataclass(frozen=True)
class EvalSet:
    """Sequences of an evaluation: the first ``count`` of a split. name: empty if there is only one
    set."""

    name: str
    batches: Batches
    count: int

    @cached_property
    def targets(self) -> int:
        """The number of its targets that count."""
        return self.batches.view.targets(np.arange(self.count))


@dataclass(frozen=True)
class Stream:
    """A job's sequences. train: sequences of optimizer steps. evaluation: evaluation sets; empty if
    the job does not evaluate."""

    train: Mixed
    evaluation: tuple[EvalSet, ...]

    @staticmethod
    def open(settings: RunSettings, folder: Path) -> Stream:
        """Open the prepared corpora in ``folder``. Raises DataError for a corpus without a
        sequence, JobError for a source read too often."""
        data = settings.data
        how: dict[str, Any] = {"sequence": data.sequence_length, "seed": data.seed, "masks": data.masks}
        corpora = [Corpus.open(one.folder) for one in training_sets(data, folder)]
        parts = [Batches(corpus, "train", **how) for corpus in corpora]
        train = Mixed(parts, [source.called for source in data.train], [(0, weights_of(data.train, parts))])
        train.check_epochs(data.train, settings.train.steps, settings.train.batches)
        if not settings.train.eval_every:
            return Stream(train, ())
        if data.eval:
            held = [Batches(Corpus.open(one.folder), "train", **how) for one in evaluation_sets(data, folder)]
            names = [source.called for source in data.eval]
        else:
            held = [Batches(corpus, "eval", **how) for corpus in corpora]
            names = [source.called for source in data.train]
        most = settings.train.eval_batches * settings.train.global_batch_size
        if len(held) == 1:
            names = [""]
        found = (EvalSet(name, one, min(most, one.windows)) for name, one in zip(names, held, strict=True))
        return Stream(train, tuple(found))

    def resumed(self, state: object, sequences: int) -> Stream | None:
        """Return the stream of a run that resumes after ``sequences`` sequences, with the mixtures
        stored in its checkpoint. Return None if the checkpoint belongs to other data: one of its
        sources is missing now."""
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
    """Return the mixtures in a checkpoint; empty for other content."""
    try:
        found = [(int(start), {str(one): int(weight) for one, weight in weights.items()}) for start, weights in state]  # type: ignore[union-attr]
    except (TypeError, ValueError, AttributeError):
        return []
    return found
