"""Microsoft's Philly (Jeon et al., ATC'19): ``cluster_job_log``, a JSON list of jobs with their attempts.

A job's GPUs are those its first attempt was given; its time is that of all attempts, first start to last end.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from plait.core.errors import DataError
from plait.place.traces.table import Trace, build
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
        name=path.name,
        schema="philly-json",
        submit="submit",
        start="start",
        end="end",
        gpus="gpus",
        id="id",
        categories={"group": "group", "user": "user"},
        never={"never started": frame["start"].isna(), "never ended": frame["end"].isna()},
    )


def _row(number: int, job: Any, path: Path) -> tuple[Any, ...]:
    if not isinstance(job, dict) or not set(job) >= KEYS:
        raise DataError(f"{path}: entry {number} is no job of a Philly log: it lacks {', '.join(sorted(KEYS))}.")
    attempts: Sequence[dict[str, Any]] = [one for one in job["attempts"] or [] if isinstance(one, dict)]
    starts = [one["start_time"] for one in attempts if one.get("start_time") not in NONE]
    ends = [one["end_time"] for one in attempts if one.get("end_time") not in NONE]
    unfinished = bool(attempts) and attempts[-1].get("end_time") in NONE
    gpus = next((count for one in attempts if (count := _gpus(one))), None)
    return (
        job["jobid"],
        job["submitted_time"],
        min(starts, default=None),
        None if unfinished else max(ends, default=None),
        gpus if attempts else None,
        job.get("vc"),
        job.get("user"),
        job.get("status"),
    )


def _gpus(attempt: dict[str, Any]) -> int:
    """GPUs over the nodes that an attempt ran on."""
    return sum(len(node.get("gpus") or ()) for node in attempt.get("detail") or () if isinstance(node, dict))
