"""A profile of an emulated cluster: its links have the rate that the lab gives them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from plait.core.profile import Profile
from plait.plan.profiled import here

pytestmark = pytest.mark.lab


@pytest.mark.slow
def test_a_profile_of_two_hosts(needs_lab: None, tmp_path: Path) -> None:
    words = ["profile", "--on", "lab:2x1@200mbit", "--seconds", "12", "--out", str(tmp_path / "lab.json")]
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
    cluster = here(found)
    assert [tier.ranks for tier in cluster.tiers] == [1, 0]
    assert cluster.tiers[1].rate.value * cluster.efficiency.across.share.value < 60e6
