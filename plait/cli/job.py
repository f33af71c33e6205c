"""``plait job``: what a job file may say."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer


def job(
    key: Annotated[
        str | None, typer.Argument(metavar="[KEY]", help="A section or setting: train, train.steps, steps.")
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print all of them as docs/job.md has them.")] = False,
    others: Annotated[
        bool, typer.Option("--peers", help="Print what other frameworks call them, as docs/reference/coming-from.md.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Look up the settings of a job file: what each takes, its default, what it does.

    Without KEY: all settings. Examples: plait job; plait job train.steps; plait job strategy
    """
    from plait.cli import terminal
    from plait.core.base.text import Table
    from plait.core.job import reference as settings

    if others:
        typer.echo(settings.coming_from(), nl=False)
        return
    if markdown:
        typer.echo(settings.markdown(), nl=False)
        return
    found = settings.reference() if key is None else settings.look_up(key)
    found = (found,) if isinstance(found, settings.SettingsTable) else found
    if as_json:
        typer.echo(json.dumps([asdict(one) for one in found], indent=2))
        return
    for one in found:
        if isinstance(one, settings.SettingsTable):
            terminal.show([Table(f"[{one.name}]"), _plain(one.meaning)])
        for entry in one.keys if isinstance(one, settings.SettingsTable) else (one,):
            terminal.text(_plain(entry.lines()), indent="    ")
        if one is not found[-1] and isinstance(one, settings.SettingsTable):
            typer.echo()


def _plain(text: str) -> str:
    return text.replace("``", "")
