"""Arnold's figure 14: nodes in use, and reserved nodes that others hold, until a planned job comes."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from benchmarks.forecast_errors import errors
from benchmarks.papers.found import HERE, ROOT, Found, Row, Series, spread
from benchmarks.papers.verdicts import NOISE
from plait.api.queueing import Replayed, ReplayOptions, replay_queue
from plait.formats.job_traces.table import Trace
from plait.place.queue.admission import ALIASES
from plait.place.queue.replay import ReplayOutcome
from plait.place.queue.reservation import ClusterShape, Planned

TRACE = HERE / "jobs" / "short-jobs.csv"
HOUR = 3600.0
PAPERS_RULE = ALIASES["arnold"]
ARRIVALS = (22, 34, 46, 58, 70)
"""Hours; the first is the figure's."""


def _replayed(trace: Path, policies: str, hour: float) -> Replayed:
    """A cluster of 2,000 nodes, 1,200 of them reserved from four hours before that hour on."""
    planned = [Planned(nodes=1200, arrival=hour * HOUR, notice=4 * HOUR, duration=12 * HOUR)]
    return replay_queue(
        trace, ReplayOptions(cluster=ClusterShape(nodes=2000), planned_jobs=planned, policies=policies, load=0.9)
    )


def _missed(trace: Trace) -> float:
    """Root mean square error of predictions, in intervals of ten minutes."""
    return errors(trace)["10-minute buckets, at most 4 h"]["model"]


def _longer(folder: Path) -> Path:
    """The trace, each of its jobs an hour longer."""
    rows = [line.split(",") for line in TRACE.read_text().splitlines()]
    at = rows[0].index("duration")
    lines = [",".join([*row[:at], str(float(row[at]) + HOUR), *row[at + 1 :]]) for row in rows[1:]]
    file = folder / TRACE.name
    file.write_text("\n".join([",".join(rows[0]), *lines]) + "\n")
    return file


def _held(replayed: Replayed) -> float:
    return round(replayed.policies[0].retention_before or 0.0, 4)


def _public() -> tuple[Row, list[float], str]:
    """Errors of the predictor on public traces, which do not ship, reserved nodes held there by the paper's
    rule, and the day of the measurement."""
    kept = json.loads((ROOT / "benchmarks" / "results" / "queue-2core.json").read_text())
    traces = kept["traces"].values()
    errors = [one["model"] for trace in traces for unit, one in trace["jct"]["rmse"].items() if "buckets" in unit]
    held = [round(trace["policies"][PAPERS_RULE]["retention_before"], 4) for trace in traces]
    name = "error of predicted run times, 10-minute intervals, public traces"
    return Row(name=name, value=spread(errors), command=kept["command"]), held, kept["date"]


def queue() -> Found:
    """Figure 14: shares of nodes in use, and of reserved nodes that others hold, until a job of 1,200 nodes
    comes."""
    policies = ("reserve-and-pack", "no-jct", "arnold", "jct-quantile")
    asked = ",".join(policies)
    found = _replayed(TRACE, asked, 22)
    trace = str(TRACE.relative_to(ROOT))
    where = shlex.join(["plait", "queue", "replay", trace, "nodes=2000", "load=0.9", "reserve=1200@+22h",
                        "announce=4h", f"policy={asked}"])  # fmt: skip
    with TemporaryDirectory() as folder:
        longer = _replayed(_longer(Path(folder)), "arnold", 22)
    series: list[Series] = []
    held: dict[str, float] = {}
    used: dict[str, float] = {}
    for policy, one, outcome in zip(policies, found.policies, found.outcomes, strict=True):
        hours = outcome.series.time / HOUR
        during = (hours >= 18) & (hours < 22)  # at 22 what is still held is evicted
        held[policy], used[policy] = round(one.retention_before or 0.0, 4), _used(outcome)
        for what, values in (("in use", outcome.series.allocation), ("held", outcome.series.retention)):
            points = list(zip(hours[during].round(3).tolist(), values[during].round(4).tolist(), strict=True))
            series.append(Series(name=f"{policy}, {what}", points=[point for point in points if point[1] == point[1]]))
    others = [_held(_replayed(TRACE, "arnold", hour)) for hour in ARRIVALS[1:]]
    public, elsewhere, date = _public()
    rows = [
        public,
        Row(name="the same, made-up jobs", value=f"{_missed(found.trace):.2f}",
            command=f"python -m benchmarks.forecast_errors {trace}"),
        Row(name="arnold: reserved nodes held at the arrival", command=where,
            over=[held["arnold"], *others, _held(longer), *elsewhere],
            note="five arrivals; jobs an hour longer; public traces"),
        Row(name="arnold: nodes in use at the arrival", command=where,
            over=[used["arnold"], _used(longer.outcomes[0])], note="the same jobs, and an hour longer"),
        Row(name="jct-quantile: reserved nodes held at the arrival", value=held["jct-quantile"]),
        Row(name="jct-quantile: nodes in use at the arrival", value=used["jct-quantile"]),
        Row(name="reserve-and-pack cannot start the job without eviction", value=held["reserve-and-pack"] > NOISE),
        Row(name="fewer nodes in use without predictions (no-jct) than with them",
            value=used["no-jct"] < used["arnold"] - NOISE),
    ]  # fmt: skip
    short, long = np.quantile(found.trace.duration / 60, (0.1, 0.9)).round().astype(int).tolist()
    facts = {"jobs": len(found.jobs), "own": len(found.trace), "short": short, "long": long,
             "least": f"{min([held['arnold'], *others]):.0%}", "most": f"{max([held['arnold'], *others]):.0%}",
             "longer": f"{_held(longer):.0%}", "public": f"{min(elsewhere):.0%}", "traces": date}  # fmt: skip
    return Found(rows=rows, series=series, facts=facts)


def _used(outcome: ReplayOutcome) -> float:
    """Share of nodes in use just before the arrival at 22."""
    return round(float(outcome.series.allocation[outcome.series.time < 22 * HOUR][-1]), 4)
