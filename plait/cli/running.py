"""Running ranks where ``--on`` says, and the folder of a run: what ``train``, ``plan --measure`` and
``profile`` share.

To add a place, write a class like ``InLab`` and give it a line in ``PLACES``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, ClassVar, Protocol

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from plait.core.cluster.hardware import Hosts
    from plait.core.job.plan import Plan
    from plait.core.job.spec import Job
    from plait.core.runs.lock import RunLock
    from plait.core.topology.rank_table import RankTable
    from plait.lab import LabSpec
    from plait.launch.hang import Suspicion
    from plait.launch.local import Child, Start
    from plait.launch.supervisor import Fleet

LOCAL = "local"


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """What is to run: ``world`` processes of ``python -m module arguments``.

    logs: the folder of what they print. timeout: seconds that one may be silent. lock: of their run, if it
    has one. silent: what rank 0 prints goes to its log as well. folder: of the run, if its ranks leave there
    what tells why they hang. deadline: seconds that a call of theirs may take; first: that they may take for
    what they do for the first time. plan: of the run that they train; they are started again when they fail,
    ``restarts`` times in a row without a new checkpoint. open_job: as the user wrote it, for another plan.
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
        """The command of each, on this machine."""
        from plait.core.base.process import command_of

        return command_of(self.module, *self.arguments)


class Place(Protocol):
    """Where ranks run."""

    @property
    def world(self) -> int | None:
        """How many ranks it has; None if as many as are asked for."""
        ...

    @property
    def hosts(self) -> Hosts:
        """Its machines, as plans see them."""
        ...

    @property
    def lab(self) -> LabSpec | None:
        """The emulated cluster that it is; None if it is none."""
        ...

    @property
    def ours(self) -> bool:
        """Whether its memory and devices are this machine's."""
        ...

    def takes(self, world: int) -> bool:
        """Whether a job of so many ranks can run there."""
        ...

    def run(self, ranks: Ranks) -> int:
        """Start ranks and see them to their end; returns and raises what ``launch.local.run_ranks`` does."""
        ...


@dataclass(frozen=True)
class Here:
    """This machine."""

    world: None = None
    lab: None = None
    ours: bool = True

    @property
    def hosts(self) -> Hosts:
        """One."""
        from plait.core.cluster.hardware import HERE

        return HERE

    def takes(self, world: int) -> bool:
        """Any."""
        return True

    def run(self, ranks: Ranks) -> int:
        """As processes; they meet at MASTER_PORT, where that is set."""
        from plait.core.base.env import chosen_port, this_host
        from plait.core.base.process import reserved_port
        from plait.launch.supervisor import Crew, OneHost
        from plait.launch.warm import warm_starts

        with ExitStack() as held:
            port = chosen_port() or held.enter_context(reserved_port())
            starts = held.enter_context(warm_starts(ranks.module, ranks.arguments, ranks.world, port))
            if ranks.plan is None:
                return _watched(starts(), ranks)

            def crew() -> Crew:
                start = starts()
                return Crew(
                    start=silenced(start) if ranks.silent else start, world=ranks.world, hosts=(this_host(),),
                    suspicion=partial(suspicion_of, ranks), plan=ranks.plan.key if ranks.plan else "",
                    beside=partial(collected, ranks),
                )  # fmt: skip

            return _kept_going(OneHost(crew), ranks)


@dataclass(frozen=True)
class InLab:
    """An emulated cluster, up as long as its ranks run. table: which host is which node; None: all in their
    order."""

    lab: LabSpec
    table: RankTable | None = None
    ours: bool = True

    def __post_init__(self) -> None:
        from plait.core.base.errors import PlacementError

        if self.table and self.table.ranks_per_node != self.lab.ranks_per_host:
            raise PlacementError(
                f"The rank table has {self.table.ranks_per_node} ranks a host, and the lab {self.lab.ranks_per_host}."
            )
        if self.table and max(self._nodes) >= self.lab.hosts:
            raise PlacementError(
                f"The rank table names host{max(self._nodes)}, and the lab has {self.lab.hosts} hosts."
            )

    @property
    def _nodes(self) -> tuple[int, ...]:
        """The host of every node, if all take part."""
        from plait.core.base.lab_hosts import number

        return tuple(map(number, self.table.hosts)) if self.table else tuple(range(self.lab.hosts))

    @property
    def world(self) -> int:
        """Of all its hosts, or of those in the table."""
        return self.table.world_size if self.table else self.lab.world_size

    @property
    def hosts(self) -> Hosts:
        """Its hosts and the rate of their links."""
        return self.lab.as_hosts

    def takes(self, world: int) -> bool:
        """As many as it has, or fewer on whole hosts: the others are spares."""
        each = self.lab.ranks_per_host
        return world == self.world or (self.table is None and world < self.world and world % each == 0)

    def run(self, ranks: Ranks) -> int:
        """As processes on the lab's hosts."""
        from plait.core.topology.rank_table import NAME
        from plait.lab import Lab

        with Lab(self.lab, command=ranks.argv, nodes=self._nodes[: ranks.world // self.lab.ranks_per_host]) as running:
            if ranks.plan is not None:
                from plait.cli.fleet import LabFleet

                return _kept_going(LabFleet(running, ranks, ranks.plan), ranks)
            if self.table:  # ranks compare it with where they are
                self.table.write(ranks.logs.parent / NAME)
            return _watched(partial(running.popen, argv=ranks.argv), ranks)


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
    def submit(self, plan: Plan, folder: Path, *, follow: bool) -> int:
        """Send the plan from outside; the run's exit status, or 0 if it is not followed."""

    @abstractmethod
    def preview(self, job: Job, folder: Path) -> tuple[str, str]:
        """What ``submit`` would send, and what to call it."""


def _in_lab(where: str) -> Place:
    from plait.lab import LabSpec

    return InLab(LabSpec.parse(where))


def _in_slurm(where: str) -> Place:
    from plait.cli.on_slurm import InSlurm

    return InSlurm(where)


def _in_kubernetes(where: str) -> Place:
    from plait.cli.on_kubernetes import InKubernetes

    return InKubernetes(where)


PLACES: Mapping[str, Callable[[str], Place]] = {"lab": _in_lab, "slurm": _in_slurm, "kubernetes": _in_kubernetes}
"""By what stands before the colon, what reads the rest."""


def place_of(on: str) -> Place:
    """What ``--on`` names. Raises JobError if it is no place."""
    from plait.core.base.errors import JobError

    if on == LOCAL:
        return Here()
    kind, _, where = on.partition(":")
    if kind not in PLACES:
        fix = (
            "Use local, slurm or slurm:PARTITION, kubernetes or kubernetes:NAMESPACE, or lab:HOSTSxRANKS@RATE such as "
            "lab:2x1@1gbit"
        )
        raise JobError(f"'{on}' is no place to run", key="--on", fix=fix)
    return PLACES[kind](where)


def with_table(place: Place, rank_table: Path | None) -> Place:
    """A place whose ranks lie as a rank table says. Raises JobError for one that has no hosts to order."""
    from dataclasses import replace

    from plait.core.base.errors import JobError
    from plait.core.topology.rank_table import RankTable

    if isinstance(place, Managed):
        return replace(place, table=rank_table)
    if rank_table and isinstance(place, InLab):
        return replace(place, table=RankTable.read(rank_table))
    if rank_table:
        fix = "Use it with --on slurm, kubernetes or lab:..."
        raise JobError("orders the nodes of a cluster", key="--rank-table", fix=fix)
    return place


def run_plan(plan: Plan, folder: Path, place: Place, *, silent: bool = False, open_job: Job | None = None) -> int:
    """Train as the plan says, in a folder that is this process's alone meanwhile; the exit status. open_job:
    as the user wrote it, where the plan has closed what it leaves open."""
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


def _kept_going(fleet: Fleet, ranks: Ranks) -> int:
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


def _watched(start: Start, ranks: Ranks) -> int:
    from plait.launch.local import run_ranks

    chosen = silenced(start) if ranks.silent else start
    suspicion = suspicion_of(ranks)
    with collected(ranks):
        return run_ranks(chosen, ranks.world, ranks.logs, timeout=ranks.timeout, lock=ranks.lock, suspicion=suspicion)


def collected(ranks: Ranks) -> AbstractContextManager[None]:
    """What ranks record is collected meanwhile, if they have a folder for it."""
    from contextlib import nullcontext

    from plait.core.job.collecting import collecting

    return collecting(ranks.folder, 0, ranks.world) if ranks.folder else nullcontext()


def suspicion_of(ranks: Ranks) -> Suspicion | None:
    """What finds out why ranks hang; None for those that leave no evidence, and a rank alone."""
    from plait.diagnose.hang import localise
    from plait.launch.hang import Suspicion

    if ranks.folder is None or ranks.world == 1:
        return None
    explain = partial(localise, world=ranks.world, deadline=ranks.deadline, first=ranks.first)
    return Suspicion(ranks.folder, ranks.world, deadline=ranks.deadline, localise=explain)


def suspicion_of_plan(plan: Plan, folder: Path) -> Suspicion | None:
    """The same of the ranks of a plan, whoever starts them."""
    assert plan.job is not None
    run = plan.job.run
    ranks = Ranks(
        module="", arguments=(), world=plan.layout.world_size, logs=folder / "logs", timeout=run.timeout,
        folder=folder, deadline=run.call_deadline, first=run.first_deadline,
    )  # fmt: skip
    return suspicion_of(ranks)


def silenced(start: Start) -> Start:
    """What rank 0 prints goes to its log as well."""

    def started(rank: int, *, stdout: IO[bytes] | None, stderr: IO[bytes], **more: Any) -> Child:
        return start(rank, stdout=stdout or stderr, stderr=stderr, **more)

    return started
