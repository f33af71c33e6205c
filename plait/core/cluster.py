"""Cluster: where a job is planned to run."""

from __future__ import annotations

from dataclasses import dataclass

MEMORY_RATE = 1e10
"""Bytes per second between ranks of one machine; only its ratio to latencies matters, and only to chunk
sizes."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Hosts of equally many ranks, each host behind one link. ranks_per_host: 0 if all ranks share one host.
    rate: bytes per second of a host's link, each way; None if nothing limits it."""

    ranks_per_host: int = 0
    rate: float | None = None

    def hosts(self, world_size: int) -> tuple[int, ...]:
        """The host of every rank: ranks fill one host after the other."""
        each = self.ranks_per_host or world_size
        return tuple(rank // each for rank in range(world_size))


HERE = Cluster()
"""This machine."""
