"""How much a result of nccl-tests may hold, at its bounds, and what of it is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from plait.core.base.errors import JobError
from plait.core.base.passed_over import PassedOver
from plait.core.cluster.profile import Group
from plait.plan import nccl_json, nccl_log
from plait.plan.nccl_json import looks, read_json
from plait.plan.nccl_log import read_log
from plait.plan.profile_import import import_profile
from tests.plan.nccl_texts import ALL_REDUCE, HEAD, log, ranks, read, row


def told(devices: int = 4, **config: Any) -> dict[str, Any]:
    named = [{"rank": rank, "hostname": "a", "device_info": "Acme X1"} for rank in range(devices)]
    half: dict[str, Any] = {"time": 20.0, "nwrong": "0"}
    return {"args": ["all_gather_perf"], "config": {"devices": named, **config}, "out_of_bounds": {"okay": "true"},
            "results": [{"size": 1024, "out_of_place": half, "in_place": half | {"time": 10.0}}]}  # fmt: skip


def rccl(**changes: Any) -> dict[str, Any]:
    return {"name": "AllReduce", "size": 1024, "inPlace": 1, "time": 20.0, "algBw": 0.0512, "wrong": "0",
            "ranks": 4, "ranksPerNode": 2, "gpusPerRank": 1, **changes}  # fmt: skip


def group(values: Any) -> Group:
    (curve,) = read_json(values, "x", "2026-01-01", PassedOver()).collectives
    return curve.group


@pytest.mark.parametrize(
    ("values", "one"),
    [
        ({"args": [], "config": {}}, True),
        ({"args": [], "config": {}, "results": []}, True),
        ({"args": []}, False),
        ({"config": {}}, False),
        ([{"algBw": 1, "inPlace": 0}], True),
        ([{"algBw": 1, "inPlace": 0, "size": 8}, 3], True),
        ([{"algBw": 1}], False),
        ([{"inPlace": 1}], False),
        ([3, {"algBw": 1, "inPlace": 0}], False),
        ([], False),
        ("args config", False),
        (None, False),
    ],
)
def test_which_documents_are_of_these(values: Any, one: bool) -> None:
    assert looks(values) is one


def test_as_many_ranks_as_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_json, "MOST_RANKS", 4)
    assert group(told()).ranks == 4
    with pytest.raises(JobError, match=r"more than 4 ranks") as caught:
        read_json(told(5), "x", "2026-01-01", PassedOver())
    assert caught.value.key == "config.devices[4]"


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"ngpus": 4}, None),
        ({"nthreads": 4}, None),
        ({"nthreads": 2, "ngpus": 2}, None),
        ({"nthreads": 1, "ngpus": 1}, None),
        ({"ngpus": 5}, "config.ngpus: 5 is not allowed"),
        ({"nthreads": 5}, "config.nthreads: 5 is not allowed"),
        ({"nthreads": 3, "ngpus": 2}, "config.ngpus: 6 GPUs of a process are not allowed"),
        ({"nthreads": 0}, "config.nthreads: 0 is not allowed"),
        ({"ngpus": True}, "config.ngpus: True is not allowed"),
        ({"ngpus": 1.0}, "config.ngpus: 1.0 is not allowed"),
        ({"ngpus": "7" * 50}, f"config.ngpus: {'7' * 40} is not allowed"),
    ],
)
def test_as_many_gpus_of_a_process_as_may_be(
    config: dict[str, Any], says: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl_json, "MOST_OF_A_PROCESS", 4)
    values = told(1, **config)
    values["config"]["devices"].append({"rank": config.get("nthreads", 1), "hostname": "b"})
    if says is None:
        each = config.get("nthreads", 1) * config.get("ngpus", 1)
        values["config"]["devices"][1]["rank"] = each
        assert group(values) == Group(ranks=2 * each, per_node=each, nodes=2)
        return
    with pytest.raises(JobError) as caught:
        read_json(values, "x", "2026-01-01", PassedOver())
    assert says in str(caught.value)


@pytest.mark.parametrize(("names", "device"), [(("", "B", "A", 3), "B"), ((3, None, "", ""), "")])
def test_the_first_device_that_is_named(names: tuple[Any, ...], device: str) -> None:
    values = told()
    for one, name in zip(values["config"]["devices"], names, strict=True):
        one["device_info"] = name
    assert read_json(values, "x", "2026-01-01", PassedOver()).machine.device == device


@pytest.mark.parametrize(
    ("test", "halves", "seconds"),
    [
        ("all_gather", {}, 20e-6),
        ("all_reduce", {}, 10e-6),
        ("all_reduce", {"in_place": None}, 20e-6),
        ("all_gather", {"out_of_place": None}, 10e-6),
    ],
)
def test_which_half_of_a_row_counts(test: str, halves: dict[str, Any], seconds: float) -> None:
    values = told()
    values["args"] = [f"{test}_perf"]
    values["results"][0] |= halves
    (curve,) = read_json(values, "x", "2026-01-01", PassedOver()).collectives
    assert curve.points[0].seconds == pytest.approx(seconds, rel=1e-12)


@pytest.mark.parametrize(
    ("bounds", "said"),
    [
        ({"okay": "true"}, []),
        ({"okay": True}, []),
        ({"okay": "TRUE"}, []),
        (3, []),
        (None, ["missing end of tables, whose rows are taken"]),
    ],
)
def test_an_end_that_says_nothing_bad(bounds: Any, said: list[str]) -> None:
    over = PassedOver()
    assert read_json(told() | {"out_of_bounds": bounds}, "x", "2026-01-01", over).collectives
    assert len(over.lines()) == len(said)
    assert all(part in line for part, line in zip(said, over.lines(), strict=True))


@pytest.mark.parametrize("okay", ["false", False, "", None])
def test_an_end_that_failed(okay: Any) -> None:
    with pytest.raises(JobError, match=r"passed over 1 rows? of a table that FAILED"):
        read_json(told() | {"out_of_bounds": {"okay": okay}}, "x", "2026-01-01", PassedOver())


@pytest.mark.parametrize("wrong", [1, "1", "nan", "many", [1], 0.5])
def test_counts_of_wrong_elements(wrong: Any) -> None:
    values = told()
    values["results"][0]["in_place"]["nwrong"] = wrong
    with pytest.raises(JobError, match=r"rows? whose results are wrong"):
        read_json(values, "x", "2026-01-01", PassedOver())


@pytest.mark.parametrize("wrong", [0, "0", "0.0", None, "N/A", "n/a", ""])
def test_counts_of_no_wrong_elements(wrong: Any) -> None:
    values = told()
    values["results"][0]["in_place"]["nwrong"] = wrong
    over = PassedOver()
    assert read_json(values, "x", "2026-01-01", over).collectives
    assert over.lines() == []


@pytest.mark.parametrize(
    ("code", "version"), [(22803, {"nccl": "2.28.3"}), (21005, {"nccl": "2.10.5"}), ("22803", {}), (None, {})]
)
def test_the_version_of_the_library(code: Any, version: dict[str, str]) -> None:
    assert read_json(told() | {"nccl_version": code}, "x", "2026-01-01", PassedOver()).versions == version


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"size": "1024"}, "has no name and size"),
        ({"size": True}, "has no name and size"),
        ({"size": None}, "has no name and size"),
        ({"name": 3}, "has no name and size"),
        ({"ranks": 0}, "how many ranks there were"),
        ({"ranksPerNode": 0}, "how many ranks there were"),
        ({"gpusPerRank": True}, "how many ranks there were"),
        ({"gpusPerRank": "1"}, "how many ranks there were"),
    ],
)
def test_rows_of_rccl_tests_that_are_refused(changes: dict[str, Any], where: str) -> None:
    with pytest.raises(JobError, match=where) as caught:
        read_json([rccl(size=2048, time=40.0), rccl(**changes)], "x", "2026-01-01", PassedOver())
    assert caught.value.key == "[1]"


@pytest.mark.parametrize(
    ("processes", "each", "gpus", "found"),
    [
        (4, 2, 1, (4, 2, 2)),
        (2, 1, 1, (2, 1, 2)),
        (4, 8, 1, (4, 4, 1)),
        (4, 4, 1, (4, 4, 1)),
        (4, 2, 2, (8, 4, 2)),
        (5, 2, 1, (5, 2, 3)),
        (6, 2, 3, (18, 6, 3)),
    ],
)
def test_ranks_of_rccl_tests(processes: int, each: int, gpus: int, found: tuple[int, int, int]) -> None:
    one = group([rccl(ranks=processes, ranksPerNode=each, gpusPerRank=gpus)])
    assert (one.ranks, one.per_node, one.nodes) == found


@pytest.mark.parametrize(
    ("name", "place", "kind"),
    [
        ("AllReduce", 1, "all_reduce"),
        ("All_Gather", 0, "all_gather"),
        ("ReduceScatter", 0, "reduce_scatter"),
        ("alltoall", 0, "all_to_all"),
    ],
)
def test_names_and_places_of_rccl_tests(name: str, place: int, kind: str) -> None:
    rows = [rccl(name=name, inPlace=at, time=20.0 + 10 * at, algBw=None) for at in (0, 1)]
    (curve,) = read_json(rows, "x", "2026-01-01", PassedOver()).collectives
    assert curve.kind == kind
    assert curve.points[0].seconds == pytest.approx((20.0 + 10 * place) / 1e6, rel=1e-12)


def test_as_many_rows_of_a_table_as_may_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_log, "MOST_ROWS", 2)
    assert len(import_profile(log(tmp_path, ALL_REDUCE)).collectives[0].points) == 2
    twice = [*ALL_REDUCE, HEAD, row(2048, 30.0, 20.0), row(4096, 30.0, 20.0), ALL_REDUCE[-2]]
    assert len(import_profile(log(tmp_path, twice)).collectives[0].points) == 4
    third = [*ALL_REDUCE[:-2], row(2097152, 600.0, 500.0), *ALL_REDUCE[-2:]]
    with pytest.raises(JobError, match="more than 2 rows of a table") as caught:
        import_profile(log(tmp_path, third))
    assert caught.value.key == "line 14"


def test_as_many_ranks_of_a_log_as_may_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_log, "MOST_RANKS", 4)
    assert import_profile(log(tmp_path, ALL_REDUCE)).collectives[0].group.ranks == 4
    monkeypatch.setattr(nccl_log, "MOST_RANKS", 3)
    with pytest.raises(JobError, match="more than 3 ranks") as caught:
        import_profile(log(tmp_path, ALL_REDUCE))
    assert caught.value.key == "line 7"


def test_the_longest_line(tmp_path: Path) -> None:
    whole = [*ALL_REDUCE[:-2], row(2097152, 600.0, 500.0), *ALL_REDUCE[-2:]]
    for more, count in ((0, 0), (1, 1)):
        lines = list(whole)
        lines[13] = lines[13].rjust(nccl_log.LONGEST_LINE + more)
        sizes, said = read(log(tmp_path, lines))
        assert (len(sizes), len(said)) == (3 - count, count)


def test_the_first_torn_line_of_a_rank_is_named(tmp_path: Path) -> None:
    lines = [line.split(" on ")[0] if "Rank  2" in line or "Rank  3" in line else line for line in ALL_REDUCE]
    with pytest.raises(JobError, match="a line of a rank is torn") as caught:
        import_profile(log(tmp_path, lines))
    assert caught.value.key == "line 6"


def test_a_torn_rank_of_another_run_does_no_harm(tmp_path: Path) -> None:
    first = [
        line.split(" on ")[0] if "Rank  2" in line else line for line in ALL_REDUCE if not line.strip()[:1].isdigit()
    ]
    assert read(log(tmp_path, [*first, *ALL_REDUCE])) == ([1024, 1048576], [])


@pytest.mark.parametrize("rank", range(4))
def test_a_torn_rank_of_the_next_run_is_that_runs(tmp_path: Path, rank: int) -> None:
    """The run before has been read; nothing but its ranks says that the next has begun."""
    again = [line.split(" on ")[0] if f"Rank  {rank}" in line else line for line in ALL_REDUCE if "Using" not in line]
    with pytest.raises(JobError, match="a line of a rank is torn") as caught:
        import_profile(log(tmp_path, [*ALL_REDUCE, *again]))
    assert caught.value.key == f"line {len(ALL_REDUCE) + 3 + rank}"


def test_ranks_of_each_run_are_their_own(tmp_path: Path) -> None:
    again = [*ALL_REDUCE[:2], *ranks("node1", "node2", "node3"), *ALL_REDUCE[7:]]
    for lines in ([*ALL_REDUCE, *again], [*ALL_REDUCE, *(line for line in again if "Using" not in line)]):
        found = import_profile(log(tmp_path, lines))
        assert sorted(curve.group.ranks for curve in found.collectives) == [4, 6]


def test_the_first_device_that_a_log_names(tmp_path: Path) -> None:
    lines = [line.replace("Acme X1", "") if "Rank  0" in line else line for line in ALL_REDUCE]
    lines = [line.replace("X1", "X2") if "Rank  1" in line else line for line in lines]
    assert import_profile(log(tmp_path, lines)).machine.device == "Acme X2"
    bare = [line.replace("Acme X1", "") for line in ALL_REDUCE]
    assert import_profile(log(tmp_path, bare)).machine.device == ""


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("all_gather.log", "all_gather"),
        ("run-reduce_scatter-4.log", "reduce_scatter"),
        ("alltoall_perf.txt", "all_to_all"),
        ("alltoallv.txt", None),
        ("run.log", None),
    ],
)
def test_a_test_that_only_the_files_name_says(name: str, kind: str | None) -> None:
    lines = "\n".join(line for line in ALL_REDUCE if "mpirun" not in line)
    if kind is None:
        with pytest.raises(JobError, match="nothing says which collective"):
            read_log(lines, name, "2026-01-01", PassedOver())
        return
    (curve,) = read_log(lines, f"/all_reduce/{name}", "2026-01-01", PassedOver()).collectives
    assert curve.kind == kind


@pytest.mark.parametrize(("unit", "seconds"), [("us", 20e-6), ("ms", 20e-3), ("s", 20.0)])
def test_units_hold_for_their_own_table(tmp_path: Path, unit: str, seconds: float) -> None:
    one = [line.replace("(us)", f"({unit})") for line in ALL_REDUCE[:11]]
    plain = " ".join(row(1024, 30.0, 20.0).split()[:5]) + " 30.0 N/A N/A 0 20.0 N/A N/A 0"
    lines = [*one, plain, ALL_REDUCE[-2], HEAD, plain.replace("1024 256", "2048 512"), ALL_REDUCE[-2]]
    (curve,) = import_profile(log(tmp_path, lines)).collectives
    assert [point.seconds for point in curve.points] == pytest.approx([seconds, 20e-6], rel=1e-12)


def test_a_unit_of_other_sizes_is_refused(tmp_path: Path) -> None:
    lines = [line.replace("(B)", "(KiB)") for line in ALL_REDUCE]
    with pytest.raises(JobError, match=r"units \(KiB\) and \(us\) are not known"):
        import_profile(log(tmp_path, lines))


def test_json_is_told_from_logs_by_what_it_holds(tmp_path: Path) -> None:
    path = tmp_path / "all.txt"
    path.write_text(json.dumps(told()))
    assert import_profile(path).collectives[0].kind == "all_gather"
