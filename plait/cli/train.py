"""``plait train``: from a job file to a trained model, on this machine or on an emulated cluster."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from plait.cli import terminal
from plait.cli.groups import grouped

if TYPE_CHECKING:
    from plait.api.places.base import LaunchTarget
    from plait.api.training import Prepared

WIDTH = 100
"""Columns of a log, also of one in a file, which somebody reads."""


@dataclass(frozen=True)
class Where:
    """Where ranks run."""

    on: Annotated[
        str,
        typer.Option(
            help="Where: local; slurm or slurm:PARTITION; kubernetes or kubernetes:NAMESPACE; lab:HOSTSxRANKS@RATE "
            "for an emulated cluster, such as lab:2x1@1gbit or, with a slower core between minipods, "
            "lab:4x1@1gbit,2pods@300mbit."
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
    """What is checked and shown instead of training."""

    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only check the job, and show what it takes of every rank.")
    ] = False
    as_json: Annotated[bool, typer.Option("--json", help="With --dry-run: as JSON.")] = False
    write: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="With --on kubernetes: write all objects of the run into this folder, for kubectl apply -f, and send "
            "nothing.",
        ),
    ] = None


@grouped
def train(
    where: Where,
    trial: Trial,
    job: Annotated[
        Path,
        typer.Argument(metavar="JOB", help="The job file (TOML), or a plan (JOB.plan.json) to be obeyed as it stands."),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[SECTION.KEY=VALUE]...", help="In place of the file's: train.steps=100."),
    ] = None,
    plan_only: Annotated[bool, typer.Option("--plan-only", hidden=True, help="For torchrun's ranks.")] = False,
) -> None:
    """Train; the same command resumes a run that was stopped or killed.

    Settings stand in the job file, in the tables [model], [data], [train], [strategy] and [run]: plait job
    lists them all, plait job KEY explains one, and docs/job.md has the same to read.

    Example: plait train specs/jobs/quickstart.toml train.steps=100 strategy.tp=1
    """
    from plait.api.checks import check_ranks, room_of
    from plait.api.places import place_of, with_table
    from plait.api.summary import what_runs
    from plait.api.training import prepare, start_run, write_plan
    from plait.core.base.text import paragraph
    from plait.core.job.spec import naming

    place, given = with_table(place_of(where.on), where.rank_table), overrides or []
    _check_options(place, trial, follow=where.follow)
    with naming(job, given):
        if trial.dry_run:
            _show(job, given, place, trial.as_json)
        if trial.write:
            _write_manifests(trial.write, job, given, place)
        if trial.dry_run or trial.write:
            return
        # torchrun's ranks may stand on other machines too
        ready = prepare(job, given, place, refuse=not plan_only)
        _remark(ready)
    if spares := check_ranks(ready.plan, place, where.on):
        terminal.text(spares)
    for line in paragraph(what_runs(ready.plan, room_of(ready.plan, place)), WIDTH, "  ").splitlines():
        terminal.say(line)
    if plan_only:  # whoever asks holds the run's lock
        write_plan(ready)
    else:
        raise typer.Exit(start_run(ready, place, follow=where.follow, told=terminal.text))


def _remark(ready: Prepared) -> None:
    """Say what was chosen and what was not taken."""
    if ready.chosen:
        terminal.text(ready.chosen)
    terminal.passed_over(ready.checked.over)
    terminal.note(ready.checked.note)


def _check_options(place: LaunchTarget, trial: Trial, *, follow: bool) -> None:
    """Raise JobError for an option that would be ignored."""
    from plait.api.places.base import Managed
    from plait.api.places.kubernetes import InKubernetes
    from plait.core.base.errors import JobError

    if trial.write and not isinstance(place, InKubernetes):
        raise JobError("is for --on kubernetes", key="--write", fix="Add it, or leave this out")
    if trial.as_json and not trial.dry_run:
        raise JobError("is for --dry-run; a run's numbers are in its metrics.jsonl", key="--json", fix="Leave it out")
    if not follow and not isinstance(place, Managed):
        raise JobError("is for --on slurm and kubernetes", key="--no-follow", fix="Leave it out")


def _write_manifests(folder: Path, job: Path, overrides: list[str], place: LaunchTarget) -> None:
    """Write what would be sent to Kubernetes."""
    from plait.api.places.kubernetes import InKubernetes
    from plait.api.training import prepare, write_manifests

    assert isinstance(place, InKubernetes)
    ready = prepare(job, overrides, place)
    _remark(ready)
    if note := write_manifests(ready, place, folder):
        terminal.text(note)
    terminal.text(
        f"wrote {folder}; send it with kubectl apply -f {folder}, end the run with kubectl delete -f {folder}"
    )


def _show(file: Path, overrides: list[str], place: LaunchTarget, as_json: bool) -> None:
    """The dry run: remarks, then the tables, then what would be sent."""
    from plait.api.places.base import Managed
    from plait.api.training import dry_run
    from plait.core.base.text import Table

    found = dry_run(file, overrides, place)
    if found.chosen and not as_json:
        terminal.text(found.chosen)
    terminal.passed_over(found.checked.over)
    terminal.note(found.checked.note)
    terminal.answer(found, as_json=as_json)
    found.check_fits()
    if isinstance(place, Managed) and found.job and not as_json:
        title, text = place.preview(found.job, found.folder)
        terminal.show([Table(title)])
        terminal.say(text)
