"""One rank of ``pipeline_meshes.py``: a pipeline of two unequal meshes by every way of resharding, times them
round by round."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from pipeline_ranks import DEVICE, Awaited
from ranks import as_rank, interleaved, timed_together
from torch import Tensor

from benchmarks.baselines.reshard_unicast import Unicast, unicast_plan
from plait.core.cluster.hardware import Hosts
from plait.core.job.plan import Plan
from plait.core.model.spec import ModelSpec
from plait.core.parallel.layout import Layout
from plait.core.parallel.strategy import Strategy
from plait.core.reshard.layouts import Reshard, TensorLayout
from plait.core.reshard.plan import ReshardPlan
from plait.core.step.schedule import Transfer
from plait.core.step.schedules import Shape, generate
from plait.core.step.segments import SegmentGraph
from plait.core.step.step import Step, Workload
from plait.plan.make import assemble_plan
from plait.plan.reshard.boundary import Fabric
from plait.train.engine.courier import LaneCourier, Lanes
from plait.train.engine.inflight import BoundaryTensors, InFlight, MicroBatch
from plait.train.engine.pipeline import Courier, Delivery, PipelineExecutor

RATE = 1.25e8  # bytes per second of a host's link, as the lab has it


@dataclass(frozen=True)
class Setup:
    """What ``pipeline_meshes.py`` asks for. degrees: (dp, tp) of both stages. forward: seconds that it
    takes. boundary: [S, B, H]."""

    hosts: int
    ranks_per_host: int
    degrees: tuple[tuple[int, int], ...]
    layers: int
    levels: int
    micro_batches: int
    forward: float
    boundary: tuple[int, int, int]
    rounds: int

    def plan(self, schedule: str, boundary: tuple[int, int, int] | None = None) -> Plan:
        """The pipeline, its boundaries resharded by Plait's way."""
        sequence, batch, hidden = boundary or self.boundary
        spec = ModelSpec(
            family="utransformer" if self.levels else "gpt", levels=self.levels, num_layers=self.layers,
            hidden=hidden, num_heads=8, vocab=256, max_sequence=sequence, tied_embeddings=False,
        )  # fmt: skip
        workload = Workload(micro_batch=batch, num_micro_batches=self.micro_batches, sequence=sequence)
        order = generate(schedule, Shape(ranks=2, micro_batches=self.micro_batches))
        step = Step.of(spec, workload, Strategy(), Layout(self.degrees), order)
        return assemble_plan(step, Hosts(ranks_per_host=self.ranks_per_host, rate=RATE))


def by(plan: Plan, way: Unicast) -> Plan:
    """The same with its boundaries resharded by a published baseline."""

    def other(one: ReshardPlan) -> ReshardPlan:
        moved = Reshard(one.source, one.destination, one.shape, one.itemsize)
        return unicast_plan(moved, Fabric(hosts=one.hosts, rate=RATE), way=way)

    edges = {edge: {name: other(one) for name, one in named.items()} for edge, named in plan.reshards[False].items()}
    return replace(plan, reshards={False: edges})


class StandIn:
    """Takes the place of a stage's executor: every op is a wait, what it sends is this rank's part of tensors
    that every rank knows, a number higher each micro-batch."""

    def __init__(self, setup: Setup, plan: Plan, rank: int) -> None:
        pp_rank = plan.layout.pp_rank_of(rank)
        self.seconds, self.rank = setup.forward, rank
        self.device, self.recorder, self.shards = DEVICE, None, None
        self.graph = SegmentGraph(num_layers=1, embeds=pp_rank == 0, heads=pp_rank == 1)
        edges = plan.reshards[False]
        self.sends = {name: self._tile(one.source, one) for name, one in edges[pp_rank, 1 - pp_rank].items()}
        self.gets = {name: self._tile(one.destination, one) for name, one in edges[1 - pp_rank, pp_rank].items()}
        self.counts = {"F": 0, "B": 0}
        self.checking, self.checked = False, 0

    def _tile(self, layout: TensorLayout, plan: ReshardPlan) -> Tensor:
        whole = torch.arange(prod(plan.shape), dtype=torch.float32).reshape(plan.shape)
        return whole[layout.tile(self.rank, plan.shape).slices].clone()

    def begin(self, _batch: MicroBatch, entering: Mapping[str, Tensor] | None = None) -> InFlight:
        state = InFlight(BoundaryTensors(1))
        state.crossing.entering = dict(entering or {})
        return state

    def phase(self, phase: str, state: InFlight, **_turn: object) -> None:
        number = self.counts[phase]
        self.counts[phase] += 1
        crossing = state.crossing
        self._check(crossing.entering if phase == "F" else crossing.returning, number)
        time.sleep(self.seconds * {"F": 1, "B": 2}[phase])
        crossing.leaving = crossing.gradient = {name: tile + number for name, tile in self.sends.items()}

    def _check(self, came: Mapping[str, Tensor], number: int) -> None:
        for name, tile in came.items() if self.checking else ():
            if not torch.equal(tile, self.gets[name] + number):
                raise ValueError(f"{name} of micro-batch {number} brought rank {self.rank} something else")
            self.checked += 1

    def loss(self, _state: InFlight) -> Tensor:
        return torch.zeros((), dtype=torch.float64)

    def step_ended(self) -> None:
        self.counts = {"F": 0, "B": 0}


class OneNumber:
    """Sends a tensor of a number or two for each that should go: what is left is the order of things."""

    def __init__(self, small: LaneCourier, whole: LaneCourier) -> None:
        self.small, self.whole = small, whole

    def send(self, transfer: Transfer, tensors: Mapping[str, Tensor]) -> Delivery:
        """Of each name."""
        return self.small.send(transfer, self.small.tiles(transfer, receiving=False))

    def receive(self, transfer: Transfer) -> tuple[Mapping[str, Tensor], Delivery]:
        """Memory as large as the tensors would be, with nothing in it."""
        return self.whole.tiles(transfer, receiving=True), self.small.receive(transfer)[1]


def variants(setup: Setup, rank: int) -> tuple[dict[str, Callable[[], object]], StandIn]:
    """A step by every way, and the stand-in of all of them."""
    plan = setup.plan("1f1b")
    stand_in = StandIn(setup, plan, rank)
    two = max(dp for dp, _ in setup.degrees)
    small = setup.plan("1f1b", (1 << setup.levels, two, 8))

    def courier(one: Plan) -> LaneCourier:
        return LaneCourier(one.schedule, one.reshards[False], Lanes(one, rank, DEVICE))

    ours = courier(plan)
    nothing = torch.zeros(1, 1, dtype=torch.int64)
    batches = [MicroBatch(nothing, nothing, nothing[0], 1.0, 0)] * setup.micro_batches

    def step(schedule: str, courier: Courier) -> Callable[[], object]:
        made = setup.plan(schedule)
        pp_rank = made.layout.pp_rank_of(rank)
        pipeline = PipelineExecutor(made.schedule, made.names, pp_rank, {pp_rank: stand_in}, courier)  # type: ignore[dict-item]
        return lambda: pipeline.run(batches)

    return {
        "send/recv": step("1f1b", Awaited(courier(by(plan, "send_recv")))),
        "alpa": step("1f1b", Awaited(courier(by(plan, "alpa")))),
        "broadcast": step("1f1b", Awaited(ours)),
        "overlap": step("1f1b", ours),
        "eager": step("eager-1f1b", ours),
        "bound": step("eager-1f1b", OneNumber(courier(small), ours)),
    }, stand_in


def measured(rank: int, text: str) -> dict[str, Any]:
    """Seconds of a step by every way, and how many tensors were compared as they came, in the first round."""
    given = json.loads(text)
    degrees = tuple((dp, tp) for dp, tp in given["degrees"])
    setup = Setup(**given | {"degrees": degrees, "boundary": tuple(given["boundary"])})
    runs, stand_in = variants(setup, rank)

    def timed(name: str, number: int) -> float:
        stand_in.checking = number == 0 and name != "bound"
        return timed_together(runs[name])

    seconds = interleaved({name: partial(timed, name) for name in runs}, setup.rounds)
    checked = torch.tensor([stand_in.checked])
    dist.all_reduce(checked)
    return {"seconds": seconds, "transfer_s": predicted(setup), "checked": int(checked.item())}


def predicted(setup: Setup) -> dict[str, list[float]]:
    """Seconds in which all tensors cross, forward and backward, by way."""
    plan = setup.plan("1f1b")
    ways = {"send/recv": by(plan, "send_recv"), "alpa": by(plan, "alpa"), "broadcast": plan}
    return {
        way: [sum(each.predicted for each in one.reshards[False][edge].values()) * 1e-9 for edge in ((0, 1), (1, 0))]
        for way, one in ways.items()
    }


if __name__ == "__main__":
    as_rank(measured)
