"""Ranks on the hosts of an emulated cluster: which hosts are up, who takes a failed one's place, how the run
goes on when too few are left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from plait.api.ranks import kept_going, watched
from plait.core.base.errors import PlaitError, RankFailure
from plait.core.base.lab_hosts import name
from plait.core.runs.host_memory import lose_memory
from plait.core.topology.rank_table import NAME, RankTable

if TYPE_CHECKING:
    from plait.api.ranks import Ranks
    from plait.core.cluster.hardware import Hosts
    from plait.core.job.plan import Plan
    from plait.lab import Lab, LabSpec
    from plait.launch.supervisor import Crew


@dataclass(frozen=True)
class InLab:
    """An emulated cluster, up as long as its ranks run. table: the host of every node; None: hosts in their
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
        """The host of every node, if all hosts take part."""
        from plait.core.base.lab_hosts import number

        return tuple(map(number, self.table.hosts)) if self.table else tuple(range(self.lab.hosts))

    @property
    def world(self) -> int:
        """Ranks of all hosts, or of the hosts in the table."""
        return self.table.world_size if self.table else self.lab.world_size

    @property
    def hosts(self) -> Hosts:
        """Its hosts and the rate of their links."""
        return self.lab.as_hosts

    def takes(self, world: int) -> bool:
        """Whether a job of so many ranks fills the lab, or fewer hosts of it; the others are spares."""
        each = self.lab.ranks_per_host
        return world == self.world or (self.table is None and world < self.world and world % each == 0)

    def run(self, ranks: Ranks) -> int:
        """Start ranks as processes on the lab's hosts and see them to their end."""
        from plait.lab import Lab

        with Lab(self.lab, command=ranks.argv, nodes=self._nodes[: ranks.world // self.lab.ranks_per_host]) as running:
            if ranks.plan is not None:
                return kept_going(LabFleet(running, ranks, ranks.plan), ranks)
            if self.table:  # ranks compare it with where they are
                self.table.write(ranks.logs.parent / NAME)
            return watched(partial(running.popen, argv=ranks.argv), ranks)


# ---- the hosts, as a run's supervisor sees them ----


OF_HOSTS = frozenset({"killed", "ended", "crashed", "stopped", "silent", "host code"})
"""Causes for which a rank's machine may be to blame. Ranks that disagree are no machine's fault, and links
are tried anyway."""


def together(reached: Sequence[set[int]], own: Sequence[int]) -> set[int]:
    """The most hosts that all reach each other; of as many, those that have more of the run's ``own``.

    >>> together([{0, 2}, set(), {0, 2}], own=[0, 1])
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
    """The hosts of a running lab. plan: the run's. ranks: of an attempt, but for how many there are."""

    lab: Lab
    ranks: Ranks
    plan: Plan
    wanted: Plan = field(init=False)
    """The plan that the run began with, to which it returns when hosts come back."""
    suspects: list[int] = field(default_factory=list[int])
    """Hosts on which ranks have failed, the last to do so at the end: used when nothing else is left."""

    def __post_init__(self) -> None:
        self.wanted = self.plan

    @property
    def _each(self) -> int:
        return self.lab.spec.ranks_per_host

    @property
    def table(self) -> RankTable:
        """Where ranks are to run next."""
        return RankTable(tuple(map(name, self.lab.nodes)), self._each, self.plan.key)

    @property
    def spares(self) -> list[int]:
        """Hosts without a rank."""
        return [host for host in range(self.lab.spec.hosts) if host not in self.lab.nodes]

    def crew(self) -> Crew:
        """Ranks on the hosts of the table, which they compare with where they are."""
        from plait.api.ranks import collected, silenced, suspicion_of
        from plait.launch.run_folder import keep_plan
        from plait.launch.supervisor import Crew

        ranks = replace(self.ranks, world=self.plan.layout.world_size)
        keep_plan(self.plan, ranks.logs.parent)
        self.table.write(ranks.logs.parent / NAME)
        start = partial(self.lab.popen, argv=ranks.argv)
        return Crew(
            start=silenced(start) if ranks.silent else start, world=ranks.world, hosts=self.table.hosts,
            suspicion=partial(suspicion_of, ranks), plan=self.plan.key, beside=partial(collected, ranks),
        )  # fmt: skip

    def mend(self, failure: RankFailure) -> str:
        """Leave out hosts that cannot be reached, and those where ranks have failed if others are free; go on
        with fewer if there are too few."""
        up = together(self.lab.reached(), self.lab.nodes)
        blamed = self._blamed(failure)
        assert self.ranks.folder is not None
        lose_memory(self.ranks.folder, [name(host) for host in range(self.lab.spec.hosts) if host not in up])
        self.suspects = [host for host in self.suspects if host not in blamed] + sorted(blamed)
        size = len(self.lab.nodes)
        wanted = self.wanted.layout.world_size // self._each
        if len(up) < size or (size < wanted and len(up) > size):
            if len(up) < wanted:
                return self._fewer(up)
            return self._anew(self.wanted, up)
        return self._moved(up, blamed)

    def _blamed(self, failure: RankFailure) -> set[int]:
        if failure.cause not in OF_HOSTS:
            return set()
        return {self.lab.nodes[rank // self._each] for rank in failure.ranks}

    def _free(self, up: set[int]) -> list[int]:
        """Spares in the order in which they are used: suspects last."""
        return sorted(up.intersection(self.spares), key=lambda host: (host in self.suspects, self._trust(host), host))

    def _trust(self, host: int) -> int:
        return self.suspects.index(host) if host in self.suspects else -1

    def _moved(self, up: set[int], blamed: set[int]) -> str:
        """As many hosts as before, others in place of those that fail."""
        from plait.api.recover import repaired

        free = self._free(up)
        clean = [host for host in free if host not in self.suspects]
        down = [host for host in self.lab.nodes if host not in up]
        down += [host for host in self.lab.nodes if host in up and host in blamed][: max(0, len(clean) - len(down))]
        if not down:
            return ""
        spares = [name(host) for host in free[: max(len(down), len(clean))]]
        table = repaired(self.plan, self.lab.spec, self.table, [name(host) for host in down], spares)
        moves = [
            f"{new} takes the place of {old} (node {node})"
            for node, (old, new) in enumerate(zip(self.table.hosts, table.hosts, strict=True))
            if old != new
        ]
        self._use(table)
        return "; ".join(moves)

    def _fewer(self, up: set[int]) -> str:
        """The run, planned anew for what is left."""
        from plait.api.recover import fewer

        lost = sorted(set(self.lab.nodes) - up)
        gone = ", ".join(map(name, lost)) or "hosts"
        need = self.wanted.layout.world_size // self._each
        short = (
            f"{gone} cannot be reached, no spare is left: {len(up)} of the lab's {self.lab.spec.hosts} hosts are up, "
            f"and the job needs {need}"
        )
        assert self.plan.job is not None
        if not self.plan.job.run.shrink:
            raise RankFailure(f"{short} (run.shrink = false).")
        try:
            plan = fewer(self.wanted, self.ranks.open_job, self.lab.spec, len(up)) if up else None
        except PlaitError as error:
            raise RankFailure(f"{short}. {error}") from None
        if plan is None:
            raise RankFailure(f"{short}; it cannot run on fewer.")
        return f"{gone} cannot be reached, and no spare is left. {self._anew(plan, up)}"

    def _anew(self, plan: Plan, up: set[int]) -> str:
        """Go on under another plan, keeping the hosts that ranks are on."""
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
        from plait.core.base.lab_hosts import number

        self.lab.nodes = tuple(map(number, table.hosts))


def _strategy(plan: Plan) -> str:
    from plait.api.choose import told

    assert plan.job is not None
    return told(plan.job)
