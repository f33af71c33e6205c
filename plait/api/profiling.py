"""Profiling a machine or a cluster: ranks that measure it are started, and write a profile."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from plait.core.base import programs

if TYPE_CHECKING:
    from plait.api.places.base import LaunchTarget
    from plait.core.job.spec import Job

LEAST_SECONDS = 5.0
TIMEOUT = 600.0
"""Seconds that a rank may be silent."""
MOST_RANKS, MOST_EACH = 64, 8
"""Ranks that are started here, and on each core."""
MOST_HERE = 8
"""Ranks on a CPU, where nobody says how many."""


def profile_machine(
    out: Path, file: Path | None, place: LaunchTarget, *, ranks: int | None = None, seconds: float = 60.0,
    nodes_per_minipod: int = 0, quiet: bool = False,
) -> int:  # fmt: skip
    """Measure a place with ranks of its own, which write the profile to ``out``; their exit status.

    file: a job file, whose layer, precision and device are measured. ranks: how many; None: the job's, or one
    for each GPU or core. seconds: at most. nodes_per_minipod: to measure across minipods as well. Logs of
    ranks stay where a rank has failed. Raises JobError.
    """
    from plait.api.ranks import Ranks
    from plait.core.base.errors import JobError
    from plait.core.base.files import explained
    from plait.core.job.spec import Job

    if not LEAST_SECONDS <= seconds < 1e6:
        raise JobError(f"{seconds:g} is not allowed", key="--seconds", fix=f"Allowed: at least {LEAST_SECONDS:g}")
    if nodes_per_minipod < 0:
        raise JobError(f"{nodes_per_minipod} is not allowed", key="--nodes-per-minipod", fix="Allowed: at least 0")
    job = Job.read(file) if file else None
    world = _ranks(ranks, job, place)
    arguments = ["--out", str(out.absolute()), "--seconds", str(seconds)]
    arguments += ["--job", str(file.absolute())] if file else []
    arguments += ["--nodes-per-minipod", str(nodes_per_minipod)] if nodes_per_minipod else []
    arguments += ["--quiet"] if quiet else []
    logs = out.with_name(f"{out.name}.logs")
    with explained(f"{logs} cannot be made", fix="Choose another with --out"):
        logs.mkdir(parents=True, exist_ok=True)
    timeout = job.run.timeout if job else TIMEOUT
    status = place.run(Ranks(module=programs.PROFILER, arguments=arguments, world=world, logs=logs, timeout=timeout))
    shutil.rmtree(logs, ignore_errors=True)
    return status


def _ranks(asked: int | None, job: Job | None, place: LaunchTarget) -> int:
    from plait.core.base.errors import JobError
    from plait.core.base.process import usable_cores
    from plait.plan.this_machine import ranks_here

    if asked is not None and asked < 1:
        raise JobError(f"{asked} is not allowed", key="--ranks", fix="Allowed: at least 1")
    if place.world is not None:
        if asked not in (None, place.world):
            raise JobError(f"{asked} are not the {place.world} ranks of --on", key="--ranks", fix="Leave it out")
        return place.world
    if asked is not None:
        most = max(MOST_RANKS, MOST_EACH * usable_cores())
        if asked > most:
            fix = "Ranks are processes of this machine; on several, start them with torchrun (docs/profile.md)"
            raise JobError(f"{asked:,} are more than the {most:,} that are started here", key="--ranks", fix=fix)
        return asked
    if job:
        return ranks_here(job.run.device, on_cpu=job.world_size)
    return ranks_here("auto", on_cpu=min(MOST_HERE, usable_cores()))
