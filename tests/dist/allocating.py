"""What each rank runs in ``test_estimate``: a job's real steps, and what they allocated and sent."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from plait.core.job import Job
from plait.core.pipeline_plan import PipelinePlan
from plait.core.schedules import Shape, find_schedule
from plait.core.segments import SegmentOp
from plait.core.settings import ITEMSIZE
from plait.plan.pipeline import plan_pipeline
from plait.plan.reshard_cost import Fabric, even_hosts
from plait.train.comm.wire import GlooWire, open_wire
from plait.train.engine.assembly import assemble
from plait.train.engine.gradients import Gradients
from plait.train.engine.groups import Groups, one_place
from plait.train.engine.optimizer import Optimizer
from plait.train.engine.shards import Shards
from plait.train.engine.steps import Run, make_executor, micro_batches, train_step, whole
from plait.train.model.sequence import SequenceGroup
from plait.train.model.transformer import Share, Transformer
from plait.train.record.recorder import Recorder
from tests.dist.equality import DEVICE
from tests.dist.pipelining import CountedWire

DTYPES = {"fp32": torch.float32, "fp64": torch.float64}
COUNTED = ("params", "grads", "optim", "replicas", "secondary")


def planned(job: Job) -> PipelinePlan:
    """As ``plait train`` plans it."""
    asked = job.strategy
    shape = Shape(ranks=asked.pp, micro_batches=job.num_micro_batches, chunks=asked.virtual_stages, slack=asked.slack)
    return plan_pipeline(
        job.model_spec(vocab=1),
        find_schedule(asked.schedule, shape)[0],
        job.degrees,
        Fabric(hosts=even_hosts(job.world_size, job.world_size), rate=1e10),
        micro_batch=job.micro_batch,
        num_micro_batches=job.num_micro_batches,
        sequence=job.data.sequence_length,
        itemsize=ITEMSIZE[job.train.precision],
        sequence_parallel=job.base_strategy.sequence_parallel,
        stage_layers=asked.stage_layers,
        shardings=[job.sharding(dp * asked.cp) for dp, _ in job.degrees],
        sequence_cut=job.sequence_cut,
    )


class _Rank:
    """One rank of a job, ready to train."""

    def __init__(self, rank: int, job: Job) -> None:
        self.job, self.recorder = job, Recorder(DEVICE)
        dtype = DTYPES[job.train.precision]
        self.shards: Shards | None = None
        self.sequence = {kind: CountedWire(open_wire("gloo", [rank])) for kind in ("ulysses", "ring")}
        if job.pipelined:
            part = assemble(
                job.model_spec(vocab=1),
                job.base_strategy,
                planned(job),
                rank,
                DEVICE,
                micro_batch=job.micro_batch,
                sequence=job.data.sequence_length,
                dtype=dtype,
                recorder=self.recorder,
            )
            self.share: Share = part.models
            self.gradients, self.groups, self.shards = part.gradients, part.groups, part.shards
            self._count_sequence(part)
            self.own, self.run, self.close = part.own, part.pipeline.run, part.courier.close
        else:
            strategy, wire = job.base_strategy, open_wire("gloo")
            model = Transformer(job.model_spec(vocab=1), strategy, tp_rank=rank, dtype=dtype)
            self.share, self.gradients, self.groups = model, Gradients(model), one_place(wire)
            executor = make_executor(
                model, strategy, wire, gradients=self.gradients, device=DEVICE, batch=job.micro_batch,
                sequence=job.data.sequence_length, recorder=self.recorder,
            )  # fmt: skip
            self.own, self.close = list, lambda: None
            self.run: Run = whole(executor)
        self.optimizer = Optimizer(self.share, self.gradients)

    def _count_sequence(self, part: Any) -> None:
        group = part.groups.sequence
        self.sequence = {"ulysses": CountedWire(group.ulysses), "ring": CountedWire(group.ring)}
        for stage in part.models.stages:
            for attention in stage.attn.values():
                attention.sequence = SequenceGroup(self.sequence["ulysses"], self.sequence["ring"])

    def step(self, number: int) -> None:
        """One optimizer step."""
        job = self.job
        torch.manual_seed(number)
        shape = job.train.global_batch_size, job.data.sequence_length
        tokens = torch.randint(0, self.share.spec.vocab, shape)
        self.batches = self.own(micro_batches(tokens, tokens, torch.arange(shape[0]), job.micro_batch, number))

    def train(self) -> None:
        """The step whose batches are there."""
        train_step(
            self.run,
            self.optimizer,
            self.groups,
            self.batches,
            sequence_parallel=self.job.base_strategy.sequence_parallel,
            learning_rate=1e-3,
            clip=1.0,
            shards=self.shards,
        )


def measured(rank: int, values: dict[str, Any]) -> dict[str, dict[str, int]]:
    """Bytes that a rank's memory holds, by kind, and that a step sends, by axis as the runtime's counters
    have it."""
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
        for wire in one.sequence.values():
            wire.sent = 0
        peak = DEVICE.allocated(one.train).peak
        if one.shards:
            one.shards.settle()
        return {"memory": _memory(one, peak), "sent": _sent(one, before)}
    finally:
        if one.shards:
            one.shards.stop()
        one.close()


def _memory(one: _Rank, peak: int) -> dict[str, int]:
    stores = one.share.units.values()
    kept = [tensor for store in stores for tensor in (store.kept, store.second) if tensor is not None]
    moments = [*one.optimizer.exp_avg.values(), *one.optimizer.exp_avg_sq.values()]
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


def _tables(share: Share) -> int:
    """Cosines and sines, which the layers of a stage share."""
    layers = [layer for model in getattr(share, "stages", [share]) for layer in model.attn.values()]
    ropes = {id(layer.rope): layer.rope for layer in layers if layer.rope}
    return sum(_bytes(list(pair)) for rope in ropes.values() for pair in rope._cache.values())


def _staging(groups: Groups) -> int:
    """What gloo's reduce-scatters keep."""
    wires = [groups.tp, groups.world, groups.tied, *groups.shards.values()]
    spare = [
        tensor for wire in wires if isinstance(wire, GlooWire) for found in wire._spare.values() for tensor in found
    ]
    return _bytes(spare)


def _sent(one: _Rank, before: Counter[str]) -> dict[str, int]:
    sent = {axis: one.shards.sent[axis] - before[axis] if one.shards else 0 for axis in COUNTED}
    sent |= {axis: wire.sent for axis, wire in one.sequence.items()} | {"tp": 0, "rows": 0, "pp": 0}
    for op, kind, _, _, size in one.recorder.take():
        if isinstance(op, SegmentOp) and kind == "comm":
            sent["rows" if op.site == "embed" else "tp"] += size
        elif kind == "transfer":
            sent["pp"] += size
    return sent
