"""``plait diagnose``: where the step went, who is slow and what that costs, from what a run recorded; or why
it hangs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from plait.api.diagnosing import HangReport, as_run, diagnose_run, explain_hang, explain_trace
from plait.cli import terminal
from plait.core.base.errors import JobError

NAMED, UNKNOWN = 3, 1
"""Exit status where a straggler, a slow network or a hang's cause was named, and of a hang whose cause is not
known; 0 where nothing is wrong, 2 where nothing could be read."""


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
    timeline: Annotated[
        bool, typer.Option("--timeline", help="What took how long, and how much communication was hidden; no verdict.")
    ] = False,
    against: Annotated[
        Path | None,
        typer.Option(help="With --timeline: compare with this plan.json, as predicted, or with this other run folder."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON line.")] = False,
) -> None:
    """Explain a run: where its steps go, which rank, host or link is slow, and what that costs; or why it
    hangs.

    Exit status: 0 nothing is wrong, 3 a straggler, a slow network or the cause of a hang was named, 1 a hang
    whose cause is not known, 2 there is nothing that can be read.
    """
    if timeline or against:
        if len(run) > 1:
            fix = "Name one; --against takes another"
            raise JobError(f"{len(run)} runs have no one timeline", key="--timeline", fix=fix)
        show_timeline(run[0], against, as_json=json)
        return
    if meta or run[0].suffix == ".parquet":
        found = explain_trace(run, meta)
    else:
        with as_run(run, terminal.aside) as folder:
            name = str(folder) if folder in run else " ".join(str(path) for path in run[:3]) + " ..." * (len(run) > 3)
            found = explain_hang(folder) if hang else diagnose_run(folder)
            found = found if isinstance(found, HangReport) else replace(found, name=name)
    for problem in found.problems if isinstance(found, HangReport) else ():
        terminal.aside(f"plait: left out: {problem}")
    terminal.answer(found, as_json=json)
    hung = found.verdict if isinstance(found, HangReport) else found.hang
    slow = not isinstance(found, HangReport) and (found.stragglers or found.late or found.network)
    if slow or (hung and hung.certain):
        raise typer.Exit(NAMED)
    raise typer.Exit(UNKNOWN if hung and hung.cause != "none" else 0)


def show_timeline(run: Path, against: Path | None = None, *, as_json: bool = False) -> None:
    """Print where a run's steps went, alone or beside a plan or another run."""
    from plait.api.timelines import read_run_timeline

    measured = read_run_timeline(run)
    terminal.answer(measured.against(against) if against else measured, as_json=as_json)
