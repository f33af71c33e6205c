"""What every trace becomes: columns of jobs in the order of their submission, and what had to be left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plait.core.base.errors import DataError
from plait.core.base.passed_over import PassedOver
from plait.place.traces.times import TimeColumn, lengths, odd, pandas, seconds

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
MOST_GPUS, LONGEST = 10_000_000, 100 * 365.25 * 86400
"""GPUs and seconds beyond which a row is a mistake, and sums over jobs would not be numbers any more."""


@dataclass(frozen=True, kw_only=True)
class Category:
    """A column of names: ``names[codes[i]]`` is job i's; -1 where it has none."""

    codes: Ints
    names: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Jobs, sorted by submission.

    submit: seconds since the first submission, (J,); begin: seconds since then at which a job started on
    the trace's own cluster (submission where the trace does not say); duration: seconds that it ran;
    gpus: whole GPUs. first: seconds since 1970 of the first submission (0 where times are relative).
    numbers and categories: what else was known at submission. preemptible: whether the trace says that a
    job may be stopped. priority: the higher goes first; 0 where the trace does not say. dropped: rows
    left out, by reason; changed: values read otherwise than written, by reason. how: what had to be
    decided about units and dates."""

    name: str
    schema: str
    id: tuple[str, ...]
    submit: Floats
    begin: Floats
    duration: Floats
    gpus: Ints
    first: float = 0.0
    numbers: Mapping[str, Floats] = field(default_factory=dict)
    categories: Mapping[str, Category] = field(default_factory=dict)
    preemptible: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, bool))
    priority: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    rows: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)
    changed: Mapping[str, int] = field(default_factory=dict)
    how: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.submit)

    @property
    def over(self) -> PassedOver:
        """Rows left out, as other readers count them."""
        over = PassedOver()
        for reason, count in self.dropped.items():
            over.note(f"rows ({reason})", count=count)
        return over

    @property
    def end(self) -> Floats:
        """When each job ended on the trace's own cluster."""
        return self.begin + self.duration

    @property
    def span(self) -> float:
        """Seconds from the first submission to one usual gap after the last; at least an hour."""
        last = float(self.submit[-1]) if len(self) else 0.0
        return max(3600.0, last * len(self) / max(1, len(self) - 1))

    def busy(self) -> float:
        """GPUs that the trace keeps busy, on average over its span."""
        return float(self.gpus @ self.duration) / self.span

    def only(self, chosen: NDArray[Any]) -> Trace:
        """The jobs that a mask or sorted indices choose; times stay what they were."""
        at = np.flatnonzero(chosen) if chosen.dtype == bool else chosen
        return replace(
            self,
            id=tuple(self.id[i] for i in at),
            submit=self.submit[at],
            begin=self.begin[at],
            duration=self.duration[at],
            gpus=self.gpus[at],
            numbers={name: column[at] for name, column in self.numbers.items()},
            categories={name: replace(column, codes=column.codes[at]) for name, column in self.categories.items()},
            preemptible=self.preemptible[at],
            priority=self.priority[at],
        )


@dataclass(frozen=True, kw_only=True)
class TraceColumns:
    """Where a table has what of a job: names of columns. gpus, preemptible: a column's name, or values.
    priority: a column of numbers. numbers, categories: further features, by name."""

    submit: str
    gpus: str | Any
    duration: str | None = None
    start: str | None = None
    end: str | None = None
    id: str | None = None
    numbers: Mapping[str, str] = field(default_factory=dict[str, str])
    categories: Mapping[str, str] = field(default_factory=dict[str, str])
    preemptible: Any = None
    priority: str | None = None


@dataclass(frozen=True, kw_only=True)
class TraceForm:
    """What a table is. form: unit of durations in a published form. how: what the reader had to decide."""

    name: str
    schema: str
    form: str = ""
    how: Sequence[str] = ()


def build(
    frame: Any,
    columns: TraceColumns,
    form: TraceForm,
    *,
    never: Mapping[str, Any] | None = None,
    units: Mapping[str, str] | None = None,
) -> Trace:
    """A trace of a table's columns. A duration is read, or what lies between start (else submission) and end.

    never: masks of rows that cannot be jobs, by reason. Rows without usable numbers are counted by reason,
    never silently left out. units: of submit, start, end and duration, where the user says them
    (``times.UNITS``, ``times.ORDERS``).
    """
    count, units, at = len(frame), units or {}, columns
    submitted = seconds(frame[at.submit], units.get("submit", ""))
    started = seconds(frame[at.start], units.get("start", "")) if at.start else TimeColumn(np.full(count, np.nan))
    over = seconds(frame[at.end], units.get("end", "")) if at.end else None
    begun, where = submitted.values, np.where(np.isnan(started.values), submitted.values, started.values)
    apart = None if over is None else over.values - where
    lasted = None
    if at.duration:
        lasted = lengths(frame[at.duration], units.get("duration", ""), apart, submitted.unit, form.form)
    if lasted is None and apart is None:
        raise DataError("A trace needs a duration, or an end.")
    ran = lasted.values if lasted else np.asarray(apart)
    asked = _asked(frame[at.gpus] if isinstance(at.gpus, str) else at.gpus)
    with np.errstate(invalid="ignore"):
        reasons = {
            **(never or {}),
            "no submission time": ~np.isfinite(begun),
            "times in another unit than most": odd(begun) | odd(where) | (odd(over.values) if over else False),
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
    early = where < begun  # clocks that disagree
    changed = {
        "part of a GPU counted as a whole one": int((asked[kept] % 1 != 0).sum()),
        "start before submission set to submission": int(early[kept].sum()),
    }
    labels = frame[at.id].to_numpy() if at.id else np.arange(count)
    stop = np.zeros(count, bool) if at.preemptible is None else np.asarray(at.preemptible, bool)
    return Trace(
        name=form.name,
        schema=form.schema,
        id=tuple(str(label) for label in labels[kept]),
        submit=begun[kept] - first,
        begin=np.maximum(where, begun)[kept] - first,
        duration=ran[kept],
        gpus=np.ceil(asked[kept]).astype(np.int64),
        first=first,
        numbers={key: _number(frame[column])[kept] for key, column in at.numbers.items()},
        categories={key: _category(frame[column].iloc[kept]) for key, column in at.categories.items()},
        preemptible=stop[kept],
        priority=_priority(frame[at.priority] if at.priority else np.zeros(count))[kept],
        rows=count,
        dropped=dropped,
        changed={reason: number for reason, number in changed.items() if number},
        how=(*form.how, *dict.fromkeys(one.how for one in (submitted, started, over, lasted) if one and one.how)),
    )


def _asked(column: Any) -> Floats:
    return pandas().to_numeric(pandas().Series(column), errors="coerce").to_numpy(float)


def _priority(column: Any) -> Ints:
    """Whole numbers of 32 bits; what is none counts as 0."""
    return np.clip(np.nan_to_num(np.round(_asked(column))), -(2.0**31), 2.0**32).astype(np.int64)


def _number(column: Any) -> Floats:
    found = _asked(column)
    return np.where(np.isfinite(found), found, np.nan)


def _dropped(reasons: Mapping[str, Any], count: int) -> tuple[dict[str, int], NDArray[np.bool_]]:
    """How many rows go for each reason, the first that holds; and which."""
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
