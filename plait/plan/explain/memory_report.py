"""Memory report of one strategy: what fills each device, when in a step, and how probable it is
that it fits.

The report is as exact as ``step.memory.estimate``, which traces the instruction lists of every pp
rank. ``closed_report`` uses the closed form instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from statistics import NormalDist
from typing import Any

import numpy as np

from plait.core.base.errors import InfeasiblePlan
from plait.core.base.text import in_bytes
from plait.core.cluster.efficiency import Overhead
from plait.core.cluster.hardware import Cluster
from plait.core.job.constraint import NO_MARGIN, Margin
from plait.core.job.spec import Job
from plait.core.model.spec import ModelSpec
from plait.core.parallel.sharding import Sharding
from plait.core.step.columns.points import StrategyTable
from plait.core.step.memory.closed_memory import device_overhead, step_memory, usable
from plait.core.step.memory.estimate import Estimate, Memory, PipelineRankEstimate, estimate
from plait.core.step.memory.memory_options import MemoryOptions
from plait.core.step.step import Step
from plait.plan.make import job_step
from plait.plan.search.fits import MEMORY_KINDS, advice, by_kind
from plait.plan.search.needs import P90, memory_deviation
from plait.plan.search.request import margin_of


@dataclass(frozen=True)
class DeviceMemory:
    """Memory of each device of one pp rank, in bytes. estimate: tensors by kind. overhead: memory
    that holds no tensors. deviation: standard deviation of the total."""

    estimate: PipelineRankEstimate
    overhead: int
    deviation: float = 0.0

    @staticmethod
    def of(
        estimate: PipelineRankEstimate, overhead_bytes: int, overhead: Overhead, doubted: float = 0.0
    ) -> DeviceMemory:
        """Return the memory of a pp rank with its deviation. overhead_bytes: bytes that hold no
        tensors; doubted: as in ``MemoryColumns``."""
        moving = estimate.memory.activations + estimate.memory.buffers
        lasting = estimate.memory.total - moving
        sizes = (np.array(float(size)) for size in (lasting, moving, overhead_bytes, doubted))
        return DeviceMemory(estimate, overhead_bytes, float(memory_deviation(overhead, *sizes)))

    @property
    def total(self) -> int:
        """Bytes of tensors and overhead."""
        return self.estimate.memory.total + self.overhead

    @property
    def band(self) -> tuple[int, int]:
        """p10 and p90 of ``total``, in bytes."""
        return int(self.total - P90 * self.deviation), int(self.total + P90 * self.deviation)


@dataclass(frozen=True)
class MemoryReport:
    """Memory of all pp ranks. usable: bytes of a device that a plan may fill. margin: the part of
    them that must stay free."""

    pp_ranks: tuple[DeviceMemory, ...]
    usable: int
    margin: Margin = NO_MARGIN

    @property
    def fullest(self) -> DeviceMemory:
        """The pp rank with the fullest devices; the first one if equal."""
        return max(self.pp_ranks, key=lambda each: each.total)

    @property
    def fits(self) -> bool:
        """True if every device can hold its predicted memory."""
        return self.fullest.total <= self.usable

    @property
    def safe(self) -> bool:
        """True if every device also keeps its margin free."""
        return all(each.total + self.kept(each) <= self.usable for each in self.pp_ranks)

    def kept(self, device: DeviceMemory) -> int:
        """Return the bytes that must stay free on each device of a pp rank."""
        return int(self.margin.reserved_bytes(device.deviation, self.usable))

    @property
    def likely(self) -> float:
        """Probability that the plan fits: the minimum over pp ranks, whose errors are taken as
        fully correlated."""
        return min(_probability(self.usable - each.total, each.deviation) for each in self.pp_ranks)

    @property
    def summary(self) -> str:
        """A phrase for messages: how full the fullest device is, how much is free, and the
        probability that this is enough."""
        full, margin = self.fullest, self.margin
        room, kept = self.usable - full.total, in_bytes(self.kept(full))
        free = f"{in_bytes(room)} stay free" if room >= 0 else f"{in_bytes(-room)} too much"
        told = f"fills {in_bytes(full.total)} of {in_bytes(self.usable)}, {free}: {percent(self.likely)} sure to fit"
        if margin.reserved_bytes(1.0, 1.0):
            return f"{told} ({kept} must stay free, {margin.reason}{'' if self.safe else ': more than do'})"
        return f"{told}, {percent(1 - self.likely)} to run out of memory"

    def description(self, *, gpu: bool) -> str:
        """Return a sentence on the fullest device: bytes of tensors and of the process, and the
        probability to fit. gpu: True for GPUs."""
        full, (device, process) = self.fullest, ("GPU", "CUDA and NCCL") if gpu else ("rank", "the process")
        each, unit = unit_of(full.total)
        sizes = (full.total, self.usable, full.estimate.memory.total, full.overhead)
        total, most, tensors, beside = (f"{size / each:,.{int(unit == 'GiB')}f}" for size in sizes)
        missed = "" if self.safe else ", less than plan.memory_margin asks of a search"
        return (
            f"Memory of strategy 1 on the fullest {device}: {total} of {most} {unit} ({tensors} tensors, {beside} "
            f"{process}); it fits with a chance of {percent(self.likely)}{missed}."
        )

    @property
    def describe_crowded(self) -> str:
        """A sentence on a strategy that fits, but leaves less memory free than its margin."""
        kept = f"{in_bytes(self.kept(self.fullest))} must stay free, {self.margin.reason}"
        return f"The strategy leaves too little memory free: it {self.summary}: {kept}"

    def describe_too_large(self, device: str) -> str:
        """Return a sentence on a strategy that does not fit. device: the device's name."""
        fullest = self.fullest
        more = f"{in_bytes(fullest.total - self.usable)} more than the {in_bytes(self.usable)} of {device}"
        what = by_kind(asdict(fullest.estimate.memory))
        return (
            f"The strategy does not fit: a rank with pp rank {fullest.estimate.index} needs "
            f"{in_bytes(fullest.total)} ({what}, beside tensors {in_bytes(fullest.overhead)}), {more} that a plan may "
            "fill."
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        low, high = self.fullest.band
        return {
            "usable_memory": self.usable,
            "memory_p10": low,
            "memory_p90": high,
            "memory_kept_free": self.kept(self.fullest),
            "probability_to_fit": self.likely,
        }

    def rows(self) -> Iterator[tuple[str, ...]]:
        """Yield the rows of a table: the header, then one row for each pp rank."""
        yield "pp rank", "layers", *MEMORY_KINDS, "overhead", "total", "p10-p90", "of device", "fullest"
        for each in self.pp_ranks:
            memory, tensors = each.estimate.memory, each.estimate
            sizes = [getattr(memory, kind) for kind in MEMORY_KINDS]
            layers = "+".join(str(count) for count in tensors.layers.values())
            alive = f", {memory.alive} micro-batches alive" if memory.alive > 1 else ""
            share = f"{each.total / self.usable:.0%}"
            words = [in_bytes(size) for size in (*sizes, each.overhead, each.total)]
            words.append("-".join(map(in_bytes, each.band)))
            yield str(tensors.index), layers, *words, share, memory.when + alive


def estimate_on(step: Step, cluster: Cluster, *, traffic: bool = True) -> Estimate:
    """Return the memory and traffic of a step on a cluster's devices. traffic: as in
    ``estimate``."""
    return estimate(step, gpu=cluster.device.kind == "cuda", traffic=traffic)


def memory_report(
    step: Step, cluster: Cluster, margin: Margin = NO_MARGIN, known_estimate: Estimate | None = None
) -> MemoryReport:
    """Return the memory of a strategy on a cluster's devices; the rank with the largest share
    represents its pp rank.

    known_estimate: the step's ``estimate_on`` the cluster, if the caller has it already.
    """
    known_estimate, overhead = known_estimate or estimate_on(step, cluster, traffic=False), cluster.overhead
    moving = [each.memory.activations + each.memory.buffers for each in known_estimate.places]
    strategy, pp = step.strategy, len(known_estimate.places)
    points = StrategyTable.of([
        {"pp": pp, "dp": each.dp, "cp": each.cp, "ring": strategy.ring, "tp": each.tp, **_factors(sharding)}
        for each, sharding in zip(known_estimate.places, step.shardings, strict=True)
    ])  # fmt: skip
    extra = device_overhead(overhead, points, np.array(moving, dtype=np.float64))
    devices = tuple(
        DeviceMemory.of(each, int(more), overhead) for each, more in zip(known_estimate.places, extra, strict=True)
    )
    return MemoryReport(devices, int(usable(cluster.device, overhead)), margin)


def check_fits_on(job: Job, report: MemoryReport, vocab: int, cluster: Cluster) -> None:
    """Raise InfeasiblePlan if the job's ranks need more memory than the cluster's devices have. The
    message says how much is missing, and the nearest change that would fit."""

    def fits(other: Job) -> bool:
        return memory_report(job_step(other, vocab), cluster).fits

    if not report.fits:
        instead = advice(job, vocab, fits, own_devices=True)
        raise InfeasiblePlan(f"{report.describe_too_large(cluster.device.name)} {instead}")


def _probability(room: float, deviation: float) -> float:
    """Return the probability that the prediction's error is at most ``room`` bytes. deviation: of
    the error, in bytes."""
    return NormalDist().cdf(room / deviation) if deviation > 0 else float(room >= 0)


def percent(share: float) -> str:
    """Return a probability as text; values near 0 or 1 do not round to certainty.

    >>> percent(0.9), percent(0.9996), percent(0.0004)
    ('90%', 'over 99.9%', 'under 0.1%')
    """
    if share > 0.999:
        return "over 99.9%"
    if share < 0.001:
        return "under 0.1%"
    return f"{share:.0%}" if 0.01 <= share <= 0.99 else f"{share:.1%}"


def unit_of(size: int) -> tuple[int, str]:
    """Return (bytes of a unit, its name) in which tables and sentences give a size: GiB, or MiB for
    less than a GiB."""
    return (1 << 30, "GiB") if size >= 1 << 30 else (1 << 20, "MiB")


def _factors(sharding: Sharding) -> dict[str, int]:
    return {name: getattr(sharding, name) for name in ("params", "grads", "optim", "secondary")}


# ---- in closed form ----


def closed_report(
    model: ModelSpec, point: Mapping[str, int], cluster: Cluster, job: Job, options: MemoryOptions
) -> MemoryReport:
    """Return the memory of the fullest pp rank, the only one that the closed form knows. options:
    of the runtime. Traffic is not counted."""
    found = step_memory(
        model, StrategyTable.of([point]), sequence=job.data.sequence_length, precision=job.train.precision,
        options=options, overhead=cluster.overhead,
    )  # fmt: skip

    def size(kind: str) -> int:
        whole = getattr(found, kind)[0]
        return int(whole) if np.isfinite(whole) else 1 << 62

    kinds = ("parameters", "gradients", "optimizer", "buffers", "activations")
    memory = Memory(**{kind: size(kind) for kind in kinds}, when="the fullest moment", alive=1)
    index, each = int(found.pp_rank[0]), point["dp"] * point["cp"] * point["tp"]
    fullest = PipelineRankEstimate(
        index=index, ranks=(index * each, (index + 1) * each - 1), dp=point["dp"], cp=point["cp"], tp=point["tp"],
        layers={index: -(-model.num_layers // point["pp"])}, share=point["micro"], memory=memory, sent={},
    )  # fmt: skip
    filled = DeviceMemory.of(fullest, size("overhead"), cluster.overhead, size("doubted"))
    return MemoryReport((filled,), int(usable(cluster.device, cluster.overhead)), margin_of(job, cluster))
