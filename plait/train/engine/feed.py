"""Micro-batches of training steps and evaluations, taken from the job's stream of sequences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from plait.core.job.plan import RunSettings
from plait.train.data.stream import EvalSet, Phase, Stream
from plait.train.engine.inflight import MicroBatch, scale_of
from plait.train.model.embedding import IGNORED

Rows = Callable[[int], slice]
"""Function from the size of a micro-batch to the sequences of it that a rank computes."""


def every(size: int) -> slice:
    """Return the slice of all sequences of a micro-batch of ``size``."""
    return slice(0, size)


@dataclass(frozen=True)
class Feed:
    """Source of micro-batches: the same stream on every rank, of which each rank reads its own
    sequences. ``RankPart.cut`` takes the rank's tokens of them. ahead: how many more sequences
    earlier steps have used than steps of the present batch size would have."""

    settings: RunSettings
    stream: Stream
    ahead: int = 0

    @property
    def identity(self) -> str | list[Phase]:
        """All settings that decide the order of sequences."""
        return self.stream.train.identity

    def position(self, step: int) -> int:
        """Return the number of sequences that earlier steps have used."""
        return self.settings.train.batches.before(step) + self.ahead

    def resumed_at(self, step: int, position: int | None) -> Feed:
        """Return a feed in which ``step`` begins at ``position`` of the stream. None: as if the job
        had always had its present settings."""
        return replace(self, ahead=0 if position is None else position - self.settings.train.batches.before(step))

    def step(self, number: int, rows: Rows = every) -> list[MicroBatch]:
        """Return the micro-batches of one optimizer step, counted from 0."""
        return self._taken(self.position(number), self.settings.train.batches.at(number), number, rows)

    def sample(self, rows: Rows = every) -> list[MicroBatch]:
        """Return micro-batches of a full batch, to time candidates with."""
        return self._taken(0, self.settings.train.global_batch_size, 0, rows)

    def _taken(self, first: int, count: int, number: int, rows: Rows) -> list[MicroBatch]:
        train, size = self.stream.train, self.settings.micro_batch
        samples = torch.arange(first, first + count)
        scale = scale_of(train.targets(first, count))
        found: list[MicroBatch] = []
        for each in samples.split(size):
            own = each[rows(len(each))]
            taken = train.take(int(own[0]) if len(own) else 0, len(own))
            share = 1 / (count * taken.tokens.shape[1])
            found.append(
                MicroBatch(taken.tokens, taken.targets, own, scale, number, starts=taken.starts, token_share=share)
            )
        return found

    def evaluation(self, rows: Rows = every) -> list[tuple[str, list[MicroBatch]]]:
        """Return (name, micro-batches) of each set of an evaluation; the same sequences in every
        shape of a run. Sequences past a set's end have no target."""
        return [(one.name, self._evaluated(one, rows)) for one in self.stream.evaluation]

    def _evaluated(self, eval_set: EvalSet, rows: Rows) -> list[MicroBatch]:
        size, found, scale = self.settings.micro_batch, list[MicroBatch](), scale_of(eval_set.targets)
        for number in range(self.evaluations):
            samples = torch.arange(number * size, (number + 1) * size)[rows(size)]
            taken = eval_set.batches.gather(samples.numpy() % eval_set.count)
            taken.targets[samples >= eval_set.count] = IGNORED
            found.append(MicroBatch(taken.tokens, taken.targets, samples % size, scale, 0, starts=taken.starts))
        return found

    @property
    def evaluations(self) -> int:
        """The number of micro-batches in an evaluation of the largest set."""
        return -(-max((one.count for one in self.stream.evaluation), default=0) // self.settings.micro_batch)


def micro_batches(
    tokens: Tensor, targets: Tensor, samples: Tensor, size: int, step: int, *,
    weights: Tensor | None = None, starts: Tensor | None = None,
) -> list[MicroBatch]:  # fmt: skip
    """Return the batch split into micro-batches whose losses add up to the mean over all its
    targets: weighted, if there are ``weights``. starts: of ``MicroBatch``."""
    counted = targets != IGNORED
    total = float(counted.sum() if weights is None else weights[counted].double().sum())
    whole = MicroBatch(tokens, targets, samples, scale_of(total), step, None, weights, starts, 1 / tokens.numel())
    return [whole.of(slice(first, first + size)) for first in range(0, len(tokens), size)]
