"""Models of how long jobs run, fitted to a trace, and what they say of jobs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import exp
from pathlib import Path
from typing import Any

from plait.api.queue_trace import HOUR, Told, read_jobs, said_of, settings_of, source_of
from plait.core.base.text import Column, Part, Shown, Table, counted
from plait.place.forecast import FEWEST_SURE, SURE, ForecastAccuracy, assess, names_of
from plait.place.groups import labels_of
from plait.place.jct import BUCKET
from plait.place.model_files import load, save
from plait.place.traces.table import Trace


@dataclass(frozen=True, kw_only=True)
class Fitted(Shown):
    """A model of how long jobs run, and how good it is. level: the upper quantile. folder: the model's."""

    trace: Trace
    accuracy: ForecastAccuracy
    level: float
    folder: Path

    def to_dict(self) -> dict[str, Any]:
        """Errors by unit and predictor, shares of jobs that ran longer, settings that were tried."""
        return source_of(self.trace) | asdict(self.accuracy) | {"level": self.level, "model": str(self.folder)}

    def parts(self) -> Iterator[Part]:
        """Errors beside those of predictors without a model."""
        yield from said_of(self.trace)
        found, late = self.accuracy, self.accuracy.late
        title = f"Error of the predicted time on the last {counted(found.tested, 'job')} (root mean square)"
        heads = ("model", "one mean", "by group", "by GPUs", "by both")
        header = ("unit", *(Column(head, ".2f") for head in heads))
        names = ("model", "constant", "group", "gpus", "group_gpus")
        yield Table(title, header, [(unit, *(by[name] for name in names)) for unit, by in found.rmse.items()])
        yield "Beside the model the means of the jobs learnt from: of all, of a group, of a number of GPUs, of both."
        yield (
            f"Of those jobs {late['online']:.1%} ran longer than the time within which {self.level:.0%} should end; "
            f"{late['split']:.1%} if nothing is learnt of them, {late['raw']:.1%} without a margin, "
            f"{late['constant']:.1%} by one quantile for all, {late['group']:.1%} by one for each group."
        )
        yield from self._promised()
        if found.tried:
            settings = ", ".join(f"{name} {value}" for name, value in found.tried[0].settings.items())
            yield (
                f"Of {len(found.tried)} settings these had the least error on jobs held back: {settings}. With the "
                f"usual ones the error would be {found.rmse['ln seconds']['untuned']:.2f} in ln seconds."
            )
        yield f"The model is in {self.folder}."

    def _promised(self) -> Iterator[Part]:
        """What the upper time holds for, and late jobs by group."""
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
    file: Path, folder: Path, *, columns: str | None = None, level: float = 0.9, draws: int = 0,
    told: Told | None = None,
) -> Fitted:  # fmt: skip
    """Fit a model of how long jobs run to the first nine tenths of a trace, test it on the rest, write it.
    draws: settings that are tried. Raises JobError and DataError."""
    trace = read_jobs(file, columns)
    model, accuracy = assess(trace, settings_of(level), progress=told, draws=draws)
    save(model, folder)
    return Fitted(trace=trace, accuracy=accuracy, level=level, folder=folder)


@dataclass(frozen=True, kw_only=True)
class PredictedDurations(Shown):
    """Predicted durations of the last jobs of a trace: (id, GPUs, typical seconds, mean buckets, upper
    seconds, for which jobs these are promised, spread of ln seconds, seconds that it ran). level: the upper
    quantile."""

    trace: Trace
    level: float
    jobs: Sequence[Mapping[str, Any]]

    def to_dict(self) -> dict[str, Any]:
        """Seconds of every job."""
        return source_of(self.trace) | {"level": self.level, "bucket_s": BUCKET, "jobs": list(self.jobs)}

    def parts(self) -> Iterator[Part]:
        """Hours of every job."""
        hours = (Column(head, ".2f") for head in ("typical", "mean", f"{self.level:.0%} end within", "ran"))
        rows = [
            (one["id"], one["gpus"], one["typical_s"] / HOUR, one["mean_buckets"] * BUCKET / HOUR,
             one["upper_s"] / HOUR, one["ran_s"] / HOUR)
            for one in self.jobs
        ]  # fmt: skip
        yield Table(f"Predicted hours of the last {counted(len(rows), 'job')}", ("job", "GPUs", *hours), rows)


def predict_durations(folder: Path, file: Path, *, columns: str | None = None, last: int = 20) -> PredictedDurations:
    """Predict how long the last jobs of a trace run, from what was known at submission. folder: of
    ``fit_durations``. Raises JobError and DataError."""
    from plait.place.features import features

    fitted, trace = load(folder), read_jobs(file, columns)
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
