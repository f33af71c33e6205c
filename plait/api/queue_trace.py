"""The jobs of a trace, as replays and models of how long jobs run begin with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from plait.core.base.errors import DataError, JobError
from plait.core.base.text import counted
from plait.place.jct import JctSettings
from plait.place.traces.columns import parse_columns
from plait.place.traces.read import read_trace
from plait.place.traces.table import Trace

Told = Callable[..., None]
"""Takes a line of progress; ``passing=True``: one that may be left out."""
HOUR = 3600


def read_jobs(file: Path, columns: str | None) -> Trace:
    """The jobs of a trace. Raises JobError, and DataError for one without any."""
    trace = read_trace(file, None if columns is None else parse_columns(columns))
    if not len(trace):
        reasons = "; ".join(f"{count} {reason}" for reason, count in trace.dropped.items())
        raise DataError(f"{file} has no job that could be played back: {trace.rows} rows{reasons and ', '}{reasons}.")
    return trace


def source_of(trace: Trace) -> dict[str, Any]:
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


def said_of(trace: Trace) -> Iterator[str]:
    """Sentences on what was read, left out, changed and decided."""
    gone = [f"{count} {reason}" for reason, count in trace.dropped.items()]
    left_out = f"; left out: {', '.join(gone)}" if gone else ""
    yield f"{trace.name} ({trace.schema}): {counted(len(trace), 'job')} of {counted(trace.rows, 'row')}{left_out}."
    yield from (f"{counted(count, 'job')}: {reason}." for reason, count in trace.changed.items())
    yield from (f"{decided[0].upper()}{decided[1:]}." for decided in trace.how)


def settings_of(level: float) -> JctSettings:
    """Of a model whose upper end is this quantile. Raises JobError for what is none."""
    if not 0.5 <= level < 1:
        raise JobError(f"{level:g} is not allowed", key="level", fix="Allowed: from 0.5 to below 1, such as 0.9")
    return JctSettings(level=level)
