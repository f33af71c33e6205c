"""A job that was checked and not started: what it takes of every rank, as tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from plait.core.base.text import Column, Part, Shown, Table, in_bytes
from plait.core.job.plan import By, told_by
from plait.core.step.memory.estimate import Estimate, PlaceEstimate
from plait.plan.fits import KINDS

if TYPE_CHECKING:
    from plait.api.places.base import LaunchTarget
    from plait.core.base.passed_over import Checked
    from plait.core.cluster.hardware import Cluster
    from plait.core.job.spec import Job
    from plait.core.step.step import Step
    from plait.plan.fits import Room
    from plait.plan.memory_report import MemoryReport

SHOWN = 6
"""Places; of more, the first, the last and the most loaded."""
HEADS = ("params", "grads", "optim", "buffers", "activ.")
AXES = {
    "tp": ("tensor parallelism", "tp"),
    "rows": ("embedding rows, at most", "rows"),
    "copies": ("copies over tp, at most", ""),
    "ulysses": ("attention heads (Ulysses)", "ulysses"),
    "ring": ("keys and values (ring)", "ring"),
    "params": ("sharded parameters", "dp"),
    "secondary": ("their second copy", "dp"),
    "grads": ("sharded gradients", "dp"),
    "optim": ("optimizer shards", "dp"),
    "replicas": ("gradients over replicas", "dp"),
    "pp": ("between stages", "pp"),
    "tied": ("tied embeddings", ""),
    "matrices": ("matrices for Muon, the mean rank", "matrices"),
}
"""What is sent on an axis, and which one it is hidden with."""


class DryMemory(NamedTuple):
    """Memory of a strategy, and what it is compared with: the devices of the cluster that the job names
    (``report``), or else this machine (``room``); neither where nothing is known of where ranks run.
    starts_here: whether ranks would start on this machine."""

    estimate: Estimate
    room: Room | None = None
    report: MemoryReport | None = None
    cluster: Cluster | None = None
    starts_here: bool = False

    @property
    def fits(self) -> bool | None:
        """Whether all ranks fit; None where nobody knows."""
        if self.report:
            return self.report.fits
        return self.room.holds(self.estimate) if self.room else None

    @property
    def available(self) -> dict[str, Any] | None:
        """Bytes a rank has, for JSON; of a cluster's device also what the fullest fills of it."""
        if self.report and self.cluster:
            fullest = {"per_rank": self.report.usable, "fullest": self.report.fullest.total}
            return {"device": self.cluster.device.name, **fullest, **self.report.to_dict()}
        there = self.room
        return {"per_rank": there.each or there.shared // self.estimate.world_size} if there else None

    @property
    def told(self) -> str:
        """What is available, and whether it is enough."""
        found, there = self.estimate, self.room
        if self.report and self.cluster:
            start = ". Only a start compares with this machine" if self.starts_here else ""
            return f"on {self.cluster.device.name} it {self.report.told}{start}"
        if there is None:
            return "available: not known here, so nothing was checked"
        verdict = "fits" if self.fits else "does not fit"
        if there.each:
            return f"available: {in_bytes(there.each)} on {there.what}: {verdict}"
        needed = f"tensors of all ranks take {in_bytes(found.bytes)}: {verdict}"
        return f"available: {in_bytes(there.shared)} on {there.what}; {needed}"


def sized(step: Step, job: Job, cluster: Cluster | None, place: LaunchTarget) -> DryMemory:
    """Return the memory of a job's step on a cluster's devices; without a cluster at the place itself."""
    from plait.plan.asking import margin_of
    from plait.plan.fits import estimate_in, room
    from plait.plan.memory_report import estimate_on, memory_report

    if cluster:
        found = estimate_on(step, cluster)
        report = memory_report(step, cluster, margin_of(job, cluster), found)
        return DryMemory(found, report=report, cluster=cluster, starts_here=place.ours)
    there = room(job.run.device, job.world_size) if place.ours else None
    return DryMemory(estimate_in(step, there), there)


@dataclass(frozen=True, kw_only=True)
class JobCheck(Shown):
    """A job that was checked and not started. file: the job's or the plan's. folder: where it would run.
    vocab: tokens. chosen: a sentence on what the planner chose; empty if it had nothing to choose. by: who
    chose which key."""

    file: Path
    folder: Path
    memory: DryMemory
    checked: Checked
    vocab: int
    job: Job
    chosen: str = ""
    by: Mapping[str, By] = field(default_factory=dict[str, By])

    @property
    def estimate(self) -> Estimate:
        """Memory and traffic of every place."""
        return self.memory.estimate

    def check_fits(self) -> None:
        """Raise InfeasiblePlan if the ranks need more memory than there is."""
        from plait.plan.fits import check_fits
        from plait.plan.memory_report import check_fits_on

        memory = self.memory
        if memory.report and memory.cluster:
            check_fits_on(self.job, memory.report, self.vocab, memory.cluster)
        elif memory.room:
            check_fits(self.job, memory.estimate, self.vocab, memory.room)

    def to_dict(self) -> dict[str, Any]:
        """Bytes of every rank by kind and by axis, and whether they fit; None where nothing is known."""
        return self.estimate.to_dict() | {
            "fits": self.memory.fits,
            "available": self.memory.available,
            "chosen": dict(self.by),
            "passed_over": self.checked.over.rows(),
        }

    def parts(self) -> Iterator[Part]:
        """Tensors of a rank of every place of the pipeline, and the most that a rank sends on each axis."""
        found, most = self.estimate, self.estimate.most
        yield f"{self.file}, which would run in {self.folder}"
        yield _head(found)
        if self.by:
            yield told_by(self.by)
        yield ""
        yield _memory(found)
        alive = f", {most.memory.alive} micro-batches alive" if most.memory.alive > 1 else ""
        yield f"most memory: place {most.index}, in the {most.memory.when}{alive}"
        if found.virtual_stages > 1:
            yield f"every place holds {found.virtual_stages} stages"
        yield self.memory.told
        if any(place.sent for place in found.places):
            yield ""
            yield _traffic(found)


def _head(found: Estimate) -> str:
    ranks = f"{found.world_size:,} rank{'s' * (found.world_size > 1)}"
    steps = f"{found.micro_batches} micro-batch{'es' * (found.micro_batches > 1)} a step"
    schedule = f", {found.schedule}" if len(found.places) > 1 or found.virtual_stages > 1 else ""
    return f"{found.parameters:,} parameters on {ranks}, {steps}{schedule}"


def _memory(found: Estimate) -> Table:
    power = min(max((found.most.memory.total.bit_length() - 1) // 10, 1), 4)
    unit = {1: "KiB", 2: "MiB", 3: "GiB", 4: "TiB"}[power]
    rows, before = list[tuple[str, ...]](), -1
    for place in _shown(found):
        if place.index > before + 1:
            rows.append((f"{place.index - before - 1} more", *[""] * (len(HEADS) + 3)))
        before = place.index
        sizes = [*(getattr(place.memory, kind) for kind in KINDS), place.memory.total]
        cells = [f"{size / (1 << 10 * power):#.3g}".rstrip(".") if size else "0" for size in sizes]
        rows.append((_ranks(place), _layers(place), f"{place.dp}x{place.cp}x{place.tp}", *cells))
    return Table(f"Tensors of a rank, {unit}", ("ranks", "layers", "dpxcpxtp", *HEADS, "total"), rows)


def _shown(found: Estimate) -> Sequence[PlaceEstimate]:
    places = found.places
    if len(places) <= SHOWN:
        return places
    return [places[at] for at in sorted({0, found.most.index, len(places) - 1})]


def _ranks(place: PlaceEstimate) -> str:
    first, last = place.ranks
    return str(first) if first == last else f"{first}-{last}"


def _layers(place: PlaceEstimate) -> str:
    """Layers of every stage of a place: ``8``, or ``2+2`` for two stages."""
    counts = list(place.layers.values())
    return "+".join(map(str, counts)) if len(counts) <= 4 else f"{len(counts)} x {max(counts)}"


def _traffic(found: Estimate) -> Table:
    rows = [
        (what, most, found.hidden.get(group, "nothing"))
        for axis, (what, group) in AXES.items()
        if (most := max(place.sent.get(axis, 0) for place in found.places))
    ]
    header = ("what", Column("at most", in_bytes), "behind")
    return Table("Bytes a rank sends in a step, and what hides it", header, rows)
