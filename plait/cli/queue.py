"""``plait queue``: jobs that wait while nodes are kept for a planned one, played back from a trace."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from plait.cli.queue_tables import about, show, show_report, source, tell, write
from plait.cli.zones import places_in, zone_of
from plait.core.base.text import counted

if TYPE_CHECKING:
    from plait.place.policy import QueuePolicy
    from plait.place.replay import ReplayOutcome
    from plait.place.reservation import Planned
    from plait.place.traces.table import Trace

app = typer.Typer(
    no_args_is_help=True,
    help="Queues beside a planned job: how long jobs will run, who may start where, what waiting costs.",
)

TraceFile = Annotated[Path, typer.Argument(metavar="TRACE", help="A CSV table of jobs, or Philly's JSON log.")]
Columns = Annotated[
    str | None,
    typer.Option(
        metavar="FIELD=COLUMN,...",
        help="Which column holds what: submit, gpus, duration (or start, end), group, queue, user, cpus, ...; "
        "times with their unit or order where it is not seen: duration=took:min, submit=day:dmy.",
        show_default="by the file's form, else by usual names",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Level = Annotated[float, typer.Option(help="The upper quantile of how long a job will run.")]
TIME = re.compile(
    r"\+?(?:(?P<d>\d+(?:\.\d+)?)d)?(?:(?P<h>\d+(?:\.\d+)?)h)?(?:(?P<m>\d+(?:\.\d+)?)m)?(?:(?P<s>\d+(?:\.\d+)?)s)?"
)
REPLAN = "10m"


@app.command()
def replay(
    trace: TraceFile,
    nodes: Annotated[int, typer.Option(help="Of the cluster.")] = 2000,
    reserve: Annotated[
        list[str] | None,
        typer.Option(metavar="NODES@TIME", help="A planned job: 1200@+22h after the replay's start; may be repeated."),
    ] = None,
    announce: Annotated[str, typer.Option(metavar="TIME", help="How long before its arrival it is known.")] = "4h",
    planned_for: Annotated[str, typer.Option(metavar="TIME", help="How long a planned job runs.")] = "12h",
    replan: Annotated[
        str, typer.Option(metavar="TIME", help="After this long reserved nodes are chosen anew, and again; 0s: never.")
    ] = REPLAN,
    policy: Annotated[
        str,
        typer.Option(
            help="fifo, reserve-and-pack, no-jct, jct-mean, jct-quantile (or arnold), oracle, all; by commas."
        ),
    ] = "all",
    overlay: Annotated[
        float | None, typer.Option(metavar="K", help="Copies of the trace, shifted and laid over each other.")
    ] = None,
    load: Annotated[
        float | None, typer.Option(help="As many copies as ask for this share of all GPUs, such as 0.9.")
    ] = None,
    window: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="How long jobs arrive.",
            show_default="the whole trace; of an overlay, until the planned job should have ended, or a week",
        ),
    ] = None,
    columns: Columns = None,
    gpus_per_node: Annotated[int, typer.Option(help="GPUs of a node.")] = 8,
    minipod: Annotated[int, typer.Option(help="Nodes of a minipod; the planned job is packed by them.")] = 50,
    zone: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE", help="The nodes of a placement: its file, or a JSON list of numbers; one a --reserve."
        ),
    ] = None,
    topology: Annotated[
        str, typer.Option(metavar="FILE", help="Which number the nodes of --zone have: the cluster's switches.")
    ] = "",
    on_late: Annotated[
        str, typer.Option("--late", help="Jobs still there when the planned one comes: preempt them, or delay it.")
    ] = "preempt",
    checkpoint: Annotated[
        str, typer.Option(metavar="TIME", help="A preempted job keeps its work up to its last checkpoint.")
    ] = "1h",
    level: Level = 0.9,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Write series.csv, summary.json and queue.svg there.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Play a trace of jobs back on a cluster that keeps nodes for a planned job, by several policies.

    Example: plait queue replay jobs.csv --nodes 2000 --load 0.9 --reserve 1200@+22h --announce 4h --policy
    all
    """
    from plait.core.base.errors import JobError
    from plait.place.forecast import walk_forward
    from plait.place.policy import find_policies
    from plait.place.replay import replay as play
    from plait.place.reservation import ClusterShape, check_planned
    from plait.place.summary import summary
    from plait.place.traces.table import MOST_GPUS
    from plait.place.workload import copies_of, workload

    policies, settings = find_policies(policy), _settings(level)
    if overlay is not None and load is not None:
        raise JobError("both are given", key="--overlay, --load", fix="Copies follow from the load: leave out one")
    for option, value in (
        ("--nodes", nodes),
        ("--gpus-per-node", gpus_per_node),
        ("--minipod", minipod),
        ("--overlay", overlay),
        ("--load", load),
    ):
        _positive(option, value)
    if nodes * gpus_per_node > MOST_GPUS:
        fix = f"A replay has at most {MOST_GPUS} GPUs"
        raise JobError(f"{nodes} nodes of {gpus_per_node} GPUs are too many", key="--nodes", fix=fix)
    if on_late not in ("preempt", "delay"):
        raise JobError(f"'{on_late}' is not allowed", key="--late", fix="Allowed: preempt, delay")
    cluster = ClusterShape(nodes=nodes, gpus_per_node=gpus_per_node, minipod=minipod)
    planned = _planned(reserve or [], announce, planned_for, zone or [], topology)
    check_planned(planned, cluster)
    how: dict[str, Any] = {
        "delay_late": on_late == "delay",
        "checkpoint": _time("--checkpoint", checkpoint),
        "replan": _replan(replan),
    }
    until = _window(window, planned, overlay is not None or load is not None)
    jobs_in = _read(trace, columns)
    gpus = nodes * gpus_per_node
    copies_of(jobs_in, gpus=gpus, copies=overlay, load=load, window=until)  # refused before it takes long
    predicted = walk_forward(jobs_in, settings, progress=tell)
    jobs = workload(jobs_in, predicted, gpus=gpus, copies=overlay, load=load, window=until)
    how["sample"] = max(300.0, jobs.window / 2000)

    def played(one: QueuePolicy) -> ReplayOutcome:
        def progress(share: float) -> None:
            tell(f"{one.name}: {share:.0%}", passing=True)

        return play(jobs, cluster, one, planned, progress=progress, **how)

    outcomes = [played(one) for one in policies]
    tell("")
    found = [summary(outcome, jobs, planned, nodes, gpus) for outcome in outcomes]
    described = about(jobs_in, jobs, cluster, planned, overlay, load)
    if out:
        write(out, described, found, outcomes, planned)
    if as_json:
        typer.echo(json.dumps(described | {"policies": [one.to_dict() for one in found], "out": out and str(out)}))
    else:
        show(jobs_in, jobs, found, planned, out)


@app.command()
def fit(
    trace: TraceFile,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Where the model goes.")] = Path("jct-model"),
    columns: Columns = None,
    level: Level = 0.9,
    search: Annotated[
        int, typer.Option(metavar="N", min=0, max=400, help="Try N settings drawn from a grid, and use the best.")
    ] = 0,
    as_json: Json = False,
) -> None:
    """Fit a model of how long jobs run to the first nine tenths of a trace, and test it on the rest.

    Example: plait queue fit jobs.csv --columns
    submit=submit_time,duration=duration,gpus=num_gpu,group=cluster
    """
    from dataclasses import asdict

    from plait.place.forecast import assess
    from plait.place.model_files import save

    jobs = _read(trace, columns)
    model, report = assess(jobs, _settings(level), progress=tell, draws=search)
    save(model, out)
    tell("")
    if as_json:
        typer.echo(json.dumps(source(jobs) | asdict(report) | {"level": level, "model": str(out)}))
    else:
        show_report(jobs, report, level, out)


@app.command()
def predict(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A folder of plait queue fit.")],
    trace: TraceFile,
    columns: Columns = None,
    last: Annotated[int, typer.Option(help="Of how many jobs, the last ones.")] = 20,
    as_json: Json = False,
) -> None:
    """Predict how long the last jobs of a trace run, from what was known when each was submitted.

    Example: plait queue predict jct-model jobs.csv --last 5
    """
    import numpy as np

    from plait.cli import terminal
    from plait.place.features import features
    from plait.place.forecast import names_of
    from plait.place.jct import BUCKET
    from plait.place.model_files import load

    _positive("--last", last)
    fitted = load(model)
    jobs = _read(trace, columns)
    said = fitted.predict(features(jobs), names_of(jobs))
    tell("")
    upper = np.exp(np.minimum(said.bound + fitted.margin, 20.0))
    rows = [
        {
            "id": jobs.id[job],
            "gpus": int(jobs.gpus[job]),
            "typical_s": round(float(np.exp(said.log[job])), 1),
            "mean_buckets": round(float(said.buckets[job]), 2),
            "upper_s": round(float(upper[job]), 1),
            "spread": round(float(said.spread[job]), 3),
            "ran_s": float(jobs.duration[job]),
        }
        for job in range(max(0, len(jobs) - last), len(jobs))
    ]
    if as_json:
        typer.echo(json.dumps(source(jobs) | {"level": fitted.settings.level, "bucket_s": BUCKET, "jobs": rows}))
        return
    terminal.passed_over(jobs.over)
    terminal.title(f"Predicted hours of the last {counted(len(rows), 'job')}")
    header = ("job", "GPUs", "typical", "mean", f"{fitted.settings.level:.0%} end within", "ran")
    terminal.table(
        header,
        [
            (
                str(row["id"]),
                str(row["gpus"]),
                f"{row['typical_s'] / 3600:.2f}",
                f"{row['mean_buckets'] * BUCKET / 3600:.2f}",
                f"{row['upper_s'] / 3600:.2f}",
                f"{row['ran_s'] / 3600:.2f}",
            )
            for row in rows
        ],
    )


# ---- what is asked ----


def _read(trace: Path, columns: str | None) -> Trace:
    from plait.core.base.errors import DataError
    from plait.place.traces.columns import parse_columns
    from plait.place.traces.read import read_trace

    found = read_trace(trace, None if columns is None else parse_columns(columns))
    if not len(found):
        reasons = "; ".join(f"{count} {reason}" for reason, count in found.dropped.items())
        raise DataError(f"{trace} has no job that could be played back: {found.rows} rows{reasons and ', '}{reasons}.")
    return found


def _settings(level: float) -> Any:
    from plait.core.base.errors import JobError
    from plait.place.jct import JctSettings

    if not 0.5 <= level < 1:
        raise JobError(f"{level:g} is not allowed", key="--level", fix="Allowed: from 0.5 to below 1, such as 0.9")
    return JctSettings(level=level)


def _positive(option: str, value: float | None) -> None:
    from plait.core.base.errors import JobError

    if value is not None and not 0 < value < float("inf"):
        raise JobError(f"{value:g} is not allowed", key=option, fix="Allowed: more than 0")


def _time(option: str, text: str) -> float:
    from plait.core.base.errors import JobError

    found = TIME.fullmatch(text.strip())
    if not found or not any(found.groups()):
        raise JobError(f"'{text}' is no time", key=option, fix="Write for example 4h, 90m or 1d12h")
    return sum(float(found[unit] or 0) * size for unit, size in (("d", 86400), ("h", 3600), ("m", 60), ("s", 1)))


def _planned(reserve: list[str], announce: str, planned_for: str, zones: list[Path], topology: str) -> list[Planned]:
    from plait.core.base.errors import JobError
    from plait.place.reservation import Planned

    if zones and len(zones) != len(reserve):
        problem = f"{counted(len(zones), 'file')} for {counted(len(reserve), 'planned job')}"
        raise JobError(problem, key="--zone", fix="Give one for each --reserve, or none")
    duration, notice = _time("--planned-for", planned_for), _time("--announce", announce)
    _positive("--planned-for", duration)
    places = places_in(topology)
    found: list[Planned] = []
    for at, text in enumerate(reserve):
        count, sign, when = text.partition("@")
        if not sign or not count.strip().isdigit():
            raise JobError(f"'{text}' is no NODES@TIME", key="--reserve", fix="Write for example 1200@+22h")
        zone = zone_of(zones[at], places) if zones else None
        arrival = _time("--reserve", when)
        found.append(Planned(nodes=int(count), arrival=arrival, notice=notice, duration=duration, zone=zone))
    return found


def _replan(text: str) -> float:
    from plait.core.base.errors import JobError

    seconds = _time("--replan", text)
    if 0 < seconds < 60:
        raise JobError(f"'{text}' is too often", key="--replan", fix="Use 0s, for never, or at least 1m")
    return seconds


def _window(text: str | None, planned: list[Planned], overlaid: bool) -> float | None:
    if text is not None:
        seconds = _time("--window", text)
        _positive("--window", seconds)
        return seconds
    if not overlaid:
        return None
    return max((one.arrival + one.duration for one in planned), default=7 * 86400.0)
