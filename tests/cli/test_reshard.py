"""``plait reshard``, as a user sees it."""

from __future__ import annotations

import json
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from plait.core.reshard.plan import ReshardPlan
from tests.support.command import plait

TIER = "unit"

CASE_3 = [
    "(2,4) R S0 R",
    "(2,4) S0 R R",
    "shape=1024,1024,512",
    "dtype=int32",
    "latency=0s",
]


def explain(*arguments: str) -> CompletedProcess[str]:
    return plait("reshard", *arguments)


def test_a_plan_for_people() -> None:
    done = explain(*CASE_3)
    assert done.returncode == 0, done.stderr
    text = " ".join(done.stdout.split())
    assert "predicted 0.8590 s; lower bound 0.8590 s, 100.0% of it by the bound" in text
    assert "host 3 receives |" in text


def test_the_same_plan_for_programs() -> None:
    found = json.loads(explain(*CASE_3, "--json").stdout)
    plan = ReshardPlan.from_dict(found)
    assert plan.key == found["key"]
    assert [step.start for step in plan.steps].count(0) == 2
    assert found["predicted"] == plan.predicted


@pytest.mark.parametrize("ending", ["svg", "png"])
def test_a_picture_in_a_file(tmp_path: Path, ending: str) -> None:
    file = tmp_path / f"picture.{ending}"
    assert explain(*CASE_3, "nics_per_host=2", "--draw", str(file)).returncode == 0
    assert file.read_bytes()[:5] == {"svg": b"<?xml", "png": b"\x89PNG\r"}[ending]


def test_meshes_that_share_ranks_and_a_way_by_name() -> None:
    named = ["ranks_per_host=2", "way=send_recv", "--json"]
    found = json.loads(explain("(4) S0", "(4)@2 R", "shape=999", *named).stdout)
    assert {step["way"] for step in found["steps"]} == {"send_recv"}
