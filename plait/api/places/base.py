"""What a place where ranks run is, and one whose manager starts them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Protocol

if TYPE_CHECKING:
    from plait.api.ranks import Ranks
    from plait.core.cluster.hardware import Hosts
    from plait.core.job.plan import Plan
    from plait.core.job.spec import Job
    from plait.lab import LabSpec


class LaunchTarget(Protocol):
    """A place where ranks run."""

    @property
    def world(self) -> int | None:
        """Number of ranks; None if there are as many as are asked for."""
        ...

    @property
    def hosts(self) -> Hosts:
        """Its machines, as plans see them."""
        ...

    @property
    def lab(self) -> LabSpec | None:
        """The emulated cluster; None at other places."""
        ...

    @property
    def ours(self) -> bool:
        """Whether memory and devices of ranks are this machine's."""
        ...

    def takes(self, world: int) -> bool:
        """Whether a job of so many ranks can run there."""
        ...

    def run(self, ranks: Ranks) -> int:
        """Start ranks and see them to their end; returns and raises what ``launch.local.run_ranks`` does."""
        ...


@dataclass(frozen=True)
class Submitted:
    """A run that a cluster's manager has taken. notes: paragraphs for the user. wait: follows the run as far
    as was asked; the exit status, 0 of a run that is not followed."""

    notes: tuple[str, ...]
    wait: Callable[[], int]


@dataclass(frozen=True, kw_only=True)
class Managed(ABC):
    """A cluster whose manager starts the ranks. table: the file of the ranks' order, if the user has one."""

    table: Path | None = None
    world: None = None
    lab: None = None
    ours: bool = False
    shares_files: ClassVar = True
    """Whether its ranks read the files that are here."""

    @property
    def hosts(self) -> Hosts:
        """Machines of which no more is known than of this one."""
        from plait.core.cluster.hardware import HERE

        return HERE

    def takes(self, world: int) -> bool:
        """Its manager says."""
        return True

    @property
    def inside(self) -> bool:
        """Whether the manager runs us already, so that ranks can be started from here."""
        return False

    @abstractmethod
    def run(self, ranks: Ranks) -> int:
        """As of every place, from inside."""

    @abstractmethod
    def submit(self, plan: Plan, folder: Path, *, follow: bool) -> Submitted:
        """Send the plan from outside. follow: whether somebody waits for the end of the run."""

    @abstractmethod
    def preview(self, job: Job, folder: Path) -> tuple[str, str]:
        """What ``submit`` would send, and what to call it."""
