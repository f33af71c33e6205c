"""``plait data``: tokenises training data once, and shows what a corpus contains."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from plait.cli import terminal

app = typer.Typer(
    no_args_is_help=True, help="Tokenise training data once, and look at it.", rich_markup_mode=None,
    add_completion=False,
)  # fmt: skip


@app.command("prepare")
def prepare(
    what: Annotated[
        list[str],
        typer.Argument(
            help="Files and folders; or a job file (TOML) and section.key=value, for what its run trains on."
        ),
    ],
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="The folder to write. Of a job: its run's, by default.")
    ] = None,
    tokenizer: Annotated[str, typer.Option(help="A Hugging Face tokenizer.json, or bytes.")] = "bytes",
    text_key: Annotated[str, typer.Option(help="The key or column that holds the text of a row.")] = "text",
    pattern: Annotated[str, typer.Option(help="Which files of a folder.")] = "*",
    eval_fraction: Annotated[float, typer.Option(help="Share of the documents kept for evaluation, 0 to 1.")] = 0.02,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Tokenise sources into a folder that data.text or data.sources of any job may name; goes on
    where a killed call has ended."""
    from plait.api.data import prepare_data

    settings = {"tokenizer": tokenizer, "text_key": text_key, "pattern": pattern, "eval_fraction": eval_fraction}
    terminal.answer(prepare_data(what, out, settings, terminal.aside), as_json=as_json)


@app.command("show")
def show(
    folder: Annotated[Path, typer.Argument(help="A prepared corpus, or the folder of a run.")],
    tokenizer: Annotated[
        str | None, typer.Option(help="The tokenizer that decodes the sample, by default the one it was made with.")
    ] = None,
    document: Annotated[int | None, typer.Option(help="Of which document to show a sample, from 0.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, a line for each corpus.")] = False,
) -> None:
    """Show documents, tokens, lengths and a sample of a prepared corpus."""
    from plait.api.data import show_data

    for found in show_data(folder, tokenizer, document):
        if not as_json:
            terminal.say(str(found.folder))
        terminal.answer(found, as_json=as_json)
