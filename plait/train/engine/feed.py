"""What steps and evaluations compute: micro-batches of the job, from its stream of sequences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from plait.core.job.spec import Job
from plait.train.data.stream import EvalSet, Phase, Stream
from plait.train.engine.inflight import MicroBatch, scale_of
from plait.train.model.loss import IGNORED

Rows = Callable[[int], slice]
"""Which sequences of a micro-batch of so many a rank computes."""


def every(size: int) -> slice:
    """All of them."""
    return slice(0, size)


@dataclass(frozen=True)
class Feed:
    """The same stream on every rank, of which each reads its own rows; ``Part.cut`` takes its tokens of
    them. ahead: sequences by which steps are further in the stream than batches of this size would be, since
    earlier ones had another."""

    job: Job
    stream: Stream
    ahead: int = 0

    @property
    def identity(self) -> str | list[Phase]:
        """All that decides which sequences come in which order."""
        return self.stream.train.identity

    def position(self, step: int) -> int:
        """Sequences that the steps before this one have used up."""
        return self.job.train.batches.before(step) + self.ahead

    def going_on(self, step: int, position: int | None) -> Feed:
        """The same, of which ``step`` begins at a position; of None, as if the job had always been this
        one."""
        return replace(self, ahead=0 if position is None else position - self.job.train.batches.before(step))

    def step(self, number: int, rows: Rows = every) -> list[MicroBatch]:
        """Of one optimizer step, counted from 0."""
        return self._taken(self.position(number), self.job.train.batches.at(number), number, rows)

    def sample(self, rows: Rows = every) -> list[MicroBatch]:
        """As many as a step of the whole batch has, to time candidates with."""
        return self._taken(0, self.job.train.global_batch_size, 0, rows)

    def _taken(self, first: int, count: int, number: int, rows: Rows) -> list[MicroBatch]:
        train, size = self.stream.train, self.job.micro_batch
        samples = torch.arange(first, first + count)
        scale = scale_of(train.targets(first, count))
        found: list[MicroBatch] = []
        for each in samples.split(size):
            own = each[rows(len(each))]
            taken = train.take(int(own[0]) if len(own) else 0, len(own))
            found.append(MicroBatch(taken.tokens, taken.targets, own, scale, number, starts=taken.starts))
        return found

    def evaluation(self, rows: Rows = every) -> list[tuple[str, list[MicroBatch]]]:
        """The micro-batches of each set of an evaluation, by its name; always the same sequences, in every
        shape of a run. Those behind a set's last have no target."""
        return [(one.name, self._evaluated(one, rows)) for one in self.stream.evaluation]

    def _evaluated(self, one: EvalSet, rows: Rows) -> list[MicroBatch]:
        size, found, scale = self.job.micro_batch, list[MicroBatch](), scale_of(one.targets)
        for number in range(self.evaluations):
            samples = torch.arange(number * size, (number + 1) * size)[rows(size)]
            taken = one.batches.gather(samples.numpy() % one.count)
            taken.targets[samples >= one.count] = IGNORED
            found.append(MicroBatch(taken.tokens, taken.targets, samples % size, scale, 0, starts=taken.starts))
        return found

    @property
    def evaluations(self) -> int:
        """Micro-batches of an evaluation of the largest set."""
        return -(-max((one.count for one in self.stream.evaluation), default=0) // self.job.micro_batch)


def micro_batches(
    tokens: Tensor, targets: Tensor, samples: Tensor, size: int, step: int, *,
    weights: Tensor | None = None, starts: Tensor | None = None,
) -> list[MicroBatch]:  # fmt: skip
    """The batch cut into micro-batches whose losses add up to the mean over all its targets: weighted, if
    there are ``weights``. starts: of ``MicroBatch``."""
    counted = targets != IGNORED
    total = float(counted.sum() if weights is None else weights[counted].double().sum())
    whole = MicroBatch(tokens, targets, samples, scale_of(total), step, None, weights, starts)
    return [whole.of(slice(first, first + size)) for first in range(0, len(tokens), size)]
