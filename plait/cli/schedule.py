"""``plait schedule``: look at a pipeline schedule before it costs anything."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from plait.core.step.dry_run import DryRun
    from plait.core.step.schedule import Schedule
    from plait.core.step.schedules import Known, Shape

app = typer.Typer(no_args_is_help=True, help="Pipeline schedules: draw them, and see what they cost.")

Picture = Annotated[
    list[Path] | None, typer.Option(metavar="FILE", help="Also draw to this file (.svg, .png, .pdf); may be repeated.")
]
MOST = 20_000
"""Forward passes of a schedule that is shown: larger ones take long, and no picture has room for them."""
Duration = Annotated[float, typer.Option(min=0.0, metavar="TIME", help="Of one micro-batch on one stage, any unit.")]


@app.command()
def show(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="gpipe, 1f1b, eager-1f1b, slack-1f1b, interleaved, zb-h1, ... or a file."),
    ],
    stages: Annotated[
        int, typer.Option(min=1, help="Pipeline ranks; each holds one stage, or several (--chunks).")
    ] = 4,
    micro_batches: Annotated[int, typer.Option(min=1, help="Micro-batches of one step.")] = 8,
    chunks: Annotated[int, typer.Option(min=1, help="Stages that a rank holds: interleaved any, zb-v two.")] = 1,
    slack: Annotated[
        str,
        typer.Option(metavar="N,N,...", help="slack-1f1b: of every boundary.", show_default="what hides the transfers"),
    ] = "",
    skip: Annotated[
        list[str] | None, typer.Option(metavar="A>B", help="A skip connection between stages; may be repeated.")
    ] = None,
    forward: Duration = 1.0,
    input_gradient: Duration = 1.0,
    weight_gradient: Duration = 1.0,
    transfer: Annotated[
        str, typer.Option(metavar="TIME[,TIME...]", help="One way over every boundary, or over each of them.")
    ] = "0",
    mode: Annotated[str, typer.Option(help="How a transfer starts: buffered, rendezvous or blocking.")] = "buffered",
    draw: Picture = None,
    ops: Annotated[
        bool, typer.Option("--ops", help="Print the ops, transfers included, instead of the picture.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Draw a schedule, with its bubble and memory, simulated and by formula. NAME may be a file with a
    hand-written one."""
    from plait.core.step.dry_run import PipelineCosts, dry_run
    from plait.core.step.schedules import closed_form

    parts = (forward, input_gradient, weight_gradient)
    schedule, shape = _schedule(name, stages, micro_batches, chunks, slack, skip or [], sum(parts), transfer)
    travels = _times(transfer, schedule.num_stages - 1, "--transfer")
    costs = PipelineCosts(
        *((seconds,) * schedule.num_stages for seconds in parts),
        edges={(a, b): sum(travels[a:b]) for a, b in schedule.edges},
    )
    run = dry_run(schedule, costs, _mode(mode))
    known = closed_form(name, shape, *parts) if shape else None
    for path in draw or []:
        from plait.api.pictures import draw_gantt
        from plait.core.base.files import explained

        with explained(f"{path} cannot be written", fix="Choose another with --draw"):
            draw_gantt(run.bars(), path, title=_title(run), unit="units of the costs")
    if as_json:
        typer.echo(json.dumps(_report(run, known)))
    elif ops:
        typer.echo(str(run.schedule))
    else:
        _print(run, known)


def _schedule(
    name: str, stages: int, micro_batches: int, chunks: int, slack: str, skips: list[str], compute: float, transfer: str
) -> tuple[Schedule, Shape | None]:
    from plait.core.base.errors import ScheduleError
    from plait.core.step.schedule import with_edges
    from plait.core.step.schedules import GENERATORS, Shape, enough_slack, find_schedule

    given: tuple[int, ...] = ()
    if slack:
        try:
            given = tuple(int(word) for word in slack.split(","))
        except ValueError:
            raise ScheduleError(
                f"--slack {slack}: whole numbers with commas between them are expected, such as 1,2,1"
            ) from None
    elif name == "slack-1f1b":
        given = enough_slack([compute] * stages, _times(transfer, stages - 1, "--transfer"))
    if name in GENERATORS:
        _check_size(stages, micro_batches, chunks)
    schedule, shape = find_schedule(name, Shape(ranks=stages, micro_batches=micro_batches, chunks=chunks, slack=given))
    passes = sum(op.kind == "F" for ops in schedule.ranks for op in ops)
    if shape is None and passes > MOST:
        raise ScheduleError(
            f"{name}: {passes} forward passes; at most {MOST} are shown. Leave out micro-batches: after the warm-up "
            "every one is like the one before."
        )
    if skips and shape:
        schedule = with_edges(schedule, [*schedule.edges, *(_edge(text) for text in skips)])
    return schedule, shape


def _check_size(stages: int, micro_batches: int, chunks: int) -> None:
    """Raise ScheduleError for more than can be shown."""
    from plait.core.base.errors import ScheduleError

    each = stages * chunks
    if each * micro_batches <= MOST:
        return
    fix = f"Choose at most {MOST // each} micro-batches" if each <= MOST else "Choose fewer stages"
    raise ScheduleError(
        f"--stages {stages} --micro-batches {micro_batches}: {each * micro_batches} forward passes; at most {MOST} are "
        f"shown. {fix}; after the warm-up every micro-batch is like the one before."
    )


def _edge(text: str) -> tuple[int, int]:
    from plait.core.base.errors import ScheduleError

    producer, _, consumer = text.partition(">")
    if not (producer.isdecimal() and consumer.isdecimal()):
        raise ScheduleError(f"--skip {text}: two stages are expected, such as '0>3'")
    return int(producer), int(consumer)


def _times(text: str, count: int, option: str) -> list[float]:
    """One time for every boundary, or as many as there are."""
    from plait.core.base.errors import ScheduleError

    try:
        found = [float(word) for word in text.split(",")]
    except ValueError:
        found = []
    if len(found) not in (1, count) or min(found) < 0:
        raise ScheduleError(
            f"{option} {text}: one number is expected, or {count} with commas between them, none below 0"
        )
    return found * count if len(found) == 1 else found


def _mode(text: str) -> Any:
    from plait.core.base.errors import ScheduleError

    if text not in ("buffered", "rendezvous", "blocking"):
        raise ScheduleError(f"--mode {text}: buffered, rendezvous or blocking")
    return text


def _title(run: DryRun) -> str:
    schedule = run.schedule
    sizes = f"{len(schedule.ranks)} ranks, {schedule.num_stages} stages, {schedule.num_micro_batches} micro-batches"
    return f"{schedule.name}: {sizes}"


def _report(run: DryRun, known: Known | None) -> dict[str, Any]:
    from plait.core.step.dry_run import peak_activations, rank_peaks

    return {
        "name": run.schedule.name,
        "edges": run.schedule.edges,
        "ranks": [[str(op) for op in ops] for ops in run.schedule.ranks],
        "makespan": run.makespan,
        "bubble": run.bubble(),
        "peak_by_stage": peak_activations(run.schedule),
        "peak_by_rank": rank_peaks(run.schedule),
        "closed_form": None if known is None else {"bubble": known.bubble, "peak_by_rank": known.peak},
        "ops": [{"rank": p.rank, "op": str(p.op), "start": p.start, "end": p.end} for p in run.placed],
    }


_COLOURS = {
    "forward": ("black", "bright_blue"),
    "backward": ("black", "bright_green"),
    "input gradient": ("black", "bright_cyan"),
    "weight gradient": ("black", "bright_yellow"),
    "transfer F": ("black", "white"),
    "transfer B": ("white", "bright_black"),
}


def _print(run: DryRun, known: Known | None) -> None:
    from plait.cli import terminal
    from plait.core.base.pictures import drawn_rows
    from plait.core.step.dry_run import rank_peaks

    terminal.title(_title(run))
    for name, pieces in drawn_rows(run.bars(), max(20, terminal.drawing_width() - 10)):
        drawn = (terminal.coloured(piece.text, *_COLOURS.get(piece.kind, (None, None))) for piece in pieces)
        typer.echo(f"{name:<8} {''.join(drawn)}")
    peaks, idle = rank_peaks(run.schedule), run.idle()
    if len(run.schedule.ranks) < run.schedule.num_stages:
        terminal.say("small letters: all but the first of a rank's stages")
    header = ("rank", "stages", "idle", "peak live activations", *(["peak by formula"] if known else []))
    rows = [
        (
            str(rank),
            ", ".join(map(str, run.schedule.stages_of(rank))),
            f"{idle[rank]:g}",
            str(peak),
            *([str(known.peak[rank])] if known else []),
        )
        for rank, peak in enumerate(peaks)
    ]
    terminal.table(header, rows)
    formula = f" (by formula, without transfers: {known.bubble:g})" if known else ""
    terminal.text(f"time of the step {run.makespan:g}; longest idle {run.bubble():g}{formula}")
