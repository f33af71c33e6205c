"""One rank of ``sequence.py``: times steps on one long sequence, or takes one step within a limit of
memory."""

from __future__ import annotations

import ctypes
import json
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ranks import as_rank, interleaved, slowest

from plait.core.cluster.hardware import HERE
from plait.core.model.spec import ModelSpec
from plait.core.parallel.layout import Layout
from plait.core.parallel.sharding import Sharding
from plait.core.parallel.strategy import Strategy
from plait.core.step.schedules import Shape, generate
from plait.core.step.step import Step, Workload
from plait.plan.make import assemble_plan
from plait.train.engine.assembly import RankPart, assemble
from plait.train.engine.inflight import MicroBatch
from plait.train.engine.optimizer import Optimizer
from plait.train.engine.steps import train_step
from plait.train.machine.gpu import device_of

DEVICE = device_of(None)
M_MMAP_THRESHOLD = -3  # of malloc.h


@dataclass(frozen=True)
class Setup:
    """What ``sequence.py`` asks for. model: fields of a ModelSpec, whose longest sequence is taken. variants:
    fields of a Strategy by name, with "optim", the shard factor of optimizer states. limit: bytes that the
    only variant may take, instead of being timed; report: where a rank writes that they were not enough."""

    ranks: int
    rounds: int
    model: Mapping[str, Any]
    variants: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    limit: int = 0
    report: str = ""

    @cached_property
    def spec(self) -> ModelSpec:
        return ModelSpec.from_dict(dict(self.model))

    @property
    def sequence(self) -> int:
        return self.spec.max_sequence


class Variant:
    """One way to share a sequence, on this rank."""

    def __init__(self, setup: Setup, rank: int, what: Mapping[str, Any]) -> None:
        given = dict(what)
        self.setup, self.rank, optim = setup, rank, given.pop("optim", 1)
        self.strategy = Strategy(**given)
        self.sharding = Sharding(optim=optim)

    def assemble(self) -> None:
        """Wires, weights, gradients, optimizer."""
        setup, strategy = self.setup, self.strategy
        workload = Workload(micro_batch=1, num_micro_batches=1, sequence=setup.sequence)
        layout = Layout.of(tp=strategy.tp, cp=strategy.cp)
        schedule = generate("1f1b", Shape(ranks=1, micro_batches=1))
        step = Step.of(setup.spec, workload, strategy, layout, schedule, shardings=[self.sharding])
        self.part: RankPart = assemble(assemble_plan(step, HERE), self.rank, DEVICE)
        self.optimizer = Optimizer(self.part.models, self.part.gradients)
        tokens = torch.randint(0, 256, (1, setup.sequence), generator=torch.Generator().manual_seed(0))
        self.batches = self.part.own([MicroBatch(tokens, tokens.roll(-1, 1), torch.arange(1), 1.0 / setup.sequence, 0)])

    def step(self) -> float:
        """One step's seconds."""
        start = time.perf_counter()
        part = self.part
        train_step(part.step, self.optimizer, self.batches, learning_rate=1e-4, clip=1.0)
        if part.shards:
            part.shards.settle()
        return time.perf_counter() - start


def timed(setup: Setup, rank: int) -> dict[str, Any]:
    """Seconds of every variant, interleaved, and what a step allocates."""
    variants = {name: Variant(setup, rank, what) for name, what in setup.variants.items()}
    for variant in variants.values():
        variant.assemble()

    def together(variant: Variant, _: int) -> float:
        dist.barrier()
        return slowest(variant.step())

    return {
        "seconds": interleaved({name: partial(together, one) for name, one in variants.items()}, setup.rounds),
        "within": {name: DEVICE.allocated(variant.step).peak for name, variant in variants.items()},
    }


def limited(setup: Setup, rank: int) -> dict[str, Any]:
    """One step of the only variant with ``limit`` bytes; how much of them was resident at most.

    Counted from the moment at which the wires are there, and what weights and gradients take by then added.
    """
    (what,) = setup.variants.values()
    variant = Variant(setup, rank, what)
    dist.barrier()
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 20)  # whatever is larger goes back to the kernel when it is freed
    variant.assemble()
    part = variant.part
    held = 4 * (part.gradients.flat.numel() + sum(store.kept.numel() for store in part.models.units.values()))
    before = _status("VmRSS") - held
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from now on
    threading.Thread(target=_guard, args=(before, setup), daemon=True).start()
    return {"seconds": variant.step(), "taken": _status("VmHWM") - before}


def _guard(before: int, setup: Setup) -> None:
    """End this rank as the kernel would as soon as it takes more than the limit. (The kernel's own limits
    count addresses, which threads and buffers reserve without using.)"""
    while (taken := _status("VmRSS") - before) <= setup.limit:
        time.sleep(0.05)
    Path(setup.report).write_text(json.dumps({"taken": taken, "failure": "out of memory"}))
    os._exit(3)


def _status(key: str) -> int:
    """Bytes of this process that /proc tells."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{key}:"))
    return int(line.split()[1]) * 1024


def measured(rank: int, text: str) -> dict[str, Any]:
    """What is asked for; a rank without memory says so in ``report`` and takes the others down."""
    setup = Setup(**json.loads(text))
    return (limited if setup.limit else timed)(setup, rank)


if __name__ == "__main__":
    as_rank(measured)
