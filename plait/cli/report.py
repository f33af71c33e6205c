"""``plait report``: a run's page as one file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from plait.cli import terminal


def report(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="The file to write.")] = Path("report.html"),
) -> None:
    """Write what plait view shows of a run into one HTML file, which needs no server and no network."""
    from plait.core.base.errors import DataError, JobError
    from plait.view.report import write_report
    from plait.view.store import Watched

    if out.suffix not in (".html", ".htm"):
        raise JobError(f"'{out.name}' is no name for a page", key="--out", fix="Name it NAME.html")
    if not run.is_dir():
        raise DataError(f"{run}: no such run folder")
    watched = Watched(run, run.absolute().name)
    found = watched.read()
    if found.recording is None and not found.hang:
        raise DataError(found.problem or f"{run} holds nothing that can be shown")
    try:
        size = write_report(watched, out)
    except OSError as error:
        raise DataError(f"{out} cannot be written: {error.strerror or error}") from None
    if found.run:
        terminal.passed_over(found.run.passed_over)
    terminal.say(f"{out}: {size / 2**20:.1f} MiB")
