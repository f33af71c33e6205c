"""The hosts of a lab as a run's supervisor sees them: which are up, who takes a failed one's place, how the
run goes on when too few are left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from plait.core.base.errors import PlaitError, RankFailure
from plait.core.base.lab_hosts import name
from plait.core.runs.host_memory import lose_memory
from plait.core.topology.rank_table import NAME, RankTable

if TYPE_CHECKING:
    from plait.api.ranks import Ranks
    from plait.core.job.plan import Plan
    from plait.lab import Lab
    from plait.launch.supervisor import Crew

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
        from plait.launch.supervisor import Crew

        ranks = replace(self.ranks, world=self.plan.layout.world_size)
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
