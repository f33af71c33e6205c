"""The nodes of a Slurm job: which of them ranks are on, in which order, and who takes a failed one's
place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from plait.core.base.cluster_env import slurm_job
from plait.core.base.errors import JobError, LaunchError, PlacementError, PlaitError, RankFailure
from plait.core.job.plan import Plan
from plait.core.topology.hostlist import fold
from plait.core.topology.rank_table import NAME, RankTable
from plait.core.topology.slurm_lines import in_topological_order
from plait.launch import slurm
from plait.launch.run_folder import hosts_given_up
from plait.launch.watch import say

PLACED = "placed_ranks.json"
"""The rank table that the user has given, in the run's folder."""
OF_HOSTS = frozenset({"killed", "ended", "crashed", "stopped", "silent", "host code"})
"""Causes of failures for which a rank's machine may be to blame."""


class GrantedNodes(NamedTuple):
    """hosts: that may be used. count: how many are to be. each: ranks of a node."""

    hosts: tuple[str, ...]
    count: int
    each: int


Order = Callable[[Plan, GrantedNodes], tuple[Sequence[str], str]]
"""The best order of nodes for a plan, and a sentence on it. Raises PlaitError where there is none."""


@dataclass
class JobNodes:
    """The nodes of the job: those that ranks are on, and spares. given: by Slurm, in its order."""

    folder: Path
    given: Sequence[str]
    world_size: int
    spares: int = 0
    lost: set[str] = field(default_factory=set[str])
    """Those that are not used any more."""

    def table(self, plan: Plan | None = None, order: Order | None = None) -> RankTable:
        """The user's rank table, if all its hosts are ours, with others for what is lost; else the nodes that
        are left in the best order that is known."""
        left = [node for node in self.given if node not in self.lost]
        if (self.folder / PLACED).is_file():
            table = RankTable.read(self.folder / PLACED)
            replaced = self.lost | (hosts_given_up(self.folder, slurm_job()[0]) - {*self.given})
            if missing := [host for host in table.hosts if host not in {*self.given, *replaced}]:
                raise PlacementError(f"The rank table has {', '.join(missing)}, which this Slurm job was not given.")
            spare = [node for node in left if node not in table.hosts]
            for place, host in enumerate(table.hosts):
                if host in replaced:
                    table = table.with_host(place, spare.pop(0))
                    say(f"{table.hosts[place]} takes the place of {host}, which was lost")
        else:
            count = len(self.given) - min(self.spares, len(self.given) - 1)
            if self.world_size % count:
                problem = f"{self.world_size} ranks do not spread evenly over the {count} nodes of this job."
                raise PlacementError(problem)
            table = self._ordered(left, count, plan, order)
        if table.world_size != self.world_size:
            raise PlacementError(f"The rank table has {table.world_size} ranks, and the run needs {self.world_size}.")
        table.write(self.folder / NAME)
        return table

    def _ordered(self, left: Sequence[str], count: int, plan: Plan | None, order: Order | None) -> RankTable:
        """``count`` of the nodes that are left: as the placer has them, else in the order of the switches."""
        each = self.world_size // count
        if order and plan and count > 1:
            try:
                hosts, said = order(plan, GrantedNodes(tuple(left), count, each))
                say(said)
                return RankTable(tuple(hosts), each, plan.key)
            except PlaitError as error:
                say(f"nodes are taken in the order of the switches, for the placer has none: {error}")
        ordered = list(left)
        with suppress(LaunchError, JobError, ValueError):  # a cluster without switches, or with none that we can read
            ordered = in_topological_order(left, slurm.command("scontrol", "show", "topology"))
        return RankTable(tuple(ordered[:count]), each)

    def mend(self, failure: RankFailure, table: RankTable) -> str:
        """Leave out the nodes that have failed; which, in words. Empty where there is nothing to leave out,
        or not enough is left."""
        if not self.spares:
            return ""
        if failure.cause in OF_HOSTS:
            self.lost |= {table.host_of(rank) for rank in failure.ranks}
        self.lost |= slurm.nodes_down(self.given)
        bad = [host for host in table.hosts if host in self.lost]
        free = [node for node in self.given if node not in self.lost and node not in table.hosts]
        return f"without {fold(bad)}" if 0 < len(bad) <= len(free) else ""
