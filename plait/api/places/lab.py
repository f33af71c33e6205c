"""Ranks on the hosts of an emulated cluster."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from plait.api.ranks import kept_going, watched

if TYPE_CHECKING:
    from plait.api.ranks import Ranks
    from plait.core.cluster.hardware import Hosts
    from plait.core.topology.rank_table import RankTable
    from plait.lab import LabSpec


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
        from plait.core.topology.rank_table import NAME
        from plait.lab import Lab

        with Lab(self.lab, command=ranks.argv, nodes=self._nodes[: ranks.world // self.lab.ranks_per_host]) as running:
            if ranks.plan is not None:
                from plait.api.places.lab_fleet import LabFleet

                return kept_going(LabFleet(running, ranks, ranks.plan), ranks)
            if self.table:  # ranks compare it with where they are
                self.table.write(ranks.logs.parent / NAME)
            return watched(partial(running.popen, argv=ranks.argv), ranks)
