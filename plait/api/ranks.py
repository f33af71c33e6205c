"""Ranks to start, and their supervision at every launch target: watching, restarts, collection of
records, explanation of hangs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from plait.core.job.plan import Plan
    from plait.core.job.spec import Job
    from plait.core.runs.lock import RunLock
    from plait.launch.hang import HangDetection
    from plait.launch.local.local import Child, RankStarter
    from plait.launch.local.supervisor import Fleet


@dataclass(frozen=True, kw_only=True)
class RankSet:
    """Processes to start: ``world`` times ``python -m module arguments``.

    logs: the folder for the ranks' output. timeout: seconds that a rank may be silent. lock: the
    run's lock, if there is a run. silent: True to send the output of rank 0 to its log, too.
    folder: the run's folder, if ranks leave evidence of hangs there. deadline: seconds that a
    collective or transfer may take; first_deadline: seconds that work may take the first time.
    plan: the run's plan, if ranks train; failed ranks are then restarted, ``restarts`` times in a
    row without a new checkpoint. open_job: the job as the user wrote it, from which another plan
    can be made."""

    module: str
    arguments: Sequence[str]
    world: int
    logs: Path
    timeout: float
    lock: RunLock | None = None
    silent: bool = False
    folder: Path | None = None
    deadline: float = 0.0
    first_deadline: float | None = None
    plan: Plan | None = None
    restarts: int = 0
    open_job: Job | None = None

    @property
    def argv(self) -> list[str]:
        """The command of a rank on this machine, as a list of arguments."""
        from plait.core.base.process import command_of

        return command_of(self.module, *self.arguments)


def run_supervised(fleet: Fleet, ranks: RankSet) -> int:
    """Train on the hosts of a fleet, attempt after attempt; return the exit status. Raises
    RankFailure when the run is given up."""
    from plait.core.job.plan import CHANGED
    from plait.core.runs.host_memory import close_memory, open_memory
    from plait.launch.local.supervisor import Supervisor

    assert ranks.folder is not None
    with ExitStack() as held:
        if ranks.plan and ranks.plan.job and ranks.plan.job.run.memory_every:
            held.callback(close_memory, ranks.folder)
            open_memory(ranks.folder)
        supervisor = Supervisor(
            fleet, ranks.folder, ranks.logs, timeout=ranks.timeout, restarts=ranks.restarts, lock=ranks.lock
        )
        return supervisor.run(ranks.plan.notes.get(CHANGED, "") if ranks.plan else "")


def run_watched(start: RankStarter, ranks: RankSet) -> int:
    """Start ranks once and watch them until they end; return and raise as
    ``launch.local.run_ranks`` does."""
    from plait.launch.local.local import run_ranks
    from plait.launch.watch import RunGuard

    chosen = with_logged_output(start) if ranks.silent else start
    suspicion = hang_detection_of(ranks)
    with collecting_records(ranks):
        return run_ranks(
            chosen, ranks.world, ranks.logs, guard=RunGuard(lock=ranks.lock, suspicion=suspicion), timeout=ranks.timeout
        )


def collecting_records(ranks: RankSet) -> AbstractContextManager[None]:
    """Return a context in which an agent collects what the ranks record; it does nothing for ranks
    without a folder of a run."""
    from contextlib import nullcontext

    from plait.core.job.collecting import collecting

    return collecting(ranks.folder, 0, ranks.world) if ranks.folder else nullcontext()


def hang_detection_of(ranks: RankSet) -> HangDetection | None:
    """Return the hang detection; None for ranks that leave no evidence, and for a single rank."""
    from plait.diagnose.verdicts.hang import localise
    from plait.launch.hang import HangDetection

    if ranks.folder is None or ranks.world == 1:
        return None
    explain = partial(localise, world=ranks.world, deadline=ranks.deadline, first=ranks.first_deadline)
    return HangDetection(ranks.folder, ranks.world, deadline=ranks.deadline, localise=explain)


def hang_detection_of_plan(plan: Plan, folder: Path) -> HangDetection | None:
    """Return the hang detection for a plan's ranks, whichever launcher starts them."""
    assert plan.job is not None
    run = plan.job.run
    ranks = RankSet(
        module="", arguments=(), world=plan.layout.world_size, logs=folder / "logs", timeout=run.timeout,
        folder=folder, deadline=run.call_deadline, first_deadline=run.first_deadline,
    )  # fmt: skip
    return hang_detection_of(ranks)


def with_logged_output(start: RankStarter) -> RankStarter:
    """Return a rank starter that sends the output of rank 0 to its log, too."""

    def started(rank: int, *, stdout: IO[bytes] | None, stderr: IO[bytes], **more: Any) -> Child:
        return start(rank, stdout=stdout or stderr, stderr=stderr, **more)

    return started
