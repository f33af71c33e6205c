"""``plait check``: hosts tried before a run: loopback, links, clocks, disk."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from plait.launch.self_check_verdict import Finding

SHOWN = 20
"""Links that are shown, the slowest."""


def check(
    on: Annotated[
        str, typer.Option(help="Where, as for plait train: local, lab:HOSTSxRANKS@RATE, or slurm inside of a job.")
    ] = "local",
    nodes: Annotated[int, typer.Option(help="How many hosts, where --on does not say: one rank on each.")] = 1,
    folder: Annotated[Path, typer.Option(help="On whose disk to try how files are written: where runs go.")] = Path(
        "runs"
    ),
    size: Annotated[float, typer.Option(help="MiB that each measurement of a link sends.")] = 8.0,
    least: Annotated[
        str | None, typer.Option(metavar="RATE", help="What every link must pass: 900mbit, 25gbit.")
    ] = None,
    clock: Annotated[float, typer.Option(help="Seconds that clocks of hosts may be apart.")] = 1.0,
    disk: Annotated[float, typer.Option(help="MB/s that every host must write to the disk.")] = 10.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Try hosts before a run: loopback, neighbours, every pair, all at once; clocks; the disk.

    Exit status 1, and a line for each, when something is bad: a host that cannot be reached, a link or a
    loopback with less than a quarter of the usual rate, clocks too far apart, a disk that is full, slow
    or cannot be written.

    Example: plait check --on lab:4x2@1gbit --least 900mbit
    """
    from dataclasses import asdict

    from plait.api.hosts import check_hosts
    from plait.api.places import place_of
    from plait.core.base.errors import JobError

    for option, value in (("--size", size), ("--nodes", nodes), ("--clock", clock), ("--disk", disk)):
        if not 0 < value < 1e9:
            raise JobError(f"{value} is not allowed", key=option, fix="Use a number above 0")
    place = place_of(on)
    if nodes != 1 and place.ours:
        raise JobError(
            f"{nodes} is not allowed with --on {on}, which says how many hosts there are", key="--nodes",
            fix="Leave it out, or try several hosts with --on lab:HOSTSxRANKS",
        )  # fmt: skip
    found = check_hosts(place, folder, nodes=nodes, size=int(size * 2**20), least=least, clock=clock, disk=disk * 1e6)
    if isinstance(found, int):
        raise typer.Exit(found)
    report, bad = found.report, found.bad
    if as_json:
        typer.echo(json.dumps({"version": 1, **report, "bad": [asdict(one) for one in bad]}))
    else:
        _show(report, bad)
    raise typer.Exit(1 if bad else 0)


def _show(report: Mapping[str, Any], bad: Sequence[Finding]) -> None:
    """Tables, then what is wrong."""
    from plait.cli import terminal
    from plait.launch.self_check_verdict import in_rate

    def rate(value: float | None) -> str:
        return "-" if value is None else in_rate(value)

    terminal.title("Hosts")
    rows: list[list[str]] = []
    for host, one in report["hosts"].items():
        disk, clock = one.get("disk") or {}, one.get("clock")
        ahead = "-" if clock is None else f"{clock[0] * 1e3:+.1f} ms (within {clock[1] * 1e3:.1f})"
        free = f"{disk['free'] / 2**30:,.0f} GiB" if "free" in disk else "-"
        together = rate(report["all_at_once"].get(host))
        rows.append([host, rate(one["loopback"]), together, ahead, rate(disk.get("rate")), free])
    terminal.table(["host", "loopback", "to all at once", "clock", "disk writes", "disk free"], rows)
    links = sorted(report["links"], key=lambda one: one.get("rate", 0.0))
    if links:
        terminal.title(f"Links, each way{f': the slowest {SHOWN} of {len(links)}' if len(links) > SHOWN else ''}")
        shown = [[one["from"], one["to"], one["kind"], rate(one.get("rate"))] for one in links[:SHOWN]]
        terminal.table(["from", "to", "", "rate"], shown)
    for one in bad:
        terminal.text(f"BAD {one.what}: {one.why}", indent="  ")
    if not bad:
        terminal.text("Nothing is wrong with what was tried.")
