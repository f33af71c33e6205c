"""One rank of ``pipeline.py``: builds every variant of a pipeline over the same link, times them round by
round."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from pipeline_peer import GptStage, StandInStage, UStage, peer_step
from ranks import as_rank, interleaved, timed_together
from steady import steady_period
from torch import Tensor

from plait.core.cluster.hardware import Hosts
from plait.core.job.plan import Plan
from plait.core.job.refine import SLACK_TOLERANCE
from plait.core.model.spec import ModelSpec
from plait.core.parallel.layout import Layout
from plait.core.parallel.strategy import Strategy
from plait.core.step.schedule import Transfer
from plait.core.step.schedules import Shape, enough_slack, generate
from plait.core.step.segments import SegmentGraph
from plait.core.step.step import Step, Workload
from plait.plan.make import assemble_plan
from plait.train.engine.assembly import assemble
from plait.train.engine.courier import LaneCourier, Lanes
from plait.train.engine.inflight import BoundaryTensors, InFlight, MicroBatch
from plait.train.engine.pipeline import Courier, Delivery, PipelineExecutor
from plait.train.machine.gpu import device_of
from plait.train.tune.measure import travel_times

DEVICE = device_of(None)


@dataclass(frozen=True)
class Setup:
    """What ``pipeline.py`` asks for. forward: seconds that a stand-in forward takes; None: a GPT computes.
    boundary: [S, B, H]."""

    places: int
    micro_batches: int
    rounds: int
    boundary: tuple[int, int, int]
    forward: float | None
    layers: int
    levels: int
    variants: tuple[str, ...]


class StandIn:
    """Takes the place of a stage's executor: every op is a wait of fixed length, what it sends is real."""

    def __init__(self, setup: Setup, pp_rank: int) -> None:
        self.setup, self.seconds = setup, setup.forward or 0.0
        self.device, self.recorder, self.shards = DEVICE, None, None
        self.graph = SegmentGraph(num_layers=1, embeds=pp_rank == 0, heads=pp_rank == setup.places - 1)
        self.result = torch.zeros(setup.boundary)
        self.spans: list[tuple[str, float, float]] = []

    def begin(self, _batch: MicroBatch, _entering: Mapping[str, Tensor] | None = None) -> InFlight:
        return InFlight(BoundaryTensors(1))

    def phase(self, phase: str, state: InFlight, **_turn: object) -> None:
        start = time.perf_counter()
        time.sleep(self.seconds * {"F": 1, "B": 2, "I": 1, "W": 1}[phase])
        self.spans.append((phase, start, time.perf_counter()))
        state.crossing.leaving = state.crossing.gradient = {"h": self.result}

    def loss(self, _state: InFlight) -> Tensor:
        return torch.zeros((), dtype=torch.float64)

    def step_ended(self) -> None:
        """Nothing to give back."""


class Awaited:
    """Stands still until what it sends has been received: 1F1B without overlap."""

    def __init__(self, courier: Courier) -> None:
        self.courier = courier

    def send(self, transfer: Transfer, tensors: Mapping[str, Tensor]) -> Delivery:
        delivery = self.courier.send(transfer, tensors)
        delivery.wait()
        return delivery

    def receive(self, transfer: Transfer) -> tuple[Mapping[str, Tensor], Delivery]:
        return self.courier.receive(transfer)


class Signals:
    """Sends one number instead of the tensor: the order of things without the transfers, the upper bound of
    arXiv 2211.05322."""

    def __init__(self, courier: Courier, small: Mapping[str, Tensor], whole: Mapping[str, Tensor]) -> None:
        self.courier, self.small, self.whole = courier, dict(small), dict(whole)

    def send(self, transfer: Transfer, tensors: Mapping[str, Tensor]) -> Delivery:
        return self.courier.send(transfer, {name: self.small[name] for name in tensors})

    def receive(self, transfer: Transfer) -> tuple[Mapping[str, Tensor], Delivery]:
        signals, delivery = self.courier.receive(transfer)
        self.small |= signals
        return {name: self.whole[name] for name in signals}, delivery


class Bench:
    """All variants of one setup on one rank."""

    def __init__(self, setup: Setup, rank: int) -> None:
        self.setup, self.rank = setup, rank
        sequence, batch, hidden = setup.boundary
        self.spec = ModelSpec(
            family="utransformer" if setup.levels else "gpt",
            levels=setup.levels,
            num_layers=setup.layers * setup.places,
            hidden=hidden,
            num_heads=max(1, hidden // 64) if setup.forward is None else 1,
            vocab=256,
            max_sequence=sequence,
            tied_embeddings=False,
        )
        generator = torch.Generator().manual_seed(1)
        tokens = torch.randint(0, 256, (setup.micro_batches * batch, sequence), generator=generator)
        self.tokens, self.targets = tokens, tokens.roll(-1, 1)
        parts = zip(self.tokens.split(batch), self.targets.split(batch), strict=True)
        self.batches = [MicroBatch(t, y, torch.arange(batch), 1.0 / tokens.numel(), 0) for t, y in parts]
        first = self.plan("1f1b")
        self.courier = self.courier_of(first)
        self.signals = self._signals()
        self.travel = travel_times(self.courier, rank, DEVICE)
        self.stand_ins: dict[str, StandIn] = {}

    def plan(self, name: str, slack: tuple[int, ...] = (), boundary: tuple[int, int, int] | None = None) -> Plan:
        setup, (sequence, batch, hidden) = self.setup, boundary or self.setup.boundary
        spec = replace(self.spec, hidden=hidden, num_heads=1, num_kv_heads=1, head_size=hidden)
        workload = Workload(micro_batch=batch, num_micro_batches=setup.micro_batches, sequence=sequence)
        shape = Shape(ranks=setup.places, micro_batches=setup.micro_batches, slack=slack)
        step = Step.of(spec, workload, Strategy(), Layout.of(pp=setup.places), generate(name, shape))
        return assemble_plan(step, Hosts(ranks_per_host=1, rate=1e8))

    def courier_of(self, plan: Plan) -> LaneCourier:
        """Lanes of its own."""
        return LaneCourier(plan.schedule, plan.reshards[False], Lanes(plan, self.rank, DEVICE))

    def _signals(self) -> Signals:
        small = self.plan("1f1b", boundary=(1 << self.setup.levels, 1, 1))
        return Signals(self.courier_of(small), self.tensors(small), self.tensors(self.plan("1f1b")))

    def tensors(self, plan: Plan) -> dict[str, Tensor]:
        """One of everything that crosses boundaries."""
        return {name: torch.zeros(one.shape) for named in plan.reshards[False].values() for name, one in named.items()}

    def ours(self, name: str, schedule: str, courier: Courier, slack: tuple[int, ...] = ()) -> Callable[[], object]:
        plan = self.plan(schedule, slack)
        if self.setup.forward is None:
            part = assemble(replace(plan, model=self.spec), self.rank, DEVICE)
            part.lanes.close()  # all variants share lanes, so that none has more connections than another
            executors: dict[int, Any] = dict(part.pipeline.executors)
        else:
            self.stand_ins[name] = StandIn(self.setup, self.rank)
            executors = {self.rank: self.stand_ins[name]}
        pipeline = PipelineExecutor(plan.schedule, plan.names, self.rank, executors, courier)
        return lambda: pipeline.run(self.batches)

    def variants(self, compute: Sequence[float]) -> dict[str, tuple[Callable[[], object], tuple[int, ...]]]:
        """Every variant's step, and its slack."""
        edges = self.setup.places - 1
        slack = enough_slack(compute, self.travel, SLACK_TOLERANCE)
        build = UStage if self.setup.levels else GptStage
        stage = (
            build(self.spec, self.rank, self.setup.places)
            if self.setup.forward is None
            else StandInStage(self.setup.forward)
        )
        inputs = (
            self.tokens
            if self.setup.forward is None
            else torch.zeros(self.setup.micro_batches * self.setup.boundary[1], 1)
        )
        peer = (
            stage,
            self.rank,
            self.setup.places,
            self.setup.micro_batches,
            self.setup.boundary,
            inputs,
            self.targets,
        )
        made: dict[str, Callable[[], tuple[Callable[[], object], tuple[int, ...]]]] = {
            "1f1b": lambda: (self.ours("1f1b", "1f1b", Awaited(self.courier)), (1,) * edges),
            "1f1b_overlap": lambda: (self.ours("1f1b_overlap", "1f1b", self.courier), (1,) * edges),
            "eager": lambda: (self.ours("eager", "eager-1f1b", self.courier), (2,) * edges),
            "slack": lambda: (self.ours("slack", "slack-1f1b", self.courier, slack), slack),
            "torch_1f1b": lambda: (peer_step("1f1b", *peer), ()),
            "torch_runtime": lambda: (peer_step("runtime", *peer), ()),
            "bound": lambda: (self.ours("bound", "eager-1f1b", self.signals), (2,) * edges),
        }
        return {name: made[name]() for name in self.setup.variants}


def measured(rank: int, text: str) -> dict[str, Any]:
    """Seconds of variants, those of crossing a boundary, periods of stand-ins with those of the theorem."""
    given = json.loads(text)
    setup = Setup(**given | {"boundary": tuple(given["boundary"]), "variants": tuple(given["variants"])})
    bench = Bench(setup, rank)
    made = bench.variants(_compute(bench))
    periods: dict[str, list[float]] = {name: [] for name in bench.stand_ins}

    def timed(name: str, number: int) -> float:
        if name in periods:
            bench.stand_ins[name].spans.clear()
        spent = timed_together(made[name][0])
        if number and name in periods:
            periods[name].append(_period(bench, name))
        return spent

    seconds = interleaved({name: partial(timed, name) for name in made}, setup.rounds)
    took = {
        name: statistics.mean(end - start for _, start, end in one.spans) * 2 for name, one in bench.stand_ins.items()
    }
    theory = {
        name: steady_period([both] * setup.places, bench.travel, made[name][1])
        for name, both in took.items()
        if name != "bound"
    }
    box: list[Any] = [{name: statistics.median(values) for name, values in periods.items()} | {"of": theory}]
    dist.broadcast_object_list(box, src=setup.places - 1)
    slacks = {name: slack for name, (_, slack) in made.items() if slack}
    return {
        "seconds": seconds, "travel": bench.travel, "slack": slacks, "period": box[0], "boundary": setup.boundary,
    }  # fmt: skip


def _compute(bench: Bench) -> list[float]:
    """Forward and backward of one micro-batch on every stage: as measured in one step without transfers."""
    if bench.setup.forward is not None:
        return [3 * bench.setup.forward] * bench.setup.places
    run = bench.ours("probe", "gpipe", bench.signals)
    run()
    took = timed_together(run) / (bench.setup.micro_batches + bench.setup.places - 1)
    return [took] * bench.setup.places


def _period(bench: Bench, name: str) -> float:
    """Seconds from one backward of the last stage to the next, after the fill; -1 on other stages."""
    if bench.rank != bench.setup.places - 1:
        return -1.0
    ends = [end for phase, _, end in bench.stand_ins[name].spans if phase == "B"]
    fill = 2 * bench.setup.places
    return (ends[-1] - ends[fill]) / (len(ends) - 1 - fill)


if __name__ == "__main__":
    as_rank(measured, lambda text: json.loads(text)["forward"] is None)
