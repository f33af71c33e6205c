"""``plait lab``: an emulated cluster on this machine, and its links."""

from __future__ import annotations

from typing import Annotated

import typer

from plait.cli import terminal
from plait.cli.commands import App, AsJson

app = App("Emulate a cluster on this Linux machine.\n\nIts hosts are behind links of a given rate.")

LabName = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Name of the lab.", show_default="the lab that this shell has started"),
]
Host = Annotated[str, typer.Argument(metavar="HOST", help="Number of the host, from 0; or pod0 for a minipod's link.")]


# Options end where the command begins, so that the command's own options need no `--` before them.
@app.command("run", context_settings={"allow_interspersed_args": False})
def run_command(
    lab: Annotated[
        str,
        typer.Argument(
            metavar="LAB",
            help="HOSTSxRANKS@RATE, such as 2x1@1gbit; further 2pods@300mbit (minipods below a slower core), "
            "nics=2 (links of a host), mtu=1500, segment=262144, by commas.",
        ),
    ],
    command: Annotated[
        list[str] | None, typer.Argument(metavar="COMMAND", help="What every rank runs.", show_default=False)
    ] = None,
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Name of the lab.", show_default="lab1, lab2, ...")
    ] = None,
    only_rank: Annotated[
        int | None, typer.Option(metavar="N", help="Show what this rank prints, not the others.")
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Let ranks write to this terminal as they are, their lines unmarked.")
    ] = False,
    grace: Annotated[
        float, typer.Option(metavar="SECONDS", help="Time between asking ranks to end and killing them.")
    ] = 5.0,
) -> None:
    """Run a command once per rank on emulated hosts.

    Ranks have the variables that torchrun would set. Returns 0 if every rank does; else the status
    of the first rank that failed, and the others are ended. Needs root or user namespaces.

    Examples:
        plait lab run 2x1@1gbit -- hostname
        plait lab run 4x1@1gbit,2pods@300mbit --name pods -- python train.py
    """
    from plait.api.labs import LabSpec, run_lab

    words = command or []
    words = words[1:] if words[:1] == ["--"] else words
    raise typer.Exit(run_lab(LabSpec.parse(lab), words, name=name, only_rank=only_rank, raw=raw, grace=grace))


@app.command()
def cut(host: Host, name: LabName = None) -> None:
    """Pull a host's cable in a running lab.

    Examples:
        plait lab cut 1
        plait lab cut pod0 --name pods
    """
    from plait.api.labs import cut_host, find_lab

    entry = find_lab(name)
    typer.echo(f"{entry.name}: {cut_host(entry, host)} is cut off")


@app.command()
def heal(host: Host, name: LabName = None) -> None:
    """Plug a host's cable in again.

    Examples:
        plait lab heal 1
        plait lab heal pod0 --name pods
    """
    from plait.api.labs import find_lab, restore_host

    entry = find_lab(name)
    typer.echo(f"{entry.name}: {restore_host(entry, host)} is connected")


@app.command()
def slow(
    host: Host,
    rate: Annotated[str, typer.Argument(metavar="RATE", help="Such as 100mbit, or unlimited.")],
    name: LabName = None,
) -> None:
    """Give a host's link another rate, in both directions.

    Examples:
        plait lab slow 1 100mbit
        plait lab slow 1 unlimited --name pods
    """
    from plait.api.labs import find_lab, slow_host

    entry = find_lab(name)
    typer.echo(f"{entry.name}: the link of {slow_host(entry, host, rate)}")


@app.command()
def stop(name: LabName = None) -> None:
    """End a running lab with its ranks; a run is saved first.

    Exit status 1 if it has not ended within ten seconds.

    Examples:
        plait lab stop
        plait lab stop --name pods
    """
    from plait.api.labs import find_lab, stop_lab

    entry = find_lab(name)
    ended = stop_lab(entry, 10.0)
    typer.echo(f"{entry.name}: {'has ended' if ended else f'was asked to end (process {entry.pid}), and still runs'}")
    raise typer.Exit(not ended)


@app.command("list")
def list_command(as_json: AsJson = False) -> None:
    """Show the labs that run now, and the links of their hosts.

    Examples:
        plait lab list
        plait lab list --json
    """
    from plait.api.labs import running_labs

    entries = running_labs()
    if as_json:
        terminal.print_json({"labs": [entry.report() for entry in entries]})
        return
    if not entries:
        typer.echo("no lab is running")
    for entry in entries:
        terminal.say(f"{entry.name}  {entry.spec}  pid {entry.pid}  {' '.join(entry.command)}")
        for host in entry.network.state():
            terminal.say(f"  host {host.host}  {host.address}  {host.nic}{'  cut off' if host.cut else ''}")
        for pod in entry.network.pod_state():
            terminal.say(f"  pod{pod.pod} to core  {pod.core}{'  cut off' if pod.cut else ''}")
