"""``plait profile``: what this machine, or a cluster, does in a second."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from plait.cli import terminal
from plait.cli.profile_placement import placement


class _Measures(TyperGroup):
    """Without ``placement``, everything else: ``plait profile [JOB]``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As ``machine [JOB]``."""
        if not args or args[0] not in self.commands:
            args = ["machine", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(cls=_Measures, help="Measure this machine or a cluster; placement: what spreading over it costs.")
app.command("placement")(placement)


@app.command("machine")
def profile(
    job: Annotated[
        Path | None, typer.Argument(metavar="[JOB]", help="A job file: its layer, precision and device are measured.")
    ] = None,
    on: Annotated[
        str, typer.Option(help="Where: local, or lab:HOSTSxRANKS@RATE for an emulated cluster, such as lab:2x2@1gbit.")
    ] = "local",
    ranks: Annotated[
        int | None, typer.Option(help="How many here.", show_default="the job's; else one for each GPU or core")
    ] = None,
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where the profile goes.")] = Path("profile.json"),
    seconds: Annotated[float, typer.Option(help="How long to measure, at most; more measures larger messages.")] = 60.0,
    nodes_per_minipod: Annotated[
        int, typer.Option(help="Nodes below one leaf switch, to measure across minipods as well.")
    ] = 0,
    files: Annotated[
        list[Path] | None,
        typer.Option(
            "--import",
            metavar="FILE",
            help="Measure nothing: read nccl-tests logs, Galvatron's bandwidth files, "
            "profiles. May be repeated; all become one profile.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the table as JSON.")] = False,
) -> None:
    """Measure collectives, matrix products, attention, one layer's modules, and what they lose side by side.

    The result is what plans rest on. On several machines start the ranks with torchrun: docs/profile.md.

    Examples: plait profile; plait profile --on lab:2x2@1gbit; plait profile --import all_reduce.log
    What spreading over minipods costs: plait profile placement --help
    """
    from plait.api.places import place_of
    from plait.api.profiling import ProfileRequest, import_profile, profile_machine
    from plait.core.base.errors import JobError
    from plait.core.base.files import check_target

    check_target(out, fix="Choose another with --out")
    if files:
        if job or ranks or on != "local":
            fix = "Leave out the job, --on and --ranks; or measure first, and import that profile with the other files"
            raise JobError("measures nothing", key="--import", fix=fix)
        found = import_profile(files, out)
    else:
        asked = ProfileRequest(job=job, ranks=ranks, seconds=seconds, nodes_per_minipod=nodes_per_minipod)
        found = profile_machine(out, place_of(on), asked, quiet=as_json)
        if isinstance(found, int):
            raise typer.Exit(found)
    terminal.answer(found, as_json=as_json)
    if found.over is not None:
        terminal.passed_over(found.over)
