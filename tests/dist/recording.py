"""What each rank runs in ``test_recording``: a job's real steps, and the spans that they left."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any

import torch

from plait.core.job.plan import Plan
from plait.core.job.spec import Job
from plait.core.record.records import Records
from plait.core.record.ring import read_ring
from plait.core.record.ring_writer import RingWriter, this_process
from plait.core.record.timeline import PLANNED, Span, spans_of
from plait.train.engine.assembly import RankPart, assemble
from plait.train.engine.feed import micro_batches
from plait.train.engine.inflight import MicroBatch
from plait.train.engine.optimizer import Optimizer
from plait.train.engine.steps import evaluate, train_step
from plait.train.record.recorder import Recorder
from tests.dist.equality import DEVICE
from tests.support.drawn import plan_of

STEPS = 3


def spans(rank: int, values: dict[str, Any]) -> tuple[Plan, list[Span]]:
    """A rank's plan and its spans of a few steps, with an evaluation between the last two."""
    plan, path = plan_of(Job.from_dict(values)), Path(mkdtemp()) / "rank.ring"
    recorder = Recorder(DEVICE, RingWriter(path, this_process(rank=rank, world=plan.layout.world_size)))
    part = assemble(plan, rank, DEVICE, recorder=recorder, eval_batches=1)
    optimizer, found = Optimizer(part.models, part.gradients), list[Span]()
    try:
        for step in range(STEPS):
            part.pipeline.prefetch()
            train_step(part.step, optimizer, _batches(part, step), learning_rate=1e-3, clip=1.0)
            records = recorder.records()
            of_step = spans_of(step, rank, recorder.spans(records))
            assert of_columns(records, rank) == of_step, "a timeline's file has other spans"
            found += of_step
            if step == STEPS - 2 and part.evaluator:
                with recorder.paused():
                    evaluate(part.evaluator, part.groups, _batches(part, step)[:1])
        done = [span for span in of_columns(Records.of(read_ring(path)), rank) if span.step < STEPS]
        assert done == found, "who reads the ring sees other spans"
        return plan, found
    finally:
        if part.shards:
            part.shards.settle()
            part.shards.stop()
        part.lanes.close()
        rmtree(path.parent)


def of_columns(records: Records, rank: int) -> list[Span]:
    """The spans of ops as a timeline's file has them, in ``spans_of``'s order."""
    columns = records.spans(rank)
    columns |= {name: columns.pop(f"{name}_ns") / 1e9 for name in ("start", "end")}
    values = [columns[field.name].tolist() for field in fields(Span)]
    spans = [span for row in zip(*values, strict=True) if (span := Span(*row)).kind in PLANNED]
    return sorted(spans, key=lambda span: (span.step, span.start))


def _batches(part: RankPart, step: int) -> list[MicroBatch]:
    work = part.plan.workload
    generator = torch.Generator().manual_seed(step)  # ranks may be threads, which share torch's own
    shape = (work.micro_batch * work.num_micro_batches, work.sequence)
    tokens = torch.randint(0, part.plan.model.vocab, shape, generator=generator)
    return part.own(micro_batches(tokens, tokens, torch.arange(len(tokens)), work.micro_batch, step))
