"""Traces: published forms, tables of one's own, and files that are refused."""

from __future__ import annotations

import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.core.base.errors import DataError, JobError
from plait.formats.job_traces import read
from plait.formats.job_traces.read import COLUMNS, FORMS, KEYS, PAI_HEADER, parse_columns, read_trace
from plait.formats.job_traces.table import CATEGORIES, NUMBERS
from tests.formats.job_traces.published import ACME, HELIOS, PAI, PHILLY, SPOT
from tests.support.workloads import trace_of

HEAD = "submit,duration,gpus\n"
CELL = st.sampled_from(("", "NaN", "inf", "-3", "0", "1", "2.5", "17", "1e3", "word"))


@settings(max_examples=25)
@given(rows=st.lists(st.tuples(CELL, CELL, CELL), max_size=30))
def test_every_row_is_a_job_or_counted(tmp_path: Path, rows: list[tuple[str, str, str]]) -> None:
    table = "".join(f"{','.join(row)},x\n" for row in [("submit", "duration", "gpus"), ("1", "1", "1"), *rows])
    found = trace_of(table, tmp_path)
    assert len(found) + sum(found.dropped.values()) == found.rows == len(rows) + 1
    assert found.over.counts == {f"rows ({why})": count for why, count in found.dropped.items()}
    assert (np.diff(found.submit) >= 0).all() and (found.begin >= found.submit).all()
    assert (found.duration > 0).all() and np.isfinite(found.duration).all() and (found.gpus >= 1).all()
    assert len(found.id) == len(found.preemptible) == len(found)


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ("1,60,10000000", ""), ("1,60,10000001", "more GPUs than there are anywhere"), ("1,3155760000,1", ""),
        ("1,3155760001,1", "ran for more than a hundred years"), ("1,60,0", "asks for no GPU"),
        ("1,60,-1", "negative number of GPUs"), ("1,60,x", "no number of GPUs"), ("1,0,1", "ran for no time"),
        ("1,-1,1", "negative duration"), ("1,x,1", "no duration"), ("x,60,1", "no submission time"),
        ("1,60,inf", "no number of GPUs"), ("inf,60,1", "no submission time"), ("x,x,x", "no submission time"),
        ("4102444800,1,1", ""), ("4102444801,1,1", "times after 2100, so in no seconds"),
    ],
)  # fmt: skip
def test_why_a_row_is_no_job(tmp_path: Path, row: str, why: str) -> None:
    found = trace_of(f"{HEAD}0,60,1\n0,60,1\n{row}\n", tmp_path)
    assert found.dropped == ({why: 1} if why else {})
    assert (len(found), found.rows) == (2 if why else 3, 3)


PUBLISHED: list[tuple[str, str, dict[str, Any]]] = [
    ("helios", HELIOS, {
        "schema": "helios", "id": ("9", "7"), "gpus": [16, 8], "submit": [0.0, 5.0], "begin": [0.0, 15.0],
        "duration": [30.0, 60.0], "dropped": {"asks for no GPU": 1}, "cpus": [64, 32], "group": ("vc1",),
    }),
    ("acme", ACME, {
        "schema": "acme", "id": ("dlc1",), "gpus": [16], "duration": [3600.0], "dropped": {"no duration": 1},
        "memory": [800], "first": 1677628800.0, "group": ("u",),
    }),
    ("spot", SPOT, {
        "schema": "alibaba-spot", "id": ("j1", "j0"), "gpus": [1, 32], "preemptible": [True, False],
        "changed": {"part of a GPU counted as a whole one": 1}, "nodes": [1, 4], "cpus": [6, 12],
        "type": ("A10", "A100"),
    }),
    ("pai", PAI, {
        "schema": "alibaba-pai", "id": ("b", "c", "a"), "gpus": [8, 1, 2], "duration": [30.0, 30.0, 300.0],
        "dropped": {"never started": 1, "never ended": 1, "asks for no GPU": 1},
        "changed": {"part of a GPU counted as a whole one": 1}, "queue": ("MISC", "T4", "V100"),
    }),
    ("philly", json.dumps(PHILLY), {
        "schema": "philly-json", "id": ("application_1",), "gpus": [3], "begin": [5.0], "duration": [600.0],
        "dropped": {"never started": 1, "never ended": 1}, "user": ("u1",), "group": ("ee9e8c",),
    }),
]  # fmt: skip


@pytest.mark.parametrize(("form", "text", "told"), PUBLISHED, ids=[form for form, _, _ in PUBLISHED])
@pytest.mark.parametrize("packed", [False, True])
def test_published_forms(tmp_path: Path, form: str, text: str, told: dict[str, Any], packed: bool) -> None:
    """Named, and known by their columns or for being JSON."""
    file = tmp_path / f"t.{'json' if form == 'philly' else 'csv'}{'.gz' if packed else ''}"
    file.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    found = read_trace(file)
    for key, value in told.items():
        if key in found.categories:
            assert found.categories[key].names == value
        else:
            own = found.numbers[key] if key in found.numbers else getattr(found, key)
            assert (own.tolist() if isinstance(own, np.ndarray) else own) == value, key
    assert repr(read_trace(file, form)) == repr(found)
    if form != "philly":
        lacks = text.replace(next(iter(FORMS[form].columns.values())), "x")
        file.write_text(lacks)
        with pytest.raises(JobError, match="format: there is no column") as caught:
            read_trace(file, form)
        assert "x" in (caught.value.fix or "")


@pytest.mark.parametrize("form", FORMS)
def test_columns_that_not_every_published_file_has(tmp_path: Path, form: str) -> None:
    text = {name: text for name, text, _ in PUBLISHED}[form]
    for column in FORMS[form].optional.values():
        text = text.replace(f"{column},", "other,").replace(f",{column}\n", ",other2\n")
    found = trace_of(text, tmp_path)
    assert found.schema == FORMS[form].schema and not FORMS[form].optional.keys() & {*found.numbers, *found.categories}


def attempts(*tries: tuple[int, int, int]) -> list[dict[str, Any]]:
    """Of a Philly job: (start, end, GPUs), in minutes after ten."""
    return [
        {"start_time": f"2017-10-03 {10 + start // 60}:{start % 60:02}:00",
         "end_time": f"2017-10-03 {10 + end // 60}:{end % 60:02}:00",
         "detail": [{"ip": "m0", "gpus": [f"gpu{i}" for i in range(count)]}]}
        for start, end, count in tries
    ]  # fmt: skip


UNEVEN = "jobs with attempts on different numbers of GPUs, which count as the most, for their GPU time: 1"
EVEN = "jobs with several attempts on as many GPUs, which last from the first start to the last end: 1"


@pytest.mark.parametrize(
    ("tries", "gpus", "took", "says"),
    [
        ([(0, 1, 1), (55, 115, 4)], 4, 60 * (60 + 1 / 4), (UNEVEN,)),
        ([(0, 30, 8), (40, 50, 2), (50, 60, 2)], 8, 60 * (30 + 20 * 2 / 8), (UNEVEN,)),
        ([(0, 10, 2), (20, 30, 2)], 2, 1800, (EVEN,)),
        ([(0, 10, 2)], 2, 600, ()),
    ],
)
def test_attempts_of_a_philly_job_keep_its_gpu_time(
    tmp_path: Path, tries: list[tuple[int, int, int]], gpus: int, took: float, says: tuple[str, ...]
) -> None:
    job = {"jobid": "a", "submitted_time": "2017-10-03 10:00:00", "attempts": attempts(*tries)}
    found = trace_of(json.dumps([PHILLY[1], job]), tmp_path, "log.json")
    assert found.gpus.tolist() == [gpus] and found.duration.tolist() == [pytest.approx(took)]
    assert found.assumptions == says


def test_a_gpu_that_a_philly_attempt_lists_twice_is_one(tmp_path: Path) -> None:
    [one] = attempts((0, 60, 2))
    one["detail"] += [{"ip": "m0", "gpus": ["gpu1"]}, {"ip": "m1", "gpus": ["gpu1"]}]
    job = {"jobid": "a", "submitted_time": "2017-10-03 10:00:00", "attempts": [one]}
    assert trace_of(json.dumps([job]), tmp_path, "log.json").gpus.tolist() == [3]


def changed_log(change: Callable[[dict[str, Any]], object], at: int = 0) -> str:
    log = json.loads(json.dumps(PHILLY))
    change(log[at])
    return json.dumps(log)


def test_an_attempt_with_odd_times_is_passed_over(tmp_path: Path) -> None:
    text = changed_log(lambda job: job["attempts"][0].update(start_time=[1], end_time={}))
    assert trace_of(text, tmp_path, "log.json").duration.tolist() == [120.0]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "no readable JSON"), ("[]\n[]", r"no readable JSON.* jq -s \. makes one"),
        ('[{"a": 1}]', "no Philly log"), ("3", "no Philly"),
        *((json.dumps([*PHILLY, entry]), "entry 3 is no job of a Philly log: it lacks attempts, ")
          for entry in (7, [], {}, dict.fromkeys(KEYS[1:], "x"))),
        (changed_log(lambda job: job.update(attempts=3)), "entry 0: attempts: int is no list"),
        (changed_log(lambda job: job["attempts"][0].update(detail=3)), "entry 0: detail: int is no list"),
        (changed_log(lambda job: job["attempts"][0]["detail"][0].update(gpus=3)), "entry 0: gpus: int is no list"),
    ],
)  # fmt: skip
def test_logs_that_cannot_be_read(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(DataError, match=says):
        trace_of(text, tmp_path, "log.json")


def test_documented_names_and_given_ones(tmp_path: Path) -> None:
    text = "when,until,n,team\n2024-01-01T10:00:00+01:00,2024-01-01T10:00:30Z,2,a\n"
    text += "2024-01-01 09:00:01,2024-01-01 09:01,1,b\n"
    found = trace_of(text, tmp_path, columns="submit=when,end=until,gpus=n,group=team")
    assert found.submit.tolist() == [0.0, 1.0] and found.duration.tolist() == [3630.0, 59.0]
    assert found.first == 1704099600.0
    for names in (0, -1):
        own = {key: known[names] for key, known in COLUMNS.items() if key not in ("end", "id", "preemptible")}
        told = trace_of(f"{','.join(own.values())}\n{','.join('2' for _ in own)}\n", tmp_path)
        assert (told.gpus.tolist(), told.duration.tolist(), told.priority.tolist()) == ([4], [2.0], [2])
        assert {*told.numbers, *told.categories} == {*NUMBERS, *CATEGORIES}
    assert trace_of("submit,start,end,gpus\n10,5,40,1\n10,30,40,1\n", tmp_path).changed == {
        "start before submission set to submission": 1
    }


def test_a_job_begins_as_it_is_submitted_at_the_earliest(tmp_path: Path) -> None:
    found = trace_of("submit,start,end,gpus\n10,5,40,1\n10,10,40,1\n10,30,40,1\n10,,40,1\n", tmp_path)
    assert found.begin.tolist() == [0, 0, 20, 0] and found.duration.tolist() == [35, 30, 10, 30]


def test_instances_multiply_gpus(tmp_path: Path) -> None:
    text = "job_id,num_gpu,num_inst,submit_time,duration\n1,2,3,0,60\n2,1,1,5,60\n"
    assert trace_of(text, tmp_path).gpus.tolist() == [2, 1]
    columns = "submit=submit_time,duration=duration,gpus=num_gpu,instances=num_inst"
    assert trace_of(text, tmp_path, columns=columns).gpus.tolist() == [6, 1]


def test_the_span_of_a_trace(tmp_path: Path) -> None:
    """To one usual gap after the last submission, and an hour at least."""
    assert trace_of(f"{HEAD}0,1,1\n6000,1,1\n12000,1,4\n", tmp_path).span == 18_000
    few = trace_of(f"{HEAD}0,1800,1\n60,900,4\n", tmp_path)
    assert few.span == 3600 and few.busy() == 1.5
    assert trace_of(f"{HEAD}7,1,1\n", tmp_path).span == 3600
    none = trace_of(HEAD, tmp_path)
    assert (len(none), none.rows, none.busy()) == (0, 0, 0.0)


def test_cells_that_are_read_otherwise_than_written_are_counted(tmp_path: Path) -> None:
    head = "id,submit,gpus,duration,priority,preemptible\n"
    found = trace_of(head + "a,0,1.5,60,high,maybe\na,1,1,60,,\nb,2,1,60,3,No\nc,2,1,60,1e99,Spot\n", tmp_path)
    assert found.priority.tolist() == [0, 0, 3, 2**32] and found.preemptible.tolist() == [False, False, False, True]
    assert found.changed == {
        "part of a GPU counted as a whole one": 1, "preemptible neither yes nor no, counted as no": 1,
        "priority that is no number, counted as 0": 1,
    }  # fmt: skip


PAI_ROW = "8ca5,worker,1.0,Terminated,1000023.6,1001069.1,600.0,29.2,200.0,MISC"


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (PAI_ROW, f"is none.*above it, such as {PAI_HEADER}"),
        ("5,60,8\n", "'5' is none.*such as submit_time,duration,num_gpus"),
        ("", "is empty"), (b"\n\n  \n", "is empty"), (b"\xff\xfea\x00", "no readable"),
        (HEAD + "0,1,60,7\n1,2,70,8\n", "rows have more cells than the first line has names"),
        (HEAD + "0,1,60,\n0,2,70,8\n", "rows have more cells"), (b"a," * 600 + b"b\n", "601 columns; at most 500"),
        (b"\0" * (2 << 20), "a line of more than|larger than field limit"),
        (gzip.compress(HEAD.encode() + b"1,1," + b"1" * (3 << 20)), "a line of more than 1048576 bytes"),
        (gzip.compress(HEAD.encode() + b"\n" * 4_000_001), "more than 4000000 lines"),
        (gzip.compress(HEAD.encode() * 2000)[:40], "no readable table"),
        (lzma.compress(HEAD.encode() * 2000)[:60], "no readable table"),
        (b"PK\x03\x04rest", "no readable table|no column"),
        ("submit,gpus,gpus,duration\n0,1,2,60\n", "two columns are called 'gpus'"),
        ("a;b\n1;2\n", r"known to hold submit, gpus, duration \(or end\); its columns, which commas separate, are a;b"),
    ],
    ids=range(16),
)  # fmt: skip
def test_tables_that_cannot_be_read(tmp_path: Path, data: str | bytes, says: str) -> None:
    (tmp_path / "t.csv").write_bytes(data.encode() if isinstance(data, str) else data)
    with pytest.raises((DataError, JobError), match=says) as caught:
        read_trace(tmp_path / "t.csv")
    assert len(str(caught.value)) < 2500


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ("submit=sub,duration=durr,gpus=n", r"no column 'durr' \(did you mean 'dur'"),
        ("submit=sub,gpus=n", r"no column is known to hold duration \(or end\)"),
        ("submit=sub,length=dur", "'length' is not a field of a job"), ("submit", "no FIELD=COLUMN"),
        ("gpus=n,gpus=n", "'gpus' is given twice"),
    ],
)  # fmt: skip
def test_columns_that_are_not_given_rightly(tmp_path: Path, columns: str, says: str) -> None:
    with pytest.raises(JobError, match=says):
        trace_of("sub,dur,n\n1,2,3\n", tmp_path, columns=columns)


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        read_trace(tmp_path / "nothing.csv")
    with pytest.raises(DataError, match="is no regular file"):
        read_trace(tmp_path)
    with pytest.raises(JobError, match=r"format: there is no form 'heliios' \(did you mean 'helios'"):
        read_trace(tmp_path, "heliios")


@pytest.mark.parametrize("more", [0, 1])
def test_rows_are_read_to_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: int) -> None:
    monkeypatch.setattr(read, "MOST_ROWS", 3)
    text = HEAD + "1,2,3\n" * (3 + more)
    if more:
        with pytest.raises(DataError, match="has more than 3 rows, the most that is read"):
            trace_of(text, tmp_path)
    else:
        assert len(trace_of(text, tmp_path)) == 3


@pytest.mark.parametrize("rows", ["0,60,1,\n0,70,2,\n", "0,60,1,\n0,70,2\n"])
def test_a_mark_that_ends_every_line_moves_no_cell(tmp_path: Path, rows: str) -> None:
    """pandas takes the first cells of such rows for their names, and all others then move."""
    found = trace_of(HEAD + rows, tmp_path)
    assert found.gpus.tolist() == [1, 2] and found.duration.tolist() == [60, 70]


def test_a_table_may_be_called_as_if_it_were_json(tmp_path: Path) -> None:
    """Where its form or its columns are told; else it is a log of Philly's."""
    file = tmp_path / "t.json"
    file.write_text(f"{HEAD}1,2,3\n")
    named = parse_columns("submit=submit,duration=duration,gpus=gpus")
    assert len(read_trace(file, "csv")) == len(read_trace(file, columns=named)) == 1
    with pytest.raises(DataError, match="no readable JSON"):
        read_trace(file)
