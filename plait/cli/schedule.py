"""``plait schedule``: look at a pipeline schedule before it costs anything."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from plait.cli import terminal

app = typer.Typer(no_args_is_help=True, help="Pipeline schedules: draw them, and see what they cost.")

Picture = Annotated[
    list[Path] | None, typer.Option(metavar="FILE", help="Also draw to this file (.svg, .png, .pdf); may be repeated.")
]
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
    from plait.api.schedules import Shape, show_schedule
    from plait.core.base.files import explained

    shape = Shape(ranks=stages, micro_batches=micro_batches, chunks=chunks, slack=_slack(slack))
    passes, edges = (forward, input_gradient, weight_gradient), [_edge(text) for text in skip or []]
    found = show_schedule(name, shape, passes, _times(transfer), edges, _mode(mode))
    for path in draw or []:
        with explained(f"{path} cannot be written", fix="Choose another with --draw"):
            found.draw(path)
    if ops and not as_json:
        typer.echo(str(found.run.schedule))
    else:
        terminal.answer(found, as_json=as_json)


def _slack(text: str) -> tuple[int, ...]:
    from plait.core.base.errors import ScheduleError

    try:
        return tuple(int(word) for word in text.split(",")) if text else ()
    except ValueError:
        raise ScheduleError(
            f"--slack {text}: whole numbers with commas between them are expected, such as 1,2,1"
        ) from None


def _edge(text: str) -> tuple[int, int]:
    from plait.core.base.errors import ScheduleError

    producer, _, consumer = text.partition(">")
    if not (producer.isdecimal() and consumer.isdecimal()):
        raise ScheduleError(f"--skip {text}: two stages are expected, such as '0>3'")
    return int(producer), int(consumer)


def _times(text: str) -> list[float]:
    """One time for all boundaries, or several."""
    from plait.core.base.errors import ScheduleError

    try:
        return [float(word) for word in text.split(",")]
    except ValueError:
        raise ScheduleError(f"--transfer {text}: one number is expected, or several with commas between them") from None


def _mode(text: str) -> Any:
    from plait.core.base.errors import ScheduleError

    if text not in ("buffered", "rendezvous", "blocking"):
        raise ScheduleError(f"--mode {text}: buffered, rendezvous or blocking")
    return text
