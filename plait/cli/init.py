"""``plait init``: a commented job file from a few questions, or from options."""

from __future__ import annotations

import select
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from plait.cli import terminal
from plait.cli.groups import grouped

if TYPE_CHECKING:
    from plait.api.new_job import JobQuestion, Wish

LOOK = 0.2
"""Seconds after which a Ctrl-C at a question is heard at the latest."""


@dataclass(frozen=True)
class Given:
    """Answers to the questions of ``plait.api.new_job``, by their names."""

    model: Annotated[
        str | None, typer.Option(help="A preset such as llama3-8b, a Hugging Face folder, or small, to try.")
    ] = None
    accelerators: Annotated[
        str | None, typer.Option(metavar="COUNTxKIND", help="8xh100, 64xh200, 2xcpu: what the job is planned for.")
    ] = None
    on: Annotated[
        str | None, typer.Option(help="here, slurm, slurm:PARTITION, kubernetes or kubernetes:NAMESPACE.")
    ] = None
    sequence_length: Annotated[str | None, typer.Option(metavar="TOKENS", help="Tokens of a sequence.")] = None
    data: Annotated[str | None, typer.Option(metavar="PATHS", help="Files and folders, or python-stdlib.")] = None
    tokenizer: Annotated[str | None, typer.Option(metavar="FILE", help="bytes, or a tokenizer.json.")] = None


@grouped
def init(
    given: Given,
    file: Annotated[Path, typer.Argument(metavar="[FILE]", help="The job file to write.")] = Path("job.toml"),
    defaults: Annotated[
        bool, typer.Option("--defaults", help="Ask nothing: what no option says has its default.")
    ] = False,
    example: Annotated[
        str | None, typer.Option(metavar="NAME", help="Write a job that ships, such as llama3-8b-slurm.")
    ] = None,
) -> None:
    """Write a job file, each key with what it means: for a model, accelerators, data and a place to run.

    On a terminal, what no option says is asked. The file is planned before it is written, and none is
    overwritten.

    Examples: plait init; plait init --model llama3-8b --accelerators 8xh100 --on slurm --defaults
    """
    from plait.api import new_job
    from plait.core.base.errors import JobError

    new_job.check_free(file)
    said = {
        one.name.replace("_", "-"): value for one in fields(given) if (value := getattr(given, one.name)) is not None
    }
    if example is not None:
        if said:
            problem = f"stands beside --{next(iter(said))}"
            raise JobError(problem, key="--example", fix="Leave out one of the two; change the file that is written")
        told = new_job.write_example(file, example)
    else:
        wish = _asked(said, defaults=defaults)
        terminal.aside("planning it ...")
        told = new_job.write_job(file, new_job.job_text(wish, file.parent))
    terminal.text(f"wrote {file}; {told}" if told else f"wrote {file}")
    terminal.text(f"next: {'; '.join(new_job.next_commands(file))}")


def _asked(said: dict[str, str], *, defaults: bool) -> Wish:
    """All answers: of options, else of a person at a terminal. Raises JobError."""
    from plait.api.new_job import QUESTIONS, Wish
    from plait.core.base.errors import JobError

    wish, asking = Wish(), sys.stdin.isatty() and sys.stdout.isatty() and not defaults
    open_ones = [one.option for one in QUESTIONS if one.name not in said]
    if open_ones and not asking and not defaults:
        problem = "is not said, and this is no terminal to ask on"
        fix = f"Add {', '.join(open_ones)}, or --defaults"
        raise JobError(problem, key=open_ones[0], fix=fix)
    for question in QUESTIONS:
        if question.name in said:
            wish.answer(question, said[question.name])
        elif defaults:
            wish.answer(question, question.default(wish))
        else:
            _ask(question, wish)
    return wish


def _ask(question: JobQuestion, wish: Wish) -> None:
    """Ask until the answer can be used."""
    from plait.core.base.errors import JobError

    default = question.default(wish)
    while True:
        terminal.text(question.asks)
        try:
            answer = _line(f"  {question.name} [{default}]: ")
        except EOFError:
            typer.echo()
            raise JobError("the input ended", key=question.option, fix="Nothing was written") from None
        except KeyboardInterrupt:
            typer.echo("\nnothing was written")
            raise
        try:
            wish.answer(question, answer.strip() or default)
            return
        except JobError as error:
            terminal.text(f"{error}", indent="  ")


def _line(prompt: str) -> str:
    """A line from the terminal. Raises EOFError and KeyboardInterrupt.

    It is waited for in short turns: a Ctrl-C between the prompt and the system's read would be heard at the
    next key only, since a signal that has come already ends no read.
    """
    typer.echo(prompt, nl=False)
    while not select.select([sys.stdin], [], [], LOOK)[0]:
        pass
    return input()
