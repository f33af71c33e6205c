"""What ``plait queue`` answers: tables, series, pictures."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait.core.base.text import counted

if TYPE_CHECKING:
    from plait.place.forecast import ForecastAccuracy
    from plait.place.replay import ReplayOutcome
    from plait.place.reservation import ClusterShape, Planned
    from plait.place.summary import Summary
    from plait.place.traces.table import Trace
    from plait.place.workload import JobTrace


class _Teller:
    """How far it is, on stderr: in one place of a terminal, a line each in a file, there without passing
    ones."""

    def __init__(self) -> None:
        self.width = 0

    def __call__(self, line: str, *, passing: bool = False) -> None:
        if sys.stderr.isatty():
            print("\r" + line[:79].ljust(self.width), end="" if line else "\r", file=sys.stderr, flush=True)
            self.width = len(line[:79])
        elif line and not passing:
            print(line, file=sys.stderr, flush=True)


tell = _Teller()


def source(jobs: Trace) -> dict[str, Any]:
    """Which trace it was, and what of it was left out."""
    return {
        "trace": jobs.name,
        "schema": jobs.schema,
        "rows": jobs.rows,
        "jobs": len(jobs),
        "dropped": dict(jobs.dropped),
        "passed_over": jobs.over.rows(),
        "changed": dict(jobs.changed),
        "read": list(jobs.how),
    }


def about(
    jobs: Trace,
    work: JobTrace,
    cluster: ClusterShape,
    planned: Sequence[Planned],
    overlay: float | None,
    load: float | None,
) -> dict[str, Any]:
    """What was played back, for programs."""
    one = jobs.busy() / (cluster.nodes * cluster.gpus_per_node)
    return source(jobs) | {
        "nodes": cluster.nodes,
        "gpus_per_node": cluster.gpus_per_node,
        "copies": overlay if overlay is not None else load and work.offered / one,
        "offered_load": work.offered,
        "window_h": work.window / 3600,
        "arrivals": int((work.submit >= 0).sum()),
        "running_at_start": int((work.submit < 0).sum()),
        "oversize": [jobs.id[job] for job in work.oversize],
        "planned": [
            {
                "nodes": one.nodes,
                "arrival_h": one.arrival / 3600,
                "notice_h": one.notice / 3600,
                "duration_h": one.duration / 3600,
            }
            for one in planned
        ],
    }


def show(jobs: Trace, work: JobTrace, found: list[Summary], planned: Sequence[Planned], out: Path | None) -> None:
    """What the policies came to, for people."""
    from plait.cli import terminal

    _show_source(jobs)
    if work.oversize:
        some = ", ".join(jobs.id[job] for job in work.oversize[:5])
        more = len(work.oversize) - 5
        names = some + (f" and {more} more" if more > 0 else "")
        terminal.text(f"Left out, since the cluster has fewer GPUs: {counted(len(work.oversize), 'job')} ({names}).")
    arrivals = int((work.submit >= 0).sum())
    terminal.title(
        f"{counted(arrivals, 'arrival')} in {work.window / 3600:.0f} h, {counted(len(work) - arrivals, 'job')} running "
        f"before; all ask for {work.offered:.0%} of the GPUs"
    )
    terminal.table(*_table(found, planned))
    if planned:
        terminal.text(
            "mean, p95: hours that jobs waited that came between announcement and arrival; all: mean of all jobs. "
            "held: reserved nodes that others hold just before the arrival, then: just after. idle: node-hours from "
            "the announcement to the last arrival of a job. in: jobs let into the zone, late: of them still there. "
            "out: jobs preempted. start: hours by which the planned job starts late."
            + (" Of several planned jobs the worst counts." if len(planned) > 1 else "")
        )
    if len(planned) > 1 or any(one.moved for summary in found for one in summary.planned):
        terminal.say("")
        header = ("policy", "planned", "at first", "held", "then", "moved", "in", "late", "start")
        terminal.table(header, _each_planned(found, planned))
        terminal.text(
            "at first: reserved nodes that others held at the announcement. moved: reserved nodes exchanged for others "
            "that are empty sooner."
        )
    if out:
        terminal.text(f"Series, summary and picture are in {out}.")


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:.2f}" if seconds < 360_000 else f"{seconds / 3600:.0f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _each_planned(found: list[Summary], planned: Sequence[Planned]) -> list[tuple[str, ...]]:
    """Rows of every policy and planned job."""
    return [
        (
            summary.policy,
            f"{one.nodes} at {planned[at].arrival / 3600:g} h",
            _share(one.announced),
            _share(one.before),
            _share(one.at),
            str(one.moved),
            str(one.admitted),
            str(one.late),
            "-" if one.delay is None else _hours(one.delay),
        )
        for summary in found
        for at, one in enumerate(summary.planned)
    ]


def _table(found: list[Summary], planned: Sequence[Planned]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    if not planned:
        header = ("policy", "mean wait h", "p50", "p95", "nodes in use", "GPUs in use")
        return header, [
            (one.policy, *map(_hours, (one.delay.mean, one.delay.p50, one.delay.p95)), _share(one.allocation),
             _share(one.gpu_allocation))
            for one in found
        ]  # fmt: skip
    header = ("policy", "mean", "p95", "all", "held", "then", "idle", "in", "late", "out", "start")
    return header, [
        (
            one.policy,
            _hours(one.notice.mean),
            _hours(one.notice.p95),
            _hours(one.delay.mean),
            _share(one.retention_before),
            _share(one.retention_at),
            f"{one.idle_node_hours:.0f}",
            str(one.admitted),
            str(one.late),
            str(one.preempted),
            "-" if one.planned_delay is None else _hours(one.planned_delay),
        )
        for one in found
    ]


def _show_source(jobs: Trace) -> None:
    from plait.cli import terminal

    said = f"{jobs.name} ({jobs.schema}): {counted(len(jobs), 'job')} of {counted(jobs.rows, 'row')}"
    gone = [f"{count} {reason}" for reason, count in jobs.dropped.items()]
    terminal.text(said + (f"; left out: {', '.join(gone)}" if gone else "") + ".")
    for reason, count in jobs.changed.items():
        terminal.text(f"{counted(count, 'job')}: {reason}.")
    for decided in jobs.how:
        terminal.text(f"{decided[0].upper()}{decided[1:]}.")


def show_report(jobs: Trace, report: ForecastAccuracy, level: float, out: Path) -> None:
    """How good a model is, for people."""
    from plait.cli import terminal

    _show_source(jobs)
    terminal.title(f"Error of the predicted time on the last {counted(report.tested, 'job')} (root mean square)")
    terminal.table(
        ("unit", "model", "mean", "mean per group"),
        [
            (unit, f"{by['model']:.2f}", f"{by['constant']:.2f}", f"{by['group']:.2f}")
            for unit, by in report.rmse.items()
        ],
    )
    terminal.text(
        f"Of those jobs {report.late['online']:.1%} ran longer than the time within which {level:.0%} should end; "
        f"{report.late['split']:.1%} if nothing is learnt of them, {report.late['raw']:.1%} without a margin, "
        f"{report.late['constant']:.1%} by one quantile for all, {report.late['group']:.1%} by one for each group."
    )
    if report.tried:
        settings = ", ".join(f"{name} {value}" for name, value in report.tried[0].settings.items())
        terminal.text(
            f"Of {len(report.tried)} settings these had the least error on jobs held back: {settings}. With the usual "
            f"ones the error would be {report.rmse['ln seconds']['untuned']:.2f} in ln seconds."
        )
    terminal.text(f"The model is in {out}.")


def write(
    out: Path, about: dict[str, Any], found: list[Summary], outcomes: list[ReplayOutcome], planned: Sequence[Planned]
) -> None:
    """The folder that ``--out`` names."""
    from plait.api.pictures import draw_curves
    from plait.core.base.errors import DataError
    from plait.core.base.files import replacing
    from plait.core.base.pictures import PlotCurve

    until = about["window_h"] * 3600
    panels: list[tuple[str, list[PlotCurve]]] = [("nodes in use", []), ("GPUs in use", [])]
    if planned:
        panels.append(("reserved nodes held", []))
    try:
        with replacing(out / "series.csv") as partial, partial.open("w", newline="") as file:
            table = csv.writer(file)
            table.writerow(("policy", "time_h", "allocation", "gpu_allocation", "retention"))
            for outcome in outcomes:
                series = outcome.series
                columns = (series.allocation, series.gpus, series.retention)
                for number, at in enumerate(series.time[series.time <= until]):
                    values = (f"{column[number]:.5f}" if column[number] >= 0 else "" for column in columns)
                    table.writerow((outcome.policy, f"{at / 3600:.4f}", *values))
                for (_, curves), column in zip(panels, columns, strict=False):
                    use = (series.time <= until) & (column >= 0)
                    points = list(zip((series.time[use] / 3600).tolist(), column[use].tolist(), strict=True))
                    if points:
                        curves.append(PlotCurve(outcome.policy, points))
        with replacing(out / "summary.json") as partial:
            partial.write_text(json.dumps(about | {"policies": [one.to_dict() for one in found]}, indent=1) + "\n")
        marks = [at / 3600 for one in planned for at in (one.announced, one.arrival)]
        title = f"{about['trace']} on {counted(about['nodes'], 'node')}"
        draw_curves(panels, out / "queue.svg", title=title, across="hours", marks=marks)
    except OSError as error:
        raise DataError(f"{out} cannot be written: {error.strerror or error}. Choose another with --out.") from None
