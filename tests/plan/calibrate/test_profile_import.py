"""What other tools' files say, and which of them cannot be used. All numbers are made up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from plait.core.base.errors import JobError
from plait.core.cluster.profile import Curve, Group, Machine, Point, Profile
from plait.plan.calibrate.profile_import import import_profile, import_profiles
from tests.formats.nccl_tests.test_json_form import written
from tests.formats.nccl_tests.texts import ALL_REDUCE, log


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
    "vanishes": ({"pp_size_2": 1e308}, "p2p_bandwidth_1nodes_8gpus_per_node.json", None, "impossible number"),
    "no bytes": ({"allreduce_size_8_0MB_time": 1.0}, "sp_time_1nodes_8gpus_per_node.json", None, "impossible number"),
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
    with pytest.raises(JobError, match="cut off"):
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
    "values": ("[" + "{}," * 1_400_000 + "{}]", "at most 2000000 are read"),
    "deep": ("[" * 100_000, "nested too deeply"),
    "keys": (json.dumps({f"pp_size_{number}": 1.0 for number in range(10_001)}), "has 10001 keys; at most 10000"),
}  # fmt: skip


@pytest.mark.parametrize("name", MANY)
def test_more_than_any_run_has_is_refused(tmp_path: Path, name: str) -> None:
    text, says = MANY[name]
    (tmp_path / "p2p_bandwidth_1nodes_8gpus_per_node.json").write_text(text)
    with pytest.raises(JobError, match=says):
        import_profile(tmp_path / "p2p_bandwidth_1nodes_8gpus_per_node.json")


def test_json_is_told_from_logs_by_what_it_holds(tmp_path: Path) -> None:
    (tmp_path / "all.txt").write_text(json.dumps(written("all_gather_perf")))
    assert import_profile(tmp_path / "all.txt").collectives[0].kind == "all_gather"


def test_what_is_no_file_is_told_in_the_systems_words_alone(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"cannot be read: Is a directory\.$"):
        import_profile(tmp_path)
