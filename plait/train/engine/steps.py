"""One optimizer step of one rank: run the micro-batches, complete, clip and apply the gradients.
Also the sums over ranks of gradients, loss and gradient norm."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from plait.core.job.settings import OnNan
from plait.train.comm.wire import sum_over
from plait.train.engine.finite import StepNumbers, check_state, explain
from plait.train.engine.gradients import Gradients
from plait.train.engine.groups import Groups
from plait.train.engine.inflight import MicroBatch, has_mean
from plait.train.engine.optimizer import Optimizer
from plait.train.engine.pipeline import PipelineExecutor
from plait.train.engine.shards import Shards
from plait.train.model.units import ShardBox
from plait.train.record.recorder import Recorder

TIED = "embedding.weight"


def complete(gradients: Gradients, groups: Groups, shards: Shards | None, *, sequence_parallel: bool) -> None:
    """Sum gradients over the ranks that hold partial ones. Afterwards every optimizer has the
    complete gradient of the parameters that it updates."""
    if shards:
        shards.complete()
    gradients.finish(groups.tp, sequence_parallel=sequence_parallel)
    tied = [(held, view) for held, view in gradients.held if held.piece.name == TIED]
    if groups.tied.size > 1 or any(held.piece.copy for held, _ in tied):
        _sum_tied(gradients, groups, tied)


def _sum_tied(gradients: Gradients, groups: Groups, tied: Sequence[tuple[ShardBox, Tensor]]) -> None:
    """Sum the tied embedding's gradient over the first and the last stage. tied: this rank's pieces
    of it."""
    tie, hidden = groups.tie, gradients.model.spec.hidden
    total = gradients.flat.new_zeros(tie.numbers)

    def part(held: ShardBox) -> Tensor:
        first = held.box.start[0] * hidden + held.box.start[1] - tie.start
        return total[first : first + held.box.elements].view(held.box.shape)

    for held, view in tied if tie.counts else ():
        part(held).add_(view)
    sum_over(groups.tied, total)
    for held, view in tied:
        view.copy_(part(held))


class Requests(NamedTuple):
    """A rank's request to all ranks after a step, or after part of an evaluation: to stop."""

    stop: bool = False


NO_REQUESTS = Requests()


def sum_loss(loss: Tensor, groups: Groups, requests: Requests = NO_REQUESTS) -> tuple[float, Requests]:
    """Return the job's loss and the requests of any rank, equal on every rank. loss: this rank's, 0
    without a head."""
    wished = (torch.full_like(loss, float(wish), dtype=torch.float64) for wish in requests)
    total, *counts = sum_over(groups.world, torch.stack((_counted(loss, groups), *wished))).tolist()
    return total, Requests(*(count > 0 for count in counts))


def _counted(loss: Tensor, groups: Groups) -> Tensor:
    """Return this rank's contribution to the job's loss: 0 except on tp rank 0, since all ranks of
    a tensor-parallel group have the same loss."""
    return loss.double() * (groups.tp_rank == 0)


def totals(gradients: Gradients, groups: Groups, loss: Tensor, requests: Requests) -> tuple[float, float, Requests]:
    """Return (loss, squared gradient norm, requests of any rank) of the whole job. loss: this
    rank's, 0 without a head."""
    square = gradients.norm_square() * groups.sharding.optim / groups.mesh.replicas
    wished = (torch.full_like(square, float(wish)) for wish in requests)
    mine = torch.stack((_counted(loss, groups), square, *wished))
    total, norm_square, *counts = sum_over(groups.world, mine).tolist()
    return total, norm_square, Requests(*(count > 0 for count in counts))


MAX_SKIPPED = 20
"""The most consecutive updates that may be skipped; a longer series will not end by itself."""


@dataclass(frozen=True)
class StepResult:
    """The result of one step. loss: mean per target, NaN if no target has weight. norm: of the
    gradients before clipping. requests: requests of any rank. skipped: updates that the run has
    skipped so far."""

    loss: float
    norm: float
    requests: Requests
    skipped: int = 0

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics to be written: loss, norm, and skipped if any update was skipped."""
        return {"loss": self.loss, "norm": self.norm, **({"skipped": self.skipped} if self.skipped else {})}


Run = Callable[[Sequence[MicroBatch]], Tensor]
"""Forward and backward of all micro-batches of a step, gradients accumulated. Returns the loss of
this rank's heads."""


@dataclass(frozen=True)
class RankStep:
    """The parts of a training step. sequence_parallel: True if gradients of replicated parameters
    cover only this rank's shard of the sequence. on_nan: whether an update that is not finite stops
    the run or is skipped."""

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
    requests: Requests = NO_REQUESTS,
) -> StepResult:
    """Run forward and backward of every micro-batch, then one update. Every rank of the job gets
    the same result.

    If loss or gradients are not finite, there is no update. Every rank then raises NotFinite,
    unless ``step.on_nan`` is ``skip`` and fewer than ``MAX_SKIPPED`` consecutive updates were
    skipped.
    """
    gradients, groups, shards = optimizer.gradients, step.groups, step.shards
    gradients.zero()
    loss = step.run(batches)
    complete(gradients, groups, shards, sequence_parallel=step.sequence_parallel)
    # Requests are summed with the norm, so that all ranks obey after the same step at no further cost.
    total, square, wished = totals(gradients, groups, loss, requests)
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
        check_state(optimizer, groups, number - 1)  # skipping updates cannot mend weights that are not finite
    return StepResult(total if has_mean(batches) else math.nan, norm, wished, optimizer.skipped)


def evaluate(
    evaluator: PipelineExecutor, groups: Groups, batches: Sequence[MicroBatch],
    stops: Callable[[], bool] = lambda: False,
) -> float | None:  # fmt: skip
    """Return the mean loss per target over all micro-batches of an evaluation; NaN if no target has
    weight. The batches' scales hold the number of targets. Dropout is off. Returns None on every
    rank if ``stops()`` is True on any rank; it is called after every ``num_micro_batches``
    micro-batches of the evaluator."""
    size, total = evaluator.schedule.num_micro_batches, 0.0
    for first in range(0, len(batches), size):
        some = batches[first : first + size]
        one = evaluator if len(some) == size else evaluator.under(evaluator.schedule.first(len(some)))
        loss, wished = sum_loss(one.run(some), groups, Requests(stop=stops()))
        if wished.stop:
            return None
        total += loss
    return total if has_mean(batches) else math.nan
