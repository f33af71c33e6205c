"""What ``plait queue`` answers: tables, series, pictures."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from plait.place.forecast import Report
    from plait.place.replay import ClusterShape, Outcome, Planned
    from plait.place.summary import Summary
    from plait.place.traces.table import Trace
    from plait.place.workload import Workload


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
        "changed": dict(jobs.changed),
    }


def about(
    jobs: Trace,
    work: Workload,
    cluster: ClusterShape,
    planned: Planned | None,
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
        "planned": planned
        and {
            "nodes": planned.nodes,
            "arrival_h": planned.arrival / 3600,
            "notice_h": planned.notice / 3600,
            "duration_h": planned.duration / 3600,
        },
    }


def show(jobs: Trace, work: Workload, found: list[Summary], planned: Planned | None, out: Path | None) -> None:
    """What the policies came to, for people."""
    from plait.cli import terminal

    _show_source(jobs)
    if work.oversize:
        some = ", ".join(jobs.id[job] for job in work.oversize[:5])
        more = len(work.oversize) - 5
        terminal.text(
            f"{len(work.oversize)} jobs want more GPUs than there are and are left out: {some}"
            + (f" and {more} more." if more > 0 else ".")
        )
    arrivals = int((work.submit >= 0).sum())
    terminal.title(
        f"{arrivals:,} jobs arrive in {work.window / 3600:.0f} h, {len(work) - arrivals:,} run before; "
        f"they ask for {work.offered:.0%} of the GPUs"
    )
    terminal.table(*_table(found, planned))
    if planned:
        terminal.text(
            "mean, p95: hours that jobs waited that came between announcement and arrival; all: mean of all jobs. "
            "held: reserved nodes that others hold just before the arrival, then: just after. idle: node-hours from "
            "the announcement to the last arrival of a job. in: jobs let into the zone, late: of them still there. "
            "out: jobs preempted. start: hours by which the planned job starts late."
        )
    if out:
        terminal.text(f"Series, summary and picture are in {out}.")


def _table(found: list[Summary], planned: Planned | None) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    def hours(seconds: float) -> str:
        return f"{seconds / 3600:.2f}" if seconds < 360_000 else f"{seconds / 3600:.0f}"

    def share(value: float | None) -> str:
        return "-" if value is None else f"{value:.1%}"

    if not planned:
        header = ("policy", "mean wait h", "p50", "p95", "nodes in use", "GPUs in use")
        return header, [
            (one.policy, *map(hours, (one.delay.mean, one.delay.p50, one.delay.p95)), share(one.allocation),
             share(one.gpu_allocation))
            for one in found
        ]  # fmt: skip
    header = ("policy", "mean", "p95", "all", "held", "then", "idle", "in", "late", "out", "start")
    return header, [
        (
            one.policy,
            hours(one.notice.mean),
            hours(one.notice.p95),
            hours(one.delay.mean),
            share(one.retention_before),
            share(one.retention_at),
            f"{one.idle_node_hours:.0f}",
            str(one.admitted),
            str(one.late),
            str(one.preempted),
            "-" if one.planned_delay is None else hours(one.planned_delay),
        )
        for one in found
    ]


def _show_source(jobs: Trace) -> None:
    from plait.cli import terminal

    said = f"{jobs.name} ({jobs.schema}): {len(jobs):,} jobs of {jobs.rows:,} rows"
    gone = [f"{count} {reason}" for reason, count in jobs.dropped.items()]
    terminal.text(said + (f"; left out: {', '.join(gone)}" if gone else "") + ".")
    for reason, count in jobs.changed.items():
        terminal.text(f"{count} jobs: {reason}.")


def show_report(jobs: Trace, report: Report, level: float, out: Path) -> None:
    """How good a model is, for people."""
    from plait.cli import terminal

    _show_source(jobs)
    terminal.title(f"Error of the predicted time on the last {report.tested:,} jobs (root mean square)")
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
    terminal.text(f"The model is in {out}.")


def write(
    out: Path, about: dict[str, Any], found: list[Summary], outcomes: list[Outcome], planned: Planned | None
) -> None:
    """The folder that ``--out`` names."""
    from plait.core.errors import DataError
    from plait.core.files import replacing
    from plait.core.gantt import Curve
    from plait.diagnose.plots import draw_curves

    until = about["window_h"] * 3600
    panels: list[tuple[str, list[Curve]]] = [("nodes in use", []), ("GPUs in use", [])]
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
                        curves.append(Curve(outcome.policy, points))
        with replacing(out / "summary.json") as partial:
            partial.write_text(json.dumps(about | {"policies": [one.to_dict() for one in found]}, indent=1) + "\n")
        marks = [(planned.arrival - planned.notice) / 3600, planned.arrival / 3600] if planned else []
        title = f"{about['trace']} on {about['nodes']} nodes"
        draw_curves(panels, out / "queue.svg", title=title, across="hours", marks=marks)
    except OSError as error:
        raise DataError(f"{out} cannot be written: {error.strerror or error}. Choose another with --out.") from None
