"""``plait timeline``: what a run has measured."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def timeline(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    perfetto: Annotated[Path | None, typer.Option(help="Write a trace for ui.perfetto.dev to this file.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON line.")] = False,
) -> None:
    """Summarise a run's measured timeline: per kind of op, how long it took and how much communication was
    hidden."""
    from plait.cli.summarise import summarise

    summarise(run, perfetto, json)
