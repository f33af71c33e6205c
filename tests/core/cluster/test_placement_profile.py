"""What follows from a measured placement profile, and which files are none."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from plait.core.base.errors import JobError
from plait.core.cluster.network import (
    Interference,
    Network,
    PlacedJob,
    PlacementProfile,
    Steps,
    affinity_row,
    network_file,
)
from plait.core.cluster.profile import Curve, Group, Machine, Point
from plait.place.solve.affinity import read_profiled


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


def test_what_a_minipods_link_carries_is_what_all_pairs_have_together() -> None:
    """Two ranks a minipod, each of which has 1 / 48 ns of it."""
    assert PROFILE.core() == pytest.approx(2 / 48e-9)
    assert PROFILE.model_copy(update={"collectives": (curve(1, 8e-9),)}).core() is None


def test_the_size_that_saturates() -> None:
    """Of 1 ms and 1 ns a byte: 16 MiB has nearly all of it, 4 MiB 0.84 of that."""
    sizes = [1 << at for at in range(12, 25, 2)]
    points = tuple(Point(bytes=size, seconds=1e-3 + size * 1e-9) for size in sizes)
    assert curve(1, 1.0).model_copy(update={"points": points}).saturation_bytes == 1 << 24
    assert curve(1, 1.0).model_copy(update={"points": points[:1]}).saturation_bytes == 1 << 12


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
    assert network.core == pytest.approx(2 / 48e-9, rel=1e-5)
    assert network.collective(1e6, 2) == pytest.approx(6 * network.collective(1e6, 1))
    assert tomllib.loads((tmp_path / "net.toml").read_text())["rate"]["date"] == "2026-11-23"
    (tmp_path / "net.toml").write_text(network_file(PROFILE).replace("value = 6", "value = 0.5"))
    with pytest.raises(JobError, match="crossing"):
        Network.read(tmp_path / "net.toml")


def test_no_network_follows_from_groups_that_stay_in_a_minipod() -> None:
    for collectives in ((), (curve(1, 8e-9),), (curve(2, 8e-9), curve(3, 9e-9))):
        alone = PROFILE.model_copy(update={"collectives": collectives})
        assert alone.crossing("all_reduce") is None
        with pytest.raises(JobError, match="both inside a minipod and across"):
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


def flat(minipods: int, seconds: float = 1e-3) -> Curve:
    """One on which a further byte takes no time."""
    points = tuple(Point(bytes=size, seconds=seconds) for size in (1 << 12, 1 << 20))
    return curve(minipods, 1e-9).model_copy(update={"points": points})


def test_a_byte_that_takes_no_time_is_compared_with_none() -> None:
    for curves in ((flat(1), curve(2, 8e-9)), (curve(1, 8e-9), flat(2))):
        assert PROFILE.model_copy(update={"collectives": curves}).crossing("all_reduce") is None
    one = curve(2, 8e-9)
    single = one.model_copy(update={"points": one.points[:1]})
    assert PROFILE.model_copy(update={"collectives": (curve(1, 8e-9), single)}).crossing("all_reduce") is None


def test_crossing_is_that_of_the_widest_spread_and_the_mean_over_groups() -> None:
    wide = curve(2, 16e-9)
    four = wide.group.model_copy(update={"ranks": 4, "nodes": 4})
    curves = (
        curve(1, 8e-9), curve(2, 16e-9), curve(3, 24e-9),
        *(each.model_copy(update={"group": four.model_copy(update={"minipods": each.group.minipods})})
          for each in (curve(1, 10e-9), curve(2, 50e-9))),
    )  # fmt: skip
    assert PROFILE.model_copy(update={"collectives": curves}).crossing("all_reduce") == pytest.approx((3 + 5) / 2)


def test_the_rate_is_the_best_inside_a_minipod(tmp_path: Path) -> None:
    curves = (curve(1, 8e-9), curve(1, 2e-9), curve(2, 1e-9))
    text = tomllib.loads(network_file(PROFILE.model_copy(update={"collectives": curves})))
    assert text["rate"]["value"] == pytest.approx(curves[1].bandwidth, rel=1e-5)
    assert text["collective_loss"]["value"] == text["p2p_loss"]["value"] == 0


def test_what_crosses_is_never_said_to_be_quicker() -> None:
    text = tomllib.loads(network_file(PROFILE.model_copy(update={"collectives": (curve(1, 8e-9), curve(2, 4e-9))})))
    assert text["crossing"]["value"] == 1


@pytest.mark.parametrize(
    "change", [{"dp": 0.0}, {"pp": 0.0}, {"steps": JOB.steps[:2]}, {"steps": JOB.steps[1:]}, {"steps": JOB.steps[::2]}]
)
def test_no_row_follows_from_a_job_without_an_axis_or_an_order(change: dict[str, Any]) -> None:
    job = JOB.model_copy(update=change)
    with pytest.raises(JobError, match="no affinity follows from it"):
        affinity_row(PROFILE.model_copy(update={"job": job}))


def test_two_groups_side_by_side() -> None:
    group = curve(1, 8e-9).group
    both = Interference(kind="all_reduce", group=group, bytes=1024, alone=2.0, together=3.0)
    assert both.slowdown == 1.5


def test_gains_of_a_row_are_rounded_ones_of_its_axis() -> None:
    (row,) = tomllib.loads(affinity_row(PROFILE))["jobs"]
    assert (row["gain_dp"], row["gain_pp"]) == (0.5, round((1.5 / 1.6 + 0.75) / 2 - 1, 4))
    assert (row["micro_batch"], row["weights"], row["dp"], row["pp"]) == (2, 1e6, 4e6, 1e6)
    named = PROFILE.model_copy(update={"machine": PROFILE.machine.model_copy(update={"device": "H100"})})
    assert tomllib.loads(affinity_row(named))["jobs"][0]["gpu"] == "H100"


def test_a_file_has_the_version_that_is_read() -> None:
    assert json.loads(PROFILE.to_json())["version"] == 1
