"""What nccl-tests and rccl-tests write as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from plait.core.base.errors import JobError
from plait.core.cluster.profile import Group
from plait.plan.profile_import import import_profile
from tests.plan.nccl_texts import read


def half(time: float, wrong: Any = 0.0, size: int = 1024) -> dict[str, Any]:
    return {
        "time": time,
        "alg_bw": size / time / 1e3 if isinstance(time, float) and time > 0 else 1.0,
        "bus_bw": 1.0,
        "nwrong": wrong,
    }


def written(name: str = "all_reduce_perf", ngpus: int = 1, **changes: Any) -> dict[str, Any]:
    """As nccl-tests write it with -J: of a process with several GPUs only the first is named."""
    devices = [
        {"rank": rank, "group": 0, "pid": 7, "hostname": f"n{rank // 4}", "device": rank % 4, "device_info": "Acme X1"}
        for rank in range(0, 8, ngpus)
    ]
    rows = [
        {"size": size, "count": size // 4, "type": "float", "redop": "sum", "root": "-1",
         "out_of_place": half(30.0, size=size), "in_place": half(20.0, size=size)}
        for size in (1024, 4096)
    ]  # fmt: skip
    return {
        "version": 3, "args": [f"/opt/nccl/{name}", "-J", "x"], "env": [], "nccl_version": 22803,
        "config": {"nthreads": 1, "ngpus": ngpus, "devices": devices}, "results": rows,
        "out_of_bounds": {"count": 0, "okay": "true"}, **changes,
    }  # fmt: skip


def document(tmp_path: Path, value: Any) -> Path:
    path = tmp_path / "result.json"
    path.write_text(json.dumps(value))
    return path


@pytest.mark.parametrize("ngpus", [1, 4])
def test_json_of_nccl_tests(tmp_path: Path, ngpus: int) -> None:
    found = import_profile(document(tmp_path, written(ngpus=ngpus)))
    (curve,) = found.collectives
    assert (curve.kind, curve.group) == ("all_reduce", Group(ranks=8, per_node=4, nodes=2))
    assert [(p.bytes, p.seconds) for p in curve.points] == [(1024, 20e-6), (4096, 20e-6)]
    assert (found.versions, found.machine.device) == ({"nccl": "2.28.3"}, "Acme X1")
    (curve,) = import_profile(document(tmp_path, written("all_gather_perf_mpi"))).collectives
    assert curve.points[0].seconds == 30e-6


def test_gpus_that_a_file_counts_and_does_not_name_are_said(tmp_path: Path) -> None:
    """One device of 8 makes 8 ranks of a node, which nothing but ``ngpus`` says."""
    (sizes, said), (_, named) = (read(document(tmp_path, written(ngpus=ngpus))) for ngpus in (8, 1))
    assert sizes == [1024, 4096] and not named
    assert [line.partition(":")[0] for line in said] == ["passed over 7 missing names of GPUs"]
    assert "config.ngpus" in said[0] and "config.devices[0]" in said[0]


def test_json_with_wrong_rows_and_without_an_end(tmp_path: Path) -> None:
    value = written()
    value["results"][0]["in_place"] = half(20.0, 5.0)
    value["out_of_bounds"] = {"count": 5, "okay": "false"}
    assert read(document(tmp_path, value)) == (
        [4096], ["passed over 1 rows whose results are wrong (the first: results[0])"],
    )  # fmt: skip
    value = written(out_of_bounds={"count": 5, "okay": "false"})
    with pytest.raises(JobError, match="passed over 2 rows of a table that FAILED"):
        import_profile(document(tmp_path, value))
    value = written()
    del value["out_of_bounds"]
    value["results"][0] |= {"out_of_place": None, "in_place": half(20.0, None)}
    sizes, said = read(document(tmp_path, value))
    assert (sizes, len(said)) == ([1024, 4096], 1)
    assert "missing end of tables" in said[0]


@pytest.mark.parametrize(
    ("change", "key", "says"),
    [
        (lambda v: v.update(args=["./run"]), "results[0]", "nothing says which collective"),
        (lambda v: v["config"].update(devices=[]), "config.devices", "0 ranks are named"),
        (lambda v: v["config"].pop("devices"), "config.devices" , "is no list"),
        (lambda v: v["config"].update(ngpus=0), "config.ngpus", "0 is not allowed"),
        (lambda v: v["config"]["devices"].pop(2), "config.devices", "rank 2 is missing"),
        (lambda v: v["config"]["devices"].append(v["config"]["devices"][0]), "config.devices[8]", "MPI=1"),
        (lambda v: v["config"]["devices"][0].pop("hostname"), "config.devices[0]", "has no rank and hostname"),
        (lambda v: v.update(results={}), "results", "is no list"),
        (lambda v: v.update(results=[3]), "results[0]", "has no size"),
        (lambda v: v["results"][1]["in_place"].update(time="nan"), "results[1].time", "above 0"),
        (lambda v: v["results"][1]["in_place"].update(time=0), "results[1].time", "above 0"),
        (lambda v: v["results"][1].update(in_place={"cpu_time": 3.0}), "results[1]", "processor's times"),
        (lambda v: v.update(results=[]), None, "has no table"),
    ],
)  # fmt: skip
def test_json_that_cannot_be_used(tmp_path: Path, change: Any, key: str | None, says: str) -> None:
    value = written()
    change(value)
    path = document(tmp_path, value)
    with pytest.raises(JobError, match=says) as caught:
        import_profile(path)
    assert caught.value.file == str(path)
    assert key is None or (caught.value.key or "").endswith(key.removeprefix("config."))


def test_json_of_rccl_tests(tmp_path: Path) -> None:
    """A row for each place."""
    rows = [
        {"numCycle": 0, "name": "AllReduce", "nodes": 2, "ranks": 16, "ranksPerNode": 8, "gpusPerRank": 1, "size": 1024,
         "type": "float", "redop": "sum", "inPlace": place, "time": 30.0 - 10 * place, "algBw": 0.04, "busBw": 1,
         "wrong": "0"}
        for place in (0, 1)
    ]  # fmt: skip
    found = import_profile(document(tmp_path, rows))
    (curve,) = found.collectives
    assert (curve.group, curve.points[0].seconds) == (Group(ranks=16, per_node=8, nodes=2), 20e-6)
    assert read(document(tmp_path, rows))[1][0].startswith("passed over 1 rows of the other place")
    with pytest.raises(JobError, match="how many ranks there were") as caught:
        import_profile(document(tmp_path, [{key: value for key, value in rows[1].items() if key != "ranks"}]))
    assert caught.value.key == "[0]"
    with pytest.raises(JobError, match="passed over 1 rows whose results are wrong"):
        import_profile(document(tmp_path, [rows[1] | {"wrong": "7"}]))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda v: v.update(config=3), "config: is no table"),
        (lambda v: v["config"].update(ngpus=1000, devices=[{"rank": 1000 * n, "hostname": "a"} for n in range(201)]),
         "more than 200000 ranks"),
        (lambda v: v["results"][0].update(size=-1), "has no size"),
        (lambda v: v["results"][0].update(size=True), "has no size"),
        (lambda v: v["config"]["devices"][0].update(rank=-1), "is no rank"),
    ],
)  # fmt: skip
def test_json_of_other_types(tmp_path: Path, change: Any, says: str) -> None:
    value = written()
    change(value)
    with pytest.raises(JobError, match=says):
        import_profile(document(tmp_path, value))


def test_a_row_of_rccl_tests_without_a_name(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="has no name and size"):
        import_profile(document(tmp_path, [{"algBw": 1, "inPlace": 1, "size": 8}]))


def test_rows_whose_bandwidth_is_not_their_size_over_their_time(tmp_path: Path) -> None:
    value = written()
    value["results"][0]["in_place"]["alg_bw"] *= 100
    sizes, said = read(document(tmp_path, value))
    assert sizes == [4096]
    assert said == [
        "passed over 1 row of which size, count, time and bandwidth contradict each other (the first: results[0])"
    ]
