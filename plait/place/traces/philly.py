"""Microsoft's Philly (Jeon et al., ATC'19): ``cluster_job_log``, a JSON list of jobs with their attempts.

A job's GPUs are those its first attempt was given; its time is that of all attempts, first start to last end.

===========  =====================================================================================
known        jobid, submitted_time, vc, user, status, attempts (start_time, end_time, detail: gpus)
passed over  jobs that never started or never ended, by reason; other keys
refused      entries without these keys; attempts, details or GPUs that are no lists
===========  =====================================================================================
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from plait.core.base.errors import DataError
from plait.place.traces.table import Trace, TraceColumns, TraceForm, build
from plait.place.traces.times import pandas

KEYS = {"jobid", "submitted_time", "attempts"}
NONE = ("", "None", None)


def is_it(value: Any) -> bool:
    """Whether a JSON value looks like this log."""
    return isinstance(value, list) and (not value or (isinstance(value[0], dict) and set(value[0]) >= KEYS))


def read(value: Any, path: Path) -> Trace:
    """The jobs of a parsed log."""
    rows = [_row(number, job, path) for number, job in enumerate(value)]
    columns = ("id", "submit", "start", "end", "gpus", "group", "user", "state")
    frame = pandas().DataFrame(rows, columns=list(columns))
    return build(
        frame,
        TraceColumns(
            submit="submit",
            start="start",
            end="end",
            gpus="gpus",
            id="id",
            categories={"group": "group", "user": "user"},
        ),
        TraceForm(name=path.name, schema="philly-json"),
        never={"never started": frame["start"].isna(), "never ended": frame["end"].isna()},
    )


def _row(number: int, job: Any, path: Path) -> tuple[Any, ...]:
    if not isinstance(job, dict) or not set(job) >= KEYS:
        raise DataError(f"{path}: entry {number} is no job of a Philly log: it lacks {', '.join(sorted(KEYS))}.")
    where = f"{path}: entry {number}"
    attempts = [one for one in _list(job["attempts"], f"{where}: attempts") if isinstance(one, dict)]
    starts = [one["start_time"] for one in attempts if isinstance(one.get("start_time"), str)]
    ends = [one["end_time"] for one in attempts if isinstance(one.get("end_time"), str)]
    unfinished = bool(attempts) and attempts[-1].get("end_time") in NONE
    gpus = next((count for one in attempts if (count := _gpus(one, where))), None)
    return (
        job["jobid"],
        job["submitted_time"],
        min((one for one in starts if one not in NONE), default=None),
        None if unfinished else max((one for one in ends if one not in NONE), default=None),
        gpus,
        job.get("vc"),
        job.get("user"),
        job.get("status"),
    )


def _gpus(attempt: dict[str, Any], where: str) -> int:
    """GPUs over the nodes that an attempt ran on."""
    nodes = [node for node in _list(attempt.get("detail"), f"{where}: detail") if isinstance(node, dict)]
    return sum(len(_list(node.get("gpus"), f"{where}: gpus")) for node in nodes)


def _list(value: Any, where: str) -> list[Any]:
    """A list; nothing is an empty one. Raises DataError for anything else."""
    if not isinstance(value, (list, type(None))):
        raise DataError(f"{where}: {type(value).__name__} is no list, as Philly's log has there.")
    return value or []
