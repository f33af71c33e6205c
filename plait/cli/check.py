"""``plait doctor`` examines this machine; ``plait check`` tests hosts before a run: loopback,
links, clocks, disk."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from plait.cli import terminal
from plait.cli.commands import AsJson


def doctor(
    folder: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Where runs go: whether it can be written, and its disk.")
    ] = Path("runs"),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for a bug report.")] = False,
) -> None:
    """Show what this machine has and lacks, and what to do.

    It looks at versions, devices, limits and clusters.

    fine: it works. look: it works, and is slow or risky, or only some need it. missing: it does not
    work; the exit status is 1 then. plait check measures links and disks of several hosts.

    Examples:
        plait doctor
        plait doctor --json
    """
    from plait.api.health import examine_machine

    terminal.aside("looking; importing PyTorch takes longest ...")
    found = examine_machine(folder)
    terminal.answer(found, as_json=as_json)
    raise typer.Exit(1 if found.missing else 0)


@dataclass(frozen=True)
class LimitOptions:
    """Options for the limits that every host and link must meet."""

    least: Annotated[
        str | None, typer.Option(metavar="RATE", help="Rate that every link must pass: 900mbit, 25gbit.")
    ] = None
    clock: Annotated[float, typer.Option(metavar="SECONDS", help="Seconds that clocks of hosts may be apart.")] = 1.0
    disk: Annotated[float, typer.Option(metavar="MB/S", help="MB/s that every host must write to the disk.")] = 10.0

    @property
    def rate(self) -> float:
        """The least rate of every link, in bytes per second; 0 if there is none."""
        from plait.core.base.lab_hosts import to_bits

        return to_bits(self.least) / 8 if self.least else 0.0


@dataclass(frozen=True)
class HostOptions:
    """Options for the hosts, and for what is tried on them."""

    on: Annotated[
        str,
        typer.Option(
            metavar="PLACE", help="Where, as for plait train: local, lab:HOSTSxRANKS@RATE, or slurm inside of a job."
        ),
    ] = "local"
    nodes: Annotated[
        int, typer.Option(metavar="N", help="How many hosts, where --on does not say, with one rank on each.")
    ] = 1
    folder: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Folder on whose disk files are tried: where runs go.")
    ] = Path("runs")
    size: Annotated[float, typer.Option(metavar="MIB", help="MiB that each measurement of a link sends.")] = 8.0


def check(wanted: LimitOptions, hosts: HostOptions, as_json: AsJson = False) -> None:
    """Test hosts before a run: links, clocks and disks.

    Links are tried as loopback, between neighbours, in every pair, and all at once. Exit status 1,
    and a line for each, when something is bad: a host that cannot be reached, a link or a loopback
    with less than a quarter of the usual rate, clocks too far apart, a disk that is full, slow or
    cannot be written.

    Examples:
        plait check --nodes 1 --size 1
        plait check --on lab:4x2@1gbit --least 900mbit
    """
    from plait.api.health import Limits, check_hosts
    from plait.api.places import place_of
    from plait.core.base.errors import JobError

    values = (("--size", hosts.size), ("--nodes", hosts.nodes), ("--clock", wanted.clock), ("--disk", wanted.disk))
    for option, value in values:
        if not 0 < value < 1e9:
            raise JobError(f"{value} is not allowed", key=option, fix="Use a number above 0")
    place = place_of(hosts.on)
    if hosts.nodes != 1 and place.is_local:
        raise JobError(
            f"{hosts.nodes} is not allowed with --on {hosts.on}, which says how many hosts there are", key="--nodes",
            fix="Leave it out, or try several hosts with --on lab:HOSTSxRANKS",
        )  # fmt: skip
    limits = Limits(rate=wanted.rate, clock=wanted.clock, disk_rate=wanted.disk * 1e6)
    found = check_hosts(place, hosts.folder, nodes=hosts.nodes, size=int(hosts.size * 2**20), limits=limits)
    if isinstance(found, int):
        raise typer.Exit(found)
    terminal.answer(found, as_json=as_json)
    raise typer.Exit(1 if found.problems else 0)
