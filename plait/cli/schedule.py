"""``plait schedule``: look at a pipeline schedule before it costs anything."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from plait.cli import terminal
from plait.cli.groups import grouped


@dataclass(frozen=True)
class ScheduleSize:
    """How large the schedule is, and how its stages are joined."""

    pp: Annotated[int, typer.Option(min=1, help="Pipeline ranks.")] = 4
    micro_batches: Annotated[int, typer.Option(min=1, help="Micro-batches of one step.")] = 8
    virtual_stages: Annotated[
        int, typer.Option(min=1, help="Stages that a rank holds: any number of interleaved, two of zb-v.")
    ] = 1
    slack: Annotated[
        str,
        typer.Option(
            metavar="N,N,...",
            help="Slack of slack-1f1b at every boundary.",
            show_default="what hides the transfers",
        ),
    ] = ""
    skip: Annotated[
        list[str] | None, typer.Option(metavar="A>B", help="Add a skip connection between stages. Repeatable.")
    ] = None


@dataclass(frozen=True)
class OpCosts:
    """What the ops of a schedule take."""

    costs: Annotated[
        str,
        typer.Option(
            metavar="F,I,W",
            help="Time of a forward, an input gradient and a weight gradient of one micro-batch on one stage, "
            "in any unit.",
        ),
    ] = "1,1,1"
    transfer: Annotated[
        str, typer.Option(metavar="TIME[,TIME...]", help="Time one way over every boundary, or over each of them.")
    ] = "0"
    mode: Annotated[str, typer.Option(help="How a transfer starts: buffered, rendezvous or blocking.")] = "buffered"

    @property
    def parts(self) -> tuple[float, float, float]:
        """Of a forward, an input gradient and a weight gradient."""
        from plait.core.base.errors import ScheduleError

        given = _times(self.costs, "--costs")
        if len(given) not in (1, 3) or min(given) < 0:
            raise ScheduleError(f"--costs {self.costs}: one number is expected, or three, none below 0")
        forward, input_gradient, weight_gradient = given * 3 if len(given) == 1 else given
        return forward, input_gradient, weight_gradient


@grouped
def schedule(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="gpipe, 1f1b, eager-1f1b, slack-1f1b, interleaved, zb-h1, ... or a file."),
    ],
    size: ScheduleSize,
    costs: OpCosts,
    draw: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Also draw to this file (.svg, .png, .pdf). Repeatable."),
    ] = None,
    ops: Annotated[
        bool, typer.Option("--ops", help="Print the ops, transfers included, instead of the picture.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Draw a pipeline schedule, with its bubble and memory, simulated and by formula. NAME may be a file with
    a hand-written one.

    Example: plait schedule zb-h1 --pp 4 --micro-batches 8 --costs 1,1,1 --transfer 0.2
    """
    from plait.api.schedules import Shape, show_schedule
    from plait.core.base.files import explained

    shape = Shape(ranks=size.pp, micro_batches=size.micro_batches, chunks=size.virtual_stages, slack=_slack(size.slack))
    edges = [_edge(text) for text in size.skip or []]
    found = show_schedule(name, shape, costs.parts, _times(costs.transfer), edges, _mode(costs.mode))
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


def _times(text: str, option: str = "--transfer") -> list[float]:
    """One time for all boundaries, or several."""
    from plait.core.base.errors import ScheduleError

    try:
        return [float(word) for word in text.split(",")]
    except ValueError:
        raise ScheduleError(f"{option} {text}: one number is expected, or several with commas between them") from None


def _mode(text: str) -> Any:
    from plait.core.base.errors import ScheduleError

    if text not in ("buffered", "rendezvous", "blocking"):
        raise ScheduleError(f"--mode {text}: buffered, rendezvous or blocking")
    return text
