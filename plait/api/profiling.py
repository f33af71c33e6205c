"""Profiles of a machine or a cluster: measured by ranks, or imported from other tools' files."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait.core.base import programs
from plait.core.base.text import Column, Part, Shown, Table

if TYPE_CHECKING:
    from plait.api.places.base import LaunchTarget
    from plait.core.base.ignored_input import IgnoredInput
    from plait.core.cluster.profile import ModulePhase, Profile
    from plait.core.job.spec import Job

PHASES: tuple[ModulePhase, ...] = ("forward", "input gradient", "weight gradient")
LEAST_SECONDS = 5.0
TIMEOUT = 600.0
"""Seconds that a rank may be silent."""
MOST_RANKS, MOST_EACH = 64, 8
"""The largest number of ranks on this machine: in total, and per core; the larger limit holds."""
MOST_HERE = 8
"""The largest number of ranks on CPUs that are started if the user gives none."""


@dataclass(frozen=True)
class ProfileAnswer(Shown):
    """A profile and its file. ignored: input that was ignored in imported files; None for a
    measured profile."""

    profile: Profile
    file: Path
    ignored: IgnoredInput | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the profile's measurements in seconds, bytes per second and FLOP/s, for JSON."""
        found = self.profile
        products = sorted(one.rate for one in found.products)
        return {
            "profile": str(self.file),
            "hash": found.hash,
            "machine": found.machine.model_dump(),
            "date": found.date,
            "collectives": [
                {
                    "kind": curve.kind, "group": curve.group.model_dump(), "layout": str(curve.group),
                    "latency": curve.latency, "bandwidth": curve.bandwidth, "bytes": curve.points[-1].bytes,
                }
                for curve in found.collectives
            ],
            "products": {"slowest": products[0], "fastest": products[-1]} if products else None,
            "memory": max((one.bytes / one.seconds for one in found.passes), default=None),
            "modules": [
                {"site": one.site, "phase": one.phase, "tp": one.tp, "seconds": one.seconds} for one in found.modules
            ],
            "overlaps": [
                {
                    "kind": one.kind, "layout": str(one.group), "computation": one.computation,
                    "communication": one.communication,
                }
                for one in found.overlaps
            ],
        } | ({} if self.ignored is None else {"passed_over": self.ignored.rows()})  # fmt: skip

    def parts(self) -> Iterator[Part]:
        """Yield tables of collectives, of overlapped computation and communication, and of modules;
        rates of matrix products and of memory."""
        found, machine = self.profile, self.profile.machine
        where = f"{machine.ranks} ranks, {machine.ranks_per_node} on a node" if machine.ranks > 1 else "1 rank"
        yield Table(f"{machine.device or machine.kind}: {where}, {machine.backend}")
        if found.collectives:
            header = ("collective", "group", Column("latency", _time), Column("largest", _size), Column("GB/s", ".3g"))
            rows = [
                (one.kind, str(one.group), one.latency, one.points[-1].bytes, one.bandwidth / 1e9)
                for one in sorted(found.collectives, key=lambda one: (one.group.nodes, one.group.ranks))
            ]
            yield Table("", header, rows)
        if found.overlaps:
            yield ""
            header = ("overlapped", "group", Column("products take", _times), Column("collective takes", _times))
            rows = [(one.kind, str(one.group), one.computation, one.communication) for one in found.overlaps]
            yield Table("", header, rows)
        if found.modules:
            yield ""
            yield self._modules()
        yield ""
        if found.products:
            slow, fast = (f(one.rate for one in found.products) for f in (min, max))
            yield f"matrix products: {_flops(slow)} to {_flops(fast)} in {found.products[0].precision}, by shape"
        if found.passes:
            yield f"memory: {max(one.bytes / one.seconds for one in found.passes) / 1e9:.3g} GB/s a rank"
        yield f"{self.file} holds it all"

    def _modules(self) -> Table:
        """Return a table of milliseconds: a row for each module and degree of tensor parallelism, a
        column for each phase."""
        modules = self.profile.modules
        taken = {(one.site, one.tp, one.phase): one.seconds * 1e3 for one in modules}
        header = ("module, ms", "tp", *(Column(phase, ".3g", none="") for phase in PHASES))
        rows = dict.fromkeys((one.site, one.tp) for one in modules)
        return Table("", header, [(*row, *(taken.get((*row, phase)) for phase in PHASES)) for row in rows])


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} us" if seconds < 1e-3 else f"{seconds * 1e3:.3g} ms"


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**20:.3g} MiB" if nbytes >= 1 << 20 else f"{nbytes / 2**10:.3g} KiB"


def _times(factor: float) -> str:
    return f"{factor:.2f}x"


def _flops(rate: float) -> str:
    return f"{rate / 1e12:.3g} TFLOP/s" if rate >= 1e12 else f"{rate / 1e9:.3g} GFLOP/s"


def import_profile(files: Sequence[Path], out: Path) -> ProfileAnswer:
    """Write a profile to ``out``, made from logs of nccl-tests, bandwidth files of Galvatron and
    other profiles. Raises JobError and LaunchError."""
    from plait.core.base.files import explained
    from plait.core.base.ignored_input import IgnoredInput
    from plait.plan.calibrate.profile_import import import_profiles

    over = IgnoredInput()
    found = import_profiles(files, over)
    with explained(f"{out} cannot be written", fix="Choose another with --out"):
        found.write(out)
    return ProfileAnswer(found, out, over)


def read_profile(file: Path) -> ProfileAnswer:
    """Return the profile in a file. Raises JobError."""
    from plait.core.cluster.profile import Profile

    return ProfileAnswer(Profile.read(file), file)


@dataclass(frozen=True)
class ProfileRequest:
    """Options of a measurement. job: a job file, whose layer, precision and device are measured.
    ranks: their number; None: the job's, or one for each GPU or core. seconds: the longest
    duration. nodes_per_minipod: nodes below one leaf switch, to measure across minipods as well; 0:
    not across minipods."""

    job: Path | None = None
    ranks: int | None = None
    seconds: float = 60.0
    nodes_per_minipod: int = 0

    def check(self) -> None:
        """Raise JobError for invalid numbers."""
        from plait.core.base.errors import JobError

        if not LEAST_SECONDS <= self.seconds < 1e6:
            fix = f"Allowed: at least {LEAST_SECONDS:g}"
            raise JobError(f"{self.seconds:g} is not allowed", key="seconds", fix=fix)
        if self.nodes_per_minipod < 0:
            problem = f"{self.nodes_per_minipod} is not allowed"
            raise JobError(problem, key="nodes_per_minipod", fix="Allowed: at least 0")


def profile_machine(
    out: Path, place: LaunchTarget, request: ProfileRequest | None = None, *, quiet: bool = False
) -> ProfileAnswer | int:
    """Measure a launch target with ranks that write the profile to ``out``; return the profile, or
    the exit status if ranks fail. request: options; None: defaults. quiet: True if ranks print
    nothing. Raises JobError for impossible numbers, LaunchError if ranks cannot be started."""
    from plait.api.ranks import RankSet
    from plait.core.base.errors import need
    from plait.core.base.files import explained
    from plait.core.job.spec import Job

    request = request or ProfileRequest()
    request.check()
    if place.is_local:
        need("torch", "measuring")
    job = Job.read(request.job) if request.job else None
    world = _ranks(request.ranks, job, place)
    arguments = ["--out", str(out.absolute()), "--seconds", str(request.seconds)]
    arguments += ["--job", str(request.job.absolute())] if request.job else []
    arguments += ["--nodes-per-minipod", str(request.nodes_per_minipod)] if request.nodes_per_minipod else []
    arguments += ["--quiet"] if quiet else []
    logs = out.with_name(f"{out.name}.logs")
    with explained(f"{logs} cannot be made", fix="Choose another with --out"):
        logs.mkdir(parents=True, exist_ok=True)
    timeout = job.run.timeout if job else TIMEOUT
    status = place.run(RankSet(module=programs.PROFILER, arguments=arguments, world=world, logs=logs, timeout=timeout))
    shutil.rmtree(logs, ignore_errors=True)
    return status or read_profile(out)


def _ranks(requested: int | None, job: Job | None, place: LaunchTarget) -> int:
    from plait.core.base.errors import JobError
    from plait.core.base.process import usable_cores
    from plait.plan.explain.job_cluster import ranks_here

    if requested is not None and requested < 1:
        raise JobError(f"{requested} is not allowed", key="world_size", fix="Allowed: at least 1")
    if place.world_size is not None:
        if requested not in (None, place.world_size):
            raise JobError(
                f"{requested} are not the {place.world_size} ranks of --on", key="world_size", fix="Leave it out"
            )
        return place.world_size
    if requested is not None:
        most = max(MOST_RANKS, MOST_EACH * usable_cores())
        if requested > most:
            fix = "Ranks are processes of this machine; on several, start them with torchrun (docs/profile.md)"
            raise JobError(f"{requested:,} are more than the {most:,} that are started here", key="world_size", fix=fix)
        return requested
    if job:
        return ranks_here(job.run.device, on_cpu=job.world_size)
    return ranks_here("auto", on_cpu=min(MOST_HERE, usable_cores()))
