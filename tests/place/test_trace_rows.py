"""Rows of a trace: each is a job or counted by the reason why it is none; tables that are refused."""

from __future__ import annotations

import gzip
import lzma
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.core.base.errors import DataError, JobError
from plait.place.traces.read import read_trace
from plait.place.traces.table import Trace
from tests.support.workloads import trace_of


def check(found: Trace) -> None:
    """What every trace promises."""
    assert (np.diff(found.submit) >= 0).all() and (found.begin >= found.submit).all()
    assert (found.duration > 0).all() and np.isfinite(found.duration).all() and (found.gpus >= 1).all()
    assert len(found.id) == len(found.preemptible) == len(found)


CELL = st.sampled_from(("", "NaN", "inf", "-3", "0", "1", "2.5", "17", "1e3", "word"))


@given(rows=st.lists(st.tuples(CELL, CELL, CELL), max_size=30))
def test_every_row_is_a_job_or_counted(tmp_path: Path, rows: list[tuple[str, str, str]]) -> None:
    table = "".join(f"{','.join(row)},x\n" for row in [("submit", "duration", "gpus"), ("1", "1", "1"), *rows])
    found = trace_of(table, tmp_path)
    assert len(found) + sum(found.dropped.values()) == found.rows == len(rows) + 1
    check(found)


def test_an_empty_table_is_a_trace_without_jobs(tmp_path: Path) -> None:
    found = trace_of("submit_time,duration,num_gpu\n", tmp_path)
    assert (len(found), found.rows, found.busy()) == (0, 0, 0.0)


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


def test_numbers_beyond_any_machine_are_left_out_by_reason(tmp_path: Path) -> None:
    found = trace_of("submit,gpus,duration\n0,1e30,5\n1,2,1e300\n2,3,4\n", tmp_path)
    assert found.gpus.tolist() == [3]
    assert sum(found.dropped.values()) == 2


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
    with pytest.raises(error, match=says):
        trace_of(text, tmp_path, columns=columns)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "no readable JSON"),
        ("[]\n[]", r"no readable JSON.* jq -s \. makes one"),
        ('[{"a": 1}]', "no Philly log"),
        ("3", "no Philly"),
    ],
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


@pytest.mark.parametrize("rows", ["0,1,60,\n0,2,70,\n", "0,1,60,\n0,2,70\n"])
def test_a_mark_that_ends_every_line_moves_no_cell(tmp_path: Path, rows: str) -> None:
    """pandas takes the first cells of such rows for their names, and all others then move."""
    found = trace_of(f"submit,gpus,duration_s\n{rows}", tmp_path)
    assert found.gpus.tolist() == [1, 2] and found.duration.tolist() == [60, 70]


@pytest.mark.parametrize("rows", ["0,1,60,7\n1,2,70,8\n", "0,1,60,\n0,2,70,8\n", "0,1,60,,7\n"])
def test_rows_of_more_cells_than_there_are_names_are_refused(tmp_path: Path, rows: str) -> None:
    with pytest.raises(DataError, match="rows have more cells than the first line has names"):
        trace_of(f"submit,gpus,duration_s\n{rows}", tmp_path)


def test_two_columns_of_one_name_are_refused_where_they_are_read(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="two columns are called 'gpus'"):
        trace_of("submit,gpus,gpus,duration_s\n0,1,2,60\n", tmp_path)
    assert trace_of("submit,gpus,x,x,duration_s\n0,1,2,2,60\n", tmp_path).gpus.tolist() == [1]


def test_cells_that_are_read_otherwise_than_written_are_said(tmp_path: Path) -> None:
    head = "id,submit,gpus,duration_s,priority,preemptible\n"
    found = trace_of(head + "a,0,1,60,high,maybe\na,1,1,60,,\nb,2,1,60,3,No\n", tmp_path)
    assert found.priority.tolist() == [0, 0, 3] and not found.preemptible.any()
    assert found.how[:-1] == (
        "cells of 'priority' that are no number, and count as 0: 1 (high)",
        "cells of 'preemptible' that are neither yes nor no, and count as no: 1 (maybe)",
        "cells of 'id' that are those of a row above; each row is a job: 1 (a)",
    )
    assert trace_of(f"{head}b,2,1,60,3,No\n", tmp_path).how == found.how[-1:]
