"""``plait export``: what a run has trained, for other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def export(
    run: Annotated[Path, typer.Argument(help="A run folder, such as runs/quickstart.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="The folder to write; Hugging Face transformers reads it.")],
    step: Annotated[
        int | None, typer.Option(help="The checkpoint after this step; by default the newest that is whole.")
    ] = None,
) -> None:
    """Write a run's checkpoint as a Hugging Face folder: safetensors, configuration and tokenizer."""
    from plait.api.trained import export_run

    exported = export_run(run, out, step)
    for warning in exported.warnings:
        typer.echo(f"warning: {warning}", err=True)
    typer.echo(f"{out} holds {run} after step {exported.step}")
