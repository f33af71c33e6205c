"""Pipeline schedules: their cost before a run, and their ops drawn over time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plait.core.base.errors import ScheduleError
from plait.core.base.pictures import Drawing
from plait.core.base.text import Column, Part, Shown, Table
from plait.core.step.clock.pipeline_clock import DryRun, PipelineCosts, Transfers, dry_run, peak_activations, rank_peaks
from plait.core.step.schedule import Edge, Schedule, with_edges
from plait.core.step.schedules import GENERATORS, ClosedFormResult, Shape, closed_form, enough_slack, find_schedule

__all__ = ["ScheduleAnswer", "Shape", "show_schedule"]

MOST = 20_000
"""The largest number of forward passes of a schedule that is shown: larger schedules take long, and
no picture has room for them."""


@dataclass(frozen=True)
class ScheduleAnswer(Shown):
    """A simulated schedule. run: its ops with their times. closed_form_costs: its bubble and live
    activations by formula; None for a hand-written schedule."""

    run: DryRun
    closed_form_costs: ClosedFormResult | None

    @property
    def title(self) -> str:
        """The schedule's name and sizes."""
        schedule = self.run.schedule
        sizes = f"{len(schedule.ranks)} ranks, {schedule.num_stages} stages, {schedule.num_micro_batches} micro-batches"
        return f"{schedule.name}: {sizes}"

    def to_dict(self) -> dict[str, Any]:
        """Return the ops of every rank with their times, the step's time, idle time and live
        activations, for JSON. Times have the unit of the passes."""
        run, known = self.run, self.closed_form_costs
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

    def parts(self) -> Iterator[Part]:
        """Yield ops over time, a row for each rank, and the step's time."""
        schedule, known = self.run.schedule, self.closed_form_costs
        yield Table(self.title)
        yield Drawing(self.run.bars())
        if len(schedule.ranks) < schedule.num_stages:
            yield "small letters: all but the first of a rank's stages"
        formula = () if known is None else ("peak by formula",)
        header = ("rank", "stages", Column("idle", "g"), "peak live activations", *formula)
        rows = [
            (rank, ", ".join(map(str, schedule.stages_of(rank))), idle, peak,
             *(() if known is None else (known.peak[rank],)))
            for rank, (idle, peak) in enumerate(zip(self.run.idle(), rank_peaks(schedule), strict=True))
        ]  # fmt: skip
        yield Table("", header, rows)
        words = "" if known is None else f" (by formula, without transfers: {known.bubble:g})"
        yield f"time of the step {self.run.makespan:g}; longest idle {self.run.bubble():g}{words}"

    def draw(self, file: Path) -> None:
        """Draw the schedule's ops over time into a file. Raises DataError for a file ending that
        names no picture format, OSError if the file cannot be written."""
        from plait.api.pictures import draw_gantt

        draw_gantt(self.run.bars(), file, title=self.title, unit="units of the costs")


def show_schedule(
    name: str, shape: Shape, passes: tuple[float, float, float] = (1.0, 1.0, 1.0),
    transfer_times: Sequence[float] = (0.0,), skip_edges: Sequence[Edge] = (), transfers: Transfers = "buffered",
) -> ScheduleAnswer:  # fmt: skip
    """Simulate a schedule.

    name: of a generator, or a file with a hand-written schedule. shape: ranks, micro-batches,
    stages per rank, slack; without slack, ``slack-1f1b`` takes the slack that hides the transfers.
    passes: the time of one micro-batch on one stage, in any unit: forward, input gradient, weight
    gradient. transfer_times: the one-way time over every boundary between stages, or one time for
    all. skip_edges: edges between stages besides the chain. transfers: how they start. Raises
    ScheduleError.
    """
    if name in GENERATORS:
        _check_size(shape)
    if name == "slack-1f1b" and not shape.slack:
        slack = enough_slack([sum(passes)] * shape.ranks, _each(transfer_times, shape.ranks - 1))
        shape = Shape(ranks=shape.ranks, micro_batches=shape.micro_batches, chunks=shape.chunks, slack=slack)
    schedule, made = find_schedule(name, shape)
    count = sum(op.computes and op.work.forward for ops in schedule.ranks for op in ops)
    if made is None and count > MOST:
        raise ScheduleError(
            f"{name}: {count} forward passes; at most {MOST} are shown. Leave out micro-batches: after the warm-up "
            "every one is like the one before."
        )
    if skip_edges and made:
        schedule = with_edges(schedule, [*schedule.edges, *skip_edges])
    run = dry_run(schedule, _costs(schedule, passes, transfer_times), transfers)
    return ScheduleAnswer(run, closed_form(name, made, *passes) if made else None)


def _costs(schedule: Schedule, passes: Sequence[float], travels: Sequence[float]) -> PipelineCosts:
    each = _each(travels, schedule.num_stages - 1)
    forward, input_gradient, weight_gradient = ((seconds,) * schedule.num_stages for seconds in passes)
    edges = {(a, b): sum(each[a:b]) for a, b in schedule.edges}
    return PipelineCosts(forward, input_gradient, weight_gradient, edges)


def _each(travels: Sequence[float], boundaries: int) -> list[float]:
    """Return a time for every boundary between stages. Raises ScheduleError for another number of
    times, and for negative times."""
    if len(travels) not in (1, boundaries) or min(travels) < 0:
        given = ",".join(f"{one:g}" for one in travels)
        problem = f"one number is expected, or {boundaries} with commas between them, none below 0"
        raise ScheduleError(f"transfer={given}: {problem}")
    return [*travels] * boundaries if len(travels) == 1 else [*travels]


def _check_size(shape: Shape) -> None:
    """Raise ScheduleError for more forward passes than can be shown."""
    each, passes = shape.num_stages, shape.num_stages * shape.micro_batches
    if passes <= MOST:
        return
    fix = f"Choose at most {MOST // each} micro-batches" if each <= MOST else "Choose fewer stages"
    raise ScheduleError(
        f"pp={shape.ranks} micro_batches={shape.micro_batches}: {passes} forward passes; at most {MOST} are "
        f"shown. {fix}; after the warm-up every micro-batch is like the one before."
    )
