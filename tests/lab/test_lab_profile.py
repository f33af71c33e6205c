"""A profile of an emulated cluster: its links have the rate that the lab gives them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from plait.core.cluster.network import Network, PlacementProfile
from plait.core.cluster.profile import Profile
from plait.plan.calibrate.profiled import cluster_from_profile

pytestmark = pytest.mark.lab


@pytest.mark.slow
def test_a_profile_of_two_hosts(needs_lab: None, tmp_path: Path) -> None:
    words = ["measure", "machine", "--on", "lab:2x1@200mbit", "seconds=6", "--out", str(tmp_path / "lab.json")]
    done = subprocess.run(
        [sys.executable, "-m", "plait.cli.main", *words], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr + done.stdout
    found = Profile.read(tmp_path / "lab.json")
    assert (found.machine.ranks, found.machine.ranks_per_node) == (2, 1)
    assert found.machine.name.startswith("lab ")
    assert {one.group.nodes for one in found.collectives} == {2}
    rates = {one.kind: one.bandwidth for one in found.collectives}
    assert 5e6 < rates["all_reduce"] < 50e6, f"200 Mbit/s are 25 MB/s, bursts pass faster; found {rates}"
    cluster = cluster_from_profile(found)
    assert [tier.ranks for tier in cluster.tiers] == [1, 0]
    assert cluster.tiers[1].rate.value * cluster.efficiency.across.share.value < 60e6


@pytest.mark.slow
def test_what_spreading_over_minipods_costs(needs_lab: None, tmp_path: Path) -> None:
    words = ["measure", "placement", "--on", "lab:4x1@200mbit,2pods@50mbit", "seconds=5", "--draw", "spread.svg"]
    done = subprocess.run(
        [sys.executable, "-m", "plait.cli.main", *words, "--network", "net.toml"],
        capture_output=True, text=True, timeout=240, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr + done.stdout
    assert max(len(line) for line in done.stdout.splitlines()) <= 80
    found = PlacementProfile.read(tmp_path / "placement-profile.json")
    assert {(one.group.ranks, one.group.minipods) for one in found.collectives} == {(2, 1), (2, 2), (4, 2)}
    assert {one.kind for one in found.collectives} == {"all_reduce", "all_gather", "reduce_scatter", "send"}
    across = next(one for one in found.interference if one.group.minipods == 2)
    assert across.slowdown > 1.2, "both share a core link"
    assert (tmp_path / "spread.svg").stat().st_size > 1000
    assert Network.read(tmp_path / "net.toml").conflicts > 1.5, "a core of a quarter of the rate, shared by two"
