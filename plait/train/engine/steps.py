"""One optimizer step of one rank: micro-batches run, gradients completed, clipped, applied."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from plait.core.job.settings import OnNan
from plait.train.engine.finite import StepNumbers, check_state, explain
from plait.train.engine.grad_sync import NONE, Wishes, complete, sum_loss, totals
from plait.train.engine.groups import Groups
from plait.train.engine.inflight import MicroBatch, has_mean
from plait.train.engine.optimizer import Optimizer
from plait.train.engine.pipeline import PipelineExecutor
from plait.train.engine.shards import Shards
from plait.train.record.recorder import Recorder

MAX_SKIPPED = 20
"""Updates that may be left out one after the other: what goes on longer does not go away."""


@dataclass(frozen=True)
class StepResult:
    """What one step gave: mean loss per target (NaN where none weighs anything), gradient norm before
    clipping, what any rank wishes, and how many updates the run has left out so far."""

    loss: float
    norm: float
    wishes: Wishes
    skipped: int = 0

    @property
    def metrics(self) -> dict[str, float]:
        """What is written of it."""
        return {"loss": self.loss, "norm": self.norm, **({"skipped": self.skipped} if self.skipped else {})}


Run = Callable[[Sequence[MicroBatch]], Tensor]
"""Forward and backward of all micro-batches of a step, gradients added up; gives the loss of the heads that
are here."""


@dataclass(frozen=True)
class RankStep:
    """What a step runs, and who completes it together. sequence_parallel: whether replicated parameters have
    seen their own shard of the sequence only. on_nan: what becomes of an update that is not finite."""

    run: Run
    groups: Groups
    shards: Shards | None = None
    sequence_parallel: bool = False
    recorder: Recorder | None = None
    on_nan: OnNan = "stop"


def train_step(
    step: RankStep,
    optimizer: Optimizer,
    batches: Sequence[MicroBatch],
    *,
    learning_rate: float,
    clip: float,
    wishes: Wishes = NONE,
) -> StepResult:
    """Forward and backward of every micro-batch, then one update. Every rank of the job gets the same
    result.

    Where loss or gradients are not finite there is no update. Raises NotFinite on every rank then, unless
    ``step.on_nan`` is ``skip`` and not too many were left out one after the other.
    """
    gradients, groups, shards = optimizer.gradients, step.groups, step.shards
    gradients.zero()
    loss = step.run(batches)
    complete(gradients, groups, shards, sequence_parallel=step.sequence_parallel)
    # Wishes travel with the norm, so that all ranks follow after the same step at no further cost.
    total, square, wished = totals(gradients, groups, loss, wishes)
    norm, recorder = math.sqrt(square), step.recorder
    if recorder:
        recorder.device.anchor()  # the host has just waited for the totals
    if math.isfinite(total) and math.isfinite(norm):
        optimizer.step(learning_rate, norm=norm, clip=clip, recorder=recorder)
        if shards:
            shards.publish(later=True)
    else:
        optimizer.skip()
        number = batches[0].step + 1
        if step.on_nan == "stop" or optimizer.skipped_in_a_row >= MAX_SKIPPED:
            numbers = StepNumbers(number, total, norm)
            raise explain(lambda: step.run(batches), optimizer, groups, shards, numbers)
        check_state(optimizer, groups, number - 1)  # weights that are not finite stay so, however much is left out
    return StepResult(total if has_mean(batches) else math.nan, norm, wished, optimizer.skipped)


def evaluate(
    evaluator: PipelineExecutor, groups: Groups, batches: Sequence[MicroBatch],
    stops: Callable[[], bool] = lambda: False,
) -> float | None:  # fmt: skip
    """Mean loss per target over all micro-batches of an evaluation, whose scales say of how many targets;
    NaN where none weighs anything. Dropout is off. None, on every rank, if any ``stops`` after as many
    micro-batches as the evaluator takes at a time."""
    size, total = evaluator.schedule.num_micro_batches, 0.0
    for first in range(0, len(batches), size):
        some = batches[first : first + size]
        one = evaluator if len(some) == size else evaluator.under(evaluator.schedule.first(len(some)))
        loss, wished = sum_loss(one.run(some), groups, Wishes(stop=stops()))
        if wished.stop:
            return None
        total += loss
    return total if has_mean(batches) else math.nan
