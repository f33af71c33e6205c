"""``plait data``: tokenises training data once, and shows what a corpus contains."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from plait.cli import terminal
from plait.cli.commands import App, AsJson, Settings, settings_help

app = App("Tokenise training data once, and look at it.")


@dataclass(frozen=True)
class CorpusSettings(Settings):
    """Settings for the reading of texts; a job file has them in [data]."""

    tokenizer: Annotated[str, "A Hugging Face tokenizer.json, or bytes."] = "bytes"
    text_key: Annotated[str, "The key or column that holds the text of a row."] = "text"
    pattern: Annotated[str, "Which files of a folder."] = "*"
    eval_fraction: Annotated[float, "Share of the documents kept for evaluation, 0 to 1."] = 0.02


@app.command("prepare")
def prepare(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE",
            help=settings_help(
                CorpusSettings,
                "Files and folders; or a job file (TOML) and section.key=value, for what its run trains on.",
            ),
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", metavar="FOLDER", help="The folder to write. Of a job: its run's, by default."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Tokenise sources into a folder that jobs may name.

    Jobs name it as data.text or in data.sources. A call that was killed goes on where it ended.

    Examples:
        plait data prepare books web.jsonl -o corpora/mine
        plait data prepare web.jsonl tokenizer=tokenizer.json text_key=body -o web
    """
    from plait.api.data import prepare_data
    from plait.core.base.codec.data import read_settings

    if Path(words[0]).suffix == ".toml":
        settings, sources = {}, words
    else:
        sources = [word for word in words if "=" not in word or Path(word).exists()]
        settings = asdict(read_settings(CorpusSettings, [word for word in words if word not in sources]))
    terminal.answer(prepare_data(sources, out, settings, terminal.aside), as_json=as_json)


@app.command("show")
def show(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A prepared corpus, or the folder of a run.")],
    tokenizer: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="The tokenizer that decodes the sample, by default the one it was made with."
        ),
    ] = None,
    document: Annotated[int | None, typer.Option(metavar="N", help="The document to show a sample of, from 0.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show documents, tokens, lengths and a sample of a corpus.

    Examples:
        plait data show corpora/mine
        plait data show corpora/mine --document 3
    """
    from plait.api.data import show_data

    for found in show_data(folder, tokenizer, document):
        if not as_json:
            terminal.say(str(found.folder))
        terminal.answer(found, as_json=as_json)
