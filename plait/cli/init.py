"""``plait init``: writes a commented job file from options; ``plait job``: explains the keys of job
files."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from plait.cli import terminal
from plait.cli.commands import AsJson


@dataclass(frozen=True)
class JobOptions:
    """Options of the job, by the names of ``plait.api.new_job``."""

    model: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="A preset such as llama3-8b, a Hugging Face folder, or small, to try."),
    ] = None
    accelerators: Annotated[
        str | None, typer.Option(metavar="COUNTxKIND", help="8xh100, 64xh200, 2xcpu: what the job is planned for.")
    ] = None
    on: Annotated[
        str | None,
        typer.Option(metavar="PLACE", help="here, slurm, slurm:PARTITION, kubernetes or kubernetes:NAMESPACE."),
    ] = None
    sequence_length: Annotated[str | None, typer.Option(metavar="TOKENS", help="Tokens of a sequence.")] = None
    data: Annotated[str | None, typer.Option(metavar="PATHS", help="Files and folders, or python-stdlib.")] = None
    tokenizer: Annotated[str | None, typer.Option(metavar="FILE", help="bytes, or a tokenizer.json.")] = None


def init(
    options: JobOptions,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The job file to write.")] = Path("job.toml"),
    defaults: Annotated[bool, typer.Option("--defaults", help="What no option says has its default.")] = False,
    example: Annotated[
        str | None, typer.Option(metavar="NAME", help="Write a job that ships, such as llama3-8b-slurm.")
    ] = None,
) -> None:
    """Write a job file for a model, accelerators, data and a place.

    Each key stands there with what it means. The file is planned before it is written, and none is
    overwritten.

    Examples:
        plait init first.toml --defaults
        plait init big.toml --model llama3-8b --accelerators 8xh100 --defaults
    """
    from plait.api import new_job
    from plait.core.base.errors import JobError

    new_job.check_new_file(file)
    named = {name.replace("_", "-"): value for name, value in asdict(options).items()}
    given = {name: value for name, value in named.items() if value is not None}
    if example is not None:
        if given:
            problem = f"conflicts with --{next(iter(given))}"
            raise JobError(problem, key="--example", fix="Leave out one of the two; change the file that is written")
        told = new_job.write_example(file, example)
    else:
        if not defaults and (missing := [f"--{name}" for name, value in named.items() if value is None]):
            raise JobError("is missing", key=missing[0], fix=f"Add {', '.join(missing)}, or --defaults")
        text = new_job.job_text(new_job.read_options(given), file.parent)
        terminal.aside("planning it ...")
        told = new_job.write_job(file, text)
    terminal.text(f"wrote {file}; {told}" if told else f"wrote {file}")
    terminal.text(f"next: {'; '.join(new_job.next_commands(file))}")


# ---- settings, looked up ----


def job(
    key: Annotated[
        str | None, typer.Argument(metavar="KEY", help="A section or setting: train, train.steps, steps.")
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print all of them as docs/job.md has them.")] = False,
    peers: Annotated[
        bool, typer.Option("--peers", help="Print what other frameworks call them, as docs/reference/coming-from.md.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Look up the settings of a job file, and what each takes.

    Without KEY: all settings.

    Examples:
        plait job train.steps
        plait job strategy
    """
    from plait.core.base.text import Table
    from plait.core.job import reference as settings

    if peers:
        typer.echo(settings.coming_from(), nl=False)
        return
    if markdown:
        typer.echo(settings.markdown(), nl=False)
        return
    found = settings.reference() if key is None else settings.look_up(key)
    found = (found,) if isinstance(found, settings.SettingsTable) else found
    if as_json:
        terminal.print_json({"settings": [asdict(one) for one in found]})
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
