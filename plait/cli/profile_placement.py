"""``plait profile placement``: what it costs to spread groups of ranks over minipods."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from plait.cli import terminal


def placement(
    job: Annotated[
        Path | None, typer.Argument(metavar="[JOB]", help="A job file: also time its steps by placement.")
    ] = None,
    on: Annotated[
        str, typer.Option(help="Where: lab:HOSTSxRANKS@RATE,PODSpods@RATE, or slurm inside of a job.")
    ] = "lab:4x1@1gbit,2pods@300mbit",
    topology: Annotated[
        str, typer.Option(help="The nodes' switches, in any form that is read.", show_default="the lab's")
    ] = "",
    nodes_per_minipod: Annotated[
        int, typer.Option(help="Where ranks fill minipods in order.", show_default="the lab's")
    ] = 0,
    ranks: Annotated[int | None, typer.Option(help="How many, where the place does not say.")] = None,
    seconds: Annotated[float, typer.Option(help="To measure collectives, at most.")] = 60.0,
    rounds: Annotated[int, typer.Option(min=1, help="Of a job's runs, in all orders by turns.")] = 3,
    seed: Annotated[int, typer.Option(help="Of the random order.")] = 0,
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where the result goes, as JSON.")] = Path(
        "placement-profile.json"
    ),
    affinity: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Append the job's row, for plait place --affinity FILE.",
            show_default="of a cluster, not of a lab: your own file, which plait place knows",
        ),
    ] = None,
    network: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write what spreading costs, for plait place --network FILE.")
    ] = None,
    draw: Annotated[Path | None, typer.Option(metavar="FILE", help="A picture: .svg, .png or .pdf.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the file's text in place of tables.")] = False,
) -> None:
    """Measure collectives by how many minipods groups spread over, what two jobs lose that share the core,
    and a job's steps by placement.

    Example: plait profile placement job.toml --on lab:4x1@1gbit,2pods@300mbit --affinity mine.toml
    """
    from plait.api.pictures import check_format
    from plait.api.places import place_of
    from plait.api.spreading import profile_spread, time_by_placement
    from plait.core.base.errors import JobError

    if draw:
        check_format(draw)
    if affinity and not job:
        raise JobError("is a job's", key="--affinity", fix="Name a job file, whose steps are timed")
    said = None if as_json else terminal.say
    found = profile_spread(out, place_of(on), nodes_per_minipod, ranks, seconds, quiet=as_json)
    if isinstance(found, int):
        raise typer.Exit(found)
    if job:
        found = found.with_job(time_by_placement(job, on, topology, rounds=rounds, seed=seed, said=said))
        found.profile.write(out)
    if job and not affinity and place_of(on).lab is None:
        affinity = found.own_affinity
    if affinity:
        found.append_affinity(affinity)
    if network:
        found.write_network(network)
    if draw:
        found.draw(draw)
    terminal.answer(found, as_json=as_json)
    written = ((out, "all of it"), (affinity, "the job's row"), (network, "the network"), (draw, "a picture"))
    for file, what in () if as_json else written:
        if file:
            terminal.text(f"{file} has {what}.")
