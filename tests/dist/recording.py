"""What each rank runs in ``test_recording``: a job's real steps, and the spans that they left."""

from __future__ import annotations

from typing import Any

import torch

from plait.core.job import Job
from plait.core.plan import Plan
from plait.core.timeline import Span, spans_of
from plait.train.engine.assembly import Part, assemble
from plait.train.engine.feed import micro_batches
from plait.train.engine.inflight import MicroBatch
from plait.train.engine.optimizer import Optimizer
from plait.train.engine.steps import evaluate, train_step
from plait.train.record.recorder import Recorder
from tests.dist.drawn import plan_of
from tests.dist.equality import DEVICE

STEPS = 3


def spans(rank: int, values: dict[str, Any]) -> tuple[Plan, list[Span]]:
    """A rank's plan and its spans of a few steps, with an evaluation between the last two."""
    plan, recorder = plan_of(Job.from_dict(values)), Recorder(DEVICE)
    part = assemble(plan, rank, DEVICE, recorder=recorder, eval_batches=1)
    optimizer, found = Optimizer(part.models, part.gradients), list[Span]()
    try:
        for step in range(STEPS):
            part.pipeline.ahead()
            train_step(part.step, optimizer, _batches(part, step), learning_rate=1e-3, clip=1.0)
            found += spans_of(step, rank, recorder.take())
            if step == STEPS - 2 and part.evaluator:
                with recorder.paused():
                    evaluate(part.evaluator.run, part.groups, _batches(part, step)[:1])
        return plan, found
    finally:
        if part.shards:
            part.shards.settle()
            part.shards.stop()
        part.lanes.close()


def _batches(part: Part, step: int) -> list[MicroBatch]:
    work = part.plan.workload
    torch.manual_seed(step)
    tokens = torch.randint(0, part.plan.model.vocab, (work.micro_batch * work.num_micro_batches, work.sequence))
    return part.own(micro_batches(tokens, tokens, torch.arange(len(tokens)), work.micro_batch, step))
