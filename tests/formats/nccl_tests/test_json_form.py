"""What nccl-tests and rccl-tests write as JSON."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from plait.core.base.errors import JobError
from plait.core.base.ignored_input import IgnoredInput
from plait.core.cluster.profile import Group, Profile
from plait.formats.nccl_tests.json_form import is_results, read_json


def half(time: float, wrong: Any = 0.0, size: int = 1024) -> dict[str, Any]:
    return {"time": time, "alg_bw": size / time / 1e3, "bus_bw": 1.0, "nwrong": wrong}


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


def rccl(place: int = 1, **changes: Any) -> dict[str, Any]:
    """A row of rccl-tests: each place has one."""
    return {"numCycle": 0, "name": "AllReduce", "nodes": 2, "ranks": 16, "ranksPerNode": 8, "gpusPerRank": 1,
            "size": 1024, "type": "float", "redop": "sum", "inPlace": place, "time": 30.0 - 10 * place,
            "algBw": 0.04, "busBw": 1, "wrong": "0", **changes}  # fmt: skip


def read(values: Any) -> tuple[Profile, list[str]]:
    over = IgnoredInput()
    return read_json(values, "a.json", "2026-01-01", over), over.lines()


@pytest.mark.parametrize("ngpus", [1, 4, 8])
def test_json_of_nccl_tests(ngpus: int) -> None:
    """GPUs that a file counts and does not name are said: nothing but ``ngpus`` says them."""
    found, said = read(written(ngpus=ngpus))
    (curve,) = found.collectives
    each = max(4, ngpus)
    assert (curve.kind, curve.group) == ("all_reduce", Group(ranks=8, per_node=each, nodes=8 // each))
    assert [(p.bytes, p.seconds) for p in curve.points] == [(1024, 20e-6), (4096, 20e-6)]
    assert (found.versions, found.machine.device) == ({"nccl": "2.28.3"}, "Acme X1")
    names = [f"passed over {8 - 8 // ngpus} missing names of GPUs"] if ngpus > 1 else []
    assert [line.partition(":")[0] for line in said] == names
    assert all("config.ngpus" in line and "config.devices[0]" in line for line in said)


Change = Callable[[dict[str, Any]], Any]
BOUNDS, WRONG = {"count": 5, "okay": "false"}, "passed over 1 rows whose results are wrong (the first: results[0])"
CONTRADICTS = "row whose size, count, time and bandwidth contradict each other (the first: results[0])"


def first(**halves: Any) -> Change:
    return lambda v: v["results"][0].update(halves)


@pytest.mark.parametrize(
    ("name", "change", "seconds", "said"),
    [
        ("all_gather_perf_mpi", lambda v: None, {1024: 30, 4096: 30}, []),
        ("all_gather_perf", first(out_of_place=None), {1024: 20, 4096: 30}, []),
        ("all_reduce_perf", first(in_place=None), {1024: 30, 4096: 20}, []),
        *(("all_reduce_perf", first(in_place=half(20.0, none)), {1024: 20, 4096: 20}, [])
          for none in (0, "0", "0.0", None, "N/A", "n/a", "")),
        *(("all_reduce_perf", first(in_place=half(20.0, wrong)), {4096: 20}, [WRONG])
          for wrong in (5.0, "1", "nan", "many", [1], 0.5)),
        ("all_reduce_perf", lambda v: (first(in_place=half(20.0, 5))(v), v.update(out_of_bounds=BOUNDS)), {4096: 20},
         [WRONG]),
        ("all_reduce_perf", first(in_place=half(20.0, size=102400)), {4096: 20}, [f"passed over 1 {CONTRADICTS}"]),
        ("all_reduce_perf", lambda v: v.pop("out_of_bounds"), {1024: 20, 4096: 20},
         ["passed over 1 missing end of tables, whose rows are taken (the first: out_of_bounds)"]),
        *(("all_reduce_perf", lambda v, b=bounds: v.update(out_of_bounds=b), {1024: 20, 4096: 20}, [])
          for bounds in ({"okay": True}, {"okay": "TRUE"}, 3)),
    ],
)  # fmt: skip
def test_rows_that_are_taken_and_counted(name: str, change: Change, seconds: dict[int, float], said: list[str]) -> None:
    values = written(name)
    change(values)
    found, told = read(values)
    assert {p.bytes: p.seconds * 1e6 for p in found.collectives[0].points} == pytest.approx(seconds)
    assert told == said


@pytest.mark.parametrize(
    ("change", "key", "says"),
    [
        (lambda v: v.update(args=["./run"]), "results[0]", "the collective is unknown"),
        (lambda v: v["config"].update(devices=[]), "config.devices", "0 ranks are named"),
        (lambda v: v["config"].pop("devices"), "config.devices", "is missing"),
        (lambda v: v.update(config=3), "config", "3 is not a table"),
        *((lambda v, t=told: v["config"].update(ngpus=t), "config.ngpus", "is not allowed")
          for told in (0, True, 1.0, 1025, "7")),
        (lambda v: v["config"].update(nthreads=33, ngpus=32), "config.ngpus", "1056 GPUs of a process are not allowed"),
        (lambda v: v["config"].update(ngpus=1000, devices=[{"rank": 1000 * n, "hostname": "a"} for n in range(201)]),
         "config.devices[200]", "more than 200000 ranks"),
        (lambda v: v["config"]["devices"].pop(2), "config.devices", "rank 2 is missing"),
        (lambda v: v["config"]["devices"].append(v["config"]["devices"][0]), "config.devices[8]", "MPI=1"),
        (lambda v: v["config"]["devices"][0].pop("hostname"), "config.devices[0].hostname", "is missing"),
        (lambda v: v["config"]["devices"][0].update(rank=-1), "config.devices[0].rank", "at least 0"),
        (lambda v: v.update(results=3), "results", "3 is not allowed"),
        (lambda v: v.update(results=[3]), "results", "3 is not allowed"),
        (lambda v: v["results"][0].update(size=-1), "results[0].size", "at least 0"),
        (lambda v: v["results"][0].update(size=True), "results[0].size", "a whole number"),
        (lambda v: v["results"][1]["in_place"].update(time="nan"), "results[1]", "above 0"),
        (lambda v: v["results"][1]["in_place"].update(time=0), "results[1]", "above 0"),
        (lambda v: v["results"][1].update(in_place={"cpu_time": 3.0}), "results[1]", "processor's times"),
        (lambda v: v["results"][1].update(in_place=None, out_of_place=None), "results[1]", "has no time"),
        (lambda v: v.update(results=[]), None, "has no table"),
        *((lambda v, t=told: v.update(out_of_bounds={"okay": t}), None, "passed over 2 rows of a table that FAILED")
          for told in ("false", False, "", None)),
    ],
)  # fmt: skip
def test_json_that_cannot_be_used(change: Change, key: str | None, says: str) -> None:
    values = written()
    change(values)
    with pytest.raises(JobError, match=says) as caught:
        read(values)
    assert (caught.value.file, caught.value.key) == ("a.json", key)


def test_the_first_device_and_the_version_that_are_named() -> None:
    for names, device in ((("", "B", "A", 3), "B"), ((3, None, "", ""), "")):
        values = written(ngpus=2, nccl_version="22803")
        for one, name in zip(values["config"]["devices"], names, strict=True):
            one["device_info"] = name
        found, _ = read(values)
        assert (found.machine.device, found.versions) == (device, {})


@pytest.mark.parametrize(
    ("name", "place", "kind"),
    [("AllReduce", 1, "all_reduce"), ("All_Gather", 0, "all_gather"), ("alltoall", 0, "all_to_all")],
)
def test_names_and_places_of_rccl_tests(name: str, place: int, kind: str) -> None:
    """A row for each place."""
    found, said = read([rccl(at, name=name) for at in (0, 1)])
    (curve,) = found.collectives
    assert (curve.kind, curve.points[0].seconds) == (kind, pytest.approx((30.0 - 10 * place) / 1e6, rel=1e-12))
    assert len(said) == 1 and said[0].startswith("passed over 1 rows of the other place")


@pytest.mark.parametrize(
    ("processes", "each", "gpus", "found"),
    [(2, 1, 1, (2, 1, 2)), (4, 8, 1, (4, 4, 1)), (4, 2, 2, (8, 4, 2)), (5, 2, 1, (5, 2, 3)), (6, 2, 3, (18, 6, 3))],
)
def test_ranks_of_rccl_tests(processes: int, each: int, gpus: int, found: tuple[int, int, int]) -> None:
    group = read([rccl(ranks=processes, ranksPerNode=each, gpusPerRank=gpus)])[0].collectives[0].group
    assert (group.ranks, group.per_node, group.nodes) == found


@pytest.mark.parametrize(
    ("changes", "key"),
    [({"size": "1024"}, "size"), ({"size": True}, "size"), ({"name": 3}, "name"), ({"ranks": 0}, "ranks"),
     ({"ranksPerNode": None}, "ranksPerNode"), ({"gpusPerRank": True}, "gpusPerRank")],
)  # fmt: skip
def test_rows_of_rccl_tests_that_are_refused(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(JobError, match="is not allowed") as caught:
        read([rccl(size=2048, time=40.0), rccl(**changes)])
    assert caught.value.key == f"[1].{key}"
    with pytest.raises(JobError, match="passed over 1 rows whose results are wrong"):
        read([rccl(wrong="7")])


@pytest.mark.parametrize(
    ("values", "one"),
    [({"args": [], "config": {}}, True), ({"args": []}, False), ([{"algBw": 1, "inPlace": 0, "size": 8}, 3], True),
     ([{"algBw": 1}], False), ([3, {"algBw": 1, "inPlace": 0}], False), ([], False), ("args config", False)],
)  # fmt: skip
def test_documents_that_are_of_these(values: Any, one: bool) -> None:
    assert is_results(values) is one
