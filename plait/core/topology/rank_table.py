"""RankTable: the node rank of each host of a job, and hence the ranks that the host runs.

A cluster manager numbers hosts as it likes, most by name. A job's groups are made of neighbouring
ranks, so the numbering is the placement: it is written down once, every launcher obeys it, and
every rank compares it with the host on which it runs.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from plait.core.base.codec.data import decode
from plait.core.base.codec.json_text import read_table
from plait.core.base.errors import JobError, PlacementError
from plait.core.base.files import replacing
from plait.core.topology.hostlist import fold

VERSION = 1
NAME = "rank_table.json"
"""File in a run's folder with which ranks compare the host on which they run."""


@dataclass(frozen=True)
class RankTable:
    """Hosts of a job and their ranks. hosts: names, by node rank. ranks_per_node: of every host.
    plan: hash of the plan that the table was made for.

    >>> table = RankTable(("n7", "n3"), ranks_per_node=2)
    >>> table.host_of(3), list(table.ranks_of("n7")), table.node_rank("n3")
    ('n3', [0, 1], 1)
    """

    hosts: tuple[str, ...]
    ranks_per_node: int
    plan: str = ""

    def __post_init__(self) -> None:
        twice = sorted(host for host, count in Counter(self.hosts).items() if count > 1)
        if twice:
            raise PlacementError(f"A rank table names {', '.join(twice)} more than once; a host runs one node's ranks.")
        if self.ranks_per_node < 1 or not self.hosts:
            raise PlacementError("A rank table needs at least one host and one rank of each.")

    @cached_property
    def _node_ranks(self) -> dict[str, int]:
        return {host: node for node, host in enumerate(self.hosts)}

    @property
    def world_size(self) -> int:
        """Number of ranks of the job."""
        return len(self.hosts) * self.ranks_per_node

    def check_job(self, world_size: int, nodes: int, section: str) -> None:
        """Raise JobError unless the table has the ranks of a job, and as many hosts as ``nodes`` of
        the job's ``section`` (0: any number)."""
        if self.world_size != world_size:
            problem = f"the rank table has {self.world_size} ranks, and the job needs {world_size}"
            raise JobError(problem, key="--rank-table", fix="Make it for this plan")
        if nodes not in (0, len(self.hosts)):
            problem = f"is {nodes}, and the rank table has {len(self.hosts)} hosts"
            raise JobError(problem, key=f"{section}.nodes", fix="Leave it out")

    def host_of(self, rank: int) -> str:
        """Return the host that runs a rank."""
        return self.hosts[rank // self.ranks_per_node]

    def node_rank(self, host: str) -> int:
        """Return the node rank of a host. Raises PlacementError for a host that is not in the
        table."""
        try:
            return self._node_ranks[host]
        except KeyError:
            raise PlacementError(f"The host {host} is not in the rank table of {len(self.hosts)} hosts.") from None

    def ranks_of(self, host: str) -> range:
        """Return the ranks of a host. Raises PlacementError for a host that is not in the table."""
        first = self.node_rank(host) * self.ranks_per_node
        return range(first, first + self.ranks_per_node)

    def check(self, rank: int, world_size: int, host: str) -> None:
        """Raise PlacementError if a rank runs on another host than in the table, or the number of
        ranks differs."""
        if world_size != self.world_size:
            raise PlacementError(
                f"{world_size} ranks were started, and the rank table has {self.world_size} ({len(self.hosts)} hosts "
                f"of {self.ranks_per_node})."
            )
        if not _same_host(host, self.host_of(rank)):
            raise PlacementError(
                f"Rank {rank} runs on {host}, and the rank table has it on {self.host_of(rank)}. Start ranks in the "
                "table's order, or remove rank_table.json from the run's folder to have none."
            )

    def with_host(self, node_rank: int, host: str) -> RankTable:
        """Return the table with ``host`` at ``node_rank``."""
        hosts = list(self.hosts)
        hosts[node_rank] = host
        return RankTable(tuple(hosts), self.ranks_per_node, self.plan)

    def write(self, path: Path) -> None:
        """Write the table as JSON, for people and for other programs: each host with its node rank
        and ranks."""
        nodes = [
            {"host": host, "node_rank": node, "ranks": list(self.ranks_of(host))}
            for node, host in enumerate(self.hosts)
        ]
        table = {"version": VERSION, "plan": self.plan, "ranks_per_node": self.ranks_per_node, "nodes": nodes}
        with replacing(path) as file:
            file.write_text(json.dumps(table, indent=1) + "\n")

    @staticmethod
    def read(path: Path) -> RankTable:
        """Return the table in a file.

        Known: ``version``, ``plan``, ``ranks_per_node`` and in each of ``nodes`` its ``host``,
        ``node_rank`` and ``ranks``. Ignored: other keys, which other tools may have added. Refused,
        with PlacementError that names the file: missing keys, values of another type, a host that
        no host list can hold, ranks that do not follow from a node's position.
        """
        try:
            return _checked(read_table(path))
        except OSError as error:
            raise PlacementError(f"{path}: {error.strerror or error}. Name a {NAME} of plait place.") from None
        except (ValueError, JobError) as error:
            raise PlacementError(f"{path}: not a rank table ({error}). Name a {NAME} of plait place.") from None
        except PlacementError as error:
            raise PlacementError(f"{path}: {error}") from None


def _same_host(one: str, other: str) -> bool:
    """Return True if two names may mean the same machine: one of them may lack the domain."""
    return one == other or (("." in one) != ("." in other) and one.split(".")[0] == other.split(".")[0])


@dataclass(frozen=True)
class _Node:
    """A node in the file of a rank table."""

    host: str
    node_rank: int
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class _Table:
    """Content of the file of a rank table."""

    version: int
    plan: str
    ranks_per_node: int
    nodes: tuple[_Node, ...]


def _checked(value: Mapping[str, Any]) -> RankTable:
    whole = decode(_Table, value, ignore_unknown=True)
    if whole.version != VERSION:
        raise ValueError(f"version {whole.version}, and this Plait reads {VERSION}")
    for node in whole.nodes:
        fold([node.host])
    table = RankTable(tuple(node.host for node in whole.nodes), whole.ranks_per_node, whole.plan)
    for number, node in enumerate(whole.nodes):
        first = number * table.ranks_per_node
        follows = len(node.ranks) == table.ranks_per_node and all(
            rank == first + place for place, rank in enumerate(node.ranks)
        )
        if node.node_rank != number or not follows:
            raise ValueError(f"node {number}: its node_rank or ranks do not follow from its place")
    return table
