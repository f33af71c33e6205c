"""Ranks on the hosts of an emulated cluster: which hosts are up, which spare replaces a failed
host, and how the run continues on too few hosts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from plait.api.ranks import run_supervised, run_watched
from plait.core.base.errors import JobError, PlacementError, PlaitError, RankFailure
from plait.core.base.lab_hosts import name, number
from plait.core.runs.host_memory import lose_memory
from plait.core.topology.rank_table import NAME, RankTable

if TYPE_CHECKING:
    from plait.api.ranks import RankSet
    from plait.core.cluster.hardware import Hosts
    from plait.core.job.plan import Plan
    from plait.core.job.spec import Job
    from plait.lab import Lab, LabSpec
    from plait.launch.local.supervisor import AttemptRanks


@dataclass(frozen=True)
class LabTarget:
    """An emulated cluster as a launch target, up as long as its ranks run. table: the host of every
    node; None: hosts in their order."""

    lab: LabSpec
    table: RankTable | None = None
    is_local: bool = True

    def __post_init__(self) -> None:
        if self.table and self.table.ranks_per_node != self.lab.ranks_per_host:
            raise PlacementError(
                f"The rank table has {self.table.ranks_per_node} ranks a host, and the lab {self.lab.ranks_per_host}. "
                "Use a table of this lab."
            )
        if self.table and max(self._nodes) >= self.lab.hosts:
            raise PlacementError(
                f"The rank table names host{max(self._nodes)}, and the lab has {self.lab.hosts} hosts. "
                "Use a table of this lab."
            )

    @property
    def _nodes(self) -> tuple[int, ...]:
        """The host of every node, if all hosts take part."""
        return tuple(map(number, self.table.hosts)) if self.table else tuple(range(self.lab.hosts))

    @property
    def world_size(self) -> int:
        """The number of ranks of all hosts, or of the hosts in the table."""
        return self.table.world_size if self.table else self.lab.world_size

    @property
    def hosts(self) -> Hosts:
        """The lab's hosts and the rate of their links."""
        return self.lab.as_hosts

    def can_run(self, world: int) -> bool:
        """Return True if ``world_size`` ranks fill the lab, or fewer of its hosts; the other hosts
        are spares then."""
        each = self.lab.ranks_per_host
        return world == self.world_size or (self.table is None and world < self.world_size and world % each == 0)

    def run(self, ranks: RankSet) -> int:
        """Start ranks as processes on the lab's hosts and watch them until they end; return the
        exit status. Raises RankFailure when the run is given up."""
        from plait.lab import Lab

        with Lab(self.lab, command=ranks.argv, nodes=self._nodes[: ranks.world // self.lab.ranks_per_host]) as running:
            if ranks.plan is not None:
                return run_supervised(LabFleet(running, ranks, ranks.plan), ranks)
            if self.table:  # ranks check their own hosts against it
                self.table.write(ranks.logs.parent / NAME)
            return run_watched(partial(running.popen, argv=ranks.argv), ranks)


# ---- the hosts as a fleet of the run's supervisor ----


HOST_CAUSES = frozenset({"killed", "ended", "crashed", "stopped", "silent", "host code"})
"""Causes of failures for which a rank's host may be to blame. If ranks disagree, no host is to
blame; links are tested in any case."""


def largest_connected(reached: Sequence[set[int]], own: Sequence[int]) -> set[int]:
    """Return the largest set of hosts that all reach each other; among sets of one size, the one
    with more of the run's ``own`` hosts.

    >>> largest_connected([{0, 2}, set(), {0, 2}], own=[0, 1])
    {0, 2}
    """
    best: set[int] = set()
    for host, others in enumerate(reached):
        mine = {other for other in others if host in reached[other]}
        while broken := [(one, mine - reached[one]) for one in mine if mine - reached[one]]:
            mine.discard(max(broken, key=lambda pair: (len(pair[1]), pair[0] not in own, pair[0]))[0])
        best = max(best, mine, key=lambda found: (len(found), len(found.intersection(own))))
    return best


@dataclass
class LabFleet:
    """The hosts of a running lab, on which the run's supervisor starts ranks. plan: the run's
    present plan, which sets the number of ranks of an attempt. ranks: their other options."""

    lab: Lab
    ranks: RankSet
    plan: Plan
    original_plan: Plan = field(init=False)
    """The plan that the run began with, to which it returns when hosts come back."""
    suspects: list[int] = field(default_factory=list[int])
    """Hosts on which ranks have failed, the latest at the end; used only when no other host is
    left."""

    def __post_init__(self) -> None:
        self.original_plan = self.plan

    @property
    def _each(self) -> int:
        return self.lab.spec.ranks_per_host

    @property
    def table(self) -> RankTable:
        """The rank table of the next attempt."""
        return RankTable(tuple(map(name, self.lab.nodes)), self._each, self.plan.key)

    @property
    def spares(self) -> list[int]:
        """Hosts without a rank."""
        return [host for host in range(self.lab.spec.hosts) if host not in self.lab.nodes]

    def crew(self) -> AttemptRanks:
        """Return the ranks of the next attempt, on the hosts of the table; ranks check their own
        hosts against the table."""
        from plait.api.ranks import collecting_records, hang_detection_of, with_logged_output
        from plait.launch.local.supervisor import AttemptRanks
        from plait.launch.run_folder import keep_plan

        ranks = replace(self.ranks, world=self.plan.layout.world_size)
        keep_plan(self.plan, ranks.logs.parent)
        self.table.write(ranks.logs.parent / NAME)
        start = partial(self.lab.popen, argv=ranks.argv)
        return AttemptRanks(
            start=with_logged_output(start) if ranks.silent else start, world=ranks.world, hosts=self.table.hosts,
            suspicion=partial(hang_detection_of, ranks), plan=self.plan.key,
            concurrent=partial(collecting_records, ranks),
        )  # fmt: skip

    def mend(self, failure: RankFailure) -> str:
        """Leave out hosts that cannot be reached, and hosts where ranks have failed if others are
        free; continue on fewer hosts if too few are left. Return a description of the change.
        Raises RankFailure if the run cannot continue."""
        up = largest_connected(self.lab.reached(), self.lab.nodes)
        blamed = self._blamed(failure)
        assert self.ranks.folder is not None
        lose_memory(self.ranks.folder, [name(host) for host in range(self.lab.spec.hosts) if host not in up])
        self.suspects = [host for host in self.suspects if host not in blamed] + sorted(blamed)
        size = len(self.lab.nodes)
        wanted = self.original_plan.layout.world_size // self._each
        if len(up) < size or (size < wanted and len(up) > size):
            if len(up) < wanted:
                return self._shrink(up)
            return self._switch_plan(self.original_plan, up)
        return self._replace_hosts(up, blamed)

    def _blamed(self, failure: RankFailure) -> set[int]:
        if failure.cause not in HOST_CAUSES:
            return set()
        return {self.lab.nodes[rank // self._each] for rank in failure.ranks}

    def _free(self, up: set[int]) -> list[int]:
        """Return the hosts of ``up`` without a rank, in the order in which they are used as spares:
        those on which ranks have failed last."""
        return sorted(up.intersection(self.spares), key=lambda host: (host in self.suspects, self._trust(host), host))

    def _trust(self, host: int) -> int:
        return self.suspects.index(host) if host in self.suspects else -1

    def _replace_hosts(self, up: set[int], blamed: set[int]) -> str:
        """Replace hosts that are not ``up`` or are blamed by spares, so that the number of hosts
        stays; return a description of the moves."""
        free = self._free(up)
        clean = [host for host in free if host not in self.suspects]
        down = [host for host in self.lab.nodes if host not in up]
        down += [host for host in self.lab.nodes if host in up and host in blamed][: max(0, len(clean) - len(down))]
        if not down:
            return ""
        spares = [name(host) for host in free[: max(len(down), len(clean))]]
        table = repair_table(self.plan, self.lab.spec, self.table, [name(host) for host in down], spares)
        moves = [
            f"{new} takes the place of {old} (node {node})"
            for node, (old, new) in enumerate(zip(self.table.hosts, table.hosts, strict=True))
            if old != new
        ]
        self._use(table)
        return "; ".join(moves)

    def _shrink(self, up: set[int]) -> str:
        """Plan the run again for the hosts in ``up``; return a description of the change. Raises
        RankFailure if that is not possible."""
        lost = sorted(set(self.lab.nodes) - up)
        gone = ", ".join(map(name, lost)) or "hosts"
        need = self.original_plan.layout.world_size // self._each
        short = (
            f"{gone} cannot be reached, no spare is left: {len(up)} of the lab's {self.lab.spec.hosts} hosts are up, "
            f"and the job needs {need}"
        )
        assert self.plan.job is not None
        if not self.plan.job.run.shrink:
            raise RankFailure(f"{short} (run.shrink = false).")
        try:
            plan = plan_for_fewer(self.original_plan, self.ranks.open_job, self.lab.spec, len(up)) if up else None
        except PlaitError as error:
            raise RankFailure(f"{short}. {error}") from None
        if plan is None:
            raise RankFailure(f"{short}; it cannot run on fewer.")
        return f"{gone} cannot be reached, and no spare is left. {self._switch_plan(plan, up)}"

    def _switch_plan(self, plan: Plan, up: set[int]) -> str:
        """Continue under another plan, on the hosts that ranks are on as far as possible; return a
        description."""
        from plait.launch.run_folder import write_run

        size = plan.layout.world_size // self._each
        kept = [host for host in self.lab.nodes if host in up]
        hosts = (kept + [host for host in self._free(up) if host not in kept])[:size]
        before, self.plan = self.plan, plan
        self._use(RankTable(tuple(map(name, hosts)), self._each, plan.key))
        assert self.ranks.folder is not None
        write_run(plan, self.ranks.folder)
        return (
            f"Planned anew for {plan.layout.world_size} ranks on {len(hosts)} host{'s' * (len(hosts) > 1)} instead of "
            f"{before.layout.world_size}: {_strategy(plan)}"
        )

    def _use(self, table: RankTable) -> None:
        self.lab.nodes = tuple(map(number, table.hosts))


def _strategy(plan: Plan) -> str:
    from plait.api.choices import strategy_line

    assert plan.job is not None
    return strategy_line(plan.job)


def repair_table(plan: Plan, lab: LabSpec, table: RankTable, down: Sequence[str], spares: Sequence[str]) -> RankTable:
    """Return the table with spares in place of the hosts that are down, which are no more than the
    spares.

    Groups spread over as few minipods as possible. If placing fails, spares are taken in their
    order, so that the run continues. Placing fails if no minipod has room for nodes that must stay
    together, or if the job's traffic is unknown.
    """
    try:
        return _placed(plan, lab, table, down, spares)
    except PlaitError:
        for host, spare in zip(down, spares, strict=False):
            table = table.with_host(table.node_rank(host), spare)
        return table


def _placed(plan: Plan, lab: LabSpec, table: RankTable, down: Sequence[str], spares: Sequence[str]) -> RankTable:
    """Return the table with hosts that ``plait place --repair`` would choose in place of those that
    are down. Raises PlacementError if none can be placed."""
    from plait.api.placing import volumes_of
    from plait.core.job.communication import CommunicationMatrix
    from plait.place.placing import NodeFilter, pools_of, spots_of
    from plait.place.repair import from_table, repair
    from plait.place.solve.affinity import affinity_of, known_profiled
    from plait.place.solve.problem import Problem

    tree = lab.as_topology
    matrix = CommunicationMatrix.of(plan, ranks_per_node=table.ranks_per_node, volumes=volumes_of(plan))
    spots = spots_of(tree, None)
    elsewhere = frozenset(spots) - {*table.hosts, *spares}
    problem = Problem.of(
        matrix, pools_of(tree, NodeFilter(avoid=elsewhere)), alpha=affinity_of(matrix, known_profiled(), "").alpha,
        plan=plan.key, topology=tree.key,
    )  # fmt: skip
    old = replace(from_table(problem, table, spots), spares=tuple(spares))
    return repair(problem, old, down=set(down), where=spots).placement.rank_table


def plan_for_fewer(plan: Plan, open_job: Job | None, lab: LabSpec, hosts: int) -> Plan | None:
    """Return the plan for this number of the lab's hosts; None if there is none.

    Values that the job leaves to the planner are planned again. A job without such values gets
    fewer data-parallel replicas, with the same global batches in the same order. open_job: the job
    as the user wrote it. Raises JobError or InfeasiblePlan if the planner finds no strategy.
    """
    from plait.plan.make import make_plan

    assert plan.job is not None
    vocab, room = plan.model.vocab, hosts * lab.ranks_per_host
    small = replace(lab, hosts=hosts, pods=lab.pods if hosts % lab.pods == 0 else 1,
                    core=lab.core if hosts % lab.pods == 0 else "unlimited")  # fmt: skip
    if open_job is not None and open_job.leaves_ranks_open:
        from plait.api.choices import close_job

        job, _ = close_job(open_job, vocab, small)
        return make_plan(job, small.as_hosts, vocab=vocab)
    for job in _smaller(plan.job):
        if job.world_size <= room and job.world_size % lab.ranks_per_host == 0:
            with suppress(PlaitError):  # try still fewer replicas
                return make_plan(job, small.as_hosts, vocab=vocab)
    return None


def _smaller(job: Job) -> Iterator[Job]:
    """Yield the job with fewer data-parallel replicas and the same global batch, the largest number
    first."""
    dp = job.strategy.dp
    degrees = (dp,) if isinstance(dp, int) else tuple(dp)
    if len(set(degrees)) > 1:
        return
    for less in range(degrees[0] - 1, 0, -1):
        value = less if isinstance(dp, int) else list((less,) * len(degrees))
        try:
            yield job.changed([f"strategy.dp={value}"])
        except JobError:  # batches or shards that cannot be divided evenly
            continue
