"""Arnold's figure 14: nodes in use, and reserved nodes that others hold, until a planned job comes."""

from __future__ import annotations

import shlex
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from benchmarks.papers.found import HERE, ROOT, Found, Row, Series
from plait.api.queueing import Replay, Replayed, replay_queue
from plait.place.forecast import assess
from plait.place.reservation import ClusterShape, Planned
from plait.place.traces.table import Trace

TRACE = HERE / "jobs" / "short-jobs.csv"
HOUR = 3600.0
ARRIVALS = (22, 34, 46, 58, 70)
"""Hours; the first is the figure's."""


def _replayed(trace: Path, policies: str, hour: float) -> Replayed:
    """A cluster of 2,000 nodes, 1,200 of them reserved from four hours before that hour on."""
    planned = [Planned(nodes=1200, arrival=hour * HOUR, notice=4 * HOUR, duration=12 * HOUR)]
    return replay_queue(trace, Replay(cluster=ClusterShape(nodes=2000), planned=planned, policies=policies, load=0.9))


def _missed(trace: Trace) -> float:
    """Root mean square error of predictions, in intervals of ten minutes."""
    return assess(trace)[1].rmse["10-minute buckets, at most 4 h"]["model"]


def _longer(folder: Path) -> Path:
    """The trace, each of its jobs an hour longer."""
    rows = [line.split(",") for line in TRACE.read_text().splitlines()]
    at = rows[0].index("duration")
    lines = [",".join([*row[:at], str(float(row[at]) + HOUR), *row[at + 1 :]]) for row in rows[1:]]
    file = folder / TRACE.name
    file.write_text("\n".join([",".join(rows[0]), *lines]) + "\n")
    return file


def _how_sure() -> dict[str, str | float]:
    """What reserved nodes are held at other arrivals, and where jobs are longer and predicted as well."""
    others = [_replayed(TRACE, "arnold", hour).policies[0].retention_before or 0.0 for hour in ARRIVALS]
    with TemporaryDirectory() as folder:
        longer = _replayed(_longer(Path(folder)), "arnold", 22)
    (outcome,) = longer.outcomes
    used = outcome.series.allocation[outcome.series.time < 22 * HOUR][-1]
    return {
        "arrivals": len(others), "least": f"{min(others):.0%}", "most": f"{max(others):.0%}",
        "longer": f"{longer.policies[0].retention_before or 0.0:.0%}", "used": f"{used:.0%}",
        "error": f"{_missed(longer.trace):.2f}",
    }  # fmt: skip


def queue() -> Found:
    """Figure 14: shares of nodes in use, and of reserved nodes that others hold, until a job of 1,200 nodes
    comes."""
    policies = ("reserve-and-pack", "no-jct", "arnold", "jct-quantile")
    asked = ",".join(policies)
    found = _replayed(TRACE, asked, 22)
    trace = str(TRACE.relative_to(ROOT))
    where = shlex.join(["plait", "queue", "replay", trace, "nodes=2000", "load=0.9", "reserve=1200@+22h",
                        "announce=4h", f"policy={asked}"])  # fmt: skip
    missed = _missed(found.trace)
    rows = [Row(name="prediction error, 10-minute intervals (root mean square)", value=f"{missed:.2f}",
                command=f"plait queue fit {trace}")]  # fmt: skip
    series: list[Series] = []
    held: dict[str, float] = {}
    for policy, one, outcome in zip(policies, found.policies, found.outcomes, strict=True):
        hours = outcome.series.time / HOUR
        during = (hours >= 18) & (hours <= 22)
        before = one.retention_before or 0.0
        rows.append(Row(name=f"{policy}: reserved nodes held at the arrival", value=round(before, 4), command=where))
        rows.append(Row(name=f"{policy}: nodes in use at the arrival", command=where,
                        value=round(float(outcome.series.allocation[hours < 22][-1]), 4)))  # fmt: skip
        for what, values in (("in use", outcome.series.allocation), ("held", outcome.series.retention)):
            points = list(zip(hours[during].round(3).tolist(), values[during].round(4).tolist(), strict=True))
            series.append(Series(name=f"{policy}, {what}", points=[point for point in points if point[1] == point[1]]))
        if policy == "arnold":
            held["reserved nodes held at the arrival"] = round(before, 4)
    short, long = np.quantile(found.trace.duration / 60, (0.1, 0.9)).round().astype(int).tolist()
    facts = {
        "jobs": len(found.jobs),
        "own": len(found.trace),
        "missed": round(missed, 2),
        "short": short,
        "long": long,
    } | _how_sure()
    return Found(rows=rows, series=series, claims={22: held}, facts=facts)
