"""Replays of a queue with planned jobs: a trace of jobs, played back under several policies."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from plait.api.durations import HOUR, ProgressCallback, read_jobs, settings_of, source_of, trace_notes
from plait.api.topologies import read_topology
from plait.core.base.codec.data import Count, Natural, NotNegative, Positive, Texts
from plait.core.base.codec.json_text import is_list, is_table, read_json
from plait.core.base.errors import DataError, JobError
from plait.core.base.files import reason_of, replacing
from plait.core.base.text import Column, Part, Shown, Table, counted
from plait.core.job.cluster_settings import Weight
from plait.core.topology.rank_table import RankTable
from plait.formats.job_traces.table import MOST_GPUS, Trace
from plait.place.queue.admission import QueuePolicy, find_policies
from plait.place.queue.forecast import walk_forward
from plait.place.queue.replay import ReplayOutcome, ReplayRules, replay
from plait.place.queue.reservation import ClusterShape, JobShape, Planned, check_planned
from plait.place.queue.workload import JobTrace, copies_of, workload
from plait.place.summary import Summary, summary
from plait.place.topologies import Remarks

__all__ = ["ClusterShape", "JobShape", "Planned", "ReplayOptions", "replay_queue"]

COLUMN_LEGEND = (
    "mean, p95: waiting hours of jobs that arrived between announcement and arrival; all: mean of all jobs. held: "
    "reserved nodes that other jobs hold just before the arrival, then: just after. idle: idle node-hours from the "
    "announcement to the last arrival of a job. in: jobs let into the zone, late: of them still there. out: jobs "
    "preempted. start: hours by which the planned job starts late."
)


def _hours(seconds: float) -> str:
    return f"{seconds / HOUR:.2f}" if seconds < 100 * HOUR else f"{seconds / HOUR:.0f}"


@dataclass(frozen=True, kw_only=True)
class ReplayOptions:
    """Options of a replay.

    planned_jobs: jobs for which nodes are reserved. policies: names, separated by commas, or
    ``all``. copies, load: copies of the trace that are superimposed, or the share of all GPUs that
    the copies request. window: seconds during which jobs arrive; None: the whole trace, or with
    copies, until the last planned job should have ended. delay_late: True if a planned job waits
    for late jobs instead of preempting them. checkpoint: seconds between checkpoints; a preempted
    job keeps whole multiples of this time. replan: seconds between new choices of the reserved
    nodes; 0: never. level: the upper quantile of a job's run time.
    """

    cluster: ClusterShape
    planned_jobs: Sequence[Planned] = ()
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
        """The number of GPUs of the cluster."""
        return self.cluster.nodes * self.cluster.gpus_per_node

    @property
    def arrival_window(self) -> float | None:
        """Seconds during which jobs arrive; None: as long as the trace lasts."""
        if self.window is not None or (self.copies is None and self.load is None):
            return self.window
        return max((one.arrival + one.duration for one in self.planned_jobs), default=7 * 24.0 * HOUR)

    def check(self) -> None:
        """Raise JobError or PlacementError for options that cannot be replayed."""
        if self.copies is not None and self.load is not None:
            raise JobError("both are given", key="overlay, load", fix="Copies follow from the load: leave out one")
        if self.gpus > MOST_GPUS:
            problem = f"{self.cluster.nodes} nodes of {self.cluster.gpus_per_node} GPUs are too many"
            raise JobError(problem, key="nodes", fix=f"A replay has at most {MOST_GPUS} GPUs")
        if 0 < self.replan < 60:
            raise JobError(f"{self.replan:g} s is too often", key="replan", fix="Use 0s, for never, or at least 1m")
        check_planned(self.planned_jobs, self.cluster)


@dataclass(frozen=True, kw_only=True)
class Replayed(Shown):
    """Results of a replay. jobs: the replayed ones. policies: a summary for each policy; outcomes:
    the same in full."""

    replay: ReplayOptions
    trace: Trace
    jobs: JobTrace
    policies: Sequence[Summary]
    outcomes: Sequence[ReplayOutcome]

    def to_dict(self) -> dict[str, Any]:
        """Return the replay, and the figures of every policy."""
        asked, jobs = self.replay, self.jobs
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
                for one in asked.planned_jobs
            ],
            "policies": [one.to_dict() for one in self.policies],
        }  # fmt: skip

    def parts(self) -> Iterator[Part]:
        """Yield a row for each policy; then a row for each planned job if there are several, or if
        one has a shape, spares or moved nodes."""
        jobs, planned = self.jobs, self.replay.planned_jobs
        yield from trace_notes(self.trace)
        if jobs.oversize:
            some = ", ".join(self.trace.id[job] for job in jobs.oversize[:5])
            names = some + (f" and {more} more" if (more := len(jobs.oversize) - 5) > 0 else "")
            yield f"Left out, since the cluster has fewer GPUs: {counted(len(jobs.oversize), 'job')} ({names})."
        arrivals = int((jobs.submit >= 0).sum())
        title = (
            f"{counted(arrivals, 'arrival')} in {jobs.window / HOUR:.0f} h, {counted(len(jobs) - arrivals, 'job')} "
            f"running before; all ask for {jobs.offered:.0%} of the GPUs "
            f"of {counted(self.replay.cluster.nodes, 'node')}"
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
        yield COLUMN_LEGEND + (" Of several planned jobs the worst counts." if len(planned) > 1 else "")
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
        planned = self.replay.planned_jobs
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

        planned = self.replay.planned_jobs
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
        title = f"{self.trace.name} on {counted(self.replay.cluster.nodes, 'node')}"
        draw_curves(panels, file, title=title, x_label="hours", marks=marks)


def replay_queue(
    file: Path,
    options: ReplayOptions,
    *,
    form: str = "",
    columns: str | None = None,
    report: ProgressCallback | None = None,
) -> Replayed:
    """Replay a trace of jobs under every policy, on a cluster that reserves nodes for planned jobs.

    file: a table (CSV) of jobs, or Philly's log (JSON). form: which published format the file has;
    "": detected. columns: the column of each field, such as ``submit=when,gpus=num_gpu``. Raises
    JobError, PlacementError and DataError.
    """
    policies, settings = find_policies(options.policies), settings_of(options.level)
    options.check()
    trace, shape = (
        read_jobs(file, form, columns),
        {"copies": options.copies, "load": options.load, "window": options.arrival_window},
    )
    copies_of(trace, gpus=options.gpus, **shape)  # refused before it takes long
    if (least := int(trace.gpus.min())) > options.gpus:
        raise DataError(
            f"{file}: every job asks for {counted(least, 'GPU')} or more, and the cluster has {options.gpus:,}. Give "
            "more nodes, or gpus_per_node."
        )
    jobs = workload(trace, walk_forward(trace, settings, progress=report), gpus=options.gpus, **shape)

    def played(policy: QueuePolicy) -> ReplayOutcome:
        def progress(share: float) -> None:
            if report:
                report(f"{policy.name}: {share:.0%}", passing=True)

        return replay(
            jobs,
            options.cluster,
            policy,
            options.planned_jobs,
            rules=ReplayRules(
                delay_late=options.delay_late,
                checkpoint=options.checkpoint,
                replan=options.replan,
                sample=max(300.0, jobs.window / 2000),
            ),
            progress=progress,
        )

    outcomes = [played(one) for one in policies]
    found = [summary(one, jobs, options.planned_jobs, options.cluster.nodes, options.gpus) for one in outcomes]
    return Replayed(replay=options, trace=trace, jobs=jobs, policies=found, outcomes=outcomes)


TIME = re.compile(
    r"\+?(?:(?P<d>\d+(?:\.\d+)?)d)?(?:(?P<h>\d+(?:\.\d+)?)h)?(?:(?P<m>\d+(?:\.\d+)?)m)?(?:(?P<s>\d+(?:\.\d+)?)s)?"
)


@dataclass(frozen=True, kw_only=True)
class ReplaySettings:
    """Settings of a replay as the user writes them, with times such as ``1d12h``, ``90m``.

    nodes, gpus_per_node, minipod: nodes of the cluster, GPUs per node, and nodes per minipod; the
    planned job is packed by minipods. reserve: planned jobs, each ``NODES@TIME`` after the replay's
    start. shape: PP groups times stages of each planned job, ``150x8``, to place it when it is
    announced; alpha: the weight of its DP groups; price: the score of a node that another job must
    leave; 0: the node's share of a minipod. spares: spare nodes reserved for each planned job.
    announce: time from a planned job's announcement to its arrival. planned_for: its run time.
    zone: files with the nodes of placements, one for each planned job. topology: maps the names of
    these nodes to numbers. policy: names, separated by commas. overlay, load: copies of the trace,
    or the share of all GPUs that they request. window: time during which jobs arrive. late: jobs
    that still run when the planned job is due are preempted, or delay it. checkpoint, replan,
    level: as in ``ReplayOptions``. format, columns: of the trace, as in ``replay_queue``.
    """

    nodes: Count = 2000
    gpus_per_node: Count = 8
    minipod: Count = 50
    reserve: Texts = ()
    announce: str = "4h"
    planned_for: str = "12h"
    shape: Texts = ()
    alpha: Weight = 0.3
    price: NotNegative = 0.0
    spares: Natural = 0
    zone: Texts = ()
    topology: str = ""
    policy: str = "all"
    overlay: Positive | None = None
    load: Positive | None = None
    window: str | None = None
    late: Literal["preempt", "delay"] = "preempt"
    checkpoint: str = "1h"
    replan: str = "10m"
    level: float = 0.9
    format: str = ""
    columns: str = ""

    def replay(self, on_remarks: Callable[[Remarks], None]) -> ReplayOptions:
        """Return the replay with these settings. on_remarks: called with remarks on the topology.
        Raises JobError that names the setting."""
        window = None if self.window is None else _seconds("window", self.window, positive=True)
        return ReplayOptions(
            cluster=ClusterShape(nodes=self.nodes, gpus_per_node=self.gpus_per_node, minipod=self.minipod),
            planned_jobs=self._planned(on_remarks), policies=self.policy, copies=self.overlay, load=self.load,
            window=window, delay_late=self.late == "delay", checkpoint=_seconds("checkpoint", self.checkpoint),
            replan=_seconds("replan", self.replan), level=self.level,
        )  # fmt: skip

    def _planned(self, remark: Callable[[Remarks], None]) -> list[Planned]:
        for key, noun in (("zone", "file"), ("shape", "shape")):
            given = getattr(self, key)
            if given and len(given) != len(self.reserve):
                problem = f"{counted(len(given), noun)} for {counted(len(self.reserve), 'planned job')}"
                raise JobError(problem, key=key, fix="Give one for each of reserve, or none")
        if self.zone and self.shape:
            raise JobError("a job whose zone is given is not placed", key="shape", fix="Leave out shape or zone")
        duration, notice = _seconds("planned_for", self.planned_for, positive=True), _seconds("announce", self.announce)
        places = node_numbers(self.topology, remark) if self.topology else {}
        found: list[Planned] = []
        for at, text in enumerate(self.reserve):
            count, sign, when = text.partition("@")
            if not sign or not count.strip().isdigit():
                raise JobError(f"'{text}' is no NODES@TIME", key="reserve", fix="Write for example 1200@+22h")
            zone = zone_of(Path(self.zone[at]), places, spares=self.spares > 0) if self.zone else None
            found.append(Planned(
                nodes=int(count), arrival=_seconds("reserve", when), notice=notice, duration=duration,
                spares=self.spares, shape=self._shape(self.shape[at]) if self.shape else None, zone=zone,
            ))  # fmt: skip
        return found

    def _shape(self, text: str) -> JobShape:
        found = re.fullmatch(r"(\d{1,6})x(\d{1,6})", text.strip())
        if not found or not all(map(int, found.groups())):
            raise JobError(f"'{text}' is no ROWSxSTAGES", key="shape", fix="Write for example 150x8")
        return JobShape(rows=int(found[1]), columns=int(found[2]), alpha=self.alpha, price=self.price)


def _seconds(key: str, text: str, *, positive: bool = False) -> float:
    found = TIME.fullmatch(text.strip())
    if not found or not any(found.groups()):
        raise JobError(f"'{text}' is no time", key=key, fix="Write for example 4h, 90m or 1d12h")
    units = (("d", 86400), ("h", 3600), ("m", 60), ("s", 1))
    seconds = sum(float(found[unit] or 0) * size for unit, size in units)
    if positive and not seconds:
        raise JobError(f"'{text}' is not allowed", key=key, fix="Allowed: more than 0s")
    return seconds


# ---- zones ----


def zone_of(file: Path, node_numbers: dict[str, int], *, spares: bool = False) -> list[int]:
    """Return the node numbers in a file: a JSON list of numbers or names, a rank table, or a
    placement with ``hosts``. node_numbers: numbers by name, from a topology. spares: True to append
    the spares of a placement. Raises JobError for any other content, PlacementError for an invalid
    rank table."""

    def refuse(why: str | Exception) -> JobError:
        fix = "Write [0, 1, 2], or give a rank table and its topology"
        why = why if isinstance(why, str) else reason_of(why)
        return JobError(f"no JSON list of node numbers: {why}", file=str(file), key="zone", fix=fix)

    try:
        value: Any = read_json(file)
    except (OSError, ValueError) as error:
        raise refuse(error) from None
    if is_table(value):
        table = value
        value, more = list(RankTable.read(file).hosts) if "nodes" in table else table.get("hosts"), table.get("spares")
        value = [*value, *more] if spares and is_list(value) and is_list(more) else value
    if not is_list(value):
        raise refuse("it is no list, and has neither nodes nor hosts")
    return [_number(node, node_numbers, refuse) for node in value]


def node_numbers(topology: str, on_remarks: Callable[[Remarks], None]) -> dict[str, int]:
    """Return the number of each of a topology's nodes: minipod after minipod, as in a replay.
    on_remarks: called with remarks on the topology."""
    tree, remarks = read_topology(topology)
    on_remarks(remarks)
    return {node.name: number for number, node in enumerate(tree.nodes)}


def _number(node: Any, places: dict[str, int], refuse: Any) -> int:
    if isinstance(node, str) and places:
        if node not in places:
            raise refuse(f"the topology has no node '{node[:40]}'")
        return places[node]
    if not isinstance(node, int) or isinstance(node, bool):
        why = (
            "is a name: set topology=FILE, which numbers the names"
            if isinstance(node, str)
            else "is no number of a node"
        )
        raise refuse(f"{json.dumps(node)[:40]} {why}")
    return node
