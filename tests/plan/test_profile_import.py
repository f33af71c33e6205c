"""What other tools' files say, and which of them cannot be used. All numbers are made up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from plait.core.base.errors import JobError
from plait.core.cluster.profile import Curve, Group, Machine, Point, Profile
from plait.plan.profile_import import import_profile, import_profiles
from tests.plan.nccl_texts import ALL_REDUCE, HEAD, OLD_HEAD, UNITS, log, ranks, row
from tests.plan.test_nccl_json import written


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
    "overlap": ({"overlap_coe": 1.1}, "overlap_coefficient.json", "overlap_coe", "plait measure machine"),
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


def test_what_is_no_file_is_told_in_the_systems_words_alone(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"cannot be read: Is a directory\.$"):
        import_profile(tmp_path)
