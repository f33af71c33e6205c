"""Every published form becomes the same table, and nothing disappears unsaid."""

from __future__ import annotations

import gzip
import json
import lzma
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.core.base.errors import DataError, JobError
from plait.place.traces.columns import parse_columns
from plait.place.traces.philly import KEYS
from plait.place.traces.read import read_trace
from plait.place.traces.table import Trace
from plait.place.traces.times import TimeColumn, lengths, odd, pandas, seconds, without_unit
from tests.support.workloads import trace_of

PHILLY = [
    {
        "status": "Pass",
        "vc": "ee9e8c",
        "jobid": "application_1",
        "user": "u1",
        "submitted_time": "2017-10-09 07:01:55",
        "attempts": [
            {"start_time": "2017-10-09 07:02:00", "end_time": "2017-10-09 07:03:00",
             "detail": [{"ip": "m1", "gpus": ["gpu0", "gpu1"]}, {"ip": "m2", "gpus": ["gpu0"]}]},
            {"start_time": "2017-10-09 07:10:00", "end_time": "2017-10-09 07:12:00",
             "detail": [{"ip": "m1", "gpus": ["gpu0", "gpu1"]}, {"ip": "m2", "gpus": ["gpu0"]}]},
        ],
    },
    {"status": "Killed", "vc": "ee9e8c", "jobid": "never", "user": "u2", "submitted_time": "2017-10-09 06:00:00",
     "attempts": []},
    {"status": "Running", "vc": "x", "jobid": "open", "user": "u2", "submitted_time": "2017-10-09 06:00:00",
     "attempts": [{"start_time": "2017-10-09 07:02:00", "end_time": "None", "detail": [{"ip": "m", "gpus": ["g"]}]}]},
]  # fmt: skip
HELIOS = """job_id,user,vc,gpu_num,cpu_num,node_num,state,submit_time,start_time,end_time,duration,queue
7,ua,vc1,8,32,1,COMPLETED,2020-04-01 00:00:10,2020-04-01 00:00:20,2020-04-01 00:01:20,60,10
8,ub,vc2,0,4,1,COMPLETED,2020-04-01 00:00:11,2020-04-01 00:00:20,2020-04-01 00:01:20,60,9
9,ua,vc1,16,64,2,FAILED,2020-04-01 00:00:05,2020-04-01 00:00:05,2020-04-01 00:00:35,30,0
"""
ACME = """job_id,user,node_num,gpu_num,cpu_num,mem_per_pod_GB,shared_mem_per_pod,type,state,submit_time,start_time,\
end_time,fail_time,stop_time,duration,queue,gpu_time
dlc1,u,2,16,128,800,200,Pretrain,COMPLETED,2023-03-01 00:00:00+00:00,2023-03-01 00:01:00+00:00,\
2023-03-01 01:01:00+00:00,,,3600,60,57600
dlc2,v,1,1,8,100,10,Evaluation,CANCELLED,2023-03-01 00:30:00+08:00,,,,,,,
"""
OPENB = """name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,deletion_time,scheduled_time
p0,1000,2000,1,500,,LS,Running,0,90,10
p1,1000,2000,1,1000,V100M16,BE,Succeeded,5,60,5
p2,1000,2000,1,1000,,LS,Pending,6,70,
p3,1000,2000,8,1000,,LS,Running,7,100,9
p4,1000,2000,0,0,,LS,Running,7,80,9
"""
SPOT = """job_name,organization,gpu_model,cpu_request,gpu_request,worker_num,submit_time,duration,job_type
j0,o1,A100,12,8,4,100,3600,HP
j1,o2,A10,6,0.5,1,50,60,Spot
"""


def test_phillys_log(tmp_path: Path) -> None:
    found = trace_of(json.dumps(PHILLY), tmp_path, "cluster_job_log.json")
    assert (found.schema, found.id, found.gpus.tolist(), found.duration.tolist()) == (
        "philly-json", ("application_1",), [3], [600.0],
    )  # fmt: skip
    assert found.begin.tolist() == [5.0]
    assert found.dropped == {"never started": 1, "never ended": 1}
    assert found.categories["user"].names == ("u1",)


def test_helios(tmp_path: Path) -> None:
    found = trace_of(HELIOS, tmp_path)
    assert (found.schema, found.id, found.gpus.tolist()) == ("helios", ("9", "7"), [16, 8])
    assert found.submit.tolist() == [0.0, 5.0] and found.begin.tolist() == [0.0, 15.0]
    assert found.dropped == {"asks for no GPU": 1}
    assert found.numbers["cpus"].tolist() == [64, 32] and found.categories["group"].names == ("vc1",)


def test_acme(tmp_path: Path) -> None:
    found = trace_of(ACME, tmp_path)
    assert (found.schema, found.id, found.gpus.tolist(), found.duration.tolist()) == ("acme", ("dlc1",), [16], [3600.0])
    assert found.dropped == {"no duration": 1}
    assert found.numbers["memory"].tolist() == [800]
    assert found.first == 1677628800.0


def test_openb(tmp_path: Path) -> None:
    found = trace_of(OPENB, tmp_path)
    assert (found.schema, found.id, found.duration.tolist()) == ("alibaba-openb", ("p0", "p1"), [80.0, 55.0])
    assert found.dropped == {"never started": 1, "still there at the end": 1, "asks for no GPU": 1}
    assert found.changed == {"part of a GPU counted as a whole one": 1}
    assert found.preemptible.tolist() == [False, True]
    assert found.categories["type"].codes.tolist() == [-1, 0]


def test_spot(tmp_path: Path) -> None:
    found = trace_of(SPOT, tmp_path)
    assert (found.schema, found.id, found.gpus.tolist()) == ("alibaba-spot", ("j1", "j0"), [1, 32])
    assert found.preemptible.tolist() == [True, False]
    assert found.changed == {"part of a GPU counted as a whole one": 1}


PAI = """job_name,task_name,inst_num,status,start_time,end_time,plan_cpu,plan_mem,plan_gpu,gpu_type
a,worker,4.0,Terminated,100.0,400.0,600.0,29.3,50.0,T4
b,ps,1.0,Failed,50.0,80.0,600.0,29.3,800.0,V100
c,worker,1.0,Terminated,60.0,90.0,600.0,29.3,25.0,MISC
d,worker,1.0,Running,70.0,,600.0,29.3,100.0,MISC
e,worker,1.0,Terminated,75.0,80.0,600.0,29.3,,P100
f,worker,1.0,Waiting,,,600.0,29.3,100.0,
"""


def test_pai(tmp_path: Path) -> None:
    """Percent of a GPU for each instance."""
    found = trace_of(PAI, tmp_path)
    assert (found.schema, found.id, found.gpus.tolist()) == ("alibaba-pai", ("b", "c", "a"), [8, 1, 2])
    assert found.duration.tolist() == [30.0, 30.0, 300.0]
    assert found.dropped == {"never started": 1, "never ended": 1, "asks for no GPU": 1}
    assert found.changed == {"part of a GPU counted as a whole one": 1}
    assert found.categories["queue"].names == ("MISC", "T4", "V100")
    assert "queue" not in trace_of(PAI.replace("gpu_type", "kind"), tmp_path).categories
    assert found.how[0] == "'plan_gpu' is read as percent of a GPU for each of 'inst_num' instances"


def test_times_in_a_finer_unit_are_read_so_and_said(tmp_path: Path) -> None:
    head, row = PAI.splitlines()[0], "{},worker,1.0,Terminated,{},{},600.0,29.3,100.0,T4\n"
    for finer, size in (("milliseconds", 10**3), ("microseconds", 10**6), ("nanoseconds", 10**9)):
        rows = row.format("a", 1718000000 * size, 1718000900 * size)
        found = trace_of(f"{head}\n{rows}", tmp_path)
        assert found.duration.tolist() == [900.0] and found.first == 1718000000
        assert any(f"'start_time' is read as {finer}" in said for said in found.how)
    mixed = "".join(row.format(name, 1718000000000 + at, 1718000900000 + at) for at, name in enumerate("abc"))
    found = trace_of(f"{head}\n{mixed}{row.format('d', 1718000000, 1718000900)}", tmp_path)
    assert found.dropped == {"times in another unit than most": 1} and set(found.duration) == {900.0}
    mixed = row.format("a", 1718000000000, 1718000900000) + row.format("b", 1718000000, 1718000900)
    assert trace_of(f"{head}\n{mixed}", tmp_path).duration.tolist() == [900.0]
    mixed = "".join(row.format(name, 1718000000 + at, 1718000900 + at) for at, name in enumerate("abc"))
    found = trace_of(f"{head}\n{mixed}{row.format('d', 1718000000000, 1718000900000)}", tmp_path)
    assert found.dropped == {"times in another unit than most": 1} and set(found.duration) == {900.0}


def test_relative_milliseconds_beyond_a_century_of_seconds_are_milliseconds(tmp_path: Path) -> None:
    found = trace_of("submit,duration,gpus\n5000000000,900000,1\n5000060000,900000,1\n", tmp_path)
    assert found.submit.tolist() == [0.0, 60.0] and found.duration.tolist() == [900.0, 900.0]
    assert any("'duration' is read as milliseconds, as the table's times are" in said for said in found.how)


def test_durations_of_a_published_form_in_milliseconds(tmp_path: Path) -> None:
    """Start and end tell, or the unit of the times."""
    found = trace_of(HELIOS.replace(",60,", ",60000,").replace(",30,", ",30000,"), tmp_path)
    assert found.duration.tolist() == [30.0, 60.0] and "milliseconds" in found.how[0]
    found = trace_of(ACME.replace(",3600,", ",3600000,"), tmp_path)
    assert found.duration.tolist() == [3600.0]
    spot = SPOT.replace(",100,3600,", ",1718000000000,900000,").replace(",50,60,", ",1718000060000,60000,")
    found = trace_of(spot, tmp_path)
    assert sorted(found.duration) == [60.0, 900.0] and found.submit.tolist() == [0.0, 60.0]


@pytest.mark.parametrize(
    ("header", "columns", "gpus", "says"),
    [
        ("plan_gpu", None, [2, 8], "'plan_gpu' is read as percent of a GPU, by its name (GPUs: 'plan_gpu:whole')"),
        ("plan_gpu", "plan_gpu:whole", [200, 800], ""),
        ("gpu_percent", "gpu_percent", [2, 8], "read as percent"),
        ("gpu_milli", "gpu_milli", [1, 1], "read as thousandths"),
        ("n", "n:percent", [2, 8], ""),
        ("n", "n:milli", [1, 1], ""),
        ("n", "n", [200, 800], ""),
    ],
)
def test_gpus_in_other_units(tmp_path: Path, header: str, columns: str | None, gpus: list[int], says: str) -> None:
    (tmp_path / "t.csv").write_text(f"submit,duration,{header}\n1,60,200\n2,60,800\n")
    found = read_trace(tmp_path / "t.csv", parse_columns(f"submit=submit,duration=duration:s,gpus={columns or header}"))
    assert found.gpus.tolist() == gpus
    assert says in " ".join(found.how) and bool(says) == bool(found.how)


def test_gpus_that_look_like_percent_are_remarked_on(tmp_path: Path) -> None:
    def how(*counts: int) -> tuple[str, ...]:
        rows = "".join(f"{at},60,{count}\n" for at, count in enumerate(counts))
        (tmp_path / "t.csv").write_text("submit,duration_s,gpus\n" + rows)
        return tuple(said for said in read_trace(tmp_path / "t.csv").how if "gpus" in said)

    assert how(25, 50, 100, 200, 50)[0].endswith("though all are multiples of 5 (percent: 'gpus:percent')")
    assert not how(25, 50, 100, 200, 8)
    assert not how(5, 10, 15, 20, 10)
    assert not how(100, 200)
    assert how(25, 50, 100, 50, 75), "100 is a whole GPU"
    assert not how(25, 50, 95, 50, 75)


def test_usual_names_and_given_ones(tmp_path: Path) -> None:
    text = "when,until,n,team\n2024-01-01T10:00:00+01:00,2024-01-01T10:00:30Z,2,a\n"
    text += "2024-01-01 09:00:01,2024-01-01 09:01,1,b\n"
    (tmp_path / "odd.csv").write_text(text)
    columns = parse_columns("submit=when,end=until,gpus=n,group=team")
    found = read_trace(tmp_path / "odd.csv", columns)
    assert found.submit.tolist() == [0.0, 1.0] and found.duration.tolist() == [3630.0, 59.0]
    assert trace_of("submit_time,duration,num_gpu,cluster\n5,3,2,x\n4,1,1,y\n", tmp_path).submit.tolist() == [0.0, 1.0]


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


def test_compressed_tables(tmp_path: Path) -> None:
    file = tmp_path / "jobs.csv.gz"
    file.write_bytes(gzip.compress(HELIOS.encode()))
    assert len(read_trace(file)) == 2


CELL = st.sampled_from(("", "NaN", "inf", "-3", "0", "1", "2.5", "17", "1e3", "word"))


@given(rows=st.lists(st.tuples(CELL, CELL, CELL), max_size=30))
def test_every_row_is_a_job_or_counted(tmp_path: Path, rows: list[tuple[str, str, str]]) -> None:
    table = "".join(f"{','.join(row)},x\n" for row in [("submit", "duration", "gpus"), ("1", "1", "1"), *rows])
    found = trace_of(table, tmp_path)
    assert len(found) + sum(found.dropped.values()) == found.rows == len(rows) + 1
    check(found)


def check(found: Trace) -> None:
    """What every trace promises."""
    assert (np.diff(found.submit) >= 0).all() and (found.begin >= found.submit).all()
    assert (found.duration > 0).all() and np.isfinite(found.duration).all() and (found.gpus >= 1).all()
    assert len(found.id) == len(found.preemptible) == len(found)


def test_an_empty_table_is_a_trace_without_jobs(tmp_path: Path) -> None:
    found = trace_of("submit_time,duration,num_gpu\n", tmp_path)
    assert (len(found), found.rows, found.busy()) == (0, 0, 0.0)


@pytest.mark.parametrize(
    ("text", "columns", "error", "says"),
    [
        ("", None, DataError, "is empty"),
        (
            "a,b\n1,2\n",
            None,
            JobError,
            r"no column is known to hold submit, gpus, duration \(or end\).*columns are a, b",
        ),
        ("sub,dur,n\n1,2,3\n", "submit=sub,duration=durr,gpus=n", JobError, r"no column 'durr' \(did you mean 'dur'"),
        ("sub,dur,n\n1,2,3\n", "submit=sub,length=dur", JobError, "'length' is nothing that a job has"),
        ("sub,dur,n\n1,2,3\n", "submit", JobError, "no FIELD=COLUMN"),
        ('"a\n', None, DataError, "no readable table"),
    ],
)
def test_tables_that_cannot_be_read(
    tmp_path: Path, text: str, columns: str | None, error: type[Exception], says: str
) -> None:
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(error, match=says):
        read_trace(tmp_path / "t.csv", None if columns is None else parse_columns(columns))


@pytest.mark.parametrize(
    ("text", "says"), [("{", "no readable JSON"), ('[{"a": 1}]', "no Philly log"), ("3", "no Philly")]
)
def test_logs_that_cannot_be_read(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(DataError, match=says):
        trace_of(text, tmp_path, "log.json")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        read_trace(tmp_path / "nothing.csv")


@pytest.mark.parametrize("kind", ["gz", "xz"])
def test_a_compressed_table_that_was_cut_off(tmp_path: Path, kind: str) -> None:
    file = tmp_path / f"t.csv.{kind}"
    text = "submit,gpus,duration\n" + "".join(f"{number},1,{number * 7919 % 1000 + 1}\n" for number in range(2000))
    whole = (gzip if kind == "gz" else lzma).compress(text.encode())
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match="is no readable table"):
        read_trace(file)


def test_numbers_beyond_any_machine_are_left_out_by_reason(tmp_path: Path) -> None:
    file = tmp_path / "t.csv"
    file.write_text("submit,gpus,duration\n0,1e30,5\n1,2,1e300\n2,3,4\n")
    found = read_trace(file)
    assert found.gpus.tolist() == [3]
    assert sum(found.dropped.values()) == 2


@pytest.mark.parametrize("mark", [";", "\t", "|"])
def test_other_separators(tmp_path: Path, mark: str) -> None:
    file = tmp_path / "t.csv"
    rows = [("submit", "gpus", "duration"), ("0", "1.0", "5"), ("1", "2.0", "6,5" if mark == ";" else "6.5")]
    file.write_text("".join(mark.join(row) + "\n" for row in rows))
    found = read_trace(file)
    assert found.gpus.tolist() == [1, 2]
    assert found.duration.tolist() == [5, 6.5]


def minutes_of(text: str, folder: Path, columns: str | None = None) -> tuple[list[float], tuple[str, ...]]:
    """Minutes between the first job's submission and the others', and what is said of how it was read."""
    (folder / "t.csv").write_text(text)
    found = read_trace(folder / "t.csv", None if columns is None else parse_columns(columns))
    return [second / 60 for second in found.submit], found.how


def dated(*days: str) -> str:
    return "submit,duration,gpus,start,end\n" + "".join(f"{day},60,1,{day},\n" for day in days)


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
    (tmp_path / "t.csv").write_text(dated("13/01/2024", "14/01/2024", "01/15/2024"))
    found = read_trace(tmp_path / "t.csv")
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
    (tmp_path / "t.csv").write_text(f"submit,duration,gpus,id\n{first},60,1,a\n{second},60,1,b\n")
    found = read_trace(tmp_path / "t.csv")
    times = dict(zip(found.id, found.submit, strict=True))
    assert times["b"] - times["a"] == hours * 3600


@pytest.mark.parametrize("zone", ["CEST", "IST", "Europe/Berlin"])
def test_a_zone_of_no_sure_meaning_is_refused(tmp_path: Path, zone: str) -> None:
    (tmp_path / "t.csv").write_text(f"submit,duration,gpus\n2024-01-01 10:00:00 {zone},60,1\n")
    with pytest.raises(DataError, match=f"time zone '{zone}'.*Write an offset"):
        read_trace(tmp_path / "t.csv")


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
    (tmp_path / "t.csv").write_text(f"submit,{header},gpus\n5,90,1\n")
    mapping = None if columns is None else parse_columns(f"submit=submit:h,duration={header}:{columns},gpus=gpus")
    found = read_trace(tmp_path / "t.csv", mapping)
    assert found.duration.tolist() == pytest.approx([minutes * 60])
    assert says in " ".join(found.how) and bool(says) == bool(found.how)


@pytest.mark.parametrize(("size", "name"), [(60, "minutes"), (3600, "hours"), (0.001, "milliseconds"), (1, "")])
def test_start_and_end_tell_the_unit_of_durations(tmp_path: Path, size: float, name: str) -> None:
    rows = [(0, 7200, 10), (100, 3600, 20), (200, 86400, 30), (300, 1800, 3000)]
    lines = [f"{at},{at + waits},{at + waits + ran},{ran / size},1" for at, ran, waits in rows]
    (tmp_path / "t.csv").write_text("\n".join(["submit_time,start_time,end_time,duration,gpus", *lines]) + "\n")
    found = read_trace(tmp_path / "t.csv")
    assert found.duration.tolist() == pytest.approx([ran for _, ran, _ in rows])
    assert found.how == ((f"'duration' is read as {name}, as start and end say",) if name else ())


def test_slurms_own_durations(tmp_path: Path) -> None:
    found = trace_of(
        "Submit,Elapsed,gpus\n2024-01-01T00:00:00,1-02:03:04,1\n2024-01-01T00:00:09,00:10:00,1\n", tmp_path
    )
    assert found.duration.tolist() == [86400 + 7384, 600]


@pytest.mark.parametrize("given", ["duration=duration:weeks", "duration=duration:dmy", "submit=submit:minits"])
def test_units_that_are_none(tmp_path: Path, given: str) -> None:
    (tmp_path / "t.csv").write_text("submit,duration,gpus\n1,2,3\n")
    with pytest.raises(JobError, match=r"is no unit of .* Units are ns, us, ms, s, min, h, d"):
        read_trace(tmp_path / "t.csv", parse_columns(f"gpus=gpus,{given}"))


def test_a_colon_in_a_columns_own_name(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("submit,took:min,gpus\n1,2,3\n")
    found = read_trace(tmp_path / "t.csv", parse_columns("submit=submit,duration=took:min,gpus=gpus"))
    assert found.duration.tolist() == [2.0]  # the column is called so
    (tmp_path / "t.csv").write_text("submit,took:min,gpus,took\n1,2,3,4\n")
    found = read_trace(tmp_path / "t.csv", parse_columns("submit=submit,duration=took:min,gpus=gpus"))
    assert found.duration.tolist() == [2.0]


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ("1,60,10000000", ""), ("1,60,10000001", "more GPUs than there are anywhere"), ("1,3155760000,1", ""),
        ("1,3155760001,1", "ran for more than a hundred years"), ("1,60,0", "asks for no GPU"),
        ("1,60,-1", "negative number of GPUs"), ("1,60,x", "no number of GPUs"), ("1,0,1", "ran for no time"),
        ("1,-1,1", "negative duration"), ("1,x,1", "no duration"), ("x,60,1", "no submission time"),
        ("1,60,inf", "no number of GPUs"), ("inf,60,1", "no submission time"), ("x,x,x", "no submission time"),
    ],
)  # fmt: skip
def test_why_a_row_is_no_job(tmp_path: Path, row: str, why: str) -> None:
    found = trace_of(f"submit,duration_s,gpus\n0,60,1\n0,60,1\n{row}\n", tmp_path)
    assert found.dropped == ({why: 1} if why else {})
    assert (len(found), found.rows) == (2 if why else 3, 3)
    assert found.over.counts == ({f"rows ({why})": 1} if why else {})


def test_a_job_that_began_before_it_was_submitted_begins_as_it_is_submitted(tmp_path: Path) -> None:
    found = trace_of("submit,start,end,gpus\n10,5,40,1\n10,10,40,1\n10,30,40,1\n", tmp_path)
    assert found.begin.tolist() == [0, 0, 20] and found.duration.tolist() == [35, 30, 10]
    assert found.changed == {"start before submission set to submission": 1}


def test_the_span_of_a_trace(tmp_path: Path) -> None:
    """To one usual gap after the last submission, and an hour at least."""
    assert trace_of("submit,duration_s,gpus\n0,1,1\n6000,1,1\n12000,1,4\n", tmp_path).span == 18_000
    few = trace_of("submit,duration_s,gpus\n0,1800,1\n60,900,4\n", tmp_path)
    assert few.span == 3600 and few.busy() == 1.5
    assert trace_of("submit,duration_s,gpus\n7,1,1\n", tmp_path).span == 3600


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


def test_a_job_of_phillys_log_needs_no_more_than_its_keys(tmp_path: Path) -> None:
    bare = {key: PHILLY[0][key] for key in KEYS}
    assert trace_of(json.dumps([bare]), tmp_path, "log.json").duration.tolist() == [600.0]
    for key in KEYS:
        lacks = {name: value for name, value in PHILLY[0].items() if name != key}
        with pytest.raises(DataError, match="no job of a Philly log: it lacks"):
            trace_of(json.dumps([bare, lacks]), tmp_path, "log.json")


def test_durations_of_which_half_are_no_numbers() -> None:
    column = pandas().Series(["60", "1:00:00"], name="took")
    assert np.isnan(lengths(column, "s").values).tolist() == [False, True]
    three = pandas().Series(["60", "1:00:00", "2-00:00:00"], name="took")
    assert lengths(three).values[1:].tolist() == [3600, 2 * 86_400]


def test_openbs_pods_of_which_none_was_deleted(tmp_path: Path) -> None:
    head, *rows = OPENB.splitlines()
    for index, row in enumerate(rows):
        parts = row.split(",")
        parts[9] = ""
        rows[index] = ",".join(parts)
    assert trace_of("\n".join([head, *rows]) + "\n", tmp_path).dropped == {"never started": 1, "no duration": 4}
    assert trace_of(head + "\n", tmp_path).rows == 0


@pytest.mark.parametrize(
    ("name", "told"),
    [("job_name", ("job_name", "")), ("at_dmy", ("at_dmy", "")), ("x", ("x", "")), ("run_ms", ("run", "ms"))],
)
def test_units_at_the_ends_of_names(name: str, told: tuple[str, str]) -> None:
    assert without_unit(name) == told


def test_spots_jobs_of_which_little_is_told(tmp_path: Path) -> None:
    """Neither their type, nor processors and GPUs, of which the table has no columns."""
    head = "job_name,organization,gpu_request,worker_num,submit_time,duration,job_type"
    found = trace_of(f"{head}\nj0,o1,8,1,1,60,\nj1,,1,2,2,9,spot x\n", tmp_path)
    assert (found.schema, found.preemptible.tolist()) == ("alibaba-spot", [False, True])
    assert set(found.numbers) == {"nodes"} and set(found.categories) == {"group", "queue"}
    assert set(trace_of(SPOT, tmp_path).numbers) == {"nodes", "cpus"}
    assert set(trace_of(SPOT, tmp_path).categories) == {"group", "queue", "type"}
