"""Ranks to start, and what surrounds them at every place: watching, starting again after a failure,
collecting records, explaining a hang.
"""

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
    from plait.launch.hang import Suspicion
    from plait.launch.local import Child, RankStarter
    from plait.launch.supervisor import Fleet


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """Processes to start: ``world`` times ``python -m module arguments``.

    logs: the folder for what ranks print. timeout: seconds that a rank may be silent. lock: the run's, if
    there is a run. silent: whether the output of rank 0 goes to its log too. folder: the run's, if ranks
    leave evidence of hangs there. deadline: seconds that a call may take; first: seconds that it may take the
    first time. plan: the run's, if ranks train; failed ranks are then started again, ``restarts`` times in a
    row without a new checkpoint. open_job: the job as the user wrote it, from which another plan can be made.
    """

    module: str
    arguments: Sequence[str]
    world: int
    logs: Path
    timeout: float
    lock: RunLock | None = None
    silent: bool = False
    folder: Path | None = None
    deadline: float = 0.0
    first: float | None = None
    plan: Plan | None = None
    restarts: int = 0
    open_job: Job | None = None

    @property
    def argv(self) -> list[str]:
        """The command of a rank, on this machine."""
        from plait.core.base.process import command_of

        return command_of(self.module, *self.arguments)


def kept_going(fleet: Fleet, ranks: Ranks) -> int:
    """Start ranks that train on a fleet, attempt after attempt; the exit status. Raises RankFailure when the
    run is given up."""
    from plait.core.job.plan import CHANGED
    from plait.core.runs.host_memory import close_memory, open_memory
    from plait.launch.supervisor import Supervisor

    assert ranks.folder is not None
    with ExitStack() as held:
        if ranks.plan and ranks.plan.job and ranks.plan.job.run.memory_every:
            held.callback(close_memory, ranks.folder)
            open_memory(ranks.folder)
        supervisor = Supervisor(
            fleet, ranks.folder, ranks.logs, timeout=ranks.timeout, restarts=ranks.restarts, lock=ranks.lock
        )
        return supervisor.run(ranks.plan.notes.get(CHANGED, "") if ranks.plan else "")


def watched(start: RankStarter, ranks: Ranks) -> int:
    """Start ranks once and watch them to their end; returns and raises what ``launch.local.run_ranks``
    does."""
    from plait.launch.local import run_ranks
    from plait.launch.watch import RunGuard

    chosen = silenced(start) if ranks.silent else start
    suspicion = suspicion_of(ranks)
    with collected(ranks):
        return run_ranks(
            chosen, ranks.world, ranks.logs, guard=RunGuard(lock=ranks.lock, suspicion=suspicion), timeout=ranks.timeout
        )


def collected(ranks: Ranks) -> AbstractContextManager[None]:
    """A context in which records of ranks are collected, if they have a folder for them."""
    from contextlib import nullcontext

    from plait.core.job.collecting import collecting

    return collecting(ranks.folder, 0, ranks.world) if ranks.folder else nullcontext()


def suspicion_of(ranks: Ranks) -> Suspicion | None:
    """The search for the cause of a hang; None for ranks that leave no evidence, and for a single rank."""
    from plait.diagnose.hang import localise
    from plait.launch.hang import Suspicion

    if ranks.folder is None or ranks.world == 1:
        return None
    explain = partial(localise, world=ranks.world, deadline=ranks.deadline, first=ranks.first)
    return Suspicion(ranks.folder, ranks.world, deadline=ranks.deadline, localise=explain)


def suspicion_of_plan(plan: Plan, folder: Path) -> Suspicion | None:
    """The search for the cause of a hang of a plan's ranks, whoever starts them."""
    assert plan.job is not None
    run = plan.job.run
    ranks = Ranks(
        module="", arguments=(), world=plan.layout.world_size, logs=folder / "logs", timeout=run.timeout,
        folder=folder, deadline=run.call_deadline, first=run.first_deadline,
    )  # fmt: skip
    return suspicion_of(ranks)


def silenced(start: RankStarter) -> RankStarter:
    """A start of ranks that sends the output of rank 0 to its log too."""

    def started(rank: int, *, stdout: IO[bytes] | None, stderr: IO[bytes], **more: Any) -> Child:
        return start(rank, stdout=stdout or stderr, stderr=stderr, **more)

    return started
