"""``plait queue``: jobs that wait while nodes are kept for a planned one, played back from a trace."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from plait.cli import terminal
from plait.cli.zones import places_in, zone_of
from plait.core.base.text import counted

if TYPE_CHECKING:
    from plait.api.queueing import Planned

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


class _Progress:
    """Lines on standard error: in one place of a terminal, a line each in a file, there without passing
    ones."""

    def __init__(self) -> None:
        self.width = 0

    def __call__(self, line: str, *, passing: bool = False) -> None:
        if sys.stderr.isatty():
            print("\r" + line[:79].ljust(self.width), end="" if line else "\r", file=sys.stderr, flush=True)
            self.width = len(line[:79])
        elif line and not passing:
            print(line, file=sys.stderr, flush=True)


tell = _Progress()


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
    from plait.api.queueing import ClusterShape, Replay, replay_queue
    from plait.core.base.errors import JobError

    numbers = {"--nodes": nodes, "--gpus-per-node": gpus_per_node, "--minipod": minipod, "--overlay": overlay}
    for option, value in (numbers | {"--load": load}).items():
        _positive(option, value)
    if on_late not in ("preempt", "delay"):
        raise JobError(f"'{on_late}' is not allowed", key="--late", fix="Allowed: preempt, delay")
    until = None if window is None else _time("--window", window)
    _positive("--window", until)
    asked = Replay(
        cluster=ClusterShape(nodes=nodes, gpus_per_node=gpus_per_node, minipod=minipod),
        planned=_planned(reserve or [], announce, planned_for, zone or [], topology),
        policies=policy, copies=overlay, load=load, window=until, delay_late=on_late == "delay",
        checkpoint=_time("--checkpoint", checkpoint), replan=_time("--replan", replan), level=level,
    )  # fmt: skip
    found = replay_queue(trace, asked, columns=columns, told=tell)
    tell("")
    if out:
        found.write(out)
    terminal.answer(found, as_json=as_json, out=out and str(out))
    if out and not as_json:
        terminal.text(f"Series, summary and picture are in {out}.")


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
    from plait.api.queueing import fit_durations

    found = fit_durations(trace, out, columns=columns, level=level, draws=search, told=tell)
    tell("")
    terminal.answer(found, as_json=as_json)


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
    from plait.api.queueing import predict_durations

    _positive("--last", last)
    found = predict_durations(model, trace, columns=columns, last=last)
    tell("")
    if not as_json:
        terminal.passed_over(found.trace.over)
    terminal.answer(found, as_json=as_json)


# ---- what is asked ----


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
    from plait.api.queueing import Planned
    from plait.core.base.errors import JobError

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
