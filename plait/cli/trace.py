"""``plait trace``: timelines to and from other tools."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from plait.cli import terminal

app = typer.Typer(
    no_args_is_help=True, help="Timelines to and from other tools.", rich_markup_mode=None, add_completion=False
)


@app.command("import")
def import_(
    files: Annotated[list[Path], typer.Argument(help="PyTorch profiler traces, flight recorder dumps (JSON).")],
    out: Annotated[Path, typer.Option("-o", "--out", help="The run folder to make.")],
) -> None:
    """Make a run folder of other tools' recordings, one file a rank; `plait diagnose` explains it."""
    from plait.api.diagnosing import import_run

    found = import_run(files, out, terminal.aside)
    terminal.passed_over(found.over)
    for note in found.notes:
        terminal.text(f"note: {note}")
    if found.verdict and found.verdict.cause != "none":
        terminal.text(found.verdict.why)
    terminal.say(f"{out}: {found.spans} spans of {found.ranks} ranks")


@app.command("export")
def export(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="NAME.pftrace for ui.perfetto.dev, or NAME.json.")],
    ranks: Annotated[str | None, typer.Option(help="Such as 0-3,8; all, if not told.")] = None,
    steps: Annotated[str | None, typer.Option(help="Such as 10-12; the last three, if not told.")] = None,
) -> None:
    """Write chosen ranks and steps of a run as a trace for ui.perfetto.dev."""
    from plait.api.timelines import export_trace
    from plait.core.base.errors import JobError
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
    """``0-3,8`` as numbers. Raises JobError for anything else."""
    from plait.core.base.errors import JobError

    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        # A digit such as '²' is of no number; and Python reads no number of thousands of digits.
        numbers = all(word.isdecimal() and len(word) < 19 for word in ([first, last] if dash else [first]))
        if not numbers:
            raise JobError(f"'{part}' is no number and no range", key=key, fix="Write it like 0-3,8")
        if dash and int(last) < int(first):
            raise JobError(f"'{part}' ends before it begins", key=key, fix=f"Write {int(last)}-{int(first)}")
        if dash and int(last) - int(first) > 1_000_000:
            raise JobError(f"'{part}' is more than anybody could look at", key=key)
        found += range(int(first), int(last or first) + 1)
    return found
