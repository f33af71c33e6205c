"""Cross-mesh resharding and eager-1F1B: the paper's cases by Plait's model of NICs, and training by five
ways.

Seconds are modelled: 10 Gbit/s a host, each way, no latency, nothing lost inside a host. The paper prints
effective bandwidths as figures without values. Alpa's way is that of its code: each host's receivers get
a share and exchange within the host, where all receivers of a task are in one host; else the whole box to
every receiver.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise

from benchmarks.baselines.reshard_searches import ORDERS
from benchmarks.baselines.reshard_unicast import unicast
from benchmarks.papers import lab
from benchmarks.papers.found import Found, Row, Series
from benchmarks.papers.planned import Settings, command, planning, settings, stage_costs
from benchmarks.papers.verdicts import MEASURED, NOISE
from plait.core.reshard.layouts import Reshard, TensorLayout, UnitTask, unit_tasks
from plait.core.reshard.plan import ReshardPlan
from plait.core.step.clock.pipeline_clock import PipelineCosts, dry_run
from plait.core.step.schedule import Schedule
from plait.core.step.schedules import Shape, generate
from plait.plan.reshard.boundary import even_hosts, plan_reshard
from plait.plan.reshard.cost import Fabric

PAPER = "resharding"
RATE = 10e9 / 8
ONE = {"1 host, 1 GPU": (1, 1), "1 host, 2": (1, 2), "1 host, 3": (1, 3), "1 host, 4": (1, 4), "2 hosts, 2": (2, 2),
       "3 hosts, 2": (3, 2), "4 hosts, 2": (4, 2)}  # fmt: skip
CUBE = (1024, 1024, 512)
MANY = {
    "case 1": ("(2,4) S0 R R", "(2,4) S0 R R", CUBE), "case 2": ("(2,4) R R R", "(2,4) S0 R R", CUBE),
    "case 3": ("(2,4) R S0 R", "(2,4) S0 R R", CUBE), "case 4": ("(2,4) R S01 R", "(2,4) S01 R R", CUBE),
    "case 5": ("(2,4) S1 R R", "(2,4) S0 R R", CUBE), "case 6": ("(2,4) S0 R R", "(3,4) S0 R R", (3072, 1024, 170)),
    "cases 7 and 8": ("(1,4) S1 R R", "(2,4) R R R", CUBE), "case 9": ("(2,4) R S0 R", "(2,4) R R S0", CUBE),
}  # fmt: skip
"""Of the artifact's suite, in which 7 and 8 are one."""
INTS = 4
CHUNKS = 100
"""Of a broadcast from one device: the paper's K. Without latency the best would be as many as can be."""
NAMES = ("send/recv", "Alpa", "broadcast")


@dataclass(frozen=True)
class Moved:
    """A tensor between two meshes."""

    source: TensorLayout
    destination: TensorLayout
    shape: tuple[int, ...]
    itemsize: int
    fabric: Fabric

    @property
    def tasks(self) -> tuple[list[UnitTask], list[int]]:
        """Unit tasks and their bytes."""
        found = list(unit_tasks(self.source, self.destination, self.shape))
        return found, [task.box.elements * self.itemsize for task in found]

    def plan(self, order: str = "list") -> ReshardPlan:
        """Plait's, or another order."""
        moved = Reshard(self.source, self.destination, self.shape, self.itemsize)
        return plan_reshard(moved, self.fabric, order=order, search=ORDERS[order])

    def seconds(self, way: str) -> float:
        """By one of ``NAMES``."""
        if way == "broadcast":
            return self.plan().predicted * 1e-9
        return unicast(*self.tasks, self.fabric, way="send_recv" if way == "send/recv" else "alpa") * 1e-9


def _one(hosts: int, each: int) -> Moved:
    """1 GiB of one device, whole on every receiver."""
    source, destination = TensorLayout.parse("(1,1) R"), TensorLayout.parse(f"({hosts},{each})@1 R")
    where = (0, *(1 + rank // each for rank in range(hosts * each)))
    whole = INTS << 28
    fabric = Fabric(hosts=where, rate=RATE, min_chunk=whole // CHUNKS, max_chunk=whole // (CHUNKS - 1))
    return Moved(source, destination, (1 << 28,), INTS, fabric)


def _many(name: str) -> Moved:
    first, second, shape = MANY[name]
    source = TensorLayout.parse(first)
    destination = TensorLayout.parse(second, first_rank=len(source.ranks))
    hosts = even_hosts(len(source.ranks) + len(destination.ranks), 4)
    return Moved(source, destination, shape, INTS, Fabric(hosts=hosts, rate=RATE))


def _command(source: str, destination: str, shape: tuple[int, ...], *more: str) -> str:
    words = ["plait", "reshard", source, destination, f"shape={','.join(map(str, shape))}"]
    return shlex.join([*words, "dtype=int32", "nic=10gbit", "latency=0s", *more])


def one_to_many() -> Found:
    """Section 5.1.1."""
    rows: list[Row] = []
    points: dict[str, list[tuple[float | str, float]]] = {name: [] for name in NAMES}
    every = [_many(name) for name in MANY]
    for name, (hosts, each) in ONE.items():
        every.append(moved := _one(hosts, each))
        taken = {way: moved.seconds(way) for way in NAMES}
        for way, seconds in taken.items():
            points[way].append((name, round(8 * INTS * (1 << 28) / seconds / 1e9, 3)))
        rows.append(Row(name=name, value=round(taken["send/recv"] / taken["broadcast"], 2),
                        command=_command("(1,1) R", f"({hosts},{each}) R", (1 << 28,)),
                        note=f"over Alpa {taken['Alpa'] / taken['broadcast']:.2f}x"))  # fmt: skip
    orders = [[moved.seconds(way) for way in NAMES] for moved in every]
    behind = [b > (1 + NOISE) * a for each in orders for a, b in pairwise(each)]
    ahead = [any(each[at + 1] < (1 - NOISE) * each[at] for each in orders) for at in (0, 1)]
    rows.append(Row(name="send/recv, Alpa, broadcast: none behind the one before, each ahead somewhere, 15 cases",
                    value=all(ahead) and not any(behind)))  # fmt: skip
    return Found(rows=rows, series=[Series(name=name, points=own) for name, own in points.items()])


def many_to_many() -> Found:
    """Section 5.1.2."""
    rows: list[Row] = []
    points: dict[str, list[tuple[float | str, float]]] = {name: [] for name in NAMES}
    for name, (first, second, shape) in MANY.items():
        moved = _many(name)
        taken = {way: moved.seconds(way) for way in NAMES}
        for way, seconds in taken.items():
            points[way].append((name, round(16 / seconds, 3)))
        note = f"over send/recv {taken['send/recv'] / taken['broadcast']:.2f}x"
        rows.append(Row(name=name, value=round(taken["Alpa"] / taken["broadcast"], 2), note=note,
                        command=_command(first, second, shape, "ranks_per_host=4")))  # fmt: skip
    most = max(float(row.value) for row in rows)  # type: ignore[arg-type]
    rows.append(Row(name="the most", value=most))
    return Found(rows=rows, series=[Series(name=name, points=own) for name, own in points.items()])


def orders() -> Found:
    """Section 5.3.1: the naive order and load balance alone, over ours."""
    rows: list[Row] = []
    points: dict[str, list[tuple[float | str, float]]] = {"naive": [], "load_balance": [], "list": []}
    for name in MANY:
        moved = _many(name)
        taken = {order: moved.plan(order=order).predicted * 1e-9 for order in points}
        for order, seconds in taken.items():
            points[order].append((name, round(16 / seconds, 3)))
        note = f"load balance alone {taken['load_balance'] / taken['list']:.2f}x"
        rows.append(Row(name=name, value=round(taken["naive"] / taken["list"], 2), note=note))
    return Found(rows=rows, series=[Series(name=name, points=own) for name, own in points.items()])


TRAINED: dict[str, Settings] = {
    "GPT 2.6B, dp 2, tp 2, pp 2": (),
    "GPT 2.6B, dp 2, tp 1, pp 4": settings(strategy__tp=1, strategy__pp=4, train__micro_batch_size=4),
    "U-Transformer 1B, dp 2, tp 2, pp 2": settings(
        model__preset="utransformer-1b", train__global_batch_size=256, train__micro_batch_size=4,
        strategy__recompute="none"),
    "U-Transformer 1B, tp 4, pp 2": settings(
        model__preset="utransformer-1b", strategy__dp=1, strategy__tp=4, train__global_batch_size=256,
        train__micro_batch_size=8, strategy__recompute="none"),
}  # fmt: skip
WAYS: dict[str, tuple[str, str, bool]] = {
    "send/recv": ("send/recv", "1f1b", True), "Alpa": ("Alpa", "1f1b", True), "broadcast": ("broadcast", "1f1b", True),
    "overlap": ("broadcast", "1f1b", False), "eager": ("broadcast", "eager-1f1b", False), "signal": ("", "1f1b", False),
}  # fmt: skip
"""(how tensors cross, the schedule, whether a rank awaits what it sends). signal: nothing is sent, which no
way can pass."""


@cache
def trained(name: str) -> Mapping[str, float]:
    """Seconds of a step's pipeline by way."""
    asked = planning(PAPER, TRAINED[name])
    schedule, costs = stage_costs(asked)
    made = asked.planner.plan(asked.planner.job)
    crossing = made.reshards[made.strategy.sequence_parallel]
    edges = {
        way: {edge: sum(_crossed(plan, way) for plan in crossing[edge].values()) for edge in costs.edges}
        for way in NAMES
    }
    return {way: _simulated(schedule, replace(costs, edges=edges.get(sent, {})), order, awaited)
            for way, (sent, order, awaited) in WAYS.items()}  # fmt: skip


def _crossed(plan: ReshardPlan, way: str) -> float:
    """One tensor over one boundary."""
    fabric = Fabric(hosts=plan.hosts, rate=RATE)
    return Moved(plan.source, plan.destination, plan.shape, plan.itemsize, fabric).seconds(way)


def _simulated(schedule: Schedule, costs: PipelineCosts, order: str, awaited: bool) -> float:
    """awaited: a stage is busy until what it has made is with the next one."""
    stages = range(schedule.num_stages)
    if awaited:
        sent = [costs.edges.get((stage, stage + 1), 0.0) for stage in (-1, *stages)]
        costs = PipelineCosts(
            tuple(costs.forward[at] + sent[at + 1] for at in stages),
            tuple(costs.input_gradient[at] + sent[at] for at in stages), costs.weight_gradient,
        )  # fmt: skip
    shape = Shape(ranks=len(schedule.ranks), micro_batches=schedule.num_micro_batches)
    return dry_run(generate(order, shape), costs).makespan


def training() -> Found:
    """Section 5.2."""
    rows: list[Row] = []
    eager: list[bool] = []
    for name in TRAINED:
        taken = trained(name)
        left = taken["overlap"] > (1 + NOISE) * taken["signal"]  # else there is nothing for eager to hide
        ahead = taken["overlap"] / taken["eager"]
        eager.append(ahead > 1 + NOISE if left else ahead > 1 - NOISE)
        note = ", ".join(f"{way} {taken['signal'] / taken[way]:.0%} of signal" for way in WAYS if way != "signal")
        rows.append(Row(name=name, value=round(taken["Alpa"] / taken["eager"], 3), note=note,
                        command=command(PAPER, TRAINED[name], "--evaluate")))  # fmt: skip
    gains = [float(row.value) for row in rows]  # type: ignore[arg-type]
    rows += [
        Row(name="eager-1F1B ahead of overlap, wherever overlap leaves something, four jobs", value=all(eager)),
        Row(name="the least of U-Transformer over the most of GPT", value=min(gains[2:]) > max(gains[:2]) + NOISE),
    ]
    return Found(rows=rows)


def on_lab(*, again: bool) -> Found:
    """Five hosts of two ranks behind 1 Gbit/s: the paper's cases scaled to hosts of two, and pipelines of
    two."""
    found = lab.measured("reshard", again=again)["cases"]
    rows: list[Row] = []
    points: dict[str, list[tuple[float | str, float]]] = {}
    for name, case in found.items():
        variants = case["variants"]
        low, high = variants["ours"]["spread"]
        note = f"ours {low:.3f} to {high:.3f} s, {variants['ours']['of_bound']:.0%} of the link"
        value = round(variants["send/recv"]["over_ours"], 2)
        rows.append(Row(name=name, value=value, command=lab.shown("reshard"), note=note))
        for way, one in variants.items():
            points.setdefault(way, []).append((name, round(one["bytes_per_second"] * 8 / 1e9, 3)))
    for name, case in lab.measured("alpa", again=again)["cases"].items():
        alpa = case["variants"]["Alpa"]
        low, high = alpa["spread"]
        rows.append(Row(name=f"{name}, over Alpa", value=round(alpa["over_ours"], 2), command=lab.shown("alpa"),
                        note=f"Alpa {low:.3f} to {high:.3f} s"))  # fmt: skip
        points.setdefault("Alpa", []).append((name, round(alpa["bytes_per_second"] * 8 / 1e9, 3)))
    pipelines = {one["case"]: one for one in lab.measured("pipeline", again=again)["cases"]}
    ahead: list[bool] = []
    for case, name in (("gpt", "GPT"), ("u", "U-Transformer")):
        variants = pipelines[case]["variants"]
        gain = variants["1f1b_overlap"]["seconds"] / variants["eager"]["seconds"]
        ahead.append(gain > 1 + MEASURED)
        rows.append(Row(name=f"eager over overlap, {name}", value=round(gain, 3), command=lab.shown("pipeline"),
                        note=f"{pipelines[case]['rounds']} rounds"))  # fmt: skip
    rows.append(Row(name="eager ahead of overlap, GPT and U-Transformer", value=all(ahead)))
    return Found(rows=rows, series=[Series(name=name, points=own) for name, own in points.items()],
                 facts={"measured": lab.dates("reshard", "alpa", "pipeline")})  # fmt: skip


def meshes_on_lab(*, again: bool) -> Found:
    """Two stages on meshes that differ, trained by every way; eager over Alpa's."""
    rows: list[Row] = []
    found = lab.measured("meshes", again=again)
    for name, case in found["cases"].items():
        model, meshes = name.split()
        ways = case["ways"]
        low, high = ways["eager"]["spread"]
        note = ", ".join(f"{way} {one['of_bound']:.0%} of bound" for way, one in ways.items() if way != "bound")
        name = f"{'GPT' if model == 'gpt' else 'U-Transformer'}, {meshes}"
        rows.append(Row(name=name, command=lab.shown("meshes"), value=round(ways["eager"]["over_alpa"], 2),
                        note=f"{note}; eager {low:.2f} to {high:.2f} s"))  # fmt: skip
    return Found(rows=rows, facts={"measured": lab.dates("meshes"), "rounds": found["rounds"]})


EMULATED: dict[str, Callable[..., Found]] = {"emulated": on_lab, "emulated-meshes": meshes_on_lab}
FIGURES: dict[str, Callable[[], Found]] = {
    "one-to-many": one_to_many, "many-to-many": many_to_many, "orders": orders, "training": training,
}  # fmt: skip
