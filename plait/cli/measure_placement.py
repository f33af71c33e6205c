"""``plait measure placement``: what it costs to spread groups of ranks over minipods."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from plait.cli import terminal
from plait.cli.groups import Settings, grouped
from plait.core.base.codec.counts import Count, Natural, Positive


@dataclass(frozen=True)
class Nodes:
    """Nodes that measure, and how they lie in minipods."""

    on: Annotated[str, typer.Option(help="Where: lab:HOSTSxRANKS@RATE,PODSpods@RATE, or slurm inside of a job.")] = (
        "lab:4x1@1gbit,2pods@300mbit"
    )
    topology: Annotated[
        str, typer.Option(help="The nodes' switches, in any form that is read.", show_default="the lab's")
    ] = ""


@dataclass(frozen=True)
class Trials(Settings):
    """Ranks that measure, how often and how long."""

    nodes_per_minipod: Annotated[
        Natural, "Nodes below one leaf switch; ranks fill minipods in order. 0: the lab's."
    ] = 0
    world_size: Annotated[Count | None, "How many ranks, where --on does not say."] = None
    seconds: Annotated[Positive, "How long to measure collectives, at most."] = 60.0
    rounds: Annotated[Count, "How often a job runs in every order, by turns."] = 3
    seed: Annotated[int, "Seed of the random order."] = 0


@dataclass(frozen=True)
class Results:
    """Files that are written."""

    out: Annotated[Path, typer.Option("-o", "--out", metavar="FILE", help="Where the result goes, as JSON.")] = Path(
        "placement-profile.json"
    )
    affinity: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Append the job's row, for place.affinity = FILE.",
            show_default="of a cluster, not of a lab: your own file, which plait place knows",
        ),
    ] = None
    network: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write what spreading costs, for place.network = FILE.")
    ] = None
    draw: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw to this file: .svg, .png or .pdf.")] = None


@grouped
def placement(
    nodes: Nodes,
    results: Results,
    trials: Trials,
    job: Annotated[
        Path | None, typer.Argument(metavar="[JOB]", help="A job file: also time its steps by placement.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the file's text in place of tables.")] = False,
) -> None:
    """Measure collectives by how many minipods groups spread over, what two jobs lose that share the core,
    and a job's steps by placement.

    Example: plait measure placement job.toml --on lab:4x1@1gbit,2pods@300mbit --affinity mine.toml
    """
    from plait.api.pictures import check_format
    from plait.api.places import place_of
    from plait.api.spreading import profile_spread, time_by_placement
    from plait.core.base.errors import JobError

    out, affinity, network, draw = results.out, results.affinity, results.network, results.draw
    if draw:
        check_format(draw)
    if affinity and not job:
        raise JobError("is a job's", key="--affinity", fix="Name a job file, whose steps are timed")
    said = None if as_json else terminal.say
    found = profile_spread(
        out, place_of(nodes.on), trials.nodes_per_minipod, trials.world_size, trials.seconds, quiet=as_json
    )
    if isinstance(found, int):
        raise typer.Exit(found)
    if job:
        found = found.with_job(
            time_by_placement(job, nodes.on, nodes.topology, rounds=trials.rounds, seed=trials.seed, said=said)
        )
        found.profile.write(out)
    if job and not affinity and place_of(nodes.on).lab is None:
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
