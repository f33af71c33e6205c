"""Files of traces that are none, or hostile: one clear error within bounds."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from plait.core.base.errors import DataError, JobError
from plait.place.traces import read
from plait.place.traces.read import read_trace
from tests.place.published import PAI, PHILLY
from tests.support.workloads import trace_of


@pytest.mark.parametrize(
    ("first", "says"),
    [
        (
            "8ca5,worker,1.0,Terminated,1000023.6,1001069.1,600.0,29.2,200.0,MISC",
            "above it, such as job_name,task_name,i",
        ),
        ("5,60,8", "'5' is none.*such as submit_time,duration,num_gpus"),
        ("5;60;8", "the first line is a job"),
    ],
)
def test_a_table_without_names_of_columns(tmp_path: Path, first: str, says: str) -> None:
    with pytest.raises(DataError, match=says):
        trace_of(f"{first}\n{first}\n", tmp_path)
    named = trace_of(f"{PAI.splitlines()[0]}\n8ca5,worker,1.0,Terminated,1.0,2.0,600.0,29.2,200.0,MISC\n", tmp_path)
    assert named.gpus.tolist() == [2]  # as advised


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"PK\x03\x04rest", "is packed with zip. Unpack it, or pack it with gzip, bzip2 or xz"),
        (b"\x28\xb5\x2f\xfdrest", "is packed with zstd"),
        (b"a," * 600 + b"b\n", "601 columns; at most 500"),
        (b"\0" * (2 << 20), "a line of more than|larger than field limit"),
        (b"\xff\xfea\x00", "no readable table"),
        (b"\n\n  \n", "is empty"),
        (gzip.compress(b"submit,duration,gpus\n" + b"1,1,1\n" * 2_000_001), "more than 2,000,000 rows of 3 columns"),
        (gzip.compress(b"submit,duration,gpus\n1,1," + b"1" * (3 << 20)), "a line of more than 1048576 bytes"),
        (gzip.compress(b"submit,duration,gpus\n" + b"\n" * 4_000_001), "more than 4000000 lines"),
    ],
    ids=range(9),
)
def test_hostile_tables(tmp_path: Path, data: bytes, says: str) -> None:
    (tmp_path / "t.csv").write_bytes(data)
    with pytest.raises(DataError, match=says):
        read_trace(tmp_path / "t.csv")


@pytest.mark.parametrize(
    "change",
    [
        lambda job: job.update(attempts=3),
        lambda job: job["attempts"][0].update(detail=3),
        lambda job: job["attempts"][0]["detail"][0].update(gpus=3),
    ],
)
def test_a_philly_log_with_other_types(tmp_path: Path, change: Any) -> None:
    log = json.loads(json.dumps(PHILLY))
    change(log[0])
    with pytest.raises(DataError, match=r"entry 0: .* is no list"):
        trace_of(json.dumps(log), tmp_path, "log.json")


def test_a_packed_philly_log_with_odd_times(tmp_path: Path) -> None:
    log = json.loads(json.dumps(PHILLY))
    log[0]["attempts"][0] |= {"start_time": [1], "end_time": {}}
    (tmp_path / "log.json.gz").write_bytes(gzip.compress(json.dumps(log).encode()))
    assert read_trace(tmp_path / "log.json.gz").duration.tolist() == [120.0]


@pytest.mark.parametrize("entry", [7, [], {}, {"jobid": "x"}])
def test_an_entry_of_a_philly_log_that_is_no_job(tmp_path: Path, entry: Any) -> None:
    log = [*json.loads(json.dumps(PHILLY)), entry]
    with pytest.raises(DataError, match=rf"entry {len(log) - 1} is no job of a Philly log: it lacks attempts, "):
        trace_of(json.dumps(log), tmp_path, "log.json")


def test_one_column_may_be_called_by_a_number(tmp_path: Path) -> None:
    found = trace_of("submit,duration,gpus,2024\n1,2,3,4\n", tmp_path)
    assert found.gpus.tolist() == [3]
    with pytest.raises(DataError, match="the first line is a job, not the names of columns"):
        trace_of("submit,duration,gpus,2024,7\n1,2,3,4,5\n", tmp_path)


def test_rows_that_are_left_out_are_counted_as_by_all_readers(tmp_path: Path) -> None:
    found = trace_of("submit,duration,gpus\n1,2,3\n1,-2,3\n1,,3\n1,5,0\n", tmp_path)
    assert found.dropped and found.over.counts == {f"rows ({why})": count for why, count in found.dropped.items()}
    assert sum(found.over.counts.values()) == 3


def test_what_a_spot_trace_tells_beside_jobs(tmp_path: Path) -> None:
    rows = "job_name,organization,gpu_request,worker_num,submit_time,duration,job_type{}\nj0,o1,8,4,1,3600,HP{}\n"
    plain = trace_of(rows.format("", "") + "j1,,1,1,2,60,spot\n", tmp_path)
    assert (set(plain.numbers), set(plain.categories)) == ({"nodes"}, {"group", "queue"})
    assert (plain.gpus.tolist(), plain.preemptible.tolist()) == ([32, 1], [False, True])
    more = trace_of(rows.format(",cpu_request,gpu_model", ",12,A100"), tmp_path)
    assert (set(more.numbers), set(more.categories)) == ({"nodes", "cpus"}, {"group", "queue", "type"})
    assert more.numbers["cpus"].tolist() == [12.0]


@pytest.mark.parametrize(("more", "refused"), [(0, False), (1, True)])
def test_columns_and_rows_are_read_to_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: int, refused: bool
) -> None:
    monkeypatch.setattr(read, "MOST_COLUMNS", 5)
    names = ["submit", "duration_s", "gpus", *(f"x{at}" for at in range(2 + more))]
    file = tmp_path / "t.csv"
    file.write_text(f"{','.join(names)}\n{','.join('1' for _ in names)}\n")
    if refused:
        with pytest.raises(DataError, match="has 6 columns; at most 5 are read"):
            read_trace(file)
    else:
        assert len(read_trace(file)) == 1
    monkeypatch.setattr(read, "MOST_COLUMNS", 9)
    for limit, most in (("MOST_ROWS", 3), ("MOST_CELLS", 9)):
        with monkeypatch.context() as patch:
            patch.setattr(read, limit, most)
            file.write_text("submit,duration_s,gpus\n" + "1,2,3\n" * (3 + more))
            if refused:
                with pytest.raises(DataError, match="has more than 3 rows of 3 columns"):
                    read_trace(file)
            else:
                assert len(read_trace(file)) == 3


def test_a_table_may_be_called_as_if_it_were_json(tmp_path: Path) -> None:
    """Where its columns are told; else it is a log of Philly's."""
    file = tmp_path / "t.json"
    file.write_text("a,b,c\n1,2,3\n")
    assert len(read_trace(file, {"submit": "a", "duration": "b", "gpus": "c"})) == 1
    with pytest.raises(DataError, match="no readable JSON"):
        read_trace(file)


def test_names_of_columns_without_end_make_no_endless_error(tmp_path: Path) -> None:
    file = tmp_path / "t.csv"
    file.write_text("x" * 10**5 + "\n1\n")
    with pytest.raises(JobError, match=r"its columns are x+\.\.\.x+ and more") as caught:
        read_trace(file)
    assert len(str(caught.value)) < 1600 + len(str(file))
