"""Queues beside planned jobs: a trace played back under several policies, and models of how long jobs run."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import exp
from pathlib import Path
from typing import Any

from plait.core.base.errors import DataError, JobError
from plait.core.base.files import replacing
from plait.core.base.text import Column, Part, Shown, Table, counted
from plait.place.forecast import FEWEST_SURE, SURE, ForecastAccuracy, assess, names_of, walk_forward
from plait.place.groups import labels_of
from plait.place.jct import BUCKET, JctSettings
from plait.place.model_files import load, save
from plait.place.policy import QueuePolicy, find_policies
from plait.place.replay import ReplayOutcome, ReplayRules, replay
from plait.place.reservation import ClusterShape, Planned, check_planned
from plait.place.summary import Summary, summary
from plait.place.traces.columns import parse_columns
from plait.place.traces.read import read_trace
from plait.place.traces.table import MOST_GPUS, Trace
from plait.place.workload import JobTrace, copies_of, workload
from plait.place.zone import JobShape

__all__ = ["ClusterShape", "JobShape", "Planned", "Replay", "fit_durations", "predict_durations", "replay_queue"]

Told = Callable[..., None]
"""Takes a line of progress; ``passing=True``: one that may be left out."""
HOUR = 3600
KEPT_ONES = (
    "mean, p95: hours that jobs waited that came between announcement and arrival; all: mean of all jobs. held: "
    "reserved nodes that others hold just before the arrival, then: just after. idle: node-hours from the announcement "
    "to the last arrival of a job. in: jobs let into the zone, late: of them still there. out: jobs preempted. start: "
    "hours by which the planned job starts late."
)


def _hours(seconds: float) -> str:
    return f"{seconds / HOUR:.2f}" if seconds < 100 * HOUR else f"{seconds / HOUR:.0f}"


# ---- replays ----


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
        return _source(self.trace) | {
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
        yield from _said_of(self.trace)
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
    policies, settings = find_policies(asked.policies), _settings(asked.level)
    asked.check()
    trace, shape = read_jobs(file, columns), {"copies": asked.copies, "load": asked.load, "window": asked.until}
    copies_of(trace, gpus=asked.gpus, **shape)  # refused before it takes long
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


# ---- how long jobs run ----


@dataclass(frozen=True, kw_only=True)
class Fitted(Shown):
    """A model of how long jobs run, and how good it is. level: the upper quantile. folder: the model's."""

    trace: Trace
    accuracy: ForecastAccuracy
    level: float
    folder: Path

    def to_dict(self) -> dict[str, Any]:
        """Errors by unit and predictor, shares of jobs that ran longer, settings that were tried."""
        return _source(self.trace) | asdict(self.accuracy) | {"level": self.level, "model": str(self.folder)}

    def parts(self) -> Iterator[Part]:
        """Errors beside those of predictors without a model."""
        yield from _said_of(self.trace)
        found, late = self.accuracy, self.accuracy.late
        title = f"Error of the predicted time on the last {counted(found.tested, 'job')} (root mean square)"
        heads = ("model", "one mean", "by group", "by GPUs", "by both")
        header = ("unit", *(Column(head, ".2f") for head in heads))
        names = ("model", "constant", "group", "gpus", "group_gpus")
        yield Table(title, header, [(unit, *(by[name] for name in names)) for unit, by in found.rmse.items()])
        yield "Beside the model the means of the jobs learnt from: of all, of a group, of a number of GPUs, of both."
        yield (
            f"Of those jobs {late['online']:.1%} ran longer than the time within which {self.level:.0%} should end; "
            f"{late['split']:.1%} if nothing is learnt of them, {late['raw']:.1%} without a margin, "
            f"{late['constant']:.1%} by one quantile for all, {late['group']:.1%} by one for each group."
        )
        yield from self._promised()
        if found.tried:
            settings = ", ".join(f"{name} {value}" for name, value in found.tried[0].settings.items())
            yield (
                f"Of {len(found.tried)} settings these had the least error on jobs held back: {settings}. With the "
                f"usual ones the error would be {found.rmse['ln seconds']['untuned']:.2f} in ln seconds."
            )
        yield f"The model is in {self.folder}."

    def _promised(self) -> Iterator[Part]:
        """What the upper time holds for, and late jobs by group."""
        groups, promised = self.accuracy.groups, 1 - self.level
        header = ("group", "learnt from", "tested", Column("ran longer", ".1%"))
        kinds = {"all_gpus": "GPUs: {}", "group": "{}", "group_gpus": "{}, GPUs: {}"}
        rows = [
            (
                kinds[one.kind].format(*one.group.rsplit(" ", 1 if one.kind == "group_gpus" else 0)),
                one.ended,
                one.tested,
                one.late,
            )
            for one in groups
        ]
        if rows:
            yield Table(f"Late jobs by group, of {FEWEST_SURE} jobs or more", header, rows)
        off = [one for one in groups if abs(one.late - promised) > SURE]
        if self.accuracy.sure:
            yield (
                f"The time within which {self.level:.0%} end holds within {100 * SURE:g} points in each. It is "
                f"promised for each group and GPU count of which {FEWEST_SURE} jobs have ended, and for all together."
            )
        else:
            why = f"{len(off)} of {len(groups)} groups are further off" if groups else "no group has as many jobs"
            yield (
                f"The time within which {self.level:.0%} end is promised for all jobs together, not for each group: "
                f"{why} (within {100 * SURE:g} points is meant, of {FEWEST_SURE} jobs)."
            )


def fit_durations(
    file: Path, folder: Path, *, columns: str | None = None, level: float = 0.9, draws: int = 0,
    told: Told | None = None,
) -> Fitted:  # fmt: skip
    """Fit a model of how long jobs run to the first nine tenths of a trace, test it on the rest, write it.
    draws: settings that are tried. Raises JobError and DataError."""
    trace = read_jobs(file, columns)
    model, accuracy = assess(trace, _settings(level), progress=told, draws=draws)
    save(model, folder)
    return Fitted(trace=trace, accuracy=accuracy, level=level, folder=folder)


@dataclass(frozen=True, kw_only=True)
class PredictedDurations(Shown):
    """Predicted durations of the last jobs of a trace: (id, GPUs, typical seconds, mean buckets, upper
    seconds, for which jobs these are promised, spread of ln seconds, seconds that it ran). level: the upper
    quantile."""

    trace: Trace
    level: float
    jobs: Sequence[Mapping[str, Any]]

    def to_dict(self) -> dict[str, Any]:
        """Seconds of every job."""
        return _source(self.trace) | {"level": self.level, "bucket_s": BUCKET, "jobs": list(self.jobs)}

    def parts(self) -> Iterator[Part]:
        """Hours of every job."""
        hours = (Column(head, ".2f") for head in ("typical", "mean", f"{self.level:.0%} end within", "ran"))
        rows = [
            (one["id"], one["gpus"], one["typical_s"] / HOUR, one["mean_buckets"] * BUCKET / HOUR,
             one["upper_s"] / HOUR, one["ran_s"] / HOUR)
            for one in self.jobs
        ]  # fmt: skip
        yield Table(f"Predicted hours of the last {counted(len(rows), 'job')}", ("job", "GPUs", *hours), rows)


def predict_durations(folder: Path, file: Path, *, columns: str | None = None, last: int = 20) -> PredictedDurations:
    """Predict how long the last jobs of a trace run, from what was known at submission. folder: of
    ``fit_durations``. Raises JobError and DataError."""
    from plait.place.features import features

    fitted, trace = load(folder), read_jobs(file, columns)
    known, names = features(trace), names_of(trace)
    said, labels = fitted.predict(known, names), labels_of(known, names)
    upper, own = fitted.raised(said.bound, labels), labels[list(labels)[-1]]
    jobs = [
        {
            "id": trace.id[job],
            "gpus": int(trace.gpus[job]),
            "typical_s": round(exp(said.log[job]), 1),
            "mean_buckets": round(float(said.buckets[job]), 2),
            "upper_s": round(exp(min(upper[job], 20.0)), 1),
            "promised_for": "its group" if own[job] in fitted.sure else "all jobs together",
            "spread": round(float(said.spread[job]), 3),
            "ran_s": float(trace.duration[job]),
        }
        for job in range(max(0, len(trace) - last), len(trace))
    ]
    return PredictedDurations(trace=trace, level=fitted.settings.level, jobs=jobs)


def read_jobs(file: Path, columns: str | None) -> Trace:
    """The jobs of a trace. Raises JobError, and DataError for one without any."""
    trace = read_trace(file, None if columns is None else parse_columns(columns))
    if not len(trace):
        reasons = "; ".join(f"{count} {reason}" for reason, count in trace.dropped.items())
        raise DataError(f"{file} has no job that could be played back: {trace.rows} rows{reasons and ', '}{reasons}.")
    return trace


def _settings(level: float) -> JctSettings:
    if not 0.5 <= level < 1:
        raise JobError(f"{level:g} is not allowed", key="level", fix="Allowed: from 0.5 to below 1, such as 0.9")
    return JctSettings(level=level)


def _source(trace: Trace) -> dict[str, Any]:
    """The trace, and rows of it that were left out."""
    return {
        "trace": trace.name,
        "schema": trace.schema,
        "rows": trace.rows,
        "jobs": len(trace),
        "dropped": dict(trace.dropped),
        "passed_over": trace.over.rows(),
        "changed": dict(trace.changed),
        "read": list(trace.how),
    }


def _said_of(trace: Trace) -> Iterator[str]:
    gone = [f"{count} {reason}" for reason, count in trace.dropped.items()]
    left_out = f"; left out: {', '.join(gone)}" if gone else ""
    yield f"{trace.name} ({trace.schema}): {counted(len(trace), 'job')} of {counted(trace.rows, 'row')}{left_out}."
    yield from (f"{counted(count, 'job')}: {reason}." for reason, count in trace.changed.items())
    yield from (f"{decided[0].upper()}{decided[1:]}." for decided in trace.how)
