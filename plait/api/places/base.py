"""Launch targets: their interface, this machine, and clusters whose manager starts the ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Protocol

from plait.api.ranks import collecting_records, hang_detection_of, run_supervised, run_watched, with_logged_output

if TYPE_CHECKING:
    from plait.api.ranks import RankSet
    from plait.core.cluster.hardware import Hosts
    from plait.core.job.plan import Plan
    from plait.core.job.spec import Job
    from plait.lab import LabSpec


class LaunchTarget(Protocol):
    """A target where ranks run: this machine, a lab or a cluster."""

    @property
    def world_size(self) -> int | None:
        """The number of ranks; None if any number can be requested."""
        ...

    @property
    def hosts(self) -> Hosts:
        """The target's machines, as plans describe them: ranks per host, NICs and their rate."""
        ...

    @property
    def lab(self) -> LabSpec | None:
        """The emulated cluster; None for other targets."""
        ...

    @property
    def is_local(self) -> bool:
        """True if ranks use the memory and devices of this machine."""
        ...

    def can_run(self, world: int) -> bool:
        """Return True if a job of ``world_size`` ranks can run on the target."""
        ...

    def run(self, ranks: RankSet) -> int:
        """Start ranks and watch them until they end; return 0, or 128 + signal if they were asked
        to stop and have saved. Raises RankFailure for a failed or silent rank, LaunchError if ranks
        cannot be started."""
        ...


@dataclass(frozen=True)
class Submission:
    """A run that a cluster manager has accepted. notes: paragraphs for the user. wait: a function
    that follows the run, if the user wants that, and returns its exit status; 0 for a run that is
    not followed."""

    notes: tuple[str, ...]
    wait: Callable[[], int]


@dataclass(frozen=True, kw_only=True)
class ManagedTarget(ABC):
    """A cluster whose manager starts the ranks. table: the file with the order of ranks, if the
    user has one."""

    table: Path | None = None
    world_size: None = None
    lab: None = None
    is_local: bool = False
    shares_files: ClassVar = True
    """True if the ranks read this machine's files."""

    @property
    def hosts(self) -> Hosts:
        """The description of this machine: no more is known of the cluster's machines."""
        from plait.core.cluster.hardware import HERE

        return HERE

    def can_run(self, world: int) -> bool:
        """Return True: the manager decides."""
        return True

    @property
    def inside(self) -> bool:
        """True if this process runs in a job of the manager, so that it can start ranks itself."""
        return False

    @abstractmethod
    def run(self, ranks: RankSet) -> int:
        """Start ranks from inside a job of the manager and watch them until they end; return the
        exit status. Raises as ``LaunchTarget.run``."""

    @abstractmethod
    def submit(self, plan: Plan, folder: Path, *, follow: bool) -> Submission:
        """Submit the plan from outside the cluster; return the accepted run. follow: True if the
        caller waits for the end of the run. Raises LaunchError if the manager refuses."""

    @abstractmethod
    def preview(self, job: Job, folder: Path) -> tuple[str, str]:
        """Return (title, text that ``submit`` would send to the manager)."""


@dataclass(frozen=True)
class LocalTarget:
    """This machine as a launch target."""

    world_size: None = None
    lab: None = None
    is_local: bool = True

    @property
    def hosts(self) -> Hosts:
        """The description of this machine, as plans use it."""
        from plait.core.cluster.hardware import HERE

        return HERE

    def can_run(self, world: int) -> bool:
        """Return True: any number of ranks may start here."""
        return True

    def run(self, ranks: RankSet) -> int:
        """Start ranks as processes of this machine and watch them until they end; return the exit
        status. Ranks get MASTER_PORT, if it is set; Plait's own ranks rendezvous in the launcher
        instead."""
        from plait.core.base.cluster_env import this_host
        from plait.core.base.env import chosen_port
        from plait.core.base.process import reserved_port
        from plait.launch.local.local import warm_starts
        from plait.launch.local.supervisor import AttemptRanks, SingleHost
        from plait.launch.run_folder import keep_plan

        with ExitStack() as held:
            port = chosen_port() or held.enter_context(reserved_port())
            starts = held.enter_context(warm_starts(ranks.module, ranks.arguments, ranks.world, port))
            if ranks.plan is None:
                return run_watched(starts(), ranks)

            plan, folder = ranks.plan, ranks.logs.parent

            def crew() -> AttemptRanks:
                keep_plan(plan, folder)
                start = starts()
                return AttemptRanks(
                    start=with_logged_output(start) if ranks.silent else start, world=ranks.world, hosts=(this_host(),),
                    suspicion=partial(hang_detection_of, ranks), plan=plan.key,
                    concurrent=partial(collecting_records, ranks),
                )  # fmt: skip

            return run_supervised(SingleHost(crew), ranks)
