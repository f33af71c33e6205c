"""``plait timeline``: what a run measured, alone or beside what was predicted or another run measured."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from plait.cli import terminal


def timeline(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    against: Annotated[
        Path | None, typer.Option(help="Compare with this plan.json, as predicted, or with this other run folder.")
    ] = None,
    perfetto: Annotated[Path | None, typer.Option(help="Write a trace for ui.perfetto.dev to this file.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON line.")] = False,
) -> None:
    """Summarise a run's measured timeline: what took how long, and how much communication was hidden."""
    from plait.api.timelines import read_run_timeline
    from plait.core.base.files import check_target, explained

    fix = "Choose another with --perfetto"
    if perfetto:
        check_target(perfetto, fix=fix)
    measured = read_run_timeline(run)
    if perfetto:
        with explained(f"{perfetto} cannot be written", fix=fix):
            measured.write_trace(perfetto)
        if not json:
            terminal.say(f"{perfetto} holds the last steps; open it at ui.perfetto.dev")
    terminal.answer(measured.against(against) if against else measured, as_json=json)
