"""Measure a whole profile, part after part, each with a share of the remaining seconds. Or measure
collectives by the number of minipods that their groups span, and the interference of groups that
share the network between minipods."""

from __future__ import annotations

import datetime
import platform
import socket
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version

import torch

from plait import __version__
from plait.core.base.env import RankEnv
from plait.core.base.errors import JobError
from plait.core.cluster.network import Interference, PlacementProfile
from plait.core.cluster.profile import CollectiveKind, Curve, Group, Machine, ModuleTime, Overlap, Profile, by_module
from plait.core.model.precision import Precision
from plait.core.model.spec import ModelSpec
from plait.core.parallel.strategy import Strategy
from plait.core.step.orders.overlap import Load
from plait.core.step.orders.segment_costs import SegmentCosts
from plait.train.comm.tree import largest
from plait.train.comm.wire import NullWire, Wire
from plait.train.engine.executor import RankContext, make_executor
from plait.train.engine.feed import micro_batches
from plait.train.engine.gradients import Gradients
from plait.train.machine.device import RankDevice, torch_dtype
from plait.train.model.transformer import ModelCut, Transformer
from plait.train.profile.collectives import (
    Channels,
    EqualGroups,
    Operation,
    layouts,
    measure_collectives,
    measure_overlaps,
)
from plait.train.profile.compute import measure_attention, measure_passes, measure_products
from plait.train.record.recorder import Recorder
from plait.train.tune.timing import RECORDED, Clock, mean_over_ranks, median_costs, recorded

SHARES = {"products": 0.15, "attention": 0.1, "memory": 0.05, "modules": 0.3, "collectives": 0.75}
"""Shares of the seconds that remain when a part begins; overlaps get what is left."""
USUAL = {
    "cpu": ModelSpec(family="gpt", num_layers=1, hidden=768, num_heads=12, vocab=8192, max_sequence=128),
    "cuda": ModelSpec(
        family="llama", num_layers=1, hidden=4096, num_heads=32, ffn_hidden=11008, vocab=8192, max_sequence=4096
    ),
}
"""The layer to measure if no job gives one."""
BYTES_A_PARAMETER = 16
"""Bytes per parameter: weights, gradients, and temporaries."""


@dataclass(frozen=True)
class MeasureRequest:
    """The scope of a measurement. model: its shapes, at its longest sequence; None: a usual
    model's. batch: sequences in a micro-batch of one rank. nodes_per_minipod: 0 if there are no
    minipods."""

    seconds: float
    precision: Precision | None = None
    model: ModelSpec | None = None
    batch: int = 1
    nodes_per_minipod: int = 0


def measure_profile(
    order: MeasureRequest,
    rank: RankEnv,
    device: RankDevice,
    *,
    deadline: float,
    cores: int,
    say: Callable[[str], object],
) -> Profile:
    """Measure a profile. Called by all ranks at the same point; returns the same profile on all.
    deadline: in seconds of the monotonic clock. cores: cores of this node."""
    kind = device.torch_device.type
    precision: Precision = order.precision or ("fp32" if kind == "cpu" else "bf16-mixed")
    machine = machine_of(rank, device, cores)
    (crowd,) = largest([machine.crowd])  # the same on all ranks, since it decides the collective measurements
    clock = Clock(device, deadline, crowd)
    found = layouts(rank.world_size, rank.local_world_size, order.nodes_per_minipod)
    lines = Channels(device, rank.rank, found, rank.local_world_size) if found else None
    products = measure_products(device, precision, order.model, clock.part(SHARES["products"]), say)
    attention = measure_attention(device, precision, clock.part(SHARES["attention"]), say)
    passes = measure_passes(device, clock.part(SHARES["memory"]), say)
    modules = _modules(order, precision, lines, device, clock.part(SHARES["modules"]), say)
    curves: list[Curve] = []
    overlaps: list[Overlap] = []
    if lines:
        curves = measure_collectives(lines, clock.part(SHARES["collectives"]), torch_dtype(precision), say)
        overlaps = measure_overlaps(lines, products, precision, clock, say)
        lines.close()
    return Profile(
        machine=machine.model_copy(update={"crowd": crowd}),
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        versions={
            "plait": __version__,
            "python": platform.python_version(),
            "torch": version("torch"),
            **device.versions,
        },
        collectives=tuple(curves),
        modules=tuple(modules),
        products=tuple(products),
        attention=tuple(attention),
        passes=tuple(passes),
        overlaps=tuple(overlaps),
    )


def _modules(
    order: MeasureRequest,
    precision: Precision,
    lines: Channels | None,
    device: RankDevice,
    clock: Clock,
    say: Callable[[str], object],
) -> list[ModuleTime]:
    """Measure a layer on every rank alone, and one sharded over the ranks of a node."""
    model = order.model or USUAL[device.torch_device.type]
    if replace(model, num_layers=1, levels=0).num_parameters * BYTES_A_PARAMETER > device.memory:
        say("a layer of this model does not fit on a device; its modules are not measured")
        return []
    wires = [None]
    if lines:
        inside = [at for at, layout in enumerate(lines.layouts) if layout.group.nodes == layout.group.stride == 1]
        wires += [lines.wires[at] for at in inside[-1:] if _cuts(model, lines.layouts[at].group.ranks, order.batch)]
    found: list[ModuleTime] = []
    for wire, budget in clock.shares(wires):
        say(f"modules of a layer, hidden {model.hidden}, tp = {wire.size if wire else 1}")
        found += measure_modules(device, model, order.batch, precision, wire, clock.of(budget))
    return found


def _cuts(model: ModelSpec, tp: int, batch: int) -> bool:
    """Return True if the model can be sharded over ``tp`` ranks."""
    try:
        Strategy(tp=tp).check(model, batch=batch, sequence=model.max_sequence)
    except JobError:
        return False
    return True


def machine_of(rank: RankEnv, device: RankDevice, cores: int) -> Machine:
    """Return a description of the measured machine."""
    return Machine(
        name=f"lab {rank.lab}" if rank.lab else socket.gethostname(),
        device=device.name,
        kind="cpu" if device.torch_device.type == "cpu" else "cuda",
        memory=device.memory // device.sharing(rank.local_world_size),
        cores=cores,
        ranks=rank.world_size,
        ranks_per_node=rank.local_world_size,
        backend=device.backend,
        crowd=_crowd(rank, cores) if device.torch_device.type == "cpu" else 1.0,
    )


def _crowd(rank: RankEnv, cores: int) -> float:
    """Return the number of threads of ranks for each core of a machine, at least 1. All hosts of a
    lab are one machine."""
    ranks = rank.world_size if rank.lab else rank.local_world_size
    return max(1.0, ranks * torch.get_num_threads() / cores)


# ---- modules ----


SYNC = Strategy(overlap="sync")


def measure_modules(
    device: RankDevice, model: ModelSpec, batch: int, precision: Precision, wire: Wire | None, clock: Clock
) -> list[ModuleTime]:
    """Measure one layer of the model, its embedding and its head, on ``batch`` sequences of maximum
    length. wire: of the tensor-parallel group; None for a rank alone.

    Nothing overlaps, so that every op shows its full time; collectives have their own spans and are
    excluded. ``plait.train.tune`` derives its orders from the same shares of a recorded step.
    """
    tp, at = (wire.size, wire.rank) if wire else (1, 0)
    family = "gpt" if model.levels else model.family  # a utransformer's layers are gpt's
    spec = replace(model, family=family, levels=0, num_layers=1, dropout=0.0, attention_dropout=0.0)
    strategy, length = replace(SYNC, tp=tp), spec.max_sequence
    share = Transformer(spec, strategy, ModelCut(tp_rank=at), dtype=torch_dtype(precision), device=device.torch_device)
    recorder = Recorder(device)
    executor = make_executor(
        share,
        strategy,
        recorder.over(wire, range(tp), "tp") if wire else NullWire(),
        Load(batch, length),
        RankContext(device, recorder),
        gradients=Gradients(share),
    )
    tokens = torch.randint(0, spec.vocab, (batch, length), generator=torch.Generator().manual_seed(0))
    (micro_batch,) = micro_batches(tokens, tokens, torch.arange(batch), batch, 0)
    clock.once(lambda: executor.run(micro_batch))
    took = clock.once(lambda: executor.run(micro_batch))
    worked = list[float]()

    def run() -> None:
        with clock.work() as seconds:
            executor.run(micro_batch)
        worked.extend(seconds)

    costs = median_costs(recorded(run, recorder, max(2, min(RECORDED, int(clock.left() / took)))))
    share_of = _of_the_work(costs, worked)
    shape = {
        "family": spec.family,
        "hidden": spec.hidden,
        "heads": spec.num_heads,
        "kv_heads": spec.num_kv_heads,
        "ffn": spec.ffn_hidden,
        "vocab": spec.vocab,
        "batch": batch,
        "sequence": length,
        "tp": tp,
        "precision": precision,
    }
    return [
        ModuleTime.model_validate({"site": site, "phase": phase, "seconds": share_of * seconds, **shape})
        for (site, phase), seconds in by_module(costs.compute).items()
    ]


def _of_the_work(costs: SegmentCosts, worked: Sequence[float]) -> float:
    """Return the factor by which ops take longer than their spans if ranks share cores. A span of a
    few milliseconds either has the core to itself or waits for it, and the median is one that did
    not wait. worked: measured seconds of every run; empty if spans are right."""
    if not worked:
        return 1.0
    return mean_over_ranks(SegmentCosts({"run": statistics.median(worked)}, {})).compute["run"] / sum(
        costs.compute.values()
    )


MEASURED_KINDS: tuple[CollectiveKind, ...] = ("all_reduce", "all_gather", "reduce_scatter", "send")
SHARE = 0.75
"""The share of the time for collectives; the rest is for interference."""


def spread_layouts(world: int, per_node: int, nodes_per_minipod: int) -> list[EqualGroups]:
    """Return groups of 2, 4, 8, ... ranks that are spread evenly over 1, 2, 4, ... minipods and
    cover the world. Neighbours in a group are on different nodes, as in a DP group.

    >>> [(one.groups, one.group.minipods) for one in spread_layouts(4, 1, 2)][:2]
    [(((0, 1), (2, 3)), 1), (((0, 2), (1, 3)), 2)]
    """
    each = per_node * nodes_per_minipod
    pods = world // each
    # Ranks of each minipod, ordered by local rank, then by node.
    inside = [
        [pod * each + node * per_node + local for local in range(per_node) for node in range(nodes_per_minipod)]
        for pod in range(pods)
    ]
    found: list[EqualGroups] = []
    ranks = 2
    while ranks <= world:
        spread = 1
        while spread <= min(ranks, pods):
            part = ranks // spread
            if pods % spread == 0 and each % part == 0:
                groups = tuple(
                    tuple(sorted(r for pod in range(first, first + spread) for r in inside[pod][at : at + part]))
                    for first in range(0, pods, spread)
                    for at in range(0, each, part)
                )
                group = Group.of(groups[0], per_node, nodes_per_minipod=nodes_per_minipod, at_once=len(groups))
                found.append(EqualGroups(groups, group))
            spread *= 2
        ranks *= 2
    return found


def measure_spreads(
    nodes_per_minipod: int,
    rank: RankEnv,
    device: RankDevice,
    *,
    deadline: float,
    cores: int,
    say: Callable[[str], object],
) -> PlacementProfile:
    """Measure a placement profile. Called by all ranks at the same point; returns the same profile
    on all. Raises JobError unless the nodes form at least two whole minipods."""
    nodes = rank.world_size // rank.local_world_size
    if nodes_per_minipod < 1 or nodes % nodes_per_minipod or nodes == nodes_per_minipod:
        raise JobError(
            f"{nodes} nodes are not several minipods of {nodes_per_minipod}", key="nodes_per_minipod",
            fix="Use a divisor of the nodes, smaller than they are",
        )  # fmt: skip
    clock = Clock(device, deadline)
    found = spread_layouts(rank.world_size, rank.local_world_size, nodes_per_minipod)
    lines = Channels(device, rank.rank, found, rank.local_world_size)
    dtype = torch_dtype("fp32" if device.torch_device.type == "cpu" else "bf16-mixed")
    curves = measure_collectives(lines, clock.part(SHARE), dtype, say, kinds=MEASURED_KINDS)
    sides = _interference(lines, clock, say, {(one.kind, str(one.group)): one.points[-1].bytes for one in curves})
    lines.close()
    return PlacementProfile(
        machine=machine_of(rank, device, cores),
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        versions={"plait": __version__, "python": platform.python_version(), "torch": version("torch")}
        | device.versions,
        nodes_per_minipod=nodes_per_minipod,
        collectives=tuple(curves),
        interference=tuple(sides),
    )


def _interference(
    lines: Channels, clock: Clock, say: Callable[[str], object], sizes: dict[tuple[str, str], int]
) -> list[Interference]:
    """Measure every second group of a layout alone, then all groups together. The layouts are those
    of pairs across nodes, which load links most."""
    wanted = [
        (at, layout)
        for at, layout in enumerate(lines.layouts)
        if layout.group.ranks == 2 and layout.group.nodes > 1 and len(layout.groups) > 1
    ]
    found: list[Interference] = []
    for (at, layout), budget in clock.shares(wanted):
        size = sizes["all_reduce", str(layout.group)]
        say(f"two jobs side by side, all_reduce of {size >> 10} KiB, {layout.group}")
        own = lines.operation("all_reduce", at, size, torch_dtype("fp32"))
        first = any(lines.rank in group for group in layout.groups[::2])
        quiet = Operation(own.bytes, lambda: None)
        alone = clock.sample((own if first else quiet).run, budget / 2, together=True)
        both = clock.sample(own.run, budget / 2, together=True)
        found.append(
            Interference(
                kind="all_reduce", group=layout.group, bytes=own.bytes, alone=alone.seconds, together=both.seconds
            )
        )
    return found
