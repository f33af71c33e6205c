"""What follows from a measured placement profile, and which files are none."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from plait.core.errors import JobError
from plait.core.placement_profile import PlacedJob, PlacementProfile, Steps, affinity_row, network_file
from plait.core.profile import Curve, Group, Machine, Point
from plait.place.affinity import read_profiled
from plait.place.network import Network


def curve(minipods: int, per_byte: float) -> Curve:
    sizes = (1 << 12, 1 << 20)
    group = Group(ranks=2, per_node=1, nodes=2, minipods=minipods, at_once=2)
    points = tuple(Point(bytes=size, seconds=1e-3 + size * per_byte) for size in sizes)
    return Curve(kind="all_reduce", group=group, points=points)


def steps(order: str, *seconds: float) -> Steps:
    return Steps.model_validate(
        {"order": order, "hosts": ("a", "b"), "dp_spread": 1, "pp_spread": 2, "seconds": seconds}
    )


JOB = PlacedJob(
    name="small", micro_batch=2, weights=1e6, dp=4e6, pp=1e6,
    steps=(steps("dp", 1.0, 2.0), steps("pp", 1.6, 4.0), steps("random", 1.5, 3.0)),
)  # fmt: skip
PROFILE = PlacementProfile(
    machine=Machine(name="lab", kind="cpu", ranks=4, ranks_per_node=1, backend="gloo"),
    date="2026-11-23",
    nodes_per_minipod=2,
    collectives=(curve(1, 8e-9), curve(2, 48e-9)),
    job=JOB,
)


def test_it_survives_its_file(tmp_path: Path) -> None:
    PROFILE.write(tmp_path / "p.json")
    assert PlacementProfile.read(tmp_path / "p.json") == PROFILE


def test_an_edited_file_is_refused(tmp_path: Path) -> None:
    values = json.loads(PROFILE.to_json()) | {"date": "2026-11-24"}
    (tmp_path / "p.json").write_text(json.dumps(values))
    with pytest.raises(JobError, match="edited"):
        PlacementProfile.read(tmp_path / "p.json")
    (tmp_path / "p.json").write_text("{}")
    with pytest.raises(JobError, match="version"):
        PlacementProfile.read(tmp_path / "p.json")


def test_latency_is_no_part_of_what_crossing_costs() -> None:
    assert PROFILE.crossing("all_reduce") == pytest.approx(6.0)
    assert PROFILE.crossing("send") is None


def test_gains_are_medians_inside_rounds() -> None:
    assert JOB.gain("dp") == pytest.approx(0.5)
    assert JOB.gain("pp") == pytest.approx((1.5 / 1.6 + 0.75) / 2 - 1)


def test_its_row_is_an_affinity_files(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    for _ in range(2):
        with file.open("a") as end:
            end.write(affinity_row(PROFILE))
    first, second = read_profiled(file)
    assert first == second
    assert (first.name, first.gpu, first.gain_dp, first.alpha) == ("small", "cpu", 0.5, 1.0)


def test_no_row_follows_without_a_job() -> None:
    with pytest.raises(JobError, match="no affinity"):
        affinity_row(PROFILE.model_copy(update={"job": None}))


def test_its_network_is_what_place_reads(tmp_path: Path) -> None:
    (tmp_path / "net.toml").write_text(network_file(PROFILE))
    network = Network.read(tmp_path / "net.toml")
    assert network.conflicts == pytest.approx(6.0)
    assert network.collective(1e6, 2) == pytest.approx(6 * network.collective(1e6, 1))
    assert tomllib.loads((tmp_path / "net.toml").read_text())["rate"]["date"] == "2026-11-23"
    (tmp_path / "net.toml").write_text(network_file(PROFILE).replace("value = 6", "value = 0.5"))
    with pytest.raises(JobError, match="crossing"):
        Network.read(tmp_path / "net.toml")


def test_no_network_follows_from_groups_that_stay_in_a_minipod() -> None:
    for collectives in ((), (curve(1, 8e-9),), (curve(2, 8e-9), curve(3, 9e-9))):
        alone = PROFILE.model_copy(update={"collectives": collectives})
        assert alone.crossing("all_reduce") is None
        with pytest.raises(JobError, match="no group both inside a minipod and across"):
            network_file(alone)


def test_what_a_file_says_wrong_is_named_with_a_way_out(tmp_path: Path) -> None:
    values = json.loads(PROFILE.to_json()) | {"nodes_per_minipod": 0}
    (tmp_path / "p.json").write_text(json.dumps(values))
    with pytest.raises(JobError, match=r"p\.json: .*nodes_per_minipod.*0 is not allowed"):
        PlacementProfile.read(tmp_path / "p.json")
    values = json.loads(PROFILE.to_json()) | {"more": 0}
    (tmp_path / "p.json").write_text(json.dumps(values))
    with pytest.raises(JobError, match="unknown key"):
        PlacementProfile.read(tmp_path / "p.json")
