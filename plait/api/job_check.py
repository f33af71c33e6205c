"""The check of a job that is not started: memory and traffic of every rank, as tables."""

from __future__ import annotations

import math
import shutil
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from plait.core.base.env import cpp_compiler
from plait.core.base.errors import JobError
from plait.core.base.ignored_input import Checked
from plait.core.base.text import Column, Part, Shown, Table, in_bytes
from plait.core.job.plan import Origin, format_origins
from plait.core.step.memory.estimate import Estimate, PipelineRankEstimate
from plait.plan.search.fits import MEMORY_KINDS

if TYPE_CHECKING:
    from plait.api.places.base import LaunchTarget
    from plait.core.base.ignored_input import Checked
    from plait.core.cluster.hardware import Cluster
    from plait.core.job.plan import Plan
    from plait.core.job.settings import TrainSection
    from plait.core.job.spec import Job
    from plait.core.step.step import Step
    from plait.lab import LabSpec
    from plait.plan.explain.memory_report import MemoryReport
    from plait.plan.search.fits import AvailableMemory

SHOWN = 6
"""The largest number of pipeline ranks that are all shown; of more, the first, the last and the one
with the most memory are."""
HEADS = ("params", "grads", "optim", "buffers", "activ.")
AXES = {
    "tp": ("tensor parallelism", "tp"),
    "rows": ("embedding rows, at most", "rows"),
    "copies": ("copies over tp, at most", ""),
    "ulysses": ("attention heads (Ulysses)", "ulysses"),
    "ring": ("keys and values (ring)", "ring"),
    "ep": ("tokens to experts, if spread evenly", "ep"),
    "params": ("sharded parameters", "dp"),
    "secondary": ("their second copy", "dp"),
    "grads": ("sharded gradients", "dp"),
    "optim": ("optimizer shards", "dp"),
    "replicas": ("gradients over replicas", "dp"),
    "pp": ("between stages", "pp"),
    "tied": ("tied embeddings", ""),
    "matrices": ("matrices for Muon, the mean rank", "matrices"),
}
"""Labels of the kinds of traffic, and the axis of each in ``Estimate.hidden``, which names the
computation that hides it; empty if none does."""


class MemoryCheck(NamedTuple):
    """Predicted memory of a strategy, and the memory it is compared with: that of the devices of
    the job's cluster (``device_report``), or of this machine (``available_here``). Neither is set
    if the ranks' machines are unknown. starts_here: True if ranks would start on this machine."""

    estimate: Estimate
    available_here: AvailableMemory | None = None
    device_report: MemoryReport | None = None
    cluster: Cluster | None = None
    starts_here: bool = False

    @property
    def fits(self) -> bool | None:
        """True if all ranks fit; None if unknown."""
        if self.device_report:
            return self.device_report.fits
        return self.available_here.holds(self.estimate) if self.available_here else None

    @property
    def available(self) -> dict[str, Any] | None:
        """Bytes available to each rank, for JSON; for a cluster's device also the bytes used by the
        fullest rank."""
        if self.device_report and self.cluster:
            fullest = {"per_rank": self.device_report.usable, "fullest": self.device_report.fullest.total}
            return {"device": self.cluster.device.name, **fullest, **self.device_report.to_dict()}
        there = self.available_here
        return {"per_rank": there.each or there.shared // self.estimate.world_size} if there else None

    @property
    def description(self) -> str:
        """A sentence on the available memory, and on whether it is enough."""
        found, there = self.estimate, self.available_here
        if self.device_report and self.cluster:
            start = ". Only a start compares with this machine" if self.starts_here else ""
            return f"on {self.cluster.device.name} it {self.device_report.summary}{start}"
        if there is None:
            return "available: not known here, so nothing was checked"
        verdict = "fits" if self.fits else "does not fit"
        if there.each:
            return f"available: {in_bytes(there.each)} on {there.what}: {verdict}"
        needed = f"tensors of all ranks take {in_bytes(found.bytes)}: {verdict}"
        return f"available: {in_bytes(there.shared)} on {there.what}; {needed}"


def memory_of_step(step: Step, job: Job, cluster: Cluster | None, place: LaunchTarget) -> MemoryCheck:
    """Return the predicted memory of a job's step, and what it is compared with: a cluster's
    devices, or without ``cluster`` the launch target's memory."""
    from plait.plan.explain.memory_report import estimate_on, memory_report
    from plait.plan.search.fits import estimate_in, room
    from plait.plan.search.request import margin_of

    if cluster:
        found = estimate_on(step, cluster)
        report = memory_report(step, cluster, margin_of(job, cluster), found)
        return MemoryCheck(found, device_report=report, cluster=cluster, starts_here=place.is_local)
    there = room(job.run.device, job.world_size) if place.is_local else None
    return MemoryCheck(estimate_in(step, there), there)


@dataclass(frozen=True, kw_only=True)
class JobCheck(Shown):
    """A job that was checked and not started. file: of the job or the plan. folder: where it would
    run. vocab: the vocabulary's size, in tokens. choice_note: a sentence on the planner's choices;
    empty if it had nothing to choose. origins: the origin of each key."""

    file: Path
    folder: Path
    memory: MemoryCheck
    checked: Checked
    vocab: int
    job: Job
    choice_note: str = ""
    origins: Mapping[str, Origin] = field(default_factory=dict[str, Origin])

    @property
    def estimate(self) -> Estimate:
        """Memory and traffic of every pipeline rank."""
        return self.memory.estimate

    def check_fits(self) -> None:
        """Raise InfeasiblePlan if the ranks need more memory than is available."""
        from plait.plan.explain.memory_report import check_fits_on
        from plait.plan.search.fits import check_fits

        memory = self.memory
        if memory.device_report and memory.cluster:
            check_fits_on(self.job, memory.device_report, self.vocab, memory.cluster)
        elif memory.available_here:
            check_fits(self.job, memory.estimate, self.vocab, memory.available_here)

    def to_dict(self) -> dict[str, Any]:
        """Return the bytes of every rank by kind and by axis, and ``fits``, which is None if
        unknown; for JSON."""
        return self.estimate.to_dict() | {
            "fits": self.memory.fits,
            "available": self.memory.available,
            "chosen": dict(self.origins),
            "passed_over": self.checked.over.rows(),
        }

    def parts(self) -> Iterator[Part]:
        """Yield a table of the bytes of a rank's tensors on every pipeline rank, and one of the
        most bytes per step that a rank sends on each axis."""
        found, most = self.estimate, self.estimate.most
        yield f"{self.file}, which would run in {self.folder}"
        yield _head(found)
        if self.origins:
            yield format_origins(self.origins)
        yield ""
        yield _memory(found)
        alive = f", {most.memory.alive} micro-batches alive" if most.memory.alive > 1 else ""
        yield f"most memory: pp rank {most.index}, in the {most.memory.when}{alive}"
        if found.virtual_stages > 1:
            yield f"every pp rank holds {found.virtual_stages} stages"
        yield self.memory.description
        if any(each.sent for each in found.places):
            yield ""
            yield _traffic(found)


def _head(estimate: Estimate) -> str:
    ranks = f"{estimate.world_size:,} rank{'s' * (estimate.world_size > 1)}"
    steps = f"{estimate.micro_batches} micro-batch{'es' * (estimate.micro_batches > 1)} a step"
    schedule = f", {estimate.schedule}" if len(estimate.places) > 1 or estimate.virtual_stages > 1 else ""
    return f"{estimate.parameters:,} parameters on {ranks}, {steps}{schedule}"


def _memory(estimate: Estimate) -> Table:
    power = min(max((estimate.most.memory.total.bit_length() - 1) // 10, 1), 4)
    unit = {1: "KiB", 2: "MiB", 3: "GiB", 4: "TiB"}[power]
    rows, before = list[tuple[str, ...]](), -1
    for each in _shown(estimate):
        if each.index > before + 1:
            rows.append((f"{each.index - before - 1} more", *[""] * (len(HEADS) + 3)))
        before = each.index
        sizes = [*(getattr(each.memory, kind) for kind in MEMORY_KINDS), each.memory.total]
        cells = [f"{size / (1 << 10 * power):#.3g}".rstrip(".") if size else "0" for size in sizes]
        rows.append((_ranks(each), _layers(each), f"{each.dp}x{each.cp}x{each.tp}", *cells))
    return Table(f"Tensors of a rank, {unit}", ("ranks", "layers", "dpxcpxtp", *HEADS, "total"), rows)


def _shown(estimate: Estimate) -> Sequence[PipelineRankEstimate]:
    estimates = estimate.places
    if len(estimates) <= SHOWN:
        return estimates
    return [estimates[at] for at in sorted({0, estimate.most.index, len(estimates) - 1})]


def _ranks(each: PipelineRankEstimate) -> str:
    first, last = each.ranks
    return str(first) if first == last else f"{first}-{last}"


def _layers(each: PipelineRankEstimate) -> str:
    """Return the layers of every stage of a pipeline rank: ``8``, or ``2+2`` for two stages."""
    counts = list(each.layers.values())
    return "+".join(map(str, counts)) if len(counts) <= 4 else f"{len(counts)} x {max(counts)}"


def _traffic(estimate: Estimate) -> Table:
    rows = [
        (what, most, estimate.hidden.get(group, "nothing"))
        for axis, (what, group) in AXES.items()
        if (most := max(each.sent.get(axis, 0) for each in estimate.places))
    ]
    header = ("what", Column("at most", in_bytes), "behind")
    return Table("Bytes a rank sends in a step, and what hides it", header, rows)


UNREAD = "folder(s) of weights of which names and shapes were checked, and values (NaN) were not looked at"


def check_files(
    job: Job, folder: Path, place: LaunchTarget, *, dry: bool = False, original_job: Job | None = None
) -> Checked:
    """Raise at once the errors that ranks would raise seconds later; return remarks on the files.

    The errors are: a folder that cannot be written; missing or insufficient data; missing weights,
    or weights of another model. Files are not checked for a launch target that cannot read this
    machine's files. dry: True if no run follows, which would check the values of weights.
    original_job: the job as its file has it. Raises JobError or DataError.
    """
    from plait.api.choices import model_notes, precision_note, unmodelled_notes, vocabulary_note
    from plait.api.places.base import ManagedTarget
    from plait.core.base.errors import JobError, LaunchError
    from plait.train.checkpoint.initial import check_initial
    from plait.train.data.check import check_data
    from plait.train.data.tokenizer import load_tokenizer

    best = best_note(job.train)
    if isinstance(place, ManagedTarget) and not place.shares_files:
        return Checked(note=best)
    try:
        _check_folder(folder)
    except LaunchError as error:
        raise JobError(str(error), key="run.folder") from None
    over = model_notes(job)
    data = check_data(job.data, job.train, folder / "corpus")
    over.add(data.over)
    vocab = load_tokenizer(job.data.tokenizer).vocab
    if job.train.init_from:
        over.add(check_initial(Path(job.train.init_from), job.model_spec(vocab)))
        if dry:
            over.note(UNREAD, job.train.init_from)
    notes = [*unmodelled_notes(job), vocabulary_note(job, vocab), precision_note(original_job or job), data.note, best]
    return Checked(over, " ".join(filter(None, notes)))


def best_note(train: TrainSection) -> str:
    """Return a sentence on the checkpoints that ``train.keep_best`` compares, or an empty string if
    it compares all. Raises JobError if no checkpoint is ever evaluated."""
    every, evaluated = train.checkpoint_every, train.eval_every
    if not train.keep_best or (every and evaluated and every % evaluated == 0):
        return ""
    if not evaluated:
        problem = "true, and train.eval_every = 0 evaluates nothing, so that no checkpoint would be the best"
        fix = f"Set train.eval_every={every or train.steps}, or train.keep_best=false"
        raise JobError(problem, key="train.keep_best", fix=fix)
    meet = math.lcm(every, evaluated)
    when = f"every {meet:,} steps and at the end" if every and meet < train.steps else "at the end alone"
    return (
        f"train.keep_best: evaluations (train.eval_every = {evaluated}) and checkpoints (train.checkpoint_every = "
        f"{every}) meet {when}: no others are compared."
    )


def check_ranks(plan: Plan, place: LaunchTarget, on: str) -> str:
    """Raise JobError if the launch target cannot run the plan's number of ranks. Return a sentence
    that names the spare hosts of a lab, or an empty string. on: the target, as the user named
    it."""
    from plait.core.base.errors import JobError
    from plait.core.base.lab_hosts import name
    from plait.core.base.text import counted

    world = plan.layout.world_size
    if not place.can_run(world):
        problem = f"{on} has {counted(place.world_size or 0, 'rank')}, the job needs {world}"
        raise JobError(problem, key="--on", fix="Change one of the two, or strategy.tp, dp, pp")
    if not (place.lab and place.world_size and world < place.world_size):
        return ""
    used, hosts = world // place.lab.ranks_per_host, place.lab.hosts
    spares = ", ".join(name(host) for host in range(used, hosts)[:5]) + (", ..." if hosts - used > 5 else "")
    return f"{hosts - used} of {hosts} hosts are spares: {spares}"


def room_of(plan: Plan, place: LaunchTarget) -> AvailableMemory | None:
    """Return the memory that this machine has for the ranks of a plan; None if they run elsewhere,
    or if it is unknown."""
    from plait.plan.search.fits import room

    return room(plan.job.run.device, plan.layout.world_size) if place.is_local and plan.job else None


def lab_without_spares(job: Job, place: LaunchTarget) -> LabSpec | None:
    """Return the lab to plan for: the launch target's, without the hosts that the job keeps as
    spares; None without a lab. Raises JobError if the remaining minipods are unequal."""
    from dataclasses import replace

    from plait.core.base.errors import JobError

    lab, spares = place.lab, job.run.spares
    if lab is None or not spares:
        return lab
    if spares >= lab.hosts or (lab.hosts - spares) % lab.pods:
        problem = f"{spares} of {lab.hosts} hosts in {lab.pods} minipods leave no equal minipods"
        raise JobError(problem, key="run.spares", fix="Choose fewer, or more hosts with --on")
    return replace(lab, hosts=lab.hosts - spares)


def check_room(job: Job, vocab: int) -> None:
    """Raise InfeasiblePlan, before planning, for a job that needs more memory than this machine
    has."""
    from plait.plan.make import job_step
    from plait.plan.search.fits import check_device, check_fits, check_size, estimate_in, room

    check_device(job.run.device, job.world_size)
    there = room(job.run.device, job.world_size)
    check_size(job, vocab, there)
    if there:
        check_fits(job, estimate_in(job_step(job, vocab), there), vocab, there)


def check_start(plan: Plan, place: LaunchTarget) -> None:
    """Raise InfeasiblePlan or JobError for a plan whose ranks would run on this machine, if it
    lacks the memory, the devices or a compiler."""
    from plait.plan.search.fits import check_device, check_fits, estimate_in

    job = plan.job
    if job is None or not place.is_local:
        return
    check_processors(job, place)
    check_device(job.run.device, plan.layout.world_size)
    if there := room_of(plan, place):
        check_fits(job, estimate_in(plan, there, traffic=False), plan.model.vocab, there)


def check_processors(job: Job, place: LaunchTarget) -> None:
    """Raise JobError for a job whose ranks would compute on this machine's CPUs, if these cannot
    meet its settings."""
    from plait.plan.search.fits import room

    if True not in (job.strategy.compile, job.strategy.cuda_graphs):
        return
    there = room(job.run.device, job.world_size) if place.is_local else None
    if not (place.lab or (there and not there.each)):
        return
    if job.strategy.cuda_graphs is True:
        raise JobError("true, and ranks here run on CPUs, which have no CUDA graphs",
                       key="strategy.cuda_graphs", fix='Use "auto" or false')  # fmt: skip
    if job.strategy.compile is True:
        check_compiler()


def _check_folder(folder: Path) -> None:
    """Raise LaunchError for a run's folder that cannot be written, or in which a file takes the
    place of a folder."""
    from plait.core.base.errors import LaunchError
    from plait.core.base.files import check_target, kind_of

    fix = "Choose another with run.folder=FOLDER or run.name=NAME"
    check_target(folder / "plan.json", fix=fix)
    for name in ("logs", "checkpoints", "corpus"):  # a run continues without recordings
        if (kind := kind_of(folder / name)) not in ("", "folder"):
            raise LaunchError(f"{folder / name} is a {kind}, and a run needs a folder there. {fix}.")


def check_compiler() -> None:
    """Raise JobError if torch.compile lacks what it needs for a CPU: a C++ compiler and Python's
    headers."""
    compiler, fix = cpp_compiler(), 'Install it, or use strategy.compile = "auto" or false'
    if shutil.which(compiler) is None:
        problem = f"true needs a C++ compiler, and '{compiler}' is not here (CXX names another)"
        raise JobError(problem, key="strategy.compile", fix=fix)
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.is_file():
        problem = f"true needs Python's headers, and {header} is not here"
        raise JobError(problem, key="strategy.compile", fix=fix)
