"""``plait queue``: queues with nodes reserved for a planned job: replays of a trace, models of run
times, live admission."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from plait.cli import terminal
from plait.cli.commands import App, AsJson, Settings

app = App(
    "Replay, predict and admit jobs beside a planned one.\n\n"
    "They say how long jobs will run, who may start where, and what waiting costs."
)

TraceFile = Annotated[Path, typer.Argument(metavar="TRACE", help="A CSV table of jobs, or Philly's JSON log.")]
SettingsFile = Annotated[
    Path | None, typer.Option("--settings", metavar="FILE", help="A file of such settings (TOML).")
]


@dataclass(frozen=True)
class TraceSettings(Settings):
    """Settings for the reading of a trace."""

    format: Annotated[str, "csv, philly, helios, acme, pai or spot; by its columns where left out, else csv."] = ""
    columns: Annotated[
        str,
        "Which column holds what, as FIELD=COLUMN,...: submit, gpus, duration (or start, end), group, queue, user, "
        "cpus, ...; docs/queue.md has what is taken where left out.",
    ] = ""


@dataclass(frozen=True)
class FitSettings(TraceSettings):
    """Settings of a model of run times."""

    level: Annotated[float, "The upper quantile of how long a job will run."] = 0.9


class _Progress:
    """Progress lines on standard error: on a terminal they overwrite each other; in a file each has
    its own line, and passing lines are left out."""

    def __init__(self) -> None:
        self.width = 0

    def __call__(self, line: str, *, passing: bool = False) -> None:
        if sys.stderr.isatty():
            print("\r" + line[:79].ljust(self.width), end="" if line else "\r", file=sys.stderr, flush=True)
            self.width = len(line[:79])
        elif line and not passing:
            print(line, file=sys.stderr, flush=True)


progress = _Progress()


@app.command()
def replay(
    trace: TraceFile,
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="What is played back: nodes=2000 load=0.9 reserve=1200@+22h."),
    ] = None,
    file: SettingsFile = None,
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", metavar="FOLDER", help="Write series.csv, summary.json and queue.svg there."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Play a trace of jobs back by several policies.

    The cluster keeps nodes for a planned job. docs/queue.md lists the settings, in a file or behind
    the trace.

    Examples:
        plait queue replay jobs.csv nodes=2000 load=0.9 reserve=1200@+22h announce=4h
        plait queue replay jobs.csv --settings replay.toml policy=fifo -o replayed
    """
    from plait.api.queueing import ReplaySettings, replay_queue
    from plait.core.base.codec.data import read_settings

    told = read_settings(ReplaySettings, settings or [], file, paths=("zone", "topology"))
    asked = told.replay(lambda remarks: terminal.remarked(remarks.notes, remarks.over))
    found = replay_queue(trace, asked, form=told.format, columns=told.columns or None, report=progress)
    progress("")
    if out:
        found.write(out)
    terminal.answer(found, as_json=as_json, out=out and str(out))
    if out and not as_json:
        terminal.text(f"Series, summary and picture are in {out}.")


@app.command()
def fit(
    trace: TraceFile,
    settings: FitSettings,
    out: Annotated[Path, typer.Option("-o", "--out", metavar="FOLDER", help="Where the model goes.")] = Path(
        "jct-model"
    ),
    as_json: AsJson = False,
) -> None:
    """Fit a model of how long jobs run to a trace.

    It is fitted to the first nine tenths, and tested on the rest.

    Examples:
        plait queue fit jobs.csv
        plait queue fit jobs.csv columns=submit=when,duration=seconds,gpus=n
    """
    from plait.api.durations import fit_durations

    found = fit_durations(
        trace, out, form=settings.format, columns=settings.columns or None, level=settings.level, progress=progress
    )
    progress("")
    terminal.answer(found, as_json=as_json)


@app.command()
def predict(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A folder of plait queue fit.")],
    trace: TraceFile,
    settings: TraceSettings,
    last: Annotated[int, typer.Option(metavar="N", min=1, help="Of how many jobs, the last ones.")] = 20,
    as_json: AsJson = False,
) -> None:
    """Predict how long the last jobs of a trace run.

    Predictions rest on what was known when each was submitted.

    Examples:
        plait queue predict jct-model jobs.csv
        plait queue predict jct-model jobs.csv --last 5 --json
    """
    from plait.api.durations import predict_durations

    found = predict_durations(model, trace, form=settings.format, columns=settings.columns or None, last=last)
    progress("")
    if not as_json:
        terminal.passed_over(found.trace.over)
    terminal.answer(found, as_json=as_json)


@app.command()
def admit(
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="What is watched: reservation=lpj1 partition=gated."),
    ] = None,
    file: SettingsFile = None,
    once: Annotated[bool, typer.Option("--once", help="One round, for cron.")] = False,
    dry: Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and do nothing.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="A line of JSON for every round and everything that is done.")
    ] = False,
) -> None:
    """Watch a reservation, and admit jobs beside it and in it.

    Jobs start as in a replay of the policy arnold. Waiting jobs of the partition (or QOS) are held;
    on Kubernetes, pods behind the scheduling gate plait.dev/admission. Let in are those that fit
    outside, those that may be preempted, and those that should end before the planned job comes.
    Others are never touched. docs/queue.md lists the settings.

    Examples:
        plait queue admit reservation=lpj1 partition=gated --once --dry-run
        plait queue admit --settings admit.toml
    """
    from plait.api.admitting import AdmissionAction, AdmitSettings, Round, admit_jobs
    from plait.core.base.codec.data import read_settings

    def report(done: AdmissionAction | Round) -> None:
        if as_json:
            print(done.to_json())
        elif isinstance(done, AdmissionAction):
            terminal.say(done.line())
        sys.stdout.flush()

    asked = read_settings(AdmitSettings, settings or [], file, paths=("model", "trace"))
    admit_jobs(asked, once=once, dry=dry, report=report)
