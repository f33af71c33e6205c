"""``plait lab``: an emulated cluster on this machine, and its cables."""

from __future__ import annotations

import json
from typing import Annotated

import typer

app = typer.Typer(
    no_args_is_help=True, help="Emulate a cluster on this Linux machine: hosts behind links of a given rate."
)

LabName = Annotated[str | None, typer.Option("--lab", metavar="NAME", help="Which lab, when several run.")]
Host = Annotated[str, typer.Argument(metavar="HOST", help="Number of the host, from 0; or pod0 for a minipod's link.")]


# Options end where the command begins, so that the command's own options need no `--` before them.
@app.command("run", context_settings={"allow_interspersed_args": False})
def run_command(
    command: Annotated[
        list[str] | None, typer.Argument(metavar="-- COMMAND...", help="What every rank runs.", show_default=False)
    ] = None,
    hosts: Annotated[int, typer.Option(help="Number of hosts.")] = 2,
    ranks_per_host: Annotated[int, typer.Option(help="Ranks on each host; they speak over its loopback.")] = 1,
    nic: Annotated[
        str, typer.Option(metavar="RATE", help="Rate of a host's link, each way: 400mbit, 2.5gbit, unlimited.")
    ] = "1gbit",
    pods: Annotated[int, typer.Option(help="Minipods: switches that hosts lie under evenly, below one core.")] = 1,
    core: Annotated[
        str, typer.Option(metavar="RATE", help="Rate of a minipod's link to the core, each way.")
    ] = "unlimited",
    mtu: Annotated[int, typer.Option(help="Largest packet of a link, in bytes.")] = 9000,
    segment: Annotated[
        int, typer.Option(metavar="BYTES", help="Most bytes TCP hands a link at once; more costs less CPU (Linux 6.3).")
    ] = 65536,
    name: Annotated[str | None, typer.Option(help="What to call the lab.", show_default="lab1, lab2, ...")] = None,
    only_rank: Annotated[
        int | None, typer.Option(metavar="N", help="Show what this rank prints, not the others.")
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Let ranks write to this terminal as they are, their lines unmarked.")
    ] = False,
    grace: Annotated[
        float, typer.Option(metavar="SECONDS", help="Between asking ranks to end and killing them.")
    ] = 5.0,
) -> None:
    """Run a command once per rank on emulated hosts, with the variables torchrun would set.

    Returns 0 if every rank does; else the status of the first rank that failed, and the others are ended.
    Needs root or user namespaces.
    """
    from plait.api.labs import LabSpec, run

    spec = LabSpec(hosts=hosts, ranks_per_host=ranks_per_host, nic=nic, mtu=mtu, segment=segment, pods=pods, core=core)
    raise typer.Exit(run(spec, command or [], name=name, only_rank=only_rank, raw=raw, grace=grace))


@app.command()
def cut(host: Host, lab: LabName = None) -> None:
    """Pull a host's cable in a running lab."""
    from plait.api.labs import cut_host, find_lab

    entry = find_lab(lab)
    typer.echo(f"{entry.name}: {cut_host(entry, host)} is cut off")


@app.command()
def heal(host: Host, lab: LabName = None) -> None:
    """Plug a host's cable in again."""
    from plait.api.labs import connect_host, find_lab

    entry = find_lab(lab)
    typer.echo(f"{entry.name}: {connect_host(entry, host)} is connected")


@app.command()
def slow(
    host: Host,
    rate: Annotated[str, typer.Argument(metavar="RATE", help="Such as 100mbit, or unlimited.")],
    lab: LabName = None,
) -> None:
    """Give a host's link another rate, in both directions."""
    from plait.api.labs import find_lab, slow_host

    entry = find_lab(lab)
    typer.echo(f"{entry.name}: the link of {slow_host(entry, host, rate)} now has {rate}")


@app.command("list")
def list_command(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Show the labs that run now, and the links of their hosts."""
    from plait.api.labs import running
    from plait.cli import terminal

    entries = running()
    if as_json:
        typer.echo(json.dumps([entry.report() for entry in entries], indent=2))
        return
    if not entries:
        typer.echo("no lab is running")
    for entry in entries:
        terminal.say(f"{entry.name}  {entry.spec}  pid {entry.pid}  {' '.join(entry.command)}")
        for host in entry.network.state():
            terminal.say(f"  host {host.host}  {host.address}  {host.nic}{'  cut off' if host.cut else ''}")
        for pod in entry.network.pod_state():
            terminal.say(f"  pod{pod.pod} to core  {pod.core}{'  cut off' if pod.cut else ''}")
