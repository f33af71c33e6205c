"""Times of traces: dates, zones, units of times and durations, and what is said of what is open."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from plait.core.base.errors import DataError, JobError
from plait.place.traces.times import TimeColumn, lengths, odd, pandas, seconds
from tests.support.workloads import trace_of


def test_relative_milliseconds_beyond_a_century_of_seconds_are_milliseconds(tmp_path: Path) -> None:
    found = trace_of("submit,duration,gpus\n5000000000,900000,1\n5000060000,900000,1\n", tmp_path)
    assert found.submit.tolist() == [0.0, 60.0] and found.duration.tolist() == [900.0, 900.0]
    assert any("'duration' is read as milliseconds, as the table's times are" in said for said in found.how)


@pytest.mark.parametrize(
    ("column", "seconds"),
    [("1500000000,1500000060", 60.0), ("1500000000000,1500000060000", 60.0), ("0:01:00,0:02:30", None)],
)
def test_times_in_other_units(tmp_path: Path, column: str, seconds: float | None) -> None:
    first, second = column.split(",")
    if seconds is None:
        found = trace_of(f"submit,duration,gpus\n1,{first},1\n2,{second},1\n", tmp_path)
        assert found.duration.tolist() == [60.0, 150.0]
    else:
        found = trace_of(f"submit,duration,gpus\n{first},5,1\n{second},5,1\n", tmp_path)
        assert found.submit.tolist() == [0.0, seconds]


def dated(*days: str) -> str:
    return "submit,duration,gpus,start,end\n" + "".join(f"{day},60,1,{day},\n" for day in days)


def minutes_of(text: str, folder: Path, columns: str | None = None) -> tuple[list[float], tuple[str, ...]]:
    """Minutes between the first job's submission and the others', and what is said of how it was read."""
    found = trace_of(text, folder, columns=columns)
    return [second / 60 for second in found.submit], found.how


DAY = 1440.0


@pytest.mark.parametrize(
    ("days", "columns", "submits", "says"),
    [
        (("03/01/2024 10:00", "15/01/2024 10:00"), None, [0, 12 * DAY], "read day first"),
        (("01/03/2024 10:00", "01/15/2024 10:00"), None, [0, 12 * DAY], ""),
        (("01.03.2024 10:00", "02.03.2024 10:00"), None, [0, DAY], "read day first"),
        (("1.3.24", "2.3.24"), None, [0, DAY], "read day first"),
        (("30/01/2024", "02/02/2024"), None, [0, 3 * DAY], "read day first"),
        (
            ("01/02/2024", "03/02/2024", "02/03/2024"),
            None,
            [0, 2 * DAY, 30 * DAY],
            "day first, in which they are in order",
        ),
        (("01/02/2024", "02/02/2024"), None, [0, 31 * DAY], "since nothing says so (day first: 'submit:dmy')"),
        (("01/02/2024", "02/02/2024"), "dmy", [0, DAY], ""),
        (("11/12/2024", "12/12/2024"), None, [0, 30 * DAY], "since nothing says so (day first: 'submit:dmy')"),
        (("12/01/2024", "12/02/2024"), None, [0, DAY], "since nothing says so (day first: 'submit:dmy')"),
        (("24-01-31", "24-02-01"), "ymd", [0, DAY], ""),
        (("2024-01-31 10:00 PM", "2024-02-01 10:00 PM"), None, [0, DAY], ""),
        (("31 Jan 2024", "1 Feb 2024"), None, [0, DAY], ""),
    ],
)
def test_which_of_two_numbers_is_the_day(
    tmp_path: Path, days: tuple[str, ...], columns: str | None, submits: list[float], says: str
) -> None:
    mapping = columns and f"submit=submit:{columns},duration=duration:s,gpus=gpus"
    found, how = minutes_of(dated(*days), tmp_path, mapping or "submit=submit,duration=duration:s,gpus=gpus")
    assert found == submits
    assert says in " ".join(how) and bool(says) == bool(how)


def test_a_date_of_another_order_than_the_others_is_no_date(tmp_path: Path) -> None:
    found = trace_of(dated("13/01/2024", "14/01/2024", "01/15/2024"), tmp_path)
    assert found.dropped == {"no submission time": 1}


@pytest.mark.parametrize(
    ("first", "second", "hours"),
    [
        ("2024-01-01 10:00:00 PST", "2024-01-01 11:00:00 PST", 1.0),
        ("2024-01-01 10:00:00 PST", "2024-01-01 10:00:00 EST", -3.0),
        ("2024-01-01 10:00 UTC", "2024-01-01 12:30:00 GMT", 2.5),
        ("2024-01-01 10:00:00 PM PST", "2024-01-02 06:00:00Z", 0.0),
    ],
)
def test_names_of_zones_that_have_one_meaning(tmp_path: Path, first: str, second: str, hours: float) -> None:
    found = trace_of(f"submit,duration,gpus,id\n{first},60,1,a\n{second},60,1,b\n", tmp_path)
    times = dict(zip(found.id, found.submit, strict=True))
    assert times["b"] - times["a"] == hours * 3600


@pytest.mark.parametrize("zone", ["CEST", "IST", "Europe/Berlin"])
def test_a_zone_of_no_sure_meaning_is_refused(tmp_path: Path, zone: str) -> None:
    with pytest.raises(DataError, match=f"time zone '{zone}'.*Write an offset"):
        trace_of(f"submit,duration,gpus\n2024-01-01 10:00:00 {zone},60,1\n", tmp_path)


@pytest.mark.parametrize(
    ("header", "columns", "minutes", "says"),
    [
        ("duration", None, 1.5, "taken as seconds, since nothing says so (minutes: 'duration:min')"),
        ("duration", "min", 90, ""),
        ("duration", "hours", 5400, ""),
        ("duration", "ms", 0.0015, ""),
        ("duration_min", None, 90, "read as minutes, by its name"),
        ("runtimeHours", None, 5400, "read as hours, by its name"),
        ("Elapsed (s)", None, 1.5, "read as seconds, by its name"),
    ],
)
def test_durations_in_other_units(tmp_path: Path, header: str, columns: str | None, minutes: float, says: str) -> None:
    mapping = columns and f"submit=submit:h,duration={header}:{columns},gpus=gpus"
    found = trace_of(f"submit,{header},gpus\n5,90,1\n", tmp_path, columns=mapping)
    assert found.duration.tolist() == pytest.approx([minutes * 60])
    assert says in " ".join(found.how) and bool(says) == bool(found.how)


@pytest.mark.parametrize(("size", "name"), [(60, "minutes"), (3600, "hours"), (0.001, "milliseconds"), (1, "")])
def test_start_and_end_tell_the_unit_of_durations(tmp_path: Path, size: float, name: str) -> None:
    rows = [(0, 7200, 10), (100, 3600, 20), (200, 86400, 30), (300, 1800, 3000)]
    lines = [f"{at},{at + waits},{at + waits + ran},{ran / size},1" for at, ran, waits in rows]
    found = trace_of("\n".join(["submit_time,start_time,end_time,duration,gpus", *lines]) + "\n", tmp_path)
    assert found.duration.tolist() == pytest.approx([ran for _, ran, _ in rows])
    assert found.how == ((f"'duration' is read as {name}, as start and end say",) if name else ())


def test_slurms_own_durations(tmp_path: Path) -> None:
    found = trace_of(
        "Submit,Elapsed,gpus\n2024-01-01T00:00:00,1-02:03:04,1\n2024-01-01T00:00:09,00:10:00,1\n", tmp_path
    )
    assert found.duration.tolist() == [86400 + 7384, 600]


@pytest.mark.parametrize("given", ["duration=duration:weeks", "duration=duration:dmy", "submit=submit:minits"])
def test_units_that_are_none(tmp_path: Path, given: str) -> None:
    with pytest.raises(JobError, match=r"is no unit of .* Units are ns, us, ms, s, min, h, d"):
        trace_of("submit,duration,gpus\n1,2,3\n", tmp_path, columns=f"gpus=gpus,{given}")


def of_column(*words: Any, unit: str = "") -> TimeColumn:
    return seconds(pandas().Series(words, name="at"), unit)


def test_half_of_a_column_may_be_no_number() -> None:
    """With more than that it is dates."""
    assert np.isnan(of_column("5", "x").values).tolist() == [False, True]
    dates = of_column("5", "2024-01-01", "2024-01-02")
    assert dates.values[2] - dates.values[1] == 86_400 and np.isnan(dates.values[0])
    assert np.isnan(of_column(None, None, None).values).all()
    assert of_column("5", None, None).values[0] == 5


def test_times_in_units() -> None:
    assert of_column(90, unit="min").values.tolist() == [5400] and of_column(90, unit="min").how == ""
    latest = 4_102_444_700
    assert of_column(latest).unit == "s"
    assert of_column(latest + 200).unit == "ms" and of_column((latest + 200) * 1000).unit == "us"
    assert of_column(0, latest + 200).unit == "ms", "0 is of any unit"
    assert of_column(0, 0).values.tolist() == [0, 0]


def test_times_of_another_unit_than_most() -> None:
    """500 times less, or after 2100; where most are not of this century all are taken."""
    now = 1.5e9
    assert odd(np.array([now, now, now, now, now / 500, now / 500.1, -now / 500.1, 0.0])).tolist() == [
        False, False, False, False, False, True, True, True,
    ]  # fmt: skip
    assert odd(np.array([1e9, 1e9, 1.0])).tolist() == [False] * 3
    assert odd(np.array([1e9, 1e9, 1e9, 4_102_444_800.0, 4_102_444_801.0])).tolist() == [False] * 4 + [True]
    assert not odd(np.array([np.nan, np.nan])).any()


def took(values: list[float], apart: list[float]) -> str:
    column = pandas().Series(values, name="took")
    found = lengths(column, apart=np.array(apart, float))
    return "s" if not found.how else found.how


def test_start_and_end_tell_the_unit_where_they_do_for_most() -> None:
    assert "minutes, as start and end say" in took([1, 2, 3], [60, 120, 180])
    assert "minutes, as start and end say" in took([1, 2, 3, 0, 4, 5], [60, 120, np.nan, 60, 0, -60]), "of those known"
    assert "since nothing says so" in took([1, 2], [60, 7]), "half are not most"
    assert "minutes" in took([1, 2, 3], [60, 120, 7])
    assert "since nothing says so" in took([1, 2], [np.nan, 0])
    assert "minutes" in took([100], [5701]) and "since nothing says so" in took([100], [5699])


def test_what_is_above_twelve_more_often_is_the_day() -> None:
    days = of_column("13/01/2024", "14/01/2024", "01/13/2024")
    assert "read day first" in days.how and np.isnan(days.values[2])
    months = of_column("01/13/2024", "01/14/2024", "13/01/2024")
    assert months.how == "" and np.isnan(months.values[2])


def test_durations_of_which_half_are_no_numbers() -> None:
    column = pandas().Series(["60", "1:00:00"], name="took")
    assert np.isnan(lengths(column, "s").values).tolist() == [False, True]
    three = pandas().Series(["60", "1:00:00", "2-00:00:00"], name="took")
    assert lengths(three).values[1:].tolist() == [3600, 2 * 86_400]
