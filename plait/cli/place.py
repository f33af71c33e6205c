"""``plait place``: chooses the host of every rank from a plan and a topology; ``plait reserve``:
reserves hosts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from plait.cli import terminal
from plait.cli.commands import AsJson, JobOverrides


@dataclass(frozen=True)
class PlacedJob:
    """The job, settings in place of the file's, and the cluster."""

    job: Annotated[
        Path, typer.Argument(metavar="JOB", help="The plan (JOB.plan.json), or a job file (TOML) to plan first.")
    ]
    overrides: JobOverrides = None
    topology: Annotated[
        str, typer.Option(metavar="FILE", help="The cluster's switches and nodes, in any form that is read.")
    ] = ""


@dataclass(frozen=True)
class FailedNodes:
    """Options for the repair of a placement whose nodes failed."""

    repair: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A rank table or placement, some of whose nodes failed.")
    ] = None
    down: Annotated[str, typer.Option(metavar="NODE,...", help="Nodes that failed: n3,n7.")] = ""


@dataclass(frozen=True)
class PlacementOutput:
    """Options for the output of a placement."""

    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", metavar="FILE", help="Write the rank table here, not beside the plan."),
    ] = None
    draw: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the cluster with the job's groups: FILE.svg.")
    ] = None
    pairs: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw which ranks send each other how much, minipods parted: FILE.svg."),
    ] = None
    as_json: AsJson = False


def place(request: PlacedJob, failed: FailedNodes, output: PlacementOutput) -> None:
    """Choose which host runs which ranks of a plan.

    Groups that talk spread over few minipods. Writes rank_table.json, which every launcher obeys,
    and says how much better any other placement could be. What to respect stands in the job's
    [place]: plait job place lists its keys. docs/place.md has examples.

    Examples:
        plait place job.plan.json --topology topology.conf
        plait place job.plan.json place.alpha=0.3 --topology slurm: --draw job.svg
    """
    from plait.api.placement_answer import placement_file
    from plait.api.placing import PlacementRequest, names_of, write_placement

    repair, down, out, draw, as_json = failed.repair, failed.down, output.out, output.draw, output.as_json
    asked = PlacementRequest(job=request.job, overrides=request.overrides or [], topology=request.topology)
    _check_options(failed, output, asked.overrides)
    asked.read()
    terminal.remarked(asked.remarks.notes, asked.remarks.over)
    target = out or (repair if repair else request.job.with_name("rank_table.json"))
    target = target if not target.name.endswith("placement.json") else target.with_name("rank_table.json")
    found = asked.repair_placement(repair, names_of(down, "--down")) if repair else asked.answer(asked.solve())
    write_placement(asked, found, target, draw)
    silent = asked.draw_pairs(found.placement, output.pairs) if output.pairs else None
    more = {"silent_pairs": silent} if silent is not None else {}
    terminal.answer(found, as_json=as_json, rank_table=str(target), **more)
    if not as_json:
        terminal.text(f"The rank table is in {target}; what repairs need besides is in {placement_file(target)}.")
    if draw and not as_json:
        terminal.text(f"The cluster with the job is drawn in {draw}.")
    if silent is not None and not as_json:
        terminal.text(f"{silent:.2%} of the pairs of ranks send each other nothing; the others are in {output.pairs}.")


def _check_options(failed: FailedNodes, output: PlacementOutput, overrides: Sequence[str]) -> None:
    """Raise JobError for options and settings that contradict each other, or name no file."""
    from plait.core.base.codec.toml_text import COMMAND_LINE
    from plait.core.base.errors import JobError

    if any(word.partition("=")[0].strip() == "place.rank_table" for word in overrides):
        problem, fix = "plait place says anew where ranks lie", "Leave it out, or keep what can stay with --repair FILE"
        raise JobError(problem, file=COMMAND_LINE, key="place.rank_table", fix=fix)
    if output.out is not None and not output.out.name:
        raise JobError(f"'{output.out}' is no file", key="--out", fix="Give the file for the rank table")
    if failed.down and not failed.repair:
        raise JobError("names nodes that failed under a placement", key="--down", fix="Give that one with --repair")
    for picture in (output.draw, output.pairs):
        if picture:
            from plait.api.pictures import check_format

            check_format(picture)


def reserve(
    rank_table: Annotated[
        Path, typer.Argument(metavar="RANK_TABLE", help="The rank table (rank_table.json) whose hosts are held.")
    ],
    name: Annotated[str, typer.Option(metavar="NAME", help="Name of the reservation.")],
    duration: Annotated[str, typer.Option(metavar="TIME", help="How long, as Slurm writes it: minutes, D-HH:MM:SS.")],
    start: Annotated[
        str, typer.Option(metavar="TIME", help="When, as Slurm writes it: now+4hours, 2030-01-31T22:00.")
    ] = "now",
    users: Annotated[
        list[str] | None, typer.Option("--user", metavar="NAME", help="Who may use it. Repeatable.", show_default="you")
    ] = None,
) -> None:
    """Reserve the hosts of a rank table for a planned job.

    It is a Slurm reservation whose nodes are never exchanged. Jobs that run there now may go on; no
    job that would last into the reservation is started there. Needs an operator of Slurm.
    plait train takes the reservation as slurm.reservation=NAME.

    Examples:
        plait reserve rank_table.json --name llm --duration 2-00:00:00
        plait reserve rank_table.json --name llm --duration 8:00:00 --start now+4hours
    """
    from plait.api.labs import reserve_hosts
    from plait.core.base.text import counted

    table = reserve_hosts(rank_table, name, duration, start=start, users=users or [])
    are = "is" if len(table.hosts) == 1 else "are"
    typer.echo(f"{name}: {counted(len(table.hosts), 'node')} {are} reserved")
