"""``plait export`` and ``plait sample``: what a run has trained, for other programs and for people."""

from __future__ import annotations

import sys
from itertools import chain
from pathlib import Path
from typing import Annotated, Literal

import typer

from plait.core.base.text import printable


def export(
    run: Annotated[Path, typer.Argument(help="A run folder, such as runs/quickstart.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="The folder to write.")],
    step: Annotated[
        str | None,
        typer.Option(
            help="The checkpoint after this step, or best, that with the least evaluation loss; by default the newest "
            "that is whole."
        ),
    ] = None,
    format: Annotated[
        Literal["huggingface", "torchtitan"],
        typer.Option(help="Safetensors, configuration and tokenizer for transformers; or torchtitan's checkpoint."),
    ] = "huggingface",
) -> None:
    """Write a run's checkpoint as a Hugging Face folder, or as torchtitan's initial_load_path."""
    from plait.api.trained import export_run

    exported = export_run(run, out, step, format)
    for warning in exported.warnings:
        typer.echo(f"warning: {warning}", err=True)
    typer.echo(f"{out} holds {run} after step {exported.step}")


def sample(
    run: Annotated[Path, typer.Argument(help="A run folder, such as runs/quickstart.")],
    prompt: Annotated[str, typer.Option(help="The text to continue.")],
    tokens: Annotated[int, typer.Option(help="How many tokens to add at most.")] = 200,
    temperature: Annotated[float, typer.Option(help="0 always takes the likeliest token.")] = 0.8,
    seed: Annotated[int, typer.Option(help="Of the random choices; the same seed gives the same text.")] = 0,
    step: Annotated[str | None, typer.Option(help="Of the checkpoint, or best; the newest if not given.")] = None,
) -> None:
    """Continue a text with a run's newest checkpoint: shows what it has learned."""
    from plait.api.trained import sampler

    trained = sampler(run, step)
    pieces = trained.generate(prompt, tokens=tokens, temperature=temperature, seed=seed)
    for warning in trained.warnings:
        typer.echo(f"warning: {warning}", err=True)
    for piece in chain([prompt], pieces):
        sys.stdout.write(printable(piece, kept="\n\t"))
        sys.stdout.flush()
    sys.stdout.write("\n")
