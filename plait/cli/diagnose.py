"""``plait diagnose``: what is wrong with a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from plait.core.errors import JobError


def diagnose(
    run: Annotated[Path, typer.Argument(help="The run's folder.", metavar="RUN")],
    hang: Annotated[
        bool, typer.Option("--hang", help="Why its ranks wait for each other: whom, and what that one does.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Say what keeps a run from going on.

    Exit status: 0 if nothing does, 3 if the cause is named, 1 if it is not known.
    """
    from plait.cli.hang import hang as explain

    if not hang:
        raise JobError("there is nothing to find out", key="plait diagnose", fix="Ask with --hang why a run hangs")
    raise typer.Exit(explain(run, as_json=as_json))
