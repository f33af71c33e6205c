"""Labs, which emulate a cluster's hosts and links on this machine; and reservations of nodes on a
real cluster."""

from __future__ import annotations

import getpass
from collections.abc import Sequence
from pathlib import Path

from plait.core.base.errors import JobError
from plait.core.topology.rank_table import RankTable
from plait.lab import LabEntry, LabSpec
from plait.lab import find as find_lab
from plait.lab import run as run_lab
from plait.lab import running as running_labs
from plait.lab import stop as stop_lab

__all__ = [
    "LabEntry",
    "LabSpec",
    "cut_host",
    "find_lab",
    "reserve_hosts",
    "restore_host",
    "run_lab",
    "running_labs",
    "slow_host",
    "stop_lab",
]  # fmt: skip


def cut_host(lab: LabEntry, host: str) -> str:
    """Cut the links of a host of a running lab. host: its number, or ``pod0`` for the link of
    minipod 0 to the core. Return the host in words, for a message. Raises JobError for an unknown
    host."""
    pod, number = _link(host)
    lab.network.cut(number, pod=pod)
    return _host_text(pod, number)


def restore_host(lab: LabEntry, host: str) -> str:
    """Restore the links that ``cut_host`` has cut. host: as for ``cut_host``. Return the host in
    words, for a message. Raises JobError for an unknown host."""
    pod, number = _link(host)
    lab.network.heal(number, pod=pod)
    return _host_text(pod, number)


def slow_host(lab: LabEntry, host: str, rate: str) -> str:
    """Set the rate of a host's links in both directions. host: as for ``cut_host``. rate: such as
    ``100mbit``, or ``unlimited``. Return the host in words, with the rates before and now. Raises
    JobError for an unknown host or an invalid rate."""
    pod, number = _link(host)
    network = lab.network
    before = network.rate(number, pod=pod)
    network.slow(number, rate, pod=pod)
    return f"{_host_text(pod, number)} had {before}, and has {network.rate(number, pod=pod)}"


def _link(name: str) -> tuple[bool, int]:
    """Return (True for a minipod such as ``pod0``, False for a host; its number). Raises JobError
    for any other name."""
    number = name.removeprefix("pod")
    if not (number.isascii() and number.isdecimal() and len(number) <= 9):
        raise JobError(f"{name!r} is no host and no minipod", fix="Write a host's number, or pod0, pod1, ...")
    return number != name, int(number)


def _host_text(pod: bool, number: int) -> str:
    return f"{'minipod' if pod else 'host'} {number}"


def reserve_hosts(file: Path, name: str, duration: str, *, start: str = "now", users: Sequence[str] = ()) -> RankTable:
    """Reserve the hosts of a rank table for a planned job, as a Slurm reservation whose nodes are
    never replaced.

    start, duration: in Slurm's notation. users: who may use the reservation; if empty, this user.
    Raises JobError and LaunchError.
    """
    from plait.launch.slurm.commands import reserve

    table = RankTable.read(file)
    reserve(table, name, start=start, duration=duration, users=users or [getpass.getuser()])
    return table
