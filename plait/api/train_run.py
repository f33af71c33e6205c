"""Training as a plan says."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plait.api.places.base import Place
    from plait.core.job.plan import Plan
    from plait.core.job.spec import Job


def run_plan(plan: Plan, folder: Path, place: Place, *, silent: bool = False, open_job: Job | None = None) -> int:
    """Train as a plan says, in a folder that is locked meanwhile; the exit status.

    silent: whether the output of rank 0 goes to its log. open_job: the job as the user wrote it, if the
    planner has closed what it leaves open; the run is planned anew from it for fewer hosts.
    """
    from plait.api.places.base import Managed
    from plait.api.ranks import Ranks
    from plait.core.base import programs
    from plait.core.runs.lock import RunLock
    from plait.core.topology.rank_table import NAME
    from plait.launch.run_folder import write_run

    job = plan.job
    assert job is not None
    if not isinstance(place, Managed):
        import_module("plait.core.record.ring_writer")  # raises LaunchError where it was not built
    with RunLock(folder) as lock:
        plan = write_run(plan, folder)
        (folder / NAME).unlink(missing_ok=True)  # of an earlier start, elsewhere
        ranks = Ranks(
            module=programs.RANK, arguments=[str(folder)], world=plan.layout.world_size, logs=folder / "logs",
            timeout=job.run.timeout, lock=lock, silent=silent, folder=folder,
            deadline=job.run.call_deadline, first=job.run.first_deadline, plan=plan,
            restarts=job.run.restarts, open_job=open_job,
        )  # fmt: skip
        return place.run(ranks)
