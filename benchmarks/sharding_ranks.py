"""One rank of ``sharding.py``: builds every variant over the same link, times them round by round."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ranks import as_rank, interleaved, slowest
from sharding_peer import fsdp_step

from plait.core.cluster.hardware import HERE
from plait.core.job.settings import MuonSection, TrainSection
from plait.core.model.spec import ModelSpec
from plait.core.parallel.layout import Layout
from plait.core.parallel.sharding import OptimizerName, Sharding
from plait.core.parallel.strategy import Strategy
from plait.core.step.schedules import Shape, generate
from plait.core.step.seconds.sharding_costs import muon_bytes
from plait.core.step.step import PipelineRank, Step, Workload
from plait.core.step.traffic import UnitAction, step_bytes, unit_traffic
from plait.plan.make import assemble_plan
from plait.train.comm.wire import NullWire, Wire
from plait.train.engine.assembly import RankPart, assemble
from plait.train.engine.executor import RunningPhase
from plait.train.engine.inflight import MicroBatch
from plait.train.engine.optimizer import Optimizer
from plait.train.engine.shards import Axis
from plait.train.engine.steps import train_step
from plait.train.machine.gpu import device_of

DEVICE = device_of(None)
STEPS = 2  # in a row: what a step leaves under way belongs to the next


@dataclass(frozen=True)
class Setup:
    """What ``sharding.py`` asks for. variants: by name, {"shard": [params, grads, optim]}, with "overlap":
    "none", "optimizer", "muon", "load" (seconds until a batch is there), "ahead" (whether the first gather
    starts before), or "only": "compute", "communication" or "first gather"; or {"fsdp": mesh}."""

    ranks: int
    rounds: int
    layers: int
    hidden: int
    sequence: int
    batch: int
    micro_batches: int
    variants: Mapping[str, Any]
    per_host: int
    vocab: int = 256

    @property
    def spec(self) -> ModelSpec:
        return ModelSpec(
            family="gpt", num_layers=self.layers, hidden=self.hidden, num_heads=max(1, self.hidden // 64),
            vocab=self.vocab, max_sequence=self.sequence, tied_embeddings=False,
        )  # fmt: skip


class Bench:
    """Data and variants of one rank."""

    def __init__(self, setup: Setup, rank: int) -> None:
        self.setup, self.rank = setup, rank
        generator = torch.Generator().manual_seed(rank)
        self.tokens = torch.randint(0, 256, (setup.batch, setup.sequence), generator=generator)
        self.targets = self.tokens.roll(-1, 1)
        sizes = setup.batch // setup.micro_batches
        parts = zip(self.tokens.split(sizes), self.targets.split(sizes), strict=True)
        self.batches = [MicroBatch(x, y, torch.arange(sizes), 1.0 / self.tokens.numel(), 0) for x, y in parts]
        self.formula: dict[str, int] = {}

    def part(self, sharding: Sharding, strategy: Strategy, optimizer: OptimizerName, matrix_itemsize: int) -> RankPart:
        setup = self.setup
        micro = setup.ranks * setup.batch // setup.micro_batches
        workload = Workload(
            micro_batch=micro, num_micro_batches=setup.micro_batches, sequence=setup.sequence, optimizer=optimizer,
            matrix_itemsize=matrix_itemsize,
        )  # fmt: skip
        schedule = generate("1f1b", Shape(ranks=1, micro_batches=setup.micro_batches))
        step = Step.of(setup.spec, workload, strategy, Layout.of(dp=setup.ranks), schedule, shardings=[sharding])
        return assemble(assemble_plan(step, HERE), self.rank, DEVICE)

    def variant(self, name: str, what: Mapping[str, Any]) -> Callable[[bool], object]:
        """Its step, told whether another variant's follows."""
        setup = self.setup
        if "fsdp" in what:
            peer = fsdp_step(setup.spec, tuple(what["fsdp"]), self.tokens, self.targets, setup.micro_batches)
            return lambda _: peer()
        params, grads, optim = what["shard"]
        sharding = Sharding(params=params, grads=grads, optim=optim)
        settings = TrainSection(optimizer=what.get("optimizer", "adamw"), muon=MuonSection(**what.get("muon", {})))
        strategy = Strategy(shard_overlap=what.get("overlap", "both"))
        part = self.part(sharding, strategy, settings.optimizer, settings.muon.itemsize(settings.precision))
        shards = part.shards
        assert shards is not None
        if what.get("only") == "compute":
            quiet: dict[Axis, Wire] = {axis: NullWire(wire.size, wire.rank) for axis, wire in shards.wires[""].items()}
            shards.wires = {"": quiet}
        if what.get("only") == "communication":
            return lambda _: _communicate(part)
        if what.get("only") == "first gather":
            return lambda _: _first_gather(part)
        optimizer = Optimizer(part.models, part.gradients, settings, part.matrices)
        if "only" not in what:
            self.formula[name] = self.over_the_link(part, sharding)
        own, load, ahead = replace(part.step, shards=shards), what.get("load", 0.0), what.get("ahead", True)

        def step(final: bool) -> None:
            if ahead:
                part.pipeline.prefetch()
            time.sleep(load)
            train_step(own, optimizer, self.batches, learning_rate=1e-4, clip=0.0)
            if final:
                shards.settle()

        return step

    def over_the_link(self, part: RankPart, sharding: Sharding) -> int:
        """What the formula's bytes put on one host's link: each rank of a group whose ring leaves the host
        counts for the ring's one way out, or, in a reduce-scatter, for all it sends to ranks elsewhere.
        Muon's matrices come from and go to all ranks alike."""
        setup, total = self.setup, 0
        units = {unit: store.numel for unit, store in part.models.units.items()}
        by_rank = step_bytes(unit_traffic(units, sharding, setup.ranks, itemsize=4), micro_batches=setup.micro_batches)
        for axis in ("params", "grads", "optim", "replicas"):
            groups = {sharding.group(rank, axis, setup.ranks) for rank in range(setup.per_host)}
            total += sum(by_rank[axis] for group in groups if any(rank >= setup.per_host for rank in group))
        elsewhere = (setup.ranks - setup.per_host) / max(1, setup.ranks - 1)
        return total + round(setup.per_host * muon_bytes(PipelineRank(part.plan, 0)) * elsewhere)


def _sent() -> int:
    """Bytes that this host has sent to others so far."""
    lines = (line.split() for line in Path("/proc/self/net/dev").read_text().replace(":", " ").splitlines()[2:])
    return sum(int(words[9]) for words in lines if words[0] != "lo")


def _communicate(part: RankPart) -> None:
    """What a step's lists say happens to units, and nothing in between."""
    shards, pipeline = part.shards, part.pipeline
    assert shards is not None
    shards.begin()
    last = len(part.plan.schedule.ranks[0]) - 1
    for at, op in enumerate(part.plan.schedule.ranks[0]):
        turn = RunningPhase({}, last=at == last)
        for action, step in pipeline.executors[op.stage].programmes[op.work.phase]:
            if isinstance(action, UnitAction):
                step(turn)
    shards.complete()
    shards.publish()
    shards.settle()


def _first_gather(part: RankPart) -> None:
    """What a step reads first is gathered, and let go of."""
    shards, first = part.shards, part.plan.schedule.ranks[0][0]
    assert shards is not None
    part.pipeline.prefetch()
    for action, _ in part.pipeline.executors[first.stage].programmes[first.work.phase]:
        if not isinstance(action, UnitAction) or action.op.verb != "gather":
            break
        shards.drop(action.op)


def measured(rank: int, text: str) -> dict[str, Any]:
    """Seconds of every variant, and bytes over a host's link: counted in the last round, by the formula."""
    setup = Setup(**json.loads(text))
    bench = Bench(setup, rank)
    link: dict[str, int] = {}

    def timed(name: str, run: Callable[[bool], object], number: int) -> float:
        dist.barrier()
        before, start = _sent(), time.perf_counter()
        for at in range(STEPS):
            run(at == STEPS - 1)
        spent = slowest((time.perf_counter() - start) / STEPS)
        if number:
            link[name] = (_sent() - before) // STEPS
        return spent

    runs = {name: partial(timed, name, bench.variant(name, what)) for name, what in setup.variants.items()}
    return {"seconds": interleaved(runs, setup.rounds), "link": link, "formula": bench.formula}


if __name__ == "__main__":
    as_rank(measured, lambda text: json.loads(text)["per_host"] == 1)
