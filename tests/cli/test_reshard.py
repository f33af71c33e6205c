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
    "--from",
    "(2,4) R S0 R",
    "--to",
    "(2,4) S0 R R",
    "--shape",
    "1024,1024,512",
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
    assert "naive 1.2885 s, load_balance 1.2885 s" in text
    assert "host 3 receives |" in text
    assert "send/recv 5.1540 s" in text


def test_the_same_plan_for_programs() -> None:
    found = json.loads(explain(*CASE_3, "--json").stdout)
    plan = ReshardPlan.from_dict(found)
    assert plan.key == found["key"]
    assert [step.start for step in plan.steps].count(0) == 2
    assert found["compared"]["exact"] == found["compared"]["list"] == found["predicted"] == plan.predicted


@pytest.mark.parametrize("ending", ["svg", "png"])
def test_a_picture_in_a_file(tmp_path: Path, ending: str) -> None:
    file = tmp_path / f"picture.{ending}"
    assert explain(*CASE_3, "nics_per_host=2", "--draw", str(file)).returncode == 0
    assert file.read_bytes()[:5] == {"svg": b"<?xml", "png": b"\x89PNG\r"}[ending]


def test_meshes_that_share_ranks_and_an_order_and_a_way_by_name() -> None:
    named = ["ranks_per_host=2", "order=exact", "way=send_recv", "--json"]
    found = json.loads(explain("--from", "(4) S0", "--to", "(4)@2 R", "--shape", "999", *named).stdout)
    assert found["order"] == "exact"
    assert {step["way"] for step in found["steps"]} == {"send_recv"}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--from", "2,4 S0 R R"], "is not a layout"),
        (["--from", "(2,4) S0 R"], "has 2 dimensions, the shape 1024,1024,512 has 3"),
        (["--shape", "4,x,4"], "whole numbers"),
        (["--shape", "4,-1,4"], "Give sizes from 0"),
        (["dtype=int31"], "did you mean 'int32'"),
        (["nic=fast"], "is not a link rate"),
        (["nic=unlimited"], "leaves nothing to plan for"),
        (["latency=50"], "ns, us, ms or s"),
        (["order=lst"], "did you mean 'list'"),
        (["way=broadcst"], "did you mean 'broadcast'"),
        (["--to", "(2,4)@4 S0 R R"], "Add ranks_per_host"),
        (["nics_per_host=0"], "at least 1"),
        (["--draw", "picture.gif"], "ends in .svg, .png, .pdf"),
    ],
)
def test_a_mistake_is_one_paragraph(arguments: list[str], says: str) -> None:
    done = explain(*CASE_3, *arguments)
    assert done.returncode == 2
    assert says in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
