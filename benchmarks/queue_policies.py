"""What ``queue.py`` runs: every policy on a 2,000-node cluster, loaded to 90 % by shifted copies of a
trace, while 1,200 nodes are kept for a job announced four hours ahead; and the predictor on the trace's
last tenth.

Nothing is predicted with knowledge of what came later: every job's prediction comes from jobs that had
ended by then, its block's model from the blocks before it. ``seconds_100k`` is one policy's replay of at
least 100,000 jobs.
"""

from __future__ import annotations

import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from forecast_errors import errors
from keeping import keep
from public_traces import read
from rich.console import Console
from rich.table import Table

from plait.core.base.errors import DataError
from plait.formats.job_traces.table import Trace
from plait.place.queue.admission import POLICIES
from plait.place.queue.forecast import Predicted, assess, walk_forward
from plait.place.queue.jct import JctSettings
from plait.place.queue.replay import ReplayRules, replay
from plait.place.queue.reservation import ClusterShape, Planned
from plait.place.queue.workload import JobTrace, workload
from plait.place.summary import Summary, summary

KINDS = (".csv", ".json", ".csv.gz", ".csv.zip")
HOUR = 3600.0
MOVING = ("no-jct", "jct-mean", "jct-quantile", "oracle")
"""Policies that are also played with nodes of the zone exchanged every ten minutes."""
MEANS = ("constant", "group", "gpus", "group_gpus")
"""Simple predictors: means of the jobs learnt from."""
BAND = (0.08, 0.12)
"""Late jobs that an upper quantile of 0.9 may have."""


def options() -> Namespace:
    """What is asked."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="*", default=["traces"], help="files, or folders of them (default: traces)")
    parser.add_argument("--columns", help="FIELD=COLUMN,... of tables that no known form fits")
    parser.add_argument("--nodes", type=int, default=2000)
    parser.add_argument("--planned", type=int, default=1200, help="nodes of the planned job")
    parser.add_argument("--arrival", type=float, default=22.0, help="hours after the replay's start")
    parser.add_argument("--announce", type=float, default=4.0, help="hours before the arrival")
    parser.add_argument("--planned-for", type=float, default=12.0, help="hours that the planned job runs")
    parser.add_argument("--load", type=float, default=0.9, help="share of the GPUs that jobs ask for")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--save", help="also write the result, with machine and command, to this file")
    return parser.parse_args()


def found_files(places: list[str]) -> list[Path]:
    """Tables and logs of the files and folders given."""
    files: list[Path] = []
    for place in map(Path, places):
        files += sorted(one for one in place.iterdir() if one.name.endswith(KINDS)) if place.is_dir() else [place]
    return [file for file in files if file.is_file()]


def main() -> int:
    """All traces."""
    given = options()
    files = found_files(given.traces)
    if not files:
        print(f"skipped: there is no trace in {', '.join(given.traces)}; name files or folders of traces")
        return 0
    result: dict[str, Any] = {"nodes": given.nodes, "planned_nodes": given.planned, "load": given.load, "traces": {}}
    for file in files:
        result["traces"][file.name] = one = measured(read(file, given.columns), given)
        show(file.name, one)
    checks = {name: dict(one["checks"]) for name, one in result["traces"].items()}
    result["passed"] = all(all(own.values()) for own in checks.values())
    keep(result, given)
    return 0


def measured(trace: Trace, given: Namespace) -> dict[str, Any]:
    """Of one trace: predictions, policies, seconds."""
    if not len(trace):
        raise DataError(f"{trace.name} has no job that could be played back: {dict(trace.dropped)}.")
    began, used = time.perf_counter(), time.process_time()
    _, report = assess(trace)
    fitted = time.perf_counter() - began, time.process_time() - used
    began, used = time.perf_counter(), time.process_time()
    predicted = walk_forward(trace, JctSettings())
    walked = time.perf_counter() - began, time.process_time() - used
    planned = Planned(
        nodes=given.planned,
        arrival=given.arrival * HOUR,
        notice=given.announce * HOUR,
        duration=given.planned_for * HOUR,
    )
    window = planned.arrival + planned.duration
    jobs = loaded(trace, predicted, given, window)
    found = {name: played(jobs, name, planned, given) for name in POLICIES}
    found |= {f"{name}, moving": played(jobs, name, planned, given, replan=600.0) for name in MOVING}
    jct = asdict(report) | {"rmse": errors(trace), "level": 0.9, "fit_seconds": fitted, "walk_forward_seconds": walked}
    speed = scale(trace, predicted, given, planned)
    return {
        "schema": trace.schema,
        "jobs": len(trace),
        "dropped": dict(trace.dropped),
        "days": trace.span / 86400,
        "arrivals": int((jobs.submit >= 0).sum()),
        "running_at_start": int((jobs.submit < 0).sum()),
        "work_in_jobs_over_notice": long_work(trace, planned.notice),
        "jct": jct,
        "policies": {name: one.to_dict() for name, one in found.items()},
        "scale": speed,
        "checks": checks(found, jct, speed),
    }


def loaded(trace: Trace, predicted: Predicted, given: Namespace, window: float) -> JobTrace:
    """Copies of the trace that load the cluster."""
    return workload(trace, predicted, gpus=8 * given.nodes, load=given.load, window=window)


def played(jobs: JobTrace, name: str, planned: Planned, given: Namespace, replan: float = 0.0) -> Summary:
    """One policy."""
    outcome = replay(jobs, ClusterShape(nodes=given.nodes), POLICIES[name], [planned], rules=ReplayRules(replan=replan))
    return summary(outcome, jobs, [planned], given.nodes, 8 * given.nodes)


def scale(trace: Trace, predicted: Predicted, given: Namespace, planned: Planned) -> dict[str, float]:
    """Seconds that 100,000 jobs take."""
    day = 86400.0
    a_day = max(1.0, float((loaded(trace, predicted, given, 3 * day).submit >= 0).sum()) / 3)
    jobs = loaded(trace, predicted, given, 1.05 * day * 100_000 / a_day)
    began, used = time.perf_counter(), time.process_time()
    replay(jobs, ClusterShape(nodes=given.nodes), POLICIES["jct-quantile"], [planned], rules=ReplayRules(replan=600.0))
    return {
        "jobs": len(jobs),
        "seconds": time.perf_counter() - began,
        "processor_seconds": time.process_time() - used,
    }


def long_work(trace: Trace, notice: float) -> float:
    """The share of GPU time in jobs that run longer than the notice: no policy can end these in time."""
    work = trace.gpus * trace.duration
    return float(work[trace.duration > notice].sum() / work.sum())


def checks(found: dict[str, Summary], jct: dict[str, Any], speed: dict[str, float]) -> dict[str, bool]:
    """What is expected of it."""
    waits = {name: one.notice.mean for name, one in found.items()}
    return {
        "retention 0 at arrival": all(
            found[name].retention_at == 0 for name in ("no-jct", "jct-mean", "jct-quantile", "oracle")
        ),
        "reserve-and-pack is not": bool(found["reserve-and-pack"].retention_at),
        "planned job in time": all(found[name].planned_delay == 0 for name in ("jct-quantile", "oracle")),
        "waits less than without JCT": waits["jct-quantile"] <= waits["no-jct"],
        "idles less than without JCT": found["jct-quantile"].idle_gpu_hours <= found["no-jct"].idle_gpu_hours,
        "oracle is never late": found["oracle"].late == 0,
        "a moving zone is emptier just before": all(
            (found[f"{name}, moving"].retention_before or 0) <= (found[name].retention_before or 0) for name in MOVING
        ),
        "late rate of the quantile": BAND[0] <= jct["late"]["online"] <= BAND[1],
        "better than constant": all(by["model"] < by["constant"] for by in jct["rmse"].values()),
        "better than every mean": all(by["model"] < min(by[name] for name in MEANS) for by in jct["rmse"].values()),
        "100,000 jobs in 30 s of a core": speed["processor_seconds"] < 30,
    }


def show(name: str, one: dict[str, Any]) -> None:
    """Tables for people."""
    console = Console(highlight=False, width=None if Console().is_terminal else 150)
    console.print(
        f"{name} ({one['schema']}): {one['jobs']:,} jobs in {one['days']:.0f} days, "
        f"left out {one['dropped'] or 'none'}; {one['arrivals']:,} arrive, {one['running_at_start']:,} run before; "
        f"{one['work_in_jobs_over_notice']:.0%} of all GPU time is in jobs longer than the notice",
        markup=False,
    )
    table = Table("policy", "wait h: mean", "p95", "all jobs", "held before", "at", "idle node-h", "idle GPU-h", "in",
                  "late", "preempted", "starts h late")  # fmt: skip
    for policy, of in one["policies"].items():
        held = ["-" if of[key] is None else f"{of[key]:.1%}" for key in ("retention_before", "retention_at")]
        table.add_row(
            policy,
            *(f"{value / HOUR:.2f}" for value in (of["notice"]["mean"], of["notice"]["p95"], of["delay"]["mean"])),
            *held,
            f"{of['idle_node_hours']:.0f}",
            f"{of['idle_gpu_hours']:.0f}",
            *(str(of[key]) for key in ("admitted", "late", "preempted")),
            f"{(of['planned_delay'] or 0) / HOUR:.2f}",
        )
    console.print(table)
    table = Table("error (root mean square)", "model", *(f"mean: {name}" for name in MEANS))
    for unit, by in one["jct"]["rmse"].items():
        table.add_row(unit, *(f"{by[key]:.3f}" for key in ("model", *MEANS)))
    console.print(table)
    late = ", ".join(f"{way} {value:.1%}" for way, value in one["jct"]["late"].items())
    console.print(f"late, of {one['jct']['tested']:,} jobs, at level 0.9: {late}")
    fit, walk, speed = one["jct"]["fit_seconds"], one["jct"]["walk_forward_seconds"], one["scale"]
    console.print(
        f"{speed['jobs']:,} jobs played back in {speed['seconds']:.1f} s ({speed['processor_seconds']:.1f} s of one "
        f"processor); fitted and tested in {fit[0]:.1f} s ({fit[1]:.1f}), all jobs predicted in {walk[0]:.1f} s "
        f"({walk[1]:.1f})"
    )
    for check, passed in one["checks"].items():
        console.print(f"{'yes' if passed else 'NO '} {check}", markup=False)
