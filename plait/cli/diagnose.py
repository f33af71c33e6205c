"""``plait diagnose``: where the step went, who is slow and what that costs, from what a run recorded."""

from __future__ import annotations

import json as json_format
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from plait.api.diagnosing import as_run, diagnose_run, explain_trace
from plait.cli import diagnose_page, terminal

if TYPE_CHECKING:
    from plait.diagnose.explain import Report

NAMED, UNKNOWN = 3, 1
"""Exit status where a straggler or the cause of a hang was named, and of a hang whose cause is not known; 0
where nothing is wrong, 2 where nothing could be read."""


def diagnose(
    run: Annotated[
        list[Path],
        typer.Argument(
            help="A run folder; or recordings of others: profiler traces or flight recorder dumps, files or a "
            "folder; or an operation trace (.parquet) with --meta."
        ),
    ],
    meta: Annotated[Path | None, typer.Option(help="Degrees of parallelism of an operation trace (YAML).")] = None,
    hang: Annotated[
        bool, typer.Option("--hang", help="Why its ranks wait for each other: for whom, and what that one does.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON line.")] = False,
) -> None:
    """Explain a run: where its steps go, which rank, host or link is slow, and what that costs; or why it
    hangs.

    Exit status: 0 nothing is wrong, 3 a straggler or the cause of a hang was named, 1 a hang whose cause is
    not known, 2 there is nothing that can be read.
    """
    if meta or run[0].suffix == ".parquet":
        raise typer.Exit(_tell(explain_trace(run, meta), json))
    with as_run(run, terminal.aside) as folder:
        name = str(folder) if folder in run else " ".join(str(path) for path in run[:3]) + " ..." * (len(run) > 3)
        if hang:
            from plait.cli.hang import hang as explain_hang

            status = explain_hang(folder, as_json=json)
        else:
            status = _tell(replace(_of_run(folder, json), name=name), json)
    raise typer.Exit(status)


def _tell(report: Report, json: bool) -> int:
    """Print what is to be said; the exit status."""
    if json:
        typer.echo(json_format.dumps(report.to_dict()))
    else:
        diagnose_page.show(report)
    if report.stragglers or report.late or (report.hang and report.hang.certain):
        return NAMED
    return UNKNOWN if report.hang else 0


def _of_run(folder: Path, as_json: bool) -> Report:
    """Of a run that hung before a step was recorded there is no more than that."""
    from plait.cli.hang import hang
    from plait.core.base.errors import DataError
    from plait.core.runs.evidence import FILE
    from plait.diagnose.imported import imported_notes

    try:
        return diagnose_run(folder)
    except DataError as error:
        if not (folder / FILE).exists():
            raise
        said = imported_notes(folder)
        if said is None:
            terminal.aside(f"plait: {error}")
        status = hang(folder, as_json=as_json)
        for note in (*said.notes, *said.over.lines()) if said and not as_json else ():
            terminal.text(f"note: {note}", indent="  ")
        raise typer.Exit(status) from None
