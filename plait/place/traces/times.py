"""Times of a table as seconds: numbers in some unit, dates in some order, durations; and what had to be
decided to read them, for people."""

from __future__ import annotations

import re
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from plait.core.base.errors import DataError

Floats = NDArray[np.float64]
UNITS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
"""Seconds of each."""
ORDERS = ("dmy", "mdy", "ymd")
"""What stands first in a date that is all numbers."""
SAID = {
    "ns": ("ns", "nanoseconds"),
    "us": ("us", "microseconds"),
    "ms": ("ms", "msec", "msecs", "millis", "milliseconds"),
    "s": ("s", "sec", "secs", "second", "seconds"),
    "min": ("min", "mins", "minute", "minutes"),
    "h": ("h", "hr", "hrs", "hour", "hours"),
    "d": ("d", "day", "days"),
}
"""How units are written, in names of columns too; the last is for people."""
ZONES = {"ut": 0, "utc": 0, "gmt": 0, "z": 0, "edt": -4, "est": -5, "cdt": -5, "cst": -6, "mdt": -6, "mst": -7,
         "pdt": -7, "pst": -8}  # fmt: skip
"""Hours of the names of zones that have one meaning by RFC 5322, 4.3."""
LATEST = 4_102_444_800.0
"""Seconds from 1970 to 2100: a later time is in a finer unit, or a mistake."""
MIXED = 500.0
"""Times that differ from most by more than this factor are in another unit."""
_ZONE = re.compile(r":\d\d(?:[.,]\d+)?\s*(?:[AaPp][Mm])?\s*(?P<zone>[A-Za-z][A-Za-z/_]*)$")
_NUMBERS = re.compile(r"^(\d{1,2})([./-])(\d{1,2})\2(\d{4}|\d\d)(?!\d)(.*)$")


class TimeColumn(NamedTuple):
    """values: seconds, NaN where there is none. how: what had to be decided; empty where nothing had. unit:
    in which they were written, as far as their size told."""

    values: Floats
    how: str = ""
    unit: str = "s"


def pandas() -> Any:
    """pandas, imported where a table is read: it is slow to load."""
    return import_module("pandas")


def unit_of(word: str) -> str:
    """The unit or order of dates that a word names; empty for another word.

    >>> unit_of("Minutes"), unit_of("dmy"), unit_of("min_duration")
    ('min', 'dmy', '')
    """
    lower = word.lower()
    return next((unit for unit, words in SAID.items() if lower in words), lower if lower in ORDERS else "")


def without_unit(name: str) -> tuple[str, str]:
    """A column's name without the unit that stands at its end, and the unit.

    >>> without_unit("duration_min"), without_unit("runtimeHours"), without_unit("Elapsed (s)")
    (('duration', 'min'), ('runtime', 'h'), ('Elapsed', 's'))
    >>> without_unit("min_duration")
    ('min_duration', '')
    """
    found = re.fullmatch(r"(.*?[A-Za-z0-9])(?:[\s_.-]*[\[(]\s*|[\s_.-]+|(?<=[a-z])(?=[A-Z]))([A-Za-z]+)\s*[\])]?", name)
    unit = unit_of(found[2]) if found else ""
    return (found[1], unit) if found and unit in UNITS else (name, "")


def seconds(column: Any, unit: str = "") -> TimeColumn:
    """Times as seconds. Numbers are of the unit, without one seconds (milliseconds or finer where most would
    be after 2100, which is said); anything else a date, UTC where it names no zone. Raises DataError for a
    zone that is only a name."""
    numbers = pandas().to_numeric(column, errors="coerce").to_numpy(float)
    known = column.notna().to_numpy()
    if known.any() and np.isnan(numbers[known]).mean() > 0.5:
        return _dates(column, unit if unit in ORDERS else "")
    if unit in UNITS:
        return TimeColumn(numbers * UNITS[unit])
    usual = _usual(numbers)
    for finer in ("ns", "us", "ms"):
        if usual * UNITS[finer] * 1e3 > LATEST:
            how = f"'{column.name}' is read as {SAID[finer][-1]}: as seconds most would be after 2100"
            return TimeColumn(numbers * UNITS[finer], how, finer)
    return TimeColumn(numbers)


def odd(times: Floats) -> NDArray[np.bool_]:
    """Which times, in seconds, cannot be of the unit in which most are: those after 2100, and those near 1970
    where most are dates of this century."""
    usual = _usual(times)
    with np.errstate(invalid="ignore"):
        early = (np.abs(times) < usual / MIXED) if usual > 1e9 else np.zeros(len(times), bool)
        return early | (times > LATEST)


def _usual(numbers: Floats) -> float:
    """The median size of numbers that are not 0, the upper of two: a number that stands there."""
    sizes = np.sort(np.abs(numbers[np.isfinite(numbers) & (numbers != 0)]))
    return float(sizes[len(sizes) // 2]) if len(sizes) else 0.0


def lengths(column: Any, unit: str = "", apart: Floats | None = None, times: str = "s", form: str = "") -> TimeColumn:
    """Durations as seconds: numbers, or 1:30:00, '2 days 01:00:00', 2-01:00:00.

    unit: as the user says. Without one the column's name tells it, or else apart, the seconds between start
    and end of each, or else times, the unit of the table's times where that is finer than seconds, or else
    form, the unit of a published form. Nothing of these: seconds, which is said.
    """
    pd = pandas()
    numbers = pd.to_numeric(column, errors="coerce")
    known = column.notna()
    if known.any() and numbers[known].isna().mean() > 0.5:
        words = column.astype("string").str.strip().str.replace(r"^(\d+)-(?=\d+:)", r"\1 days ", regex=True)
        return TimeColumn(pd.to_timedelta(words, errors="coerce").dt.total_seconds().to_numpy(float))
    values = numbers.to_numpy(float)
    if unit in UNITS:
        return TimeColumn(values * UNITS[unit])
    if found := without_unit(str(column.name))[1]:
        return TimeColumn(values * UNITS[found], f"'{column.name}' is read as {SAID[found][-1]}, by its name")
    if found := _told(values, apart):
        said = f"'{column.name}' is read as {SAID[found][-1]}, as start and end say"
        return TimeColumn(values * UNITS[found], said if found != "s" else "")
    if times != "s":
        said = f"'{column.name}' is read as {SAID[times][-1]}, as the table's times are (seconds: '{column.name}:s')"
        return TimeColumn(values * UNITS[times], said)
    if form:
        return TimeColumn(values * UNITS[form])
    return TimeColumn(
        values, f"'{column.name}' is taken as seconds, since nothing says so (minutes: '{column.name}:min')"
    )


def _told(values: Floats, apart: Floats | None) -> str:
    """The unit in which most durations are what lies between start and end; empty where none is."""
    if apart is None:
        return ""
    use = np.isfinite(values) & np.isfinite(apart) & (values > 0) & (apart > 0)
    if not use.any():
        return ""
    ratios = apart[use] / values[use]
    shares = {unit: float((np.abs(ratios / size - 1) < 0.05).mean()) for unit, size in UNITS.items()}
    best = max(shares, key=lambda unit: shares[unit])
    return best if shares[best] > 0.5 else ""


def _dates(column: Any, order: str) -> TimeColumn:
    """As ISO 8601 writes them, where they are so; else in the order that is given, or that they show."""
    pd = pandas()
    words = column.astype("string").str.strip()
    dates = pd.to_datetime(words, errors="coerce", utc=True, format="ISO8601")
    rest = (dates.isna() & words.notna()).to_numpy()
    how = ""
    if rest.any():
        plain = _with_offsets(words[rest], str(column.name))
        order, how = (order, "") if order else _order(plain, str(column.name))
        dates[rest] = _parsed(_as_iso(plain, order))
    whole = dates.dt.as_unit("us").astype("int64").to_numpy() / 1e6
    return TimeColumn(np.where(dates.isna().to_numpy(), np.nan, whole), how)


def _parsed(words: Any) -> Any:
    pd = pandas()
    found = pd.to_datetime(words, errors="coerce", utc=True, format="ISO8601")
    left = found.isna() & words.notna()
    if left.any():  # slower by far
        found[left] = pd.to_datetime(words[left], errors="coerce", utc=True, format="mixed")
    return found


def _with_offsets(words: Any, name: str) -> Any:
    """Names of time zones as offsets. Raises DataError for one of several meanings, or of none."""
    zones = words.str.extract(_ZONE, expand=False)
    named = sorted({str(zone) for zone in zones.dropna().unique()} - {"AM", "PM", "am", "pm"})
    unknown = [zone for zone in named if zone.lower() not in ZONES]
    if unknown:
        raise DataError(
            f"The dates in '{name}' name the time zone '{unknown[0]}', which says no offset for sure. Write an offset, "
            "as in 2024-01-31 10:00:00+01:00."
        )
    for zone in named:
        own = zones == zone
        words = words.mask(own, words.str[: -len(zone)].str.rstrip() + f"{ZONES[zone.lower()]:+03d}:00")
    return words


def _order(words: Any, name: str) -> tuple[str, str]:
    """What stands first in dates of two small numbers and a year, and what to say of it."""
    parts = words.str.extract(_NUMBERS)
    first, second = (pandas().to_numeric(parts[at], errors="coerce") for at in (0, 2))
    if not first.notna().any():
        return "mdy", ""
    days, months = int((first > 12).sum()), int((second > 12).sum())
    if days != months:
        return ("dmy", f"dates in '{name}' are read day first") if days > months else ("mdy", "")
    if (parts[1] == ".").mean() > 0.5:  # nobody writes 1.31.2024
        return "dmy", f"dates in '{name}' are read day first"
    ordered = [order for order in ("mdy", "dmy") if _parsed(_as_iso(words, order)).dropna().is_monotonic_increasing]
    if ordered == ["dmy"]:
        return "dmy", f"dates in '{name}' are read day first, in which they are in order"
    told = "" if ordered == ["mdy"] else f", since nothing says so (day first: '{name}:dmy')"
    return "mdy", f"dates in '{name}' are read month first{told}"


def _as_iso(words: Any, order: str) -> Any:
    """Dates of numbers with the year first; of any other order than they have, no dates."""

    def turned(found: re.Match[str]) -> str:
        one, _, two, last, rest = found.groups()
        year, month, day = {"dmy": (last, two, one), "mdy": (last, one, two), "ymd": (one, two, last)}[order]
        return f"{year if len(year) == 4 else '20' + year.zfill(2)}-{month.zfill(2)}-{day.zfill(2)}{rest}"

    return words.str.replace(_NUMBERS, turned, regex=True)
