"""One rank of ``domino.py``: builds every variant over the same weights, times them round by round."""

from __future__ import annotations

import resource
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from dtensor_tp import DTensorGpt, dtensor_step
from ranks import as_rank, interleaved, slowest
from torch.distributed.device_mesh import DeviceMesh
from typical import typical_costs

from plait.core.job.settings import TrainSection
from plait.core.model.spec import ModelSpec
from plait.core.parallel.strategy import Strategy
from plait.core.record.exposure import Exposure
from plait.core.step.orders.overlap import Load
from plait.core.step.orders.segment_costs import SegmentCosts
from plait.train.comm.wire import Wire, open_wire
from plait.train.engine.executor import RankContext, SegmentExecutor, make_executor
from plait.train.engine.gradients import Gradients
from plait.train.engine.inflight import MicroBatch
from plait.train.engine.optimizer import LearningRate, Optimizer
from plait.train.machine.device import RankDevice
from plait.train.machine.gpu import device_of
from plait.train.model.transformer import ModelCut, Transformer
from plait.train.record.recorder import Recorder

SLICED = {
    "sync": Strategy(tp=2, overlap="sync"),
    "async": Strategy(tp=2, overlap="async"),
    "domino": Strategy(tp=2, p1=2),
    "domino_p4": Strategy(tp=2, p1=4),
    "column": Strategy(tp=2, p2=2),
    "hybrid": Strategy(tp=2, p1=2, p2=2),
    "none": Strategy(tp=2, overlap="no-communication"),
}


@dataclass
class Bench:
    """Shapes, weights and gradients that all variants share."""

    spec: ModelSpec
    batch: MicroBatch
    model: Transformer
    gradients: Gradients
    wire: Wire
    device: RankDevice

    def executor(
        self, strategy: Strategy, costs: SegmentCosts | None = None, recorder: Recorder | None = None
    ) -> SegmentExecutor:
        size, sequence = self.batch.tokens.shape
        return make_executor(
            self.model,
            strategy,
            recorder.over(self.wire, range(self.wire.size), "tp") if recorder else self.wire,
            Load(size, sequence, costs),
            RankContext(self.device, recorder),
            gradients=self.gradients,
        )

    def step(self, executor: SegmentExecutor, rest: StepRest | None = None) -> Callable[[], object]:
        """Forward and backward; with ``rest`` all of a training step."""

        def run() -> None:
            batch = rest.batch() if rest else self.batch
            self.gradients.zero()
            executor.run(batch)
            if rest:
                rest.update()

        return run

    def collectives(self) -> Callable[[], object]:
        """The plain variant's all-reduces, nothing else."""
        size, sequence = self.batch.tokens.shape
        buffer = torch.zeros(size * sequence * self.spec.hidden)

        def run() -> None:
            for _ in range(4 * self.spec.num_layers + 1):
                self.wire.start("all_reduce", buffer, buffer).wait()

        return run


class StepRest:
    """Of a step what is neither forward nor backward: the next batch of a file of tokens; gradients
    completed, clipped by their norm and applied by AdamW, at the learning rate of the step's number."""

    def __init__(self, bench: Bench) -> None:
        self.bench, self.number = bench, 0
        train = TrainSection(steps=1000, warmup_steps=100)
        self.rate, self.clip = LearningRate.of(train), train.clip_grad
        self.optimizer = Optimizer(bench.model, bench.gradients, train)
        file = tempfile.TemporaryFile()  # noqa: SIM115 - it goes with the map
        np.random.default_rng(1).integers(0, bench.spec.vocab, 1 << 20, dtype=np.uint16).tofile(file)
        self.tokens = np.memmap(file, dtype=np.uint16, mode="r")

    def batch(self) -> MicroBatch:
        """Rows of the file, one after the other."""
        size, sequence = self.bench.batch.tokens.shape
        own = (self.number * size * sequence) % (len(self.tokens) - size * sequence - 1)
        read = torch.from_numpy(self.tokens[own : own + size * sequence + 1].astype(np.int64))
        tokens, targets = read[:-1].view(size, sequence), read[1:].view(size, sequence)
        return MicroBatch(tokens, targets, torch.arange(size), 1.0 / tokens.numel(), 0)

    def update(self) -> None:
        """Equal on both ranks."""
        bench = self.bench
        bench.gradients.finish(bench.wire, sequence_parallel=False)
        norm = float(bench.gradients.norm(bench.wire))
        self.optimizer.step(self.rate(self.number), norm=norm, clip=self.clip)
        self.number += 1


def measured(_: int, names: str, family: str, *shape: str) -> dict[str, Any]:
    """Seconds and processor time of every variant that is named; what the recorder says is hidden."""
    layers, hidden, sequence, size, rounds, whole = map(int, shape)
    bench = _build(family, layers, hidden, sequence, size)
    recorder = Recorder(bench.device)
    costs = _costs(bench, recorder)
    asked = names.split(",")
    rest = StepRest(bench) if whole else None
    runs = {
        name: bench.step(bench.executor(strategy, costs), rest) for name, strategy in SLICED.items() if name in asked
    }
    if "comm" in asked:
        runs["comm"] = bench.collectives()
    if "dtensor" in asked:
        peer = DTensorGpt(bench.spec, DeviceMesh("cpu", [0, 1]))
        runs["dtensor"] = lambda: dtensor_step(peer, bench.batch.tokens, bench.batch.targets)
    times = interleaved({name: partial(_timed, run) for name, run in runs.items()}, rounds, turned=True)
    result: dict[str, Any] = {
        kind: {name: [both[at] for both in found] for name, found in times.items()}
        for at, kind in enumerate(("seconds", "cpu"))
    }
    recorded = [name for name in ("async", "domino", "column", "hybrid") if name in asked]
    return result | {"recorded_hidden": {name: _recorded(bench, SLICED[name], costs, recorder) for name in recorded}}


def _build(family: str, layers: int, hidden: int, sequence: int, size: int) -> Bench:
    heads = max(2, hidden // 64)
    more: dict[str, Any] = {"ffn_hidden": 4 * hidden} if family == "llama" else {}
    spec = ModelSpec(
        family="llama" if family == "llama" else "gpt",
        num_layers=layers,
        hidden=hidden,
        num_heads=heads,
        vocab=256,
        max_sequence=sequence,
        parallel_block=family == "parallel",
        **more,
    )
    model = Transformer(spec, Strategy(tp=2), ModelCut(tp_rank=dist.get_rank()))
    tokens = torch.randint(0, spec.vocab, (size, sequence), generator=torch.Generator().manual_seed(1))
    batch = MicroBatch(tokens, tokens.roll(-1, 1), torch.arange(size), 1.0 / tokens.numel(), 0)
    return Bench(spec, batch, model, Gradients(model), open_wire("gloo"), device_of(None))


def _costs(bench: Bench, recorder: Recorder) -> SegmentCosts:
    """Measured costs, from which the orders are made, as a run does before training."""
    plain = bench.executor(SLICED["sync"], recorder=recorder)
    return typical_costs(lambda: plain.run(bench.batch), recorder)


def _timed(run: Callable[[], object], _: int) -> list[float]:
    """Seconds and CPU seconds of the rank that took the most."""
    dist.barrier()
    start, before = time.perf_counter(), _cpu()
    run()
    spent, used = time.perf_counter() - start, _cpu() - before
    return [slowest(spent), slowest(used)]


def _cpu() -> float:
    """CPU seconds of this rank, user and kernel, all threads."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _recorded(bench: Bench, strategy: Strategy, costs: SegmentCosts, recorder: Recorder) -> float | None:
    """Hidden fraction of three steps as the recorder counts it."""
    executor = bench.executor(strategy, costs, recorder)
    found = Exposure(0.0, 0.0)
    for _ in range(3):
        dist.barrier()
        recorder.take()
        executor.run(bench.batch)
        more = recorder.records().exposure()
        found = Exposure(found.total + more.total, found.exposed + more.exposed)
    return found.fraction


if __name__ == "__main__":
    as_rank(measured, lambda *_: True)
