"""What steps and evaluations compute: micro-batches of the whole job, from its stream of sequences."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from plait.core.job import Job
from plait.train.data.stream import Stream
from plait.train.engine.inflight import MicroBatch
from plait.train.model.loss import IGNORED


@dataclass(frozen=True)
class Feed:
    """The same on every rank; ``Part.own`` takes a rank's share."""

    job: Job
    stream: Stream

    @property
    def identity(self) -> str:
        """A hash of all that decides which sequences come in which order."""
        return self.stream.train.identity

    def step(self, number: int) -> list[MicroBatch]:
        """Of one optimizer step, counted from 0."""
        tokens, targets = self.stream.train.batch_at(number)
        samples = torch.from_numpy(self.stream.train.sample_ids(number))
        return micro_batches(tokens, targets, samples, self.job.micro_batch, number)

    def evaluation(self) -> list[MicroBatch]:
        """Of an evaluation, always the same; none if the job evaluates nothing."""
        found: list[MicroBatch] = []
        batches = self.stream.evaluation
        for tokens, targets in batches.eval_batches(self.job.train.eval_batches) if batches else ():
            found += micro_batches(tokens, targets, torch.arange(len(tokens)), len(tokens), 0)
        return found


def micro_batches(tokens: Tensor, targets: Tensor, samples: Tensor, size: int, step: int) -> list[MicroBatch]:
    """The batch cut into micro-batches whose losses add up to the mean over all its targets."""
    scale = 1.0 / max(1, int((targets != IGNORED).sum()))
    parts = zip(tokens.split(size), targets.split(size), samples.split(size), strict=True)
    return [MicroBatch(t, y, s, scale, step) for t, y, s in parts]
