"""One optimizer step of one rank: micro-batches through the segment executor, gradients completed, clipped,
applied."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from plait.core.overlap import segment_order
from plait.core.segment_costs import SegmentCosts, segment_costs
from plait.core.segments import Action, Phase, SegmentGraph
from plait.core.settings import OnNan
from plait.core.strategy import Strategy
from plait.train.comm.wire import NullWire, Wire
from plait.train.engine.executor import SegmentExecutor
from plait.train.engine.finite import check_state, explain
from plait.train.engine.gradients import Gradients
from plait.train.engine.groups import Groups
from plait.train.engine.inflight import MicroBatch
from plait.train.engine.optimizer import Optimizer
from plait.train.engine.shards import Shards
from plait.train.machine.device import Device
from plait.train.model.loss import IGNORED
from plait.train.model.transformer import Transformer
from plait.train.record.recorder import Recorder


def make_executor(
    model: Transformer,
    strategy: Strategy,
    wire: Wire,
    *,
    gradients: Gradients | None,
    device: Device,
    batch: int,
    sequence: int,
    costs: SegmentCosts | None = None,
    recorder: Recorder | None = None,
    seed: int = 0,
    phases: Sequence[Phase] = ("step",),
    shards: Shards | None = None,
) -> SegmentExecutor:
    """An executor of the strategy's segment lists for the phases given; without ``gradients`` it only
    evaluates."""
    graph = SegmentGraph.of(model.spec, strategy, model.stage, backward=gradients is not None)
    costs = costs or segment_costs(model.spec, strategy, batch=batch, sequence=sequence)
    programmes: dict[Phase, list[Action]] = {
        phase: segment_order(replace(graph, phase=phase), strategy.overlap, costs, batch) for phase in phases
    }
    used = NullWire(strategy.tp, model.tp_rank) if strategy.overlap == "none" else wire
    return SegmentExecutor(
        model,
        graph,
        programmes,
        used,
        strategy,
        gradients=gradients,
        device=device,
        recorder=recorder,
        seed=seed,
        shards=shards,
    )


MAX_SKIPPED = 20
"""Updates that may be left out one after the other: what goes on longer does not go away."""


@dataclass(frozen=True)
class StepResult:
    """What one step gave: mean loss per target, gradient norm before clipping, seconds, whether any rank was
    asked to stop, and how many updates the run has left out so far."""

    loss: float
    norm: float
    seconds: float
    stop: bool
    skipped: int = 0


def micro_batches(tokens: Tensor, targets: Tensor, samples: Tensor, size: int, step: int) -> list[MicroBatch]:
    """The batch cut into micro-batches whose losses add up to the mean over all its targets."""
    scale = 1.0 / max(1, int((targets != IGNORED).sum()))
    parts = zip(tokens.split(size), targets.split(size), samples.split(size), strict=True)
    return [MicroBatch(t, y, s, scale, step) for t, y, s in parts]


Run = Callable[[Sequence[MicroBatch]], Tensor]
"""Forward and backward of all micro-batches of a step, gradients added up; gives the loss of the heads that
are here."""


def whole(executor: SegmentExecutor) -> Run:
    """Of a model that is not cut into stages."""
    return lambda batches: torch.stack([executor.run(batch) for batch in batches]).sum()


def train_step(
    run: Run,
    optimizer: Optimizer,
    groups: Groups,
    batches: Sequence[MicroBatch],
    *,
    sequence_parallel: bool,
    learning_rate: float,
    clip: float,
    stop: bool = False,
    shards: Shards | None = None,
    on_nan: OnNan = "stop",
) -> StepResult:
    """Forward and backward of every micro-batch, then one update. Every rank of the job gets the same
    result.

    Where loss or gradients are not finite there is no update. Raises NotFinite on every rank then, unless
    ``on_nan`` is ``skip`` and not too many were left out one after the other.
    """
    start = time.perf_counter()
    gradients = optimizer.gradients
    gradients.zero()
    loss = run(batches)
    groups.complete(gradients, shards, sequence_parallel=sequence_parallel)
    # The wish to stop travels with the norm, so that all ranks stop after the same step at no further cost.
    total, square, stops = groups.totals(gradients, loss, stop)
    norm = math.sqrt(square)
    if math.isfinite(total) and math.isfinite(norm):
        optimizer.step(learning_rate, norm=norm, clip=clip)
        if shards:
            shards.publish()
    else:
        optimizer.skip()
        number = batches[0].step + 1
        if on_nan == "stop" or optimizer.skipped_in_a_row >= MAX_SKIPPED:
            raise explain(lambda: run(batches), optimizer, groups, shards, step=number, loss=total, norm=norm)
        check_state(optimizer, groups, number - 1)  # weights that are not finite stay so, however much is left out
    return StepResult(total, norm, time.perf_counter() - start, stops, optimizer.skipped)


def evaluate(run: Run, groups: Groups, batches: Sequence[MicroBatch]) -> float:
    """Mean loss per target over evaluation batches, dropout off."""
    return groups.sum_loss(run(batches)) / len(batches)
