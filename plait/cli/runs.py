"""``plait export`` and ``plait timeline``: what a finished run gives to other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def export(
    run: Annotated[Path, typer.Argument(help="A run folder, such as runs/quickstart.")],
    out: Annotated[Path, typer.Argument(help="The folder to write; Hugging Face transformers reads it.")],
) -> None:
    """Write a run's newest checkpoint as Hugging Face safetensors."""
    from plait.train.checkpoint.export import export_run

    step = export_run(run, out)
    typer.echo(f"{out} holds {run} after step {step}")


def timeline(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    perfetto: Annotated[Path | None, typer.Option(help="Write a trace for ui.perfetto.dev to this file.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON line.")] = False,
) -> None:
    """Summarise a run's measured timeline: per kind of op, how long it took and how much communication was
    hidden."""
    from plait.cli.summarise import summarise

    summarise(run, perfetto, json)
