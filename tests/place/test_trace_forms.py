"""Published forms of traces, and tables of one's own: which column is what."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import pytest

from plait.core.base.errors import DataError
from plait.place.traces.published import PHILLY_KEYS
from plait.place.traces.read import read_trace
from plait.place.traces.times import without_unit
from tests.place.published import ACME, HELIOS, OPENB, PAI, PHILLY, SPOT
from tests.support.workloads import trace_of


def test_phillys_log(tmp_path: Path) -> None:
    found = trace_of(json.dumps(PHILLY), tmp_path, "cluster_job_log.json")
    assert (found.schema, found.id, found.gpus.tolist(), found.duration.tolist()) == (
        "philly-json", ("application_1",), [3], [600.0],
    )  # fmt: skip
    assert found.begin.tolist() == [5.0]
    assert found.dropped == {"never started": 1, "never ended": 1}
    assert found.categories["user"].names == ("u1",)


@pytest.mark.parametrize(
    ("attempts", "gpus", "took", "says"),
    [
        ([(0, 1, 1), (55, 115, 4)], 4, 60 * (60 + 1 / 4), "attempts on different numbers of GPUs, .*: 1"),
        (
            [(0, 30, 8), (40, 50, 2), (50, 60, 2)],
            8,
            60 * (30 + 20 * 2 / 8),
            "attempts on different numbers of GPUs, .*: 1",
        ),
        ([(0, 10, 2), (20, 30, 2)], 2, 1800, "several attempts on as many GPUs, .* first start to the last end: 1"),
        ([(0, 10, 2)], 2, 600, ""),
    ],
)
def test_attempts_of_a_philly_job_keep_its_gpu_time(
    tmp_path: Path, attempts: list[tuple[int, int, int]], gpus: int, took: float, says: str
) -> None:
    tries = [
        {
            "start_time": f"2017-10-03 {10 + start // 60}:{start % 60:02}:00",
            "end_time": f"2017-10-03 {10 + end // 60}:{end % 60:02}:00",
            "detail": [{"ip": "m0", "gpus": [f"gpu{i}" for i in range(count)]}],
        }
        for start, end, count in attempts
    ]
    job = {"jobid": "a", "submitted_time": "2017-10-03 10:00:00", "attempts": tries}
    found = trace_of(json.dumps([PHILLY[1], job]), tmp_path, "log.json")
    assert found.gpus.tolist() == [gpus] and found.duration.tolist() == [pytest.approx(took)]
    assert len(found.how) == bool(says) and re.search(says, " ".join(found.how))


def test_instances_multiply_gpus_where_that_is_asked_for_and_are_said_where_not(tmp_path: Path) -> None:
    text = "job_id,num_gpu,num_inst,submit_time,duration_s\n1,2,3,0,60\n2,1,1,5,60\n"
    plain = trace_of(text, tmp_path)
    assert plain.gpus.tolist() == [2, 1]
    assert any("'num_inst' counts several" in line and "instances=num_inst" in line for line in plain.how)
    columns = "submit=submit_time,duration=duration_s,gpus=num_gpu"
    asked = trace_of(text, tmp_path, columns=f"{columns},instances=num_inst")
    assert asked.gpus.tolist() == [6, 1] and not any("num_inst" in line for line in asked.how)
    assert "num_inst" not in " ".join(trace_of(text.replace("1,2,3,", "1,2,1,"), tmp_path).how), "one instance each"


def test_a_gpu_that_a_philly_attempt_lists_twice_is_one(tmp_path: Path) -> None:
    nodes = [{"ip": "m0", "gpus": ["gpu0", "gpu1"]}, {"ip": "m0", "gpus": ["gpu1"]}, {"ip": "m1", "gpus": ["gpu1"]}]
    tries = [{"start_time": "2017-10-03 10:00:00", "end_time": "2017-10-03 11:00:00", "detail": nodes}]
    job = {"jobid": "a", "submitted_time": "2017-10-03 10:00:00", "attempts": tries}
    assert trace_of(json.dumps([job]), tmp_path, "log.json").gpus.tolist() == [3]


def test_a_job_of_phillys_log_needs_no_more_than_its_keys(tmp_path: Path) -> None:
    bare = {key: PHILLY[0][key] for key in PHILLY_KEYS}
    assert trace_of(json.dumps([bare]), tmp_path, "log.json").duration.tolist() == [600.0]
    for key in PHILLY_KEYS:
        lacks = {name: value for name, value in PHILLY[0].items() if name != key}
        with pytest.raises(DataError, match="no job of a Philly log: it lacks"):
            trace_of(json.dumps([bare, lacks]), tmp_path, "log.json")


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


def test_openbs_pods_of_which_none_was_deleted(tmp_path: Path) -> None:
    head, *rows = OPENB.splitlines()
    for index, row in enumerate(rows):
        parts = row.split(",")
        parts[9] = ""
        rows[index] = ",".join(parts)
    assert trace_of("\n".join([head, *rows]) + "\n", tmp_path).dropped == {"never started": 1, "no duration": 4}
    assert trace_of(head + "\n", tmp_path).rows == 0


def test_spot(tmp_path: Path) -> None:
    found = trace_of(SPOT, tmp_path)
    assert (found.schema, found.id, found.gpus.tolist()) == ("alibaba-spot", ("j1", "j0"), [1, 32])
    assert found.preemptible.tolist() == [True, False]
    assert found.changed == {"part of a GPU counted as a whole one": 1}


def test_spots_jobs_of_which_little_is_told(tmp_path: Path) -> None:
    """Neither their type, nor processors and GPUs, of which the table has no columns."""
    head = "job_name,organization,gpu_request,worker_num,submit_time,duration,job_type"
    found = trace_of(f"{head}\nj0,o1,8,1,1,60,\nj1,,1,2,2,9,spot x\n", tmp_path)
    assert (found.schema, found.preemptible.tolist()) == ("alibaba-spot", [False, True])
    assert set(found.numbers) == {"nodes"} and set(found.categories) == {"group", "queue"}
    assert set(trace_of(SPOT, tmp_path).numbers) == {"nodes", "cpus"}
    assert set(trace_of(SPOT, tmp_path).categories) == {"group", "queue", "type"}


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
    found = trace_of(
        f"submit,duration,{header}\n1,60,200\n2,60,800\n",
        tmp_path,
        columns=f"submit=submit,duration=duration:s,gpus={columns or header}",
    )
    assert found.gpus.tolist() == gpus
    assert says in " ".join(found.how) and bool(says) == bool(found.how)


def test_gpus_that_look_like_percent_are_remarked_on(tmp_path: Path) -> None:
    def how(*counts: int) -> tuple[str, ...]:
        rows = "".join(f"{at},60,{count}\n" for at, count in enumerate(counts))
        return tuple(said for said in trace_of("submit,duration_s,gpus\n" + rows, tmp_path).how if "gpus" in said)

    assert how(25, 50, 100, 200, 50)[0].endswith("though all are multiples of 5 (percent: 'gpus:percent')")
    assert not how(25, 50, 100, 200, 8)
    assert not how(5, 10, 15, 20, 10)
    assert not how(100, 200)
    assert how(25, 50, 100, 50, 75), "100 is a whole GPU"
    assert not how(25, 50, 95, 50, 75)


def test_usual_names_and_given_ones(tmp_path: Path) -> None:
    text = "when,until,n,team\n2024-01-01T10:00:00+01:00,2024-01-01T10:00:30Z,2,a\n"
    text += "2024-01-01 09:00:01,2024-01-01 09:01,1,b\n"
    found = trace_of(text, tmp_path, columns="submit=when,end=until,gpus=n,group=team")
    assert found.submit.tolist() == [0.0, 1.0] and found.duration.tolist() == [3630.0, 59.0]
    assert trace_of("submit_time,duration,num_gpu,cluster\n5,3,2,x\n4,1,1,y\n", tmp_path).submit.tolist() == [0.0, 1.0]


def test_a_colon_in_a_columns_own_name(tmp_path: Path) -> None:
    found = trace_of("submit,took:min,gpus\n1,2,3\n", tmp_path, columns="submit=submit,duration=took:min,gpus=gpus")
    assert found.duration.tolist() == [2.0]  # the column is called so
    found = trace_of(
        "submit,took:min,gpus,took\n1,2,3,4\n", tmp_path, columns="submit=submit,duration=took:min,gpus=gpus"
    )
    assert found.duration.tolist() == [2.0]


@pytest.mark.parametrize(
    ("name", "told"),
    [("job_name", ("job_name", "")), ("at_dmy", ("at_dmy", "")), ("x", ("x", "")), ("run_ms", ("run", "ms"))],
)
def test_units_at_the_ends_of_names(name: str, told: tuple[str, str]) -> None:
    assert without_unit(name) == told


def test_compressed_tables(tmp_path: Path) -> None:
    file = tmp_path / "jobs.csv.gz"
    file.write_bytes(gzip.compress(HELIOS.encode()))
    assert len(read_trace(file)) == 2


@pytest.mark.parametrize("mark", [";", "\t", "|"])
def test_other_separators(tmp_path: Path, mark: str) -> None:
    rows = [("submit", "gpus", "duration"), ("0", "1.0", "5"), ("1", "2.0", "6,5" if mark == ";" else "6.5")]
    found = trace_of("".join(mark.join(row) + "\n" for row in rows), tmp_path)
    assert found.gpus.tolist() == [1, 2]
    assert found.duration.tolist() == [5, 6.5]
