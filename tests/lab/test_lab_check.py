"""``plait check`` on labs: links that are slow or cut are named."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from plait.lab import Lab, LabSpec
from plait.launch.health.links import Limits, findings
from plait.launch.local.local import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("needs_lab")]


def told(folder: Path, spec: str, harm: Callable[[Lab], object]) -> list[tuple[str, tuple[str, ...]]]:
    """What is wrong on a lab to which something has happened."""
    argv = [sys.executable, "-m", "plait.launch.health.links", str(folder), str(folder), str(1 << 20)]
    with Lab(LabSpec.parse(spec)) as lab:
        harm(lab)
        status = run_ranks(
            lambda rank, **more: lab.popen(rank, argv, **more), lab.spec.world_size, folder / "logs", timeout=60
        )
    assert status == 0
    report = json.loads((folder / "check.json").read_text())
    limits = Limits(disk_rate=0.0, disk_free=0)
    return [(one.what, one.hosts) for one in findings(report, limits) if one.what != "loopback"]


def test_the_host_with_a_slow_link_is_named(tmp_path: Path) -> None:
    found = told(tmp_path, "4x2@400mbit", lambda lab: lab.slow(2, "20mbit"))
    assert ("link", ("host2",)) in found


def test_a_cut_host_is_missing(tmp_path: Path) -> None:
    assert told(tmp_path, "3x1@400mbit", lambda lab: lab.cut(1)) == [("missing", ("node 1",))]


def test_a_good_lab_by_command(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "plait.cli.main", "check", "--on", "lab:2x1@100mbit", "--json", "--disk", "0.001",
         "--size", "1", "--least", "200mbit"],
        cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr  # 100 are no 200
    bad = json.loads(done.stdout)["bad"]
    assert {tuple(one["hosts"]) for one in bad if one["what"] == "link"} == {("host0", "host1"), ("host1", "host0")}


def test_hosts_of_a_lab_tell_whom_they_reach() -> None:
    with Lab(LabSpec.parse("3x1@1gbit")) as lab:
        assert lab.reached() == [{0, 1, 2}] * 3
        lab.cut(1)
        reached = lab.reached()
        assert reached[0] == reached[2] == {0, 2}
        lab.heal(1)
        assert lab.reached() == [{0, 1, 2}] * 3
