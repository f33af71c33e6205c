"""``plait calibrate``: what a cluster's constants are, by runs that were recorded on it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from plait.cli import terminal


def calibrate(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs on one cluster.")],
    cluster: Annotated[
        str | None,
        typer.Option(help="Whose constants to begin with: a preset or a file.", show_default="the first run's"),
    ] = None,
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where the cluster goes.")] = Path("cluster.toml"),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Refit a cluster's constants to recorded runs, so that the next plan is nearer to what they took.

    Example: plait calibrate runs/first runs/second; plait plan job.toml cluster.file=cluster.toml
    """
    from plait.api.calibrating import calibrate_cluster

    terminal.answer(calibrate_cluster(runs, out, cluster), as_json=as_json)
