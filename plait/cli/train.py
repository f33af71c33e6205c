"""``plait train``: from a job file to a trained model, on this machine, an emulated cluster, Slurm
or Kubernetes."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from plait.cli import terminal
from plait.cli.commands import JobOverrides
from plait.core.base.text import printable

if TYPE_CHECKING:
    from plait.api.places.base import LaunchTarget
    from plait.api.training import PreparedRun

WIDTH = 100
"""The width of a log in columns, also of a log in a file, which people read."""


@dataclass(frozen=True)
class Where:
    """The job, and options for the launch target."""

    job: Annotated[
        Path,
        typer.Argument(metavar="JOB", help="The job file (TOML), or a plan (JOB.plan.json) to be obeyed as it stands."),
    ]
    on: Annotated[
        str,
        typer.Option(
            metavar="PLACE",
            help="Where: local; slurm or slurm:PARTITION; kubernetes or kubernetes:NAMESPACE; lab:HOSTSxRANKS@RATE "
            "for an emulated cluster, such as lab:2x1@1gbit or, with a slower core between minipods, "
            "lab:4x1@1gbit,2pods@300mbit.",
        ),
    ] = "local"
    rank_table: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="With --on slurm, kubernetes or lab: which host runs which ranks (rank_table.json)."
        ),
    ] = None
    follow: Annotated[
        bool,
        typer.Option(help="With --on slurm or kubernetes: show what the job prints until it ends; Ctrl-C stops it."),
    ] = True


@dataclass(frozen=True)
class Trial:
    """Options for checks in place of training."""

    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only check the job, and show what it takes of every rank.")
    ] = False
    as_json: Annotated[bool, typer.Option("--json", help="With --dry-run: as JSON.")] = False
    write: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="With --on kubernetes: write all objects of the run into this folder, for kubectl apply -f, and send "
            "nothing.",
        ),
    ] = None


def train(
    where: Where,
    trial: Trial,
    overrides: JobOverrides = None,
    plan_only: Annotated[bool, typer.Option("--plan-only", hidden=True, help="For torchrun's ranks.")] = False,
) -> None:
    """Train a model; the same command resumes a stopped run.

    Settings stand in the job file, in the tables [model], [data], [train], [strategy] and [run]:
    plait job lists them all, plait job KEY explains one, and docs/job.md has the same to read.

    Examples:
        plait train first.toml
        plait train first.toml train.steps=100 strategy.tp=1 --dry-run
    """
    from plait.api.job_check import check_ranks, room_of
    from plait.api.places import place_of, with_table
    from plait.api.training import describe_run, prepare, start_run, write_plan
    from plait.core.base.text import paragraph
    from plait.core.job.spec import naming

    job, given, place = where.job, overrides or [], with_table(place_of(where.on), where.rank_table)
    _check_options(place, trial, follow=where.follow)
    with naming(job, given):
        if trial.dry_run:
            _show(job, given, place, trial.as_json)
        if trial.write:
            _write_manifests(trial.write, job, given, place)
        if trial.dry_run or trial.write:
            return
        terminal.say(f"planning {job}")
        # torchrun's ranks may run on other machines, too
        ready = prepare(job, given, place, check_memory=not plan_only)
        _remark(ready)
    if spares := check_ranks(ready.plan, place, where.on):
        terminal.text(spares)
    for line in paragraph(describe_run(ready.plan, room_of(ready.plan, place)), WIDTH, "  ").splitlines():
        terminal.say(line)
    if plan_only:  # the caller holds the run's lock
        write_plan(ready)
    else:
        raise typer.Exit(start_run(ready, place, follow=where.follow, report=terminal.text))


def _remark(ready: PreparedRun) -> None:
    """Print the planner's choice, and the input that was ignored."""
    if ready.chosen:
        terminal.text(ready.chosen)
    terminal.passed_over(ready.checked.over)
    terminal.note(ready.checked.note)


def _check_options(place: LaunchTarget, trial: Trial, *, follow: bool) -> None:
    """Raise JobError for an option that would be ignored."""
    from plait.api.places.base import ManagedTarget
    from plait.api.places.kubernetes import KubernetesTarget
    from plait.core.base.errors import JobError

    if trial.write and not isinstance(place, KubernetesTarget):
        raise JobError("is for --on kubernetes", key="--write", fix="Add it, or leave this out")
    if trial.as_json and not trial.dry_run:
        raise JobError("is for --dry-run; a run's numbers are in its metrics.jsonl", key="--json", fix="Leave it out")
    if not follow and not isinstance(place, ManagedTarget):
        raise JobError("is for --on slurm and kubernetes", key="--no-follow", fix="Leave it out")


def _write_manifests(folder: Path, job: Path, overrides: list[str], place: LaunchTarget) -> None:
    """Write the manifests that would be sent to Kubernetes."""
    from plait.api.places.kubernetes import KubernetesTarget
    from plait.api.training import prepare, write_manifests

    assert isinstance(place, KubernetesTarget)
    ready = prepare(job, overrides, place)
    _remark(ready)
    if note := write_manifests(ready, place, folder):
        terminal.text(note)
    terminal.text(
        f"wrote {folder}; send it with kubectl apply -f {folder}, end the run with kubectl delete -f {folder}"
    )


def _show(file: Path, overrides: list[str], place: LaunchTarget, as_json: bool) -> None:
    """Print the dry run: remarks, then tables, then what would be submitted."""
    from plait.api.places.base import ManagedTarget
    from plait.api.training import dry_run
    from plait.core.base.text import Table

    found = dry_run(file, overrides, place)
    if found.choice_note and not as_json:
        terminal.text(found.choice_note)
    terminal.passed_over(found.checked.over)
    terminal.note(found.checked.note)
    terminal.answer(found, as_json=as_json)
    found.check_fits()
    if isinstance(place, ManagedTarget) and found.job and not as_json:
        title, text = place.preview(found.job, found.folder)
        terminal.show([Table(title)])
        terminal.say(text)


# ---- trained models ----


RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, such as runs/first.")]


def export(
    run: RunFolder,
    out: Annotated[Path, typer.Option("-o", "--out", metavar="FOLDER", help="The folder to write.")],
    step: Annotated[
        str | None,
        typer.Option(
            metavar="STEP",
            help="The checkpoint after this step, or best, that with the least evaluation loss; by default the newest "
            "that is whole.",
        ),
    ] = None,
) -> None:
    """Write a run's checkpoint as a Hugging Face folder.

    It holds safetensors, configuration and tokenizer.

    Examples:
        plait export runs/first -o exported
        plait export runs/first -o exported --step best
    """
    from plait.api.training import export_run

    exported = export_run(run, out, step)
    for warning in exported.warnings:
        typer.echo(f"warning: {warning}", err=True)
    typer.echo(f"{out} holds {run} after step {exported.step}")


def sample(
    run: RunFolder,
    prompt: Annotated[str, typer.Option(metavar="TEXT", help="The text to continue.")],
    tokens: Annotated[int, typer.Option(metavar="N", help="How many tokens to add at most.")] = 200,
    temperature: Annotated[float, typer.Option(metavar="T", help="0 always takes the likeliest token.")] = 0.8,
    seed: Annotated[
        int, typer.Option(metavar="N", help="Of the random choices; the same seed gives the same text.")
    ] = 0,
    step: Annotated[
        str | None, typer.Option(metavar="STEP", help="Of the checkpoint, or best; the newest if not given.")
    ] = None,
) -> None:
    """Continue a text with a run's newest checkpoint.

    Examples:
        plait sample runs/first --prompt "def main("
        plait sample runs/first --prompt "import " --tokens 50 --temperature 0
    """
    from plait.api.training import sampler

    trained = sampler(run, step)
    pieces = trained.generate(prompt, tokens=tokens, temperature=temperature, seed=seed)
    for warning in trained.warnings:
        typer.echo(f"warning: {warning}", err=True)
    for piece in chain([prompt], pieces):
        sys.stdout.write(printable(piece, kept="\n\t"))
        sys.stdout.flush()
    sys.stdout.write("\n")
