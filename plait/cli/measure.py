"""``plait measure machine``: what this machine, or a cluster, does in a second."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from plait.cli import terminal
from plait.cli.groups import grouped
from plait.cli.measure_placement import placement

app = typer.Typer(no_args_is_help=True, help="Measure a machine or a cluster, which plans and placements rest on.")
app.command("placement")(placement)


@dataclass(frozen=True)
class Measuring:
    """Ranks that measure, and for how long."""

    on: Annotated[
        str, typer.Option(help="Where: local, or lab:HOSTSxRANKS@RATE for an emulated cluster, such as lab:2x2@1gbit.")
    ] = "local"
    world_size: Annotated[
        int | None,
        typer.Option(help="How many ranks, on this machine.", show_default="the job's; else one for each GPU or core"),
    ] = None
    nodes_per_minipod: Annotated[
        int, typer.Option(help="Nodes below one leaf switch, to measure across minipods as well.")
    ] = 0
    seconds: Annotated[float, typer.Option(help="How long to measure, at most; more measures larger messages.")] = 60.0


@app.command("machine")
@grouped
def machine(
    where: Measuring,
    job: Annotated[
        Path | None, typer.Argument(metavar="[JOB]", help="A job file: its layer, precision and device are measured.")
    ] = None,
    out: Annotated[Path, typer.Option("-o", "--out", metavar="FILE", help="Where the profile goes.")] = Path(
        "profile.json"
    ),
    files: Annotated[
        list[Path] | None,
        typer.Option(
            "--import",
            metavar="FILE",
            help="Measure nothing: read nccl-tests logs, Galvatron's bandwidth files, profiles. Repeatable; all become "
            "one profile.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the table as JSON.")] = False,
) -> None:
    """Measure collectives, matrix products, attention, one layer's modules, and what they lose side by side.

    The result is a profile. On several machines start the ranks with torchrun: docs/profile.md.

    Example: plait measure machine --on lab:2x2@1gbit
    """
    from plait.api.places import place_of
    from plait.api.profiling import ProfileRequest, import_profile, profile_machine
    from plait.core.base.errors import JobError
    from plait.core.base.files import check_target

    check_target(out, fix="Choose another with --out")
    if files:
        if job or where.world_size or where.on != "local":
            fix = "Leave out the job, --on and --world-size; or measure first, and import that profile as well"
            raise JobError("measures nothing", key="--import", fix=fix)
        found = import_profile(files, out)
    else:
        asked = ProfileRequest(
            job=job, ranks=where.world_size, seconds=where.seconds, nodes_per_minipod=where.nodes_per_minipod
        )
        found = profile_machine(out, place_of(where.on), asked, quiet=as_json)
        if isinstance(found, int):
            raise typer.Exit(found)
    terminal.answer(found, as_json=as_json)
    if found.over is not None:
        terminal.passed_over(found.over)
