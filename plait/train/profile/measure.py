"""A whole profile, part after part, each with its share of the seconds that are left."""

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
from plait.core.cluster.profile import Curve, Machine, ModuleTime, Overlap, Profile, by_module
from plait.core.model.precision import Precision
from plait.core.model.spec import ModelSpec
from plait.core.parallel.strategy import Strategy
from plait.core.step.orders.overlap import Load
from plait.core.step.seconds.segment_costs import SegmentCosts
from plait.train.comm.wire import NullWire, Wire
from plait.train.engine.executor import RankContext, make_executor
from plait.train.engine.feed import micro_batches
from plait.train.engine.gradients import Gradients
from plait.train.machine.device import RankDevice, torch_dtype
from plait.train.model.transformer import ModelCut, Transformer
from plait.train.profile.clock import Clock, slowest
from plait.train.profile.collectives import Lines, layouts, measure_collectives
from plait.train.profile.compute import measure_attention, measure_passes, measure_products
from plait.train.profile.overlaps import measure_overlaps
from plait.train.record.recorder import Recorder
from plait.train.tune.timing import RECORDED, mean_over_ranks, median_costs, recorded

SHARES = {"products": 0.15, "attention": 0.1, "memory": 0.05, "modules": 0.3, "collectives": 0.75}
"""Of the seconds that are left when a part begins; overlaps have the rest."""
USUAL = {
    "cpu": ModelSpec(family="gpt", num_layers=1, hidden=768, num_heads=12, vocab=8192, max_sequence=128),
    "cuda": ModelSpec(
        family="llama", num_layers=1, hidden=4096, num_heads=32, ffn_hidden=11008, vocab=8192, max_sequence=4096
    ),
}
"""The layer that is measured where no job says."""
BYTES_A_PARAMETER = 16
"""Weights, gradients, and what is alive while they are made."""


@dataclass(frozen=True)
class MeasureRequest:
    """What to measure. model: its shapes, and its sequences; none: a usual one's. batch: sequences of a
    micro-batch of one rank. nodes_per_minipod: 0 if there are no minipods."""

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
    """Called by all ranks at the same point; the same profile on all. deadline: by the monotonic clock.
    cores: of this node."""
    kind = device.torch_device.type
    precision: Precision = order.precision or ("fp32" if kind == "cpu" else "bf16-mixed")
    machine = machine_of(rank, device, cores)
    (crowd,) = slowest([machine.crowd])  # the same on all, since it decides what they do together
    clock = Clock(device, deadline, crowd)
    found = layouts(rank.world_size, rank.local_world_size, order.nodes_per_minipod)
    lines = Lines(device, rank.rank, found, rank.local_world_size) if found else None
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
    lines: Lines | None,
    device: RankDevice,
    clock: Clock,
    say: Callable[[str], object],
) -> list[ModuleTime]:
    """A layer on every rank alone, and one cut over the ranks of a node."""
    model = order.model or USUAL[device.torch_device.type]
    if replace(model, num_layers=1, levels=0).num_parameters * BYTES_A_PARAMETER > device.memory:
        say("a layer of this model has no room on a device; its modules are left out")
        return []
    wires = [None]
    if lines:
        inside = [at for at, layout in enumerate(lines.layouts) if layout.group.nodes == layout.group.stride == 1]
        wires += [lines.wires[at] for at in inside[-1:] if _cuts(model, lines.layouts[at].group.ranks, order.batch)]
    found: list[ModuleTime] = []
    for number, wire in enumerate(wires):
        say(f"modules of a layer, hidden {model.hidden}, tp = {wire.size if wire else 1}")
        found += measure_modules(device, model, order.batch, precision, wire, clock.part(1 / (len(wires) - number)))
    return found


def _cuts(model: ModelSpec, tp: int, batch: int) -> bool:
    """Whether the model can be cut over so many ranks."""
    try:
        Strategy(tp=tp).check(model, batch=batch, sequence=model.max_sequence)
    except JobError:
        return False
    return True


def machine_of(rank: RankEnv, device: RankDevice, cores: int) -> Machine:
    """What is measured."""
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
    """Ranks that want each core at the same time; the hosts of a lab are one machine."""
    ranks = rank.world_size if rank.lab else rank.local_world_size
    return max(1.0, ranks * torch.get_num_threads() / cores)


# ---- modules ----


SYNC = Strategy(overlap="sync")


def measure_modules(
    device: RankDevice, model: ModelSpec, batch: int, precision: Precision, wire: Wire | None, clock: Clock
) -> list[ModuleTime]:
    """One layer of the model, its embedding and its head, on ``batch`` sequences of its greatest length.
    wire: of the tensor-parallel group; none for a rank alone.

    Nothing is hidden, so that every op shows what it takes; collectives have spans of their own and are left
    out. A module's share of a recorded step is what ``plait.train.tune`` makes orders from as well.
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
    """By how much ops take longer than their spans say, where ranks share cores: a span of a few milliseconds
    has the core for itself or waits for it, and the median is one that did not wait. worked: of every run,
    what it took; nothing where spans are right."""
    if not worked:
        return 1.0
    return mean_over_ranks(SegmentCosts({"run": statistics.median(worked)}, {})).compute["run"] / sum(
        costs.compute.values()
    )
