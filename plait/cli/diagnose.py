"""``plait diagnose``: where step time went, which ranks are slow and what that costs, from a run's
recordings; or why the run hangs. ``plait trace``: imports and exports timelines of other tools."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from plait.api.diagnosing import HangReport, as_run, diagnose_run, explain_hang
from plait.cli import terminal
from plait.cli.commands import App, AsJson
from plait.core.base.errors import JobError

NAMED, UNKNOWN = 3, 1
"""Exit statuses if a straggler, a slow network or a hang's cause was named, and if a hang's cause
is unknown; 0 if nothing is wrong, 2 if nothing could be read."""


def diagnose(
    run: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN",
            help="A run folder; or recordings of others: profiler traces or flight recorder dumps, files or a folder.",
        ),
    ],
    hang: Annotated[
        bool, typer.Option("--hang", help="Why its ranks wait for each other: for whom, and what that one does.")
    ] = False,
    timeline: Annotated[
        bool, typer.Option("--timeline", help="What took how long, and how much communication was hidden; no verdict.")
    ] = False,
    against: Annotated[
        Path | None,
        typer.Option(
            metavar="PLAN_OR_RUN",
            help="With --timeline: compare with this plan.json, as predicted, or with this other run folder.",
        ),
    ] = None,
    json: AsJson = False,
) -> None:
    """Explain where a run's time goes, what is slow, or why it hangs.

    A slow rank, host or link is named, with what it costs. Exit status: 0 nothing is wrong, 3 a
    straggler, a slow network or the cause of a hang was named, 1 a hang whose cause is not known, 2
    there is nothing that can be read.

    Examples:
        plait diagnose runs/first
        plait diagnose runs/first --timeline
    """
    if timeline or against:
        if hang:
            raise JobError("conflicts with --timeline and --against", key="--hang", fix="Leave it out, or them")
        if len(run) > 1:
            fix = "Name one; --against takes another"
            raise JobError(f"{len(run)} runs have no one timeline", key="--timeline", fix=fix)
        show_timeline(run[0], against, as_json=json)
    else:
        raise typer.Exit(_explain(run, hang=hang, as_json=json))


def _explain(run: list[Path], *, hang: bool, as_json: bool) -> int:
    """Print what is wrong with a run; return the exit status."""
    with as_run(run, terminal.aside) as folder:
        name = str(folder) if folder in run else " ".join(str(path) for path in run[:3]) + " ..." * (len(run) > 3)
        found = explain_hang(folder) if hang else diagnose_run(folder)
        found = found if isinstance(found, HangReport) else replace(found, name=name)
    for problem in found.problems if isinstance(found, HangReport) else ():
        terminal.aside(f"plait: left out: {problem}")
    terminal.answer(found, as_json=as_json)
    hung = found.verdict if isinstance(found, HangReport) else found.hang
    slow = not isinstance(found, HangReport) and (found.stragglers or found.late or found.network)
    if slow or (hung and hung.certain):
        return NAMED
    return UNKNOWN if hung and hung.cause != "none" else 0


def show_timeline(run: Path, against: Path | None = None, *, as_json: bool = False) -> None:
    """Print where a run's step time went, alone or next to a plan or another run."""
    from plait.api.timelines import read_run_timeline

    measured = read_run_timeline(run)
    terminal.answer(measured.against(against) if against else measured, as_json=as_json)


# ---- plait trace ----


trace = App("Convert timelines from and to other tools.")


@trace.command("import")
def import_(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE", help="PyTorch profiler traces, flight recorder dumps (pickles or JSON)."),
    ],
    out: Annotated[Path, typer.Option("-o", "--out", metavar="FOLDER", help="The run folder to make.")],
) -> None:
    """Make a run folder of other tools' recordings.

    There is one file a rank. plait diagnose explains the folder.

    Examples:
        plait trace import rank0.json rank1.json -o runs/traced
        plait trace import dumps/nccl_trace_rank_* -o runs/hung
    """
    from plait.api.diagnosing import import_run

    found = import_run(files, out, terminal.aside)
    terminal.passed_over(found.over)
    for note in found.notes:
        terminal.text(f"note: {note}")
    if found.verdict and found.verdict.cause != "none":
        terminal.text(found.verdict.why)
    terminal.say(f"{out}: {found.spans} spans of {found.ranks} ranks")


@trace.command("export")
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    out: Annotated[
        Path, typer.Option("-o", "--out", metavar="FILE", help="NAME.pftrace for ui.perfetto.dev, or NAME.json.")
    ],
    ranks: Annotated[str | None, typer.Option(metavar="N-M,N", help="Such as 0-3,8; all by default.")] = None,
    steps: Annotated[
        str | None, typer.Option(metavar="N-M,N", help="Such as 10-12; the last three by default.")
    ] = None,
) -> None:
    """Write ranks and steps of a run as a trace for Perfetto.

    Examples:
        plait trace export runs/first -o first.pftrace
        plait trace export runs/first -o first.json --ranks 0 --steps 10-12
    """
    from plait.api.timelines import export_trace
    from plait.core.base.files import check_target, explained

    if out.suffix not in (".pftrace", ".json"):
        raise JobError(f"'{out.suffix}' is no format for traces", key="--out", fix="Name it .pftrace or .json")
    fix = "Choose another with --out"
    if out.suffix == ".json" and out.exists() and run.resolve() in out.resolve().parents:
        raise JobError(f"{out} is a file of the run", key="--out", fix=fix)
    check_target(out, fix=fix)
    wanted = None if steps is None else [step - 1 for step in _numbers(steps, "--steps")]
    with explained(f"{out} cannot be written", fix=fix):
        found = export_trace(run, out, None if ranks is None else _numbers(ranks, "--ranks"), wanted)
    for note in found.notes:
        terminal.text(note)
    terminal.say(
        f"{out}: {found.spans} spans of {found.ranks} ranks and {found.steps} steps; open it at ui.perfetto.dev"
    )


def _numbers(text: str, key: str) -> list[int]:
    """Return the numbers in text such as ``0-3,8``. Raises JobError for any other text."""
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        # '²' is a digit that int() does not read; int() also refuses numbers of thousands of digits.
        numbers = all(word.isdecimal() and len(word) < 19 for word in ([first, last] if dash else [first]))
        if not numbers:
            raise JobError(f"'{part}' is no number and no range", key=key, fix="Write it like 0-3,8")
        if dash and int(last) < int(first):
            raise JobError(f"'{part}' ends before it begins", key=key, fix=f"Write {int(last)}-{int(first)}")
        if dash and int(last) - int(first) > 1_000_000:
            raise JobError(f"'{part}' is more than anybody could look at", key=key)
        found += range(int(first), int(last or first) + 1)
    return found
