"""What each rank runs in ``test_estimate``: a job's real steps, and what they allocated and
sent."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import torch

from plait.core.cluster.hardware import HERE
from plait.core.job.spec import Job
from plait.core.record.records import axis_of
from plait.core.step.segments import SegmentOp
from plait.plan.make import make_plan
from plait.train.comm.flight import LoggedWire
from plait.train.comm.wire import GlooWire
from plait.train.engine.assembly import assemble
from plait.train.engine.feed import micro_batches
from plait.train.engine.groups import Groups
from plait.train.engine.optimizer import Optimizer
from plait.train.engine.steps import train_step
from plait.train.model.transformer import StageModels
from plait.train.record.recorder import Recorder
from tests.dist.counting import CountedWire, count_sequence
from tests.dist.equality import DEVICE

COUNTED = ("params", "grads", "optim", "replicas", "secondary")


class _Rank:
    """One rank of a job, ready to train."""

    def __init__(self, rank: int, job: Job) -> None:
        self.job, self.recorder = job, Recorder(DEVICE)
        self.part = part = assemble(make_plan(job, HERE, vocab=1), rank, DEVICE, recorder=self.recorder)
        self.share, self.shards = part.models, part.shards
        self.tied = CountedWire(part.groups.tied)
        self.groups = replace(part.groups, tied=self.tied)
        self.sequence = count_sequence(part)
        self.gradients, self.optimizer = part.gradients, Optimizer(part.models, part.gradients)

    def step(self, number: int) -> None:
        """One optimizer step."""
        job = self.job
        torch.manual_seed(number)
        shape = job.train.global_batch_size, job.data.sequence_length
        tokens = torch.randint(0, self.share.spec.vocab, shape)
        starts = _starts(shape) if job.data.masks else None
        found = micro_batches(tokens, tokens, torch.arange(shape[0]), job.micro_batch, number, starts=starts)
        self.batches = self.part.own(found)

    def train(self) -> None:
        """The step whose batches are there."""
        step = replace(self.part.step, groups=self.groups, shards=self.shards)
        train_step(step, self.optimizer, self.batches, learning_rate=1e-3, clip=1.0)


def _starts(shape: tuple[int, int]) -> torch.Tensor:
    """Sequences of one document, and of drawn ones."""
    places = torch.arange(shape[1]).expand(shape)
    begins = torch.rand(shape) < 0.03
    begins[::2], begins[:, 0] = False, True
    return torch.where(begins, places, 0).cummax(dim=1).values


def measured(rank: int, values: dict[str, Any]) -> dict[str, dict[str, int]]:
    """Bytes that a rank's memory holds, by kind, and that a step sends, by axis as the runtime's
    counters have it."""
    one = _Rank(rank, Job.from_dict(values))
    try:
        for number in range(2):  # the first makes what stays: position tables, buffers
            one.step(number)
            one.train()
        if one.shards:
            one.shards.settle()
        one.step(2)
        one.recorder.take()
        before = Counter(one.shards.sent) if one.shards else Counter[str]()
        for wire in (one.tied, *one.sequence.values()):
            wire.sent = 0
        peak = DEVICE.allocated(one.train).peak
        if one.shards:
            one.shards.settle()
        return {"memory": _memory(one, peak), "sent": _sent(one, before)}
    finally:
        if one.shards:
            one.shards.stop()
        one.part.lanes.close()


def _memory(one: _Rank, peak: int) -> dict[str, int]:
    stores = one.share.units.values()
    kept = [tensor for store in stores for tensor in (store.kept, store.second) if tensor is not None]
    moments = [tensor for kind in one.optimizer.states.values() for tensor in kind.values()]
    masters = list(one.optimizer.masters.values()) if one.optimizer.separate else []
    return {
        "parameters": _bytes(kept),
        "gradients": _bytes([one.gradients.flat]),
        "optimizer": _bytes([*moments, *masters]),
        "buffers": (one.shards.pool if one.shards else 0) + _tables(one.share) + _staging(one.groups),
        "activations": peak,
    }


def _bytes(tensors: list[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _tables(share: StageModels) -> int:
    """Cosines and sines, which the layers of a stage share."""
    ropes = [model.rope for model in share.stages if model.rope]
    return sum(_bytes(list(pair)) for rope in ropes for pair in rope._cache.values())


def _staging(groups: Groups) -> int:
    """What gloo's reduce-scatters keep."""
    shards = [wire for wires in groups.wires.values() for wire in wires.values()]
    wires = {id(wire): wire for wire in (groups.tp, groups.world, groups.tied, *shards)}.values()
    bare = [wire.wire if isinstance(wire, LoggedWire) else wire for wire in wires]
    spare = [found for wire in bare if isinstance(wire, GlooWire) for found in wire._spare.values()]
    return sum(_bytes(tensors) for tensors in spare)


def _sent(one: _Rank, before: Counter[str]) -> dict[str, int]:
    sent = {axis: one.shards.sent[axis] - before[axis] if one.shards else 0 for axis in COUNTED}
    sent |= {axis: wire.sent for axis, wire in one.sequence.items()}
    sent |= {"tied": one.tied.sent, "tp": 0, "rows": 0, "pp": 0}
    for op, kind, _, _, size in one.recorder.take():
        if isinstance(op, SegmentOp) and kind == "comm":
            if axis_of(kind, str(op)) != "ep":  # depends on the tokens
                sent["rows" if op.site == "embed" else "tp"] += size
        elif kind == "transfer":
            sent["pp"] += size
    return sent
