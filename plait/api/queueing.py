"""Queues beside planned jobs: a trace played back under several policies."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plait.api.queue_trace import HOUR, Told, read_jobs, said_of, settings_of, source_of
from plait.core.base.errors import DataError, JobError
from plait.core.base.files import replacing
from plait.core.base.text import Column, Part, Shown, Table, counted
from plait.place.forecast import walk_forward
from plait.place.policy import QueuePolicy, find_policies
from plait.place.replay import ReplayOutcome, ReplayRules, replay
from plait.place.reservation import ClusterShape, Planned, check_planned
from plait.place.summary import Summary, summary
from plait.place.traces.table import MOST_GPUS, Trace
from plait.place.workload import JobTrace, copies_of, workload
from plait.place.zone import JobShape

__all__ = ["ClusterShape", "JobShape", "Planned", "Replay", "replay_queue"]

KEPT_ONES = (
    "mean, p95: hours that jobs waited that came between announcement and arrival; all: mean of all jobs. held: "
    "reserved nodes that others hold just before the arrival, then: just after. idle: node-hours from the announcement "
    "to the last arrival of a job. in: jobs let into the zone, late: of them still there. out: jobs preempted. start: "
    "hours by which the planned job starts late."
)


def _hours(seconds: float) -> str:
    return f"{seconds / HOUR:.2f}" if seconds < 100 * HOUR else f"{seconds / HOUR:.0f}"


@dataclass(frozen=True, kw_only=True)
class Replay:
    """A replay that is asked for.

    planned: jobs that nodes are kept for. policies: their names with commas between them, or ``all``. copies,
    load: copies of the trace that are laid over each other, or the share of all GPUs that they are to ask
    for. window: seconds during which jobs arrive; None: the whole trace, or of copies until the last planned
    job should have ended. delay_late: a planned job waits for jobs that are late in place of preempting them.
    checkpoint: seconds of work that a preempted job keeps whole multiples of. replan: seconds after which
    reserved nodes are chosen anew; 0: never. level: the upper quantile of how long a job will run.
    """

    cluster: ClusterShape
    planned: Sequence[Planned] = ()
    policies: str = "all"
    copies: float | None = None
    load: float | None = None
    window: float | None = None
    delay_late: bool = False
    checkpoint: float = 3600.0
    replan: float = 600.0
    level: float = 0.9

    @property
    def gpus(self) -> int:
        """GPUs of the cluster."""
        return self.cluster.nodes * self.cluster.gpus_per_node

    @property
    def until(self) -> float | None:
        """Seconds during which jobs arrive; None: as long as the trace lasts."""
        if self.window is not None or (self.copies is None and self.load is None):
            return self.window
        return max((one.arrival + one.duration for one in self.planned), default=7 * 24.0 * HOUR)

    def check(self) -> None:
        """Raise JobError or PlacementError for what cannot be played back."""
        if self.copies is not None and self.load is not None:
            raise JobError("both are given", key="overlay, load", fix="Copies follow from the load: leave out one")
        if self.gpus > MOST_GPUS:
            problem = f"{self.cluster.nodes} nodes of {self.cluster.gpus_per_node} GPUs are too many"
            raise JobError(problem, key="nodes", fix=f"A replay has at most {MOST_GPUS} GPUs")
        if 0 < self.replan < 60:
            raise JobError(f"{self.replan:g} s is too often", key="replan", fix="Use 0s, for never, or at least 1m")
        check_planned(self.planned, self.cluster)


@dataclass(frozen=True, kw_only=True)
class Replayed(Shown):
    """Outcome of every policy."""

    asked: Replay
    trace: Trace
    jobs: JobTrace
    policies: Sequence[Summary]
    outcomes: Sequence[ReplayOutcome]

    def to_dict(self) -> dict[str, Any]:
        """The replay, and numbers of every policy."""
        asked, jobs = self.asked, self.jobs
        one = self.trace.busy() / asked.gpus
        return source_of(self.trace) | {
            "nodes": asked.cluster.nodes,
            "gpus_per_node": asked.cluster.gpus_per_node,
            "copies": asked.copies if asked.copies is not None else asked.load and jobs.offered / one,
            "offered_load": jobs.offered,
            "window_h": jobs.window / HOUR,
            "arrivals": int((jobs.submit >= 0).sum()),
            "running_at_start": int((jobs.submit < 0).sum()),
            "oversize": [self.trace.id[job] for job in jobs.oversize],
            "planned": [
                {
                    "nodes": one.nodes, "arrival_h": one.arrival / HOUR, "notice_h": one.notice / HOUR,
                    "duration_h": one.duration / HOUR, "spares": one.spares,
                    "shape": one.shape and [one.shape.rows, one.shape.columns],
                }
                for one in asked.planned
            ],
            "policies": [one.to_dict() for one in self.policies],
        }  # fmt: skip

    def parts(self) -> Iterator[Part]:
        """A row for each policy; with several planned jobs, or moved ones, also a row for each of them."""
        jobs, planned = self.jobs, self.asked.planned
        yield from said_of(self.trace)
        if jobs.oversize:
            some = ", ".join(self.trace.id[job] for job in jobs.oversize[:5])
            names = some + (f" and {more} more" if (more := len(jobs.oversize) - 5) > 0 else "")
            yield f"Left out, since the cluster has fewer GPUs: {counted(len(jobs.oversize), 'job')} ({names})."
        arrivals = int((jobs.submit >= 0).sum())
        title = (
            f"{counted(arrivals, 'arrival')} in {jobs.window / HOUR:.0f} h, {counted(len(jobs) - arrivals, 'job')} "
            f"running before; all ask for {jobs.offered:.0%} of the GPUs"
        )
        if not planned:
            yield self._without_planned(title)
            return
        header = (
            "policy", Column("mean", _hours), Column("p95", _hours), Column("all", _hours), Column("held", ".1%"),
            Column("then", ".1%"), Column("idle", ".0f"), "in", "late", "out", Column("start", _hours),
        )  # fmt: skip
        rows = [
            (one.policy, one.notice.mean, one.notice.p95, one.delay.mean, one.retention_before, one.retention_at,
             one.idle_node_hours, one.admitted, one.late, one.preempted, one.planned_delay)
            for one in self.policies
        ]  # fmt: skip
        yield Table(title, header, rows)
        yield KEPT_ONES + (" Of several planned jobs the worst counts." if len(planned) > 1 else "")
        shaped = any(one.shape or one.spares for one in planned)
        if shaped or len(planned) > 1 or any(one.moved for each in self.policies for one in each.planned):
            yield ""
            yield self._each_planned()
            yield (
                "at first: reserved nodes that others held at the announcement. moved: reserved nodes exchanged for "
                "others that are empty sooner."
                + shaped
                * " DP, PP: minipods of the most spread group. lent: preemptible jobs that started on spares."
            )

    def _without_planned(self, title: str) -> Table:
        header = (
            "policy", Column("mean wait h", _hours), Column("p50", _hours), Column("p95", _hours),
            Column("nodes in use", ".1%"), Column("GPUs in use", ".1%"),
        )  # fmt: skip
        rows = [
            (one.policy, one.delay.mean, one.delay.p50, one.delay.p95, one.allocation, one.gpu_allocation)
            for one in self.policies
        ]
        return Table(title, header, rows)

    def _each_planned(self) -> Table:
        share = (Column(head, ".1%") for head in ("at first", "held", "then"))
        planned = self.asked.planned
        header = ("policy", "planned", *share, "moved", "in", "late", Column("start", _hours))
        shaped, spared = (any(getattr(one, name) for one in planned) for name in ("shape", "spares"))
        header += ("DP", "PP") * shaped + ("lent",) * spared
        rows = [
            (each.policy, f"{one.nodes} at {planned[at].arrival / HOUR:g} h", one.announced, one.before, one.at,
             one.moved, one.admitted, one.late, one.delay, *(one.dp_spread, one.pp_spread) * shaped,
             *(one.lent,) * spared)
            for each in self.policies
            for at, one in enumerate(each.planned)
        ]  # fmt: skip
        return Table("", header, rows)

    def write(self, folder: Path) -> None:
        """Write ``series.csv`` (shares of nodes, GPUs and reserved nodes in use, over hours),
        ``summary.json`` and a picture. Raises DataError for a folder that cannot be written."""
        try:
            with replacing(folder / "series.csv") as partial, partial.open("w", newline="") as file:
                self._write_series(file)
            with replacing(folder / "summary.json") as partial:
                partial.write_text(json.dumps(self.to_dict(), indent=1) + "\n")
            self._draw(folder / "queue.svg")
        except OSError as error:
            why = error.strerror or error
            raise DataError(f"{folder} cannot be written: {why}. Choose another with --out.") from None

    def _write_series(self, file: Any) -> None:
        table = csv.writer(file)
        table.writerow(("policy", "time_h", "allocation", "gpu_allocation", "retention"))
        for outcome in self.outcomes:
            series = outcome.series
            columns = (series.allocation, series.gpus, series.retention)
            for number, at in enumerate(series.time[series.time <= self.jobs.window]):
                values = (f"{column[number]:.5f}" if column[number] >= 0 else "" for column in columns)
                table.writerow((outcome.policy, f"{at / HOUR:.4f}", *values))

    def _draw(self, file: Path) -> None:
        from plait.api.pictures import draw_curves
        from plait.core.base.pictures import PlotCurve

        planned = self.asked.planned
        names = ("nodes in use", "GPUs in use", "reserved nodes held")[: 3 if planned else 2]
        panels: list[tuple[str, list[PlotCurve]]] = [(name, []) for name in names]
        for outcome in self.outcomes:
            series = outcome.series
            shares = (series.allocation, series.gpus, series.retention)
            for (_, curves), column in zip(panels, shares, strict=False):
                use = (series.time <= self.jobs.window) & (column >= 0)
                points = list(zip((series.time[use] / HOUR).tolist(), column[use].tolist(), strict=True))
                if points:
                    curves.append(PlotCurve(outcome.policy, points))
        marks = [at / HOUR for one in planned for at in (one.announced, one.arrival)]
        title = f"{self.trace.name} on {counted(self.asked.cluster.nodes, 'node')}"
        draw_curves(panels, file, title=title, across="hours", marks=marks)


def replay_queue(file: Path, asked: Replay, *, columns: str | None = None, told: Told | None = None) -> Replayed:
    """Play a trace of jobs back on a cluster that keeps nodes for planned jobs, under every policy.

    file: a table (CSV) of jobs, or Philly's log (JSON). columns: which column holds what, as
    ``submit=when,gpus=num_gpu``; None: by usual names. Raises JobError, PlacementError and DataError.
    """
    policies, settings = find_policies(asked.policies), settings_of(asked.level)
    asked.check()
    trace, shape = read_jobs(file, columns), {"copies": asked.copies, "load": asked.load, "window": asked.until}
    copies_of(trace, gpus=asked.gpus, **shape)  # refused before it takes long
    if (least := int(trace.gpus.min())) > asked.gpus:
        raise DataError(
            f"{file}: every job asks for {counted(least, 'GPU')} or more, and the cluster has {asked.gpus:,}. Give "
            "more nodes, or gpus_per_node."
        )
    jobs = workload(trace, walk_forward(trace, settings, progress=told), gpus=asked.gpus, **shape)

    def played(one: QueuePolicy) -> ReplayOutcome:
        def progress(share: float) -> None:
            if told:
                told(f"{one.name}: {share:.0%}", passing=True)

        return replay(
            jobs,
            asked.cluster,
            one,
            asked.planned,
            rules=ReplayRules(
                delay_late=asked.delay_late,
                checkpoint=asked.checkpoint,
                replan=asked.replan,
                sample=max(300.0, jobs.window / 2000),
            ),
            progress=progress,
        )

    outcomes = [played(one) for one in policies]
    found = [summary(one, jobs, asked.planned, asked.cluster.nodes, asked.gpus) for one in outcomes]
    return Replayed(asked=asked, trace=trace, jobs=jobs, policies=found, outcomes=outcomes)
