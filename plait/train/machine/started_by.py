"""Ranks that others have started: srun itself, mpirun, a shell over ssh; and their order by a rank table.

What they set is turned into torchrun's variables before anything reads those.
"""

from __future__ import annotations

import re

from plait.core.base.cluster_env import chosen_rank_table, forget, started_values, starter_of, this_host
from plait.core.base.env import RankEnv, become_rank
from plait.core.base.errors import LaunchError, PlacementError
from plait.core.topology.hostlist import expand
from plait.core.topology.rank_table import RankTable


def take_place() -> None:
    """Become the rank that this process's starter has made it, and of a rank table the one of its host.
    Raises LaunchError for variables that contradict each other, PlacementError for a host that the table
    does not have."""
    if starter := starter_of():
        forget(("GROUP_RANK", "NODE_RANK"))  # of another starter's around it
        become_rank(_variables(starter.name, started_values(starter)))
    if path := chosen_rank_table():
        become_rank(_by_table(RankTable.read(path), RankEnv.read()))


def _variables(name: str, told: dict[str, str]) -> dict[str, str]:
    found = {"RANK": told["rank"], "WORLD_SIZE": told["world_size"]}
    if "local_rank" in told:
        found["LOCAL_RANK"] = told["local_rank"]
    if "per_node" in told:
        counts = tasks_of_nodes(told["per_node"])
        if not (number := told.get("node", "")).isdecimal():
            raise LaunchError(f"{name} says that this is node {number!r}, which is no number.")
        if (node := int(number)) >= len(counts):
            raise LaunchError(f"{name} says that this is node {node}, and has tasks on {len(counts)}.")
        found |= {"LOCAL_WORLD_SIZE": str(counts[node]), "NODE_RANK": str(node), "GROUP_RANK": str(node)}
    elif "local_world_size" in told:
        found["LOCAL_WORLD_SIZE"] = told["local_world_size"]
    if "nodes" in told:
        try:
            found["MASTER_ADDR"] = expand(told["nodes"])[0]
        except (ValueError, IndexError):
            raise LaunchError(f"{name} says that its nodes are {told['nodes']!r}, which cannot be read.") from None
    return found


def tasks_of_nodes(text: str) -> list[int]:
    """Slurm's short form of the tasks of each node.

    >>> tasks_of_nodes("4(x2),2")
    [4, 4, 2]
    """
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if not match:
            raise LaunchError(f"Slurm's tasks of nodes are told as {text!r}, which cannot be read.")
        found += [int(match[1])] * int(match[2] or 1)
    return found


def _by_table(table: RankTable, rank: RankEnv) -> dict[str, str]:
    """The rank of this process's place on its host."""
    if rank.local_world_size != table.ranks_per_node or rank.world_size != table.world_size:
        raise PlacementError(
            f"{rank.world_size} ranks were started, {rank.local_world_size} of them on this host, and the rank table "
            f"has {table.world_size}, {table.ranks_per_node} on each of {len(table.hosts)} hosts."
        )
    node = table.node_rank(this_host())
    return {
        "RANK": str(node * table.ranks_per_node + rank.local_rank), "NODE_RANK": str(node), "GROUP_RANK": str(node),
        "MASTER_ADDR": table.hosts[0],
    }  # fmt: skip
