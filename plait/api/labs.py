"""Emulated clusters on this machine: labs of hosts behind links, and a real Slurm of a few nodes; nodes held
on a real cluster."""

from __future__ import annotations

import getpass
from collections.abc import Sequence
from pathlib import Path

from plait.core.base.errors import JobError
from plait.core.base.text import counted
from plait.core.topology.rank_table import RankTable
from plait.core.topology.switches import Topology
from plait.lab import LabEntry, LabSpec
from plait.lab import find as find_lab
from plait.lab import run as run_lab
from plait.lab import running as running_labs
from plait.lab import stop as stop_lab
from plait.lab.slurm import SlurmCluster, SlurmSpec
from plait.lab.slurm import down as end_slurm
from plait.lab.slurm import find as find_slurm
from plait.lab.slurm import running as running_slurms
from plait.lab.slurm import up as start_slurm

__all__ = [
    "LabEntry", "LabSpec", "SlurmCluster", "SlurmSpec", "connect_host", "cut_host", "end_slurm", "find_lab",
    "find_slurm", "reserve_hosts", "run_lab", "running_labs", "running_slurms", "slow_host", "slurm_spec",
    "start_slurm", "stop_lab",
]  # fmt: skip


def cut_host(lab: LabEntry, host: str) -> str:
    """Pull a cable of a running lab. host: its number, or ``pod0`` for a minipod's link to the core. Returns
    the host in words. Raises JobError."""
    pod, number = _link(host)
    (lab.network.cut_pod if pod else lab.network.cut)(number)
    return _said(pod, number)


def connect_host(lab: LabEntry, host: str) -> str:
    """Plug a cable in again, as ``cut_host`` names it."""
    pod, number = _link(host)
    (lab.network.heal_pod if pod else lab.network.heal)(number)
    return _said(pod, number)


def slow_host(lab: LabEntry, host: str, rate: str) -> str:
    """Give a link, as ``cut_host`` names it, another rate in both directions: ``100mbit``, ``unlimited``.
    Returns the host in words, with the rate before and now. Raises JobError."""
    pod, number = _link(host)
    network = lab.network
    before = network.pod_rate(number) if pod else network.rate(number)
    (network.slow_pod if pod else network.slow)(number, rate)
    now = network.pod_rate(number) if pod else network.rate(number)
    return f"{_said(pod, number)} had {before}, and has {now}"


def _link(name: str) -> tuple[bool, int]:
    """True for the name of a minipod, and the number in it."""
    number = name.removeprefix("pod")
    if not (number.isascii() and number.isdecimal() and len(number) <= 9):
        raise JobError(f"{name!r} is no host and no minipod", fix="Write a host's number, or pod0, pod1, ...")
    return number != name, int(number)


def _said(pod: bool, number: int) -> str:
    return f"{'minipod' if pod else 'host'} {number}"


def slurm_spec(topology: Topology, file: str, nodes: int | None = None) -> SlurmSpec:
    """The Slurm cluster of a topology that is a tree. file: the topology's, for messages. nodes: how many
    there are to be, if anybody says. Raises JobError."""
    from plait.place.writers import written

    names = tuple(node.name for node in topology.nodes)
    if nodes not in (None, len(names)):
        raise JobError(f"has {counted(len(names), 'node')}, not {nodes}", file=file, fix="Leave out --nodes")
    return SlurmSpec.of(names, written(topology, "topology.conf"), file)


def reserve_hosts(file: Path, name: str, duration: str, *, start: str = "now", users: Sequence[str] = ()) -> RankTable:
    """Hold the hosts of a rank table for a planned job, as a Slurm reservation whose nodes are never
    exchanged.

    start, duration: as Slurm writes them. users: who may use it; nobody: you. Raises JobError and
    LaunchError.
    """
    from plait.launch.slurm import reserve

    table = RankTable.read(file)
    reserve(table, name, start=start, duration=duration, users=users or [getpass.getuser()])
    return table
