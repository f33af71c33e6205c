"""Models of jobs' run times, fitted to a trace, and their predictions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import exp
from pathlib import Path
from typing import Any

from plait.core.base.errors import DataError, JobError
from plait.core.base.text import Column, Part, Shown, Table, counted
from plait.formats.job_traces.read import parse_columns, read_trace
from plait.formats.job_traces.table import Trace
from plait.place.queue.features import features
from plait.place.queue.forecast import FEWEST_SURE, SURE, ForecastAccuracy, assess, names_of
from plait.place.queue.jct import BUCKET, JctSettings, labels_of, load, save

ProgressCallback = Callable[..., None]
"""A callback for a line of progress; ``passing=True`` marks a line that may be omitted."""
HOUR = 3600


def read_jobs(file: Path, form: str, columns: str | None) -> Trace:
    """Return the jobs of a trace. form: its published format; "": detected. columns: the trace's
    columns by field. Raises JobError for unknown names, DataError for a file without jobs that can
    be replayed."""
    trace = read_trace(file, form, None if columns is None else parse_columns(columns))
    if not len(trace):
        reasons = "; ".join(f"{count} {reason}" for reason, count in trace.dropped.items())
        raise DataError(f"{file} has no job that could be played back: {trace.rows} rows{reasons and ', '}{reasons}.")
    return trace


def source_of(trace: Trace) -> dict[str, Any]:
    """Return the trace's name, its counts of rows read and left out, and what was changed, for
    JSON."""
    return {
        "trace": trace.name,
        "schema": trace.schema,
        "rows": trace.rows,
        "jobs": len(trace),
        "dropped": dict(trace.dropped),
        "passed_over": trace.over.rows(),
        "changed": dict(trace.changed),
        "read": list(trace.assumptions),
    }


def trace_notes(trace: Trace) -> Iterator[str]:
    """Yield sentences on the rows of a trace that were read, left out or changed, and on what was
    assumed."""
    gone = [f"{count} {reason}" for reason, count in trace.dropped.items()]
    left_out = f"; left out: {', '.join(gone)}" if gone else ""
    yield f"{trace.name} ({trace.schema}): {counted(len(trace), 'job')} of {counted(trace.rows, 'row')}{left_out}."
    yield from (f"{counted(count, 'job')}: {reason}." for reason, count in trace.changed.items())
    yield from (f"{decided[0].upper()}{decided[1:]}." for decided in trace.assumptions)


def settings_of(level: float) -> JctSettings:
    """Return the settings of a model whose upper quantile is ``level``. Raises JobError for a level
    outside [0.5, 1)."""
    if not 0.5 <= level < 1:
        raise JobError(f"{level:g} is not allowed", key="level", fix="Allowed: from 0.5 to below 1, such as 0.9")
    return JctSettings(level=level)


@dataclass(frozen=True, kw_only=True)
class FittedDurations(Shown):
    """A model of jobs' run times, and its accuracy. trace: what it was fitted to. level:
    probability of the predicted upper quantile, such as 0.9. folder: the model's folder."""

    trace: Trace
    accuracy: ForecastAccuracy
    level: float
    folder: Path

    def to_dict(self) -> dict[str, Any]:
        """Return errors, and shares of jobs that ran longer than their upper quantile, for JSON."""
        return source_of(self.trace) | asdict(self.accuracy) | {"level": self.level, "model": str(self.folder)}

    def parts(self) -> Iterator[Part]:
        """Yield the model's error next to that of one mean for all jobs, and late jobs by group."""
        yield from trace_notes(self.trace)
        found, by = self.accuracy, self.accuracy.rmse["ln seconds"]
        yield (
            f"Of the last {counted(found.tested, 'job')} the predicted ln seconds are off by {by['model']:.2f} "
            f"(root mean square); by {by['constant']:.2f} if one mean is taken for all. "
            f"{found.late['online']:.1%} ran longer than the time within which {self.level:.0%} should end."
        )
        yield from self._quantile_coverage()
        yield f"The model is in {self.folder}."

    def _quantile_coverage(self) -> Iterator[Part]:
        """Yield the late jobs by group, and the groups for which the upper quantile is promised."""
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
    file: Path, folder: Path, *, form: str = "", columns: str | None = None, level: float = 0.9,
    progress: ProgressCallback | None = None,
) -> FittedDurations:  # fmt: skip
    """Fit a model of jobs' run times to the first nine tenths of a trace, test it on the rest, and
    write it to ``folder``. Raises JobError and DataError."""
    trace = read_jobs(file, form, columns)
    model, accuracy = assess(trace, settings_of(level), progress=progress)
    save(model, folder)
    return FittedDurations(trace=trace, accuracy=accuracy, level=level, folder=folder)


@dataclass(frozen=True, kw_only=True)
class PredictedDurations(Shown):
    """Predicted run times of the last jobs of a trace. level: the upper quantile. jobs: a record
    for each job:

    id, gpus        the job's id and its GPUs
    typical_s       exp of the mean predicted ln seconds
    mean_buckets    mean run time, in buckets of ``bucket_s`` seconds
    upper_s         the upper quantile, in seconds
    promised_for    the jobs for which the upper quantile is promised
    spread          standard deviation over bagged models of the predicted ln seconds
    ran_s           the seconds that the job ran
    """

    trace: Trace
    level: float
    jobs: Sequence[Mapping[str, Any]]

    def to_dict(self) -> dict[str, Any]:
        """Return the records of all jobs, for JSON."""
        return source_of(self.trace) | {"level": self.level, "bucket_s": BUCKET, "jobs": list(self.jobs)}

    def parts(self) -> Iterator[Part]:
        """Yield a table of every job's hours."""
        hours = (Column(head, ".2f") for head in ("typical", "mean", f"{self.level:.0%} end within", "ran"))
        rows = [
            (one["id"], one["gpus"], one["typical_s"] / HOUR, one["mean_buckets"] * BUCKET / HOUR,
             one["upper_s"] / HOUR, one["ran_s"] / HOUR)
            for one in self.jobs
        ]  # fmt: skip
        yield Table(f"Predicted hours of the last {counted(len(rows), 'job')}", ("job", "GPUs", *hours), rows)


def predict_durations(
    folder: Path, file: Path, *, form: str = "", columns: str | None = None, last: int = 20
) -> PredictedDurations:
    """Predict the run times of the last jobs of a trace, from what was known at their submission.
    folder: written by ``fit_durations``. last: the number of jobs. Raises JobError and
    DataError."""
    fitted, trace = load(folder), read_jobs(file, form, columns)
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
