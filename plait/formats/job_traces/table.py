"""The common form of every trace: arrays of jobs in order of submission, and counts of dropped
rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plait.core.base.ignored_input import IgnoredInput

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
MOST_GPUS, LONGEST = 10_000_000, 100 * 365.25 * 86400
"""The largest GPUs and seconds of a job; more is a mistake in the row, and sums over jobs would
overflow."""
LATEST = 4_102_444_800.0
"""Seconds from 1970 to 2100; a later time is in a finer unit than seconds."""
NUMBERS, CATEGORIES = ("cpus", "memory", "nodes"), ("group", "queue", "user", "type")
YES, NO = ("1", "1.0", "true", "yes", "y", "t", "spot"), ("0", "0.0", "false", "no", "n", "f", "hp", "")
"""Words for a preemptible job, and for a job that is not; ``spot`` and ``hp`` are Alibaba's."""


def pandas() -> Any:
    """Return the module pandas, imported only when a table is read, because it is slow to load."""
    return import_module("pandas")


@dataclass(frozen=True, kw_only=True)
class Category:
    """A column of names: ``names[codes[i]]`` is job i's name; the code is -1 if job i has none."""

    codes: Ints
    names: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Jobs, sorted by submission.

    submit: seconds since the first submission, (J,). begin: start on the trace's own cluster, in
    seconds since the first submission; equal to submit if unknown. duration: running time in
    seconds. gpus: whole GPUs. first: the first submission in seconds since 1970; 0 if times are
    relative. numbers, categories: other fields known at submission. preemptible: True for jobs that
    the trace marks so. priority: higher goes first; 0 if unknown. rows: rows in the file. dropped:
    numbers of dropped rows by reason. changed: numbers of values read otherwise than written, by
    reason. assumptions: Plait's decisions where the form is ambiguous."""

    name: str
    schema: str
    id: tuple[str, ...]
    submit: Floats
    begin: Floats
    duration: Floats
    gpus: Ints
    first: float = 0.0
    numbers: Mapping[str, Floats] = field(default_factory=dict[str, Floats])
    categories: Mapping[str, Category] = field(default_factory=dict[str, Category])
    preemptible: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, bool))
    priority: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    rows: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict[str, int])
    changed: Mapping[str, int] = field(default_factory=dict[str, int])
    assumptions: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.submit)

    @property
    def over(self) -> IgnoredInput:
        """The dropped rows, in the form of other readers' counts."""
        over = IgnoredInput()
        for reason, count in self.dropped.items():
            over.note(f"rows ({reason})", count=count)
        return over

    @property
    def end(self) -> Floats:
        """Each job's end on the trace's own cluster, in seconds since the first submission."""
        return self.begin + self.duration

    @property
    def span(self) -> float:
        """Seconds from the first submission to one mean gap after the last submission; at least an
        hour."""
        last = float(self.submit[-1]) if len(self) else 0.0
        return max(3600.0, last * len(self) / max(1, len(self) - 1))

    def busy(self) -> float:
        """Return the mean number of busy GPUs over the trace's span."""
        return float(self.gpus @ self.duration) / self.span

    def only(self, chosen: NDArray[Any]) -> Trace:
        """Return the trace of the jobs chosen by a mask or by sorted indices, with unchanged
        times."""
        at = np.flatnonzero(chosen) if chosen.dtype == bool else chosen
        columns = ("submit", "begin", "duration", "gpus", "preemptible", "priority")
        return replace(
            self,
            id=tuple(self.id[i] for i in at),
            numbers={name: column[at] for name, column in self.numbers.items()},
            categories={name: replace(column, codes=column.codes[at]) for name, column in self.categories.items()},
            **{name: getattr(self, name)[at] for name in columns},
        )


def build(
    frame: Any, name: str, schema: str, how: tuple[str, ...] = (), never: Mapping[str, Any] | None = None
) -> Trace:
    """Return the trace of a table whose columns are the fields of ``read.COLUMNS``. Without a
    duration column, a job's duration is the time from start (else submission) to end.

    never: masks of rows that cannot be jobs, by reason. Rows without usable numbers are dropped and
    counted by reason.
    """
    count = len(frame)
    begun, started, ended = (seconds(frame.get(column), count) for column in ("submit", "start", "end"))
    where = np.where(np.isnan(started), begun, started)
    ran = _numbers(frame["duration"]) if "duration" in frame else ended - where
    asked = _numbers(frame["gpus"])
    with np.errstate(invalid="ignore"):
        reasons = {
            **(never or {}),
            "no submission time": ~np.isfinite(begun),
            "times after 2100, so in no seconds": (begun > LATEST) | (where > LATEST),
            "no duration": ~np.isfinite(ran),
            "negative duration": ran < 0,
            "ran for no time": ran == 0,
            "no number of GPUs": ~np.isfinite(asked),
            "negative number of GPUs": asked < 0,
            "asks for no GPU": asked == 0,
            "more GPUs than there are anywhere": asked > MOST_GPUS,
            "ran for more than a hundred years": ran > LONGEST,
        }
    dropped, gone = _dropped(reasons, count)
    kept = np.flatnonzero(~gone)
    kept = kept[np.argsort(begun[kept], kind="stable")]
    first = float(begun[kept[0]]) if len(kept) else 0.0
    stop, priority, odd = _preemption_and_priority(frame)
    changed = {"part of a GPU counted as a whole one": asked % 1 != 0,
               "start before submission set to submission": where < begun, **odd}  # fmt: skip
    labels = frame["id"].to_numpy() if "id" in frame else np.arange(count)
    return Trace(
        name=name, schema=schema, assumptions=how, rows=count, dropped=dropped, first=first,
        id=tuple(str(label) for label in labels[kept]),
        submit=begun[kept] - first, begin=np.maximum(where, begun)[kept] - first, duration=ran[kept],
        gpus=np.ceil(asked[kept]).astype(np.int64), preemptible=stop[kept], priority=priority[kept],
        numbers={key: _numbers(frame[key])[kept] for key in NUMBERS if key in frame},
        categories={key: _category(frame[key].iloc[kept]) for key in CATEGORIES if key in frame},
        changed={reason: number for reason, mask in changed.items() if (number := int(mask[kept].sum()))},
    )  # fmt: skip


def seconds(column: Any, count: int = 0) -> Floats:
    """Return times as seconds: numbers, else ISO 8601 dates, in UTC if they have no zone. For a
    column of None return ``count`` unknown times (NaN)."""
    if column is None:
        return np.full(count, np.nan)
    numbers, known = _numbers(column), column.notna().to_numpy()
    if not known.any() or np.isnan(numbers[known]).mean() <= 0.5:
        return numbers
    words = column.astype("string").str.strip()
    dates = pandas().to_datetime(words, errors="coerce", utc=True, format="ISO8601")
    return np.where(dates.isna().to_numpy(), np.nan, dates.dt.as_unit("us").astype("int64").to_numpy() / 1e6)


def _numbers(column: Any) -> Floats:
    found = pandas().to_numeric(column, errors="coerce").to_numpy(float)
    return np.where(np.isfinite(found), found, np.nan)


def _preemption_and_priority(frame: Any) -> tuple[NDArray[np.bool_], Ints, dict[str, NDArray[np.bool_]]]:
    """Return the preemptible jobs, priorities as 32-bit integers, and masks of cells read otherwise
    than written."""
    stop, priority, odd = np.zeros(len(frame), bool), np.zeros(len(frame)), dict[str, NDArray[np.bool_]]()
    if "preemptible" in frame:
        words = frame["preemptible"].astype("string").str.strip().str.lower().fillna("")
        stop = words.isin(YES).to_numpy(bool)
        odd["preemptible neither yes nor no, counted as no"] = ~words.isin((*YES, *NO)).to_numpy(bool)
    if "priority" in frame:
        priority = _numbers(frame["priority"])
        odd["priority that is no number, counted as 0"] = np.isnan(priority) & frame["priority"].notna().to_numpy()
    return stop, np.clip(np.nan_to_num(np.round(priority)), -(2.0**31), 2.0**32).astype(np.int64), odd


def _dropped(reasons: Mapping[str, Any], count: int) -> tuple[dict[str, int], NDArray[np.bool_]]:
    """Return the number of dropped rows by their first reason, and the mask of all dropped rows."""
    gone = np.zeros(count, bool)
    dropped: dict[str, int] = {}
    for reason, mask in reasons.items():
        new = np.asarray(mask, bool) & ~gone
        if new.any():
            dropped[reason] = int(new.sum())
            gone |= new
    return dropped, gone


def _category(column: Any) -> Category:
    codes, names = pandas().factorize(column.astype("string"), sort=True)
    return Category(codes=np.asarray(codes, np.int64), names=tuple(str(name) for name in names))
