"""``plait schedule``: shows a pipeline schedule and its predicted cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import typer

from plait.cli import terminal
from plait.cli.commands import AsJson, Draw, Settings
from plait.core.base.numbers import Count

LONGEST = 1e12
"""The largest time of an op or transfer, in any unit."""


@dataclass(frozen=True)
class ScheduleSettings(Settings):
    """Settings for the size of a schedule, the edges between its stages, and the times of its
    ops."""

    pp: Annotated[Count, "Pipeline ranks."] = 4
    micro_batches: Annotated[Count, "Micro-batches of one step."] = 8
    virtual_stages: Annotated[Count, "Stages that a rank holds: any number of interleaved, two of zb-v."] = 1
    slack: Annotated[str, "Slack of slack-1f1b at every boundary, as 1,2,1; left out: what hides the transfers."] = ""
    skip: Annotated[tuple[str, ...], "A skip connection between stages, as 0>3. Repeatable."] = ()
    costs: Annotated[
        str, "Time of a forward, an input gradient and a weight gradient of one micro-batch on one stage, in any unit."
    ] = "1,1,1"
    transfer: Annotated[str, "Time one way over every boundary, or over each of them, with commas."] = "0"
    mode: Annotated[Literal["buffered", "rendezvous", "blocking"], "How a transfer starts."] = "buffered"

    @property
    def parts(self) -> tuple[float, float, float]:
        """The times of a forward, an input gradient and a weight gradient."""
        from plait.core.base.errors import ScheduleError

        given = _times(self.costs, "costs")
        if len(given) not in (1, 3):
            raise ScheduleError(f"costs={self.costs}: one number is expected, or three")
        forward, input_gradient, weight_gradient = given * 3 if len(given) == 1 else given
        return forward, input_gradient, weight_gradient


def schedule(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="gpipe, 1f1b, eager-1f1b, slack-1f1b, interleaved, zb-h1, ... or a file."),
    ],
    drawn: ScheduleSettings,
    draw: Draw = None,
    ops: Annotated[
        bool, typer.Option("--ops", help="Print the ops, transfers included, instead of the picture.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Draw a pipeline schedule, with its bubble and memory.

    Both are simulated, and by formula. NAME may be a file with a hand-written schedule.

    Examples:
        plait schedule 1f1b
        plait schedule zb-h1 pp=4 micro_batches=8 costs=1,1,1 transfer=0.2
    """
    from plait.api.schedules import Shape, show_schedule
    from plait.core.base.files import explained

    shape = Shape(
        ranks=drawn.pp, micro_batches=drawn.micro_batches, chunks=drawn.virtual_stages, slack=_slack(drawn.slack)
    )
    edges = [_edge(text) for text in drawn.skip]
    found = show_schedule(name, shape, drawn.parts, _times(drawn.transfer, "transfer"), edges, drawn.mode)
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
            f"slack={text}: whole numbers with commas between them are expected, such as 1,2,1"
        ) from None


def _edge(text: str) -> tuple[int, int]:
    from plait.core.base.errors import ScheduleError

    producer, _, consumer = text.partition(">")
    if not (producer.isdecimal() and consumer.isdecimal()):
        raise ScheduleError(f"skip={text}: two stages are expected, such as '0>3'")
    return int(producer), int(consumer)


def _times(text: str, key: str) -> list[float]:
    """Return one time for all boundaries, or several times. Raises ScheduleError for other text."""
    from plait.core.base.errors import ScheduleError

    try:
        found = [float(word) for word in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(0 <= each <= LONGEST for each in found):
        told = f"one number from 0 to {LONGEST:g} is expected, or several with commas between them"
        raise ScheduleError(f"{key}={text}: {told}")
    return found
