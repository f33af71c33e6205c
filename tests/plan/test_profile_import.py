"""What other tools' files say, and which of them cannot be used. All numbers are made up."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.core.errors import JobError
from plait.core.passed_over import PassedOver
from plait.core.profile import Curve, Group, Machine, Point, Profile
from plait.plan.profile_import import import_profile, import_profiles

HEAD = "#  size  count  type  redop  root  time  algbw  busbw #wrong  time  algbw  busbw #wrong"
UNITS = "#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)"
OLD_HEAD = "#       size         count    type     time   algbw   busbw  error     time   algbw   busbw  error"


def ranks(*hosts: str, each: int = 2, group: str = "Group  0 ") -> list[str]:
    found = [f"on {host} device {at} [0x0{at}] Acme X1" for host in hosts for at in range(each)]
    return ["# Using devices", *(f"#  Rank {n:2} {group}Pid {100 + n} {where}" for n, where in enumerate(found))]


def row(size: int, out: float, into: float, name: str = "float     sum      -1") -> str:
    return f"{size:12} {size // 4:13} {name} {out:8} 1.00 1.00 0 {into:8} 1.00 1.00 0"


def log(tmp_path: Path, lines: list[str], name: str = "test.log") -> Path:
    path = tmp_path / name
    path.write_text("\n".join(lines) + "\n")
    return path


ALL_REDUCE = ["# nThread 1 nGpus 1 minBytes 8", "mpirun -np 4 ./build/all_reduce_perf -b 8", *ranks("node1", "node2"),
              "NCCL version 2.28.7+cuda13.0", "#", HEAD, UNITS, row(1024, 30.0, 20.0), row(1048576, 300.0, 250.0),
              "# Out of bounds values : 0 OK", "# Avg bus bandwidth    : 9.25"]  # fmt: skip


def test_an_all_reduce_over_two_nodes(tmp_path: Path) -> None:
    found = import_profile(log(tmp_path, ALL_REDUCE))
    (curve,) = found.collectives
    assert curve.kind == "all_reduce"
    assert curve.group == Group(ranks=4, per_node=2, nodes=2)
    assert [(p.bytes, p.seconds) for p in curve.points] == [(1024, 20e-6), (1048576, 250e-6)]
    assert found.machine == Machine(device="Acme X1", kind="cuda", ranks=4, ranks_per_node=2, backend="nccl")
    assert found.versions == {"nccl": "2.28.7"}


def test_several_kinds_one_after_the_other(tmp_path: Path) -> None:
    """By the header of newer versions; an all-to-all's size is one rank's, a row may have N/A."""
    gather = ["# Collective test starting: all_gather_perf", *ranks("a", each=4), HEAD, UNITS,
              row(4096, 40.0, 35.0, "float none -1"), "# Collective test concluded: all_gather_perf"]  # fmt: skip
    swap = ["# Collective test starting: alltoall_perf", *ranks("a", each=4), HEAD, UNITS,
            row(4096, 50.0, 45.0, "float none -1").removesuffix(" 0") + " N/A"]  # fmt: skip
    reduced = ["# Collective test starting: reduce_perf", *ranks("a", each=4), HEAD, row(4096, 9.0, 9.0)]
    found = import_profile(log(tmp_path, [*gather, *reduced, *swap]))
    assert {one.kind: (one.points[0].bytes, one.points[0].seconds) for one in found.collectives} == {
        "all_gather": (4096, 40e-6),
        "all_to_all": (4 * 4096, 50e-6),
    }


def test_an_old_table_named_by_its_file(tmp_path: Path) -> None:
    """Without Group, redop and root; sendrecv_perf in the file's name; what mpirun puts before lines."""
    lines = [*ranks("a", "b", each=1, group=""), OLD_HEAD, row(4096, 40.0, 35.0, "float")]
    path = log(tmp_path, [f"[1,0]<stdout>:{line}" for line in lines], "sendrecv_perf.txt")
    (curve,) = import_profile(path).collectives
    assert (curve.kind, curve.group.nodes, curve.points[0].seconds) == ("send", 2, 40e-6)


def test_equal_sizes_are_samples_of_one_point(tmp_path: Path) -> None:
    rows = [row(1024, 30.0, each) for each in (20.0, 26.0, 22.0)]
    (curve,) = import_profile(log(tmp_path, [*ALL_REDUCE[:11], *rows])).collectives
    assert curve.points == (Point(bytes=1024, seconds=22e-6),)


def test_runs_without_their_own_headline(tmp_path: Path) -> None:
    """Ranks after a table belong to the next; sizes of nothing are no points."""
    second = [line for line in ranks("a", "b", "c", each=1) if "Using" not in line]
    swap = [*second, "# alltoall_perf", HEAD, row(0, 0.0, 0.0), row(4096, 50.0, 45.0)]
    found = import_profile(log(tmp_path, [*ALL_REDUCE, *swap]))
    assert [(one.kind, one.group.ranks, one.group.nodes) for one in found.collectives] == [
        ("all_reduce", 4, 2),
        ("all_to_all", 3, 3),
    ]
    assert len(found.collectives[1].points) == 1


def test_groups_of_a_split_run_are_side_by_side(tmp_path: Path) -> None:
    split = [
        f"#  Rank {n} Group {g} Pid 1 on {host} device {g} [0x0{g}] X" for g in (0, 1) for n, host in enumerate("ab")
    ]
    (curve,) = import_profile(log(tmp_path, ["all_reduce_perf", *split, HEAD, row(4, 1.0, 1.0)])).collectives
    assert curve.group == Group(ranks=2, per_node=1, nodes=2, stride=2, at_once=2)


WRONG_LOGS = {
    "no table": (ALL_REDUCE[:7], None, "no table"),
    "cut off": (ALL_REDUCE[:11], None, "no table"),
    "no ranks": (["all_reduce_perf", HEAD, row(8, 1.0, 1.0)], "line 3", "0 ranks are named"),
    "one rank": (["all_reduce_perf", *ranks("a", each=1), HEAD, row(8, 1.0, 1.0)], "line 5", "1 ranks are named"),
    "no kind": ([*ranks("a"), HEAD, row(8, 1.0, 1.0)], "line 5", "which collective"),
    "negative": ([*ALL_REDUCE[:11], row(8, 1.0, -2.0)], "line 12", "above 0"),
    "nan": ([*ALL_REDUCE[:11], row(8, 1.0, float("nan"))], "line 12", "above 0"),
    "twice": (["all_reduce_perf", *ranks("a", each=1), *ranks("a", each=1)[1:], HEAD], "line 4", "MPI=1"),
    "no number": ([*ALL_REDUCE[:11], f" {10**18}{'0' * 5000} 1 float sum -1 1 1 1 0 1 1 1 0"], None, "cannot be"),
    "vanishes": ([*ALL_REDUCE[:11], row(8, 1.0, 1e-320)], None, "cannot be"),
    "superscript": (["all_reduce_perf", *ranks("a"), HEAD, row(8, 1.0, 1.0).replace("8", "\u00b2")], None, "no table"),
    "no time": (["all_reduce_perf", *ranks("a"), "#  size count", " 8 2"], "line 6", "has no time"),
}  # fmt: skip


@pytest.mark.parametrize(("lines", "key", "says"), WRONG_LOGS.values(), ids=WRONG_LOGS)
def test_a_wrong_log_is_one_clear_error(tmp_path: Path, lines: list[str], key: str | None, says: str) -> None:
    path = log(tmp_path, lines)
    with pytest.raises(JobError) as caught:
        import_profile(path)
    assert (caught.value.file, caught.value.key) == (str(path), key)
    assert says in str(caught.value)


def galvatron(tmp_path: Path, values: Any, name: str = "allreduce_bandwidth_2nodes_4gpus_per_node.json") -> Path:
    path = tmp_path / name
    path.write_text(json.dumps(values))
    return path


def test_galvatrons_bus_bandwidth(tmp_path: Path) -> None:
    """Neighbours, or as far apart as can be."""
    values = {"allreduce_size_8_consec_1": 40.0, "allreduce_size_4_consec_1": 160.0, "allreduce_size_2_consec_0": 20.0}
    found = import_profile(galvatron(tmp_path, values))
    assert {str(one.group): one.bandwidth / 1e9 for one in found.collectives} == pytest.approx(
        {"8 ranks, on 2 nodes": 40.0, "4 ranks, in a node": 160.0, "2 ranks, one on each of 2 nodes": 20.0}
    )
    assert (found.machine.ranks, found.machine.ranks_per_node) == (8, 4)
    assert [one.group.stride for one in found.collectives] == [1, 1, 4]


def test_galvatrons_sends_and_times(tmp_path: Path) -> None:
    sends = galvatron(tmp_path, {"pp_size_2": 10.0}, "p2p_bandwidth_2nodes_4gpus_per_node.json")
    times = galvatron(
        tmp_path,
        {"allreduce_size_4_2MB_time": 0.5, "allreduce_size_4_1MB_time": 0.4, "all2all_size_4_1MB_time": 0.2},
        "sp_time_2nodes_4gpus_per_node.json",
    )
    found = {one.kind: one for one in import_profiles([sends, times]).collectives}
    assert found["send"].bandwidth == pytest.approx(10e9)
    assert (found["send"].group.stride, found["send"].group.nodes) == (4, 2)
    assert [(p.bytes, p.seconds) for p in found["all_reduce"].points] == [(1 << 20, 0.4e-3), (2 << 20, 0.5e-3)]
    assert found["all_to_all"].points == (Point(bytes=4 << 20, seconds=0.2e-3),)


WRONG_FILES: dict[str, tuple[Any, str, str | None, str]] = {
    "name": ({"pp_size_2": 1.0}, "bandwidth.json", None, "how many nodes"),
    "key": ({"speed": 1.0}, "p2p_bandwidth_1nodes_8gpus_per_node.json", "speed", "Known: allreduce_size_N"),
    "negative": ({"pp_size_2": -1.0}, "p2p_bandwidth_1nodes_8gpus_per_node.json", "pp_size_2", "above 0"),
    "nan": ({"pp_size_2": float("nan")}, "p2p_bandwidth_1nodes_8gpus_per_node.json", None, "NaN is no number"),
    "text": ({"pp_size_2": "12"}, "p2p_bandwidth_1nodes_8gpus_per_node.json", "pp_size_2", "above 0"),
    "null": ({"pp_size_2": None}, "p2p_bandwidth_1nodes_8gpus_per_node.json", "pp_size_2", "above 0"),
    "too many": ({"pp_size_16": 1.0}, "p2p_bandwidth_1nodes_8gpus_per_node.json", "pp_size_16", "16 of 8 ranks"),
    "none": ({"pp_size_0": 1.0}, "p2p_bandwidth_1nodes_8gpus_per_node.json", "pp_size_0", "0 of 8 ranks"),
    "odd": ({"pp_size_3": 1.0}, "p2p_bandwidth_1nodes_8gpus_per_node.json", "pp_size_3", "3 of 8 ranks"),
    "large": ({"pp_size_2": 10**400}, "p2p_bandwidth_1nodes_8gpus_per_node.json", "pp_size_2", "above 0"),
    "vanishes": ({"pp_size_2": 1e308}, "p2p_bandwidth_1nodes_8gpus_per_node.json", None, "cannot be"),
    "no bytes": ({"allreduce_size_8_0MB_time": 1.0}, "sp_time_1nodes_8gpus_per_node.json", None, "cannot be"),
    "empty": ({}, "p2p_bandwidth_1nodes_8gpus_per_node.json", None, "neither"),
    "overlap": ({"overlap_coe": 1.1}, "overlap_coefficient.json", "overlap_coe", "plait profile"),
}


@pytest.mark.parametrize(("values", "name", "key", "says"), WRONG_FILES.values(), ids=WRONG_FILES)
def test_a_wrong_file_is_one_clear_error(tmp_path: Path, values: Any, name: str, key: str | None, says: str) -> None:
    path = galvatron(tmp_path, values, name)
    with pytest.raises(JobError) as caught:
        import_profile(path)
    assert (caught.value.file, caught.value.key) == (str(path), key)
    assert says in str(caught.value)


def test_files_that_are_not_there_or_not_whole(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="cannot be read"):
        import_profile(tmp_path / "absent.log")
    (tmp_path / "cut.json").write_text('{"pp_size_2": 1')
    with pytest.raises(JobError, match="only a part"):
        import_profile(tmp_path / "cut.json")


def test_a_node_that_was_measured_and_logs_of_many_become_one(tmp_path: Path) -> None:
    machine = Machine(device="Acme X1", kind="cuda", memory=1 << 36, ranks=2, ranks_per_node=2, backend="nccl")
    inside = Curve(kind="send", group=Group(ranks=2, per_node=2, nodes=1), points=(Point(bytes=8, seconds=1e-6),))
    Profile(machine=machine, date="2026-01-01", collectives=(inside,)).write(tmp_path / "node.json")
    found = import_profiles([tmp_path / "node.json", log(tmp_path, ALL_REDUCE)])
    assert [one.kind for one in found.collectives] == ["send", "all_reduce"]
    assert (found.machine.memory, found.machine.ranks) == (1 << 36, 4)


def read(path: Path) -> tuple[list[int], list[str]]:
    """Sizes of the one curve of a file, and what is said of what was passed over."""
    over = PassedOver()
    (curve,) = import_profile(path, over).collectives
    return [point.bytes for point in curve.points], over.lines()


BREAKS_OFF = "passed over 1 missing ends of tables, whose rows are taken"


@pytest.mark.parametrize("words", [1, 2, 8, 12])
def test_a_row_that_was_cut_is_counted(tmp_path: Path, words: int) -> None:
    cut = " ".join(row(2097152, 600.0, 500.0).split()[:words])
    sizes, said = read(log(tmp_path, [*ALL_REDUCE[:-2], cut]))
    assert sizes == [1024, 1048576]
    assert "passed over 1 torn rows of a table (the first: line 14)" in said
    assert len(said) == 2 and BREAKS_OFF in said[0] + said[1]


@pytest.mark.parametrize(
    "lines",
    [
        ["  2097152   524288  float   gpu-b:9:9 [1] NCCL INFO comm 0x5 rank 5 nranks 8 - Init COMPLETE",
         " sum  -1  600.0 1.00 1.00 0  500.0 1.00 1.00 0"],
        [row(2097152, 600.0, 500.0) + " NCCL INFO"],
        [row(2097152, 600.0, 500.0).replace("600.0", "60gpu-a:0.0")],
        [row(2097152, 600.0, 500.0).replace("float", "flo 4")],
    ],
)  # fmt: skip
def test_a_row_that_others_wrote_into_is_counted(tmp_path: Path, lines: list[str]) -> None:
    sizes, said = read(log(tmp_path, [*ALL_REDUCE[:-2], *lines, *ALL_REDUCE[-2:]]))
    assert sizes == [1024, 1048576]
    assert said == ["passed over 1 torn rows of a table (the first: line 14)"]


def wrong(line: str, out: str, into: str) -> str:
    words = line.split()
    return " ".join([*words[:8], out, *words[9:12], into])


@pytest.mark.parametrize("marks", [("0", "2e+06"), ("3", "0"), ("nan", "0"), ("1*", "0"), ("inf", "N/A")])
def test_rows_with_wrong_results_are_counted(tmp_path: Path, marks: tuple[str, str]) -> None:
    lines = [*ALL_REDUCE[:-2], wrong(row(2097152, 600.0, 500.0), *marks), "# Out of bounds values : 4 FAILED"]
    sizes, said = read(log(tmp_path, lines))
    assert sizes == [1024, 1048576]
    assert said == ["passed over 1 rows whose results are wrong (the first: line 14)"]


def test_rows_that_nobody_checked_are_taken(tmp_path: Path) -> None:
    lines = [*ALL_REDUCE[:-2], wrong(row(2097152, 600.0, 500.0), "N/A", "N/A"), *ALL_REDUCE[-2:]]
    assert read(log(tmp_path, lines)) == ([1024, 1048576, 2097152], [])


def test_a_table_that_failed_without_saying_which_is_passed_over(tmp_path: Path) -> None:
    """An old one, whose errors are differences; another table of the log is taken."""
    old = [OLD_HEAD, row(4096, 9.0, 9.0, "float"), row(8192, 9.0, 9.0, "float"), "# Out of bounds values : 2 FAILED"]
    lines = ["all_reduce_perf", *ranks("a", "b"), *old]
    with pytest.raises(JobError, match="passed over 2 rows of a table that FAILED without saying which"):
        import_profile(log(tmp_path, lines))
    sizes, said = read(log(tmp_path, [*lines, *ALL_REDUCE]))
    assert sizes == [1024, 1048576]
    assert said == ["passed over 2 rows of a table that FAILED without saying which (the first: line 10)"]


@pytest.mark.parametrize(
    "prefix",
    ["0: ", " 0: ", "[1,0]<stdout>:", "[1,0]<stdout>: ", "[0] ", "> ", "2026-01-31T10:00:00.123Z ", "worker-0  | ",
     "[2026-01-31 10:00:00] ", "Jan 31 10:00:00 host app[12]: ", "[pod/w-0/main] 2026-01-31T10:00:00Z "],
)  # fmt: skip
def test_what_stands_before_lines(tmp_path: Path, prefix: str) -> None:
    noise = ["gpu-a:1:1 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/IPC", "12 warnings"]
    lines = [prefix + line for line in ALL_REDUCE]
    sizes, said = read(log(tmp_path, [*lines[:-2], *noise, *lines[-2:]]))
    assert sizes == [1024, 1048576]
    assert not said


def test_another_prefix_than_the_headings(tmp_path: Path) -> None:
    """Time stamps of which the heading has none."""
    lines = [line if not line.strip()[:1].isdigit() else f"10:00:00.5 {line}" for line in ALL_REDUCE]
    assert read(log(tmp_path, lines)) == ([1024, 1048576], [])


STAMPED = HEAD + " timestamp"


def test_more_columns(tmp_path: Path) -> None:
    stamps = [f"{row(size, 30.0, 20.0)}  2026-01-31 10:00:00" for size in (1024, 4096)]
    assert read(log(tmp_path, [*ALL_REDUCE[:9], STAMPED, *stamps, *ALL_REDUCE[-2:]]))[0] == [1024, 4096]
    head = "#  size count type redop root time algbw busbw #wrong i_min i_max i_p99 i_cv% time algbw busbw #wrong i_min"
    rows = ["1024 256 float sum -1 30.0 1.0 1.0 0 29.0 31.0 30.5 1.2e+01 20.0 1.0 1.0 0 19.0"]
    assert read(log(tmp_path, [*ALL_REDUCE[:9], head, *rows, *ALL_REDUCE[-2:]])) == ([1024], [])


def test_only_in_place(tmp_path: Path) -> None:
    head = "#       size         count      type   redop    root     time   algbw   busbw  #wrong"
    lines = [*ALL_REDUCE[:9], head, "1024 256 float sum -1 20.0 1.0 1.0 0", *ALL_REDUCE[-2:]]
    (curve,) = import_profile(log(tmp_path, lines)).collectives
    assert curve.points == (Point(bytes=1024, seconds=20e-6),)
    blank = f"{1024:12}  {256:12}     float     sum      -1{' ' * 32}    20.00    1.00    1.00       0"
    (curve,) = import_profile(log(tmp_path, [*ALL_REDUCE[:11], blank, *ALL_REDUCE[-2:]])).collectives
    assert curve.points == (Point(bytes=1024, seconds=20e-6),)


def test_tests_of_no_use_and_sizes_of_nothing_are_counted(tmp_path: Path) -> None:
    """An alltoallv is no all-to-all."""
    other = ["# Collective test starting: alltoallv_perf", *ranks("a", "b"), HEAD, row(64, 9.0, 9.0), ALL_REDUCE[-2]]
    last = ["# Collective test starting: /opt/nccl/all_reduce_perf_mpi", *ALL_REDUCE[2:]]
    zero = [*last[:-2], row(0, 5.0, 5.0), *last[-2:]]
    sizes, said = read(log(tmp_path, [*other, *zero]))
    assert sizes == [1024, 1048576]
    assert sorted(said) == [
        "passed over 1 rows of 0 bytes, which is less than one element a rank (the first: line 22)",
        "passed over 1 rows of alltoallv_perf, which no plan uses (the first: line 8)",
    ]


def test_rows_under_no_heading_are_counted(tmp_path: Path) -> None:
    sizes, said = read(log(tmp_path, [row(64, 1.0, 1.0), *ALL_REDUCE, row(128, 1.0, 1.0)]))
    assert sizes == [1024, 1048576]
    assert said == ["passed over 2 rows under no heading (the first: line 1)"]


def test_a_bandwidth_below_the_least_is_said(tmp_path: Path) -> None:
    sizes, said = read(log(tmp_path, [*ALL_REDUCE[:-1], "# Avg bus bandwidth    : 9.25 FAILED"]))
    assert sizes == [1024, 1048576]
    assert "below the least that was asked for" in said[0]


@pytest.mark.parametrize(
    ("change", "key", "says"),
    [
        (lambda line: line.replace("device 1 [0x01]", "dev"), "line 5", "a line of a rank is torn"),
        (lambda line: "" if "Rank  2" in line else line, "line 11", "of 4 ranks above this table rank 2 is missing"),
        (lambda line: line.replace("time", "cputime"), "line 12", "has the processor's times"),
    ],
)
def test_ranks_that_are_not_all_there(tmp_path: Path, change: Any, key: str, says: str) -> None:
    with pytest.raises(JobError, match=says) as caught:
        import_profile(log(tmp_path, [line for line in map(change, ALL_REDUCE) if line]))
    assert caught.value.key == key


def test_versions_and_packed_logs(tmp_path: Path) -> None:
    lines = ["# nccl-tests version 2.17.6 nccl-headers=22803 nccl-library=22803", *ALL_REDUCE]
    path = tmp_path / "all.log.gz"
    path.write_bytes(gzip.compress("\n".join(lines).replace("NCCL version 2.28.7+cuda13.0", "x").encode()))
    assert import_profile(path).versions == {"nccl": "2.28.3"}
    rccl = [line.replace("NCCL version 2.28.7", "RCCL version 2.22.3") for line in ALL_REDUCE]
    assert import_profile(log(tmp_path, rccl)).versions == {"rccl": "2.22.3"}


def half(time: float, wrong: Any = 0.0) -> dict[str, Any]:
    return {"time": time, "alg_bw": 1.0, "bus_bw": 1.0, "nwrong": wrong}


def written(name: str = "all_reduce_perf", ngpus: int = 1, **changes: Any) -> dict[str, Any]:
    """As nccl-tests write it with -J: of a process with several GPUs only the first is named."""
    devices = [
        {"rank": rank, "group": 0, "pid": 7, "hostname": f"n{rank // 4}", "device": rank % 4, "device_info": "Acme X1"}
        for rank in range(0, 8, ngpus)
    ]
    rows = [
        {"size": size, "count": size // 4, "type": "float", "redop": "sum", "root": "-1", "out_of_place": half(30.0),
         "in_place": half(20.0)}
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
    assert "missing ends of tables" in said[0]


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
         "type": "float", "redop": "sum", "inPlace": place, "time": 30.0 - 10 * place, "algBw": 1, "busBw": 1,
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


@given(seed=st.integers(0, 10**9))
def test_a_damaged_row_changes_the_answer_or_is_counted_or_refused(
    tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    chance = random.Random(seed)
    whole = row(2097152, 600.0, 500.0)
    letters = list(whole)
    for _ in range(chance.randint(1, 4)):
        place = chance.randrange(len(letters))
        letters[place] = chance.choice(["", letters[place] * 2, chance.choice(" \t#.-xN/0e7")])
    damaged = "".join(letters)
    over, points, error = PassedOver(), dict[int, float](), None
    path = log(tmp_path_factory.mktemp("log", numbered=True), [*ALL_REDUCE[:-2], damaged, *ALL_REDUCE[-2:]])
    try:
        points = {point.bytes: point.seconds for point in import_profile(path, over).collectives[0].points}
    except JobError as refused:
        error = refused
    if error:
        assert error.key == "line 14" or "cannot be" in str(error)
    elif points == {1024: 20e-6, 1048576: 250e-6, 2097152: 500e-6} and not over:
        words, own = damaged.split()[-13:], whole.split()  # only what nobody reads was damaged
        assert [float(words[at]) for at in (0, 8, 9, 12)] == [float(own[at]) for at in (0, 8, 9, 12)]
    else:
        assert over or points.get(2097152) != 500e-6


MANY: dict[str, tuple[str, str]] = {
    "lines": ("\n" * 1_000_001, "has more than 1000000 lines"),
    "bytes": ("x" * (33 << 20), "cannot be read: it has"),
    "rows": ("\n".join([*ALL_REDUCE[:11], *[row(8, 1.0, 1.0)] * 50_001]), "line 50012: more than 50000 rows"),
    "a rank far away": ("\n".join([*ALL_REDUCE[:6], ranks("z", each=1)[1].replace("Rank  0", f"Rank {10**15}"),
                                   *ALL_REDUCE[9:]]), "rank 3 is missing"),
    "values": ("[" + "{}," * 1_400_000 + "{}]", "at most 2000000 are read"),
    "deep": ("[" * 100_000, "nested too deeply"),
    "keys": (json.dumps({f"pp_size_{number}": 1.0 for number in range(10_001)}), "has 10001 keys; at most 10000"),
    "gpus": (json.dumps(written() | {"config": {"nthreads": 1024, "ngpus": 1024, "devices": []}}), "1048576 GPUs of a"),
}  # fmt: skip


@pytest.mark.parametrize("name", MANY)
def test_more_than_any_run_has_is_refused(tmp_path: Path, name: str) -> None:
    text, says = MANY[name]
    (tmp_path / "p2p_bandwidth_1nodes_8gpus_per_node.json").write_text(text)
    with pytest.raises(JobError, match=says):
        import_profile(tmp_path / "p2p_bandwidth_1nodes_8gpus_per_node.json")


def test_long_lines_are_counted(tmp_path: Path) -> None:
    sizes, said = read(log(tmp_path, [*ALL_REDUCE[:-2], "#" * 20_000, *ALL_REDUCE[-2:]]))
    assert (sizes, said) == (
        [1024, 1048576],
        ["passed over 1 lines of more than 10000 characters (the first: line 14)"],
    )


def test_other_lines_that_begin_with_a_number_are_passed_over(tmp_path: Path) -> None:
    found = import_profile(log(tmp_path, [*ALL_REDUCE, "4 ranks have ended"]))
    assert len(found.collectives[0].points) == 2
