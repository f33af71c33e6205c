"""What a rank's start takes does not grow with the world: the counts of ``benchmarks/startup.py``;
and what small programs load."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from plait.core.base.programs import RENDERER, SELF_CHECK
from plait.train.comm.tree import FAN

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def counted() -> list[dict[str, Any]]:
    code = "import json, startup_worlds as s; print(json.dumps([s.of_a_world(world) for world in (64, 2048)]))"
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([str(BENCHMARKS.parent), str(BENCHMARKS)])}
    ran = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
    return json.loads(ran.stdout)


@pytest.mark.system
def test_a_rank_opens_and_asks_as_much_in_any_world(counted: list[dict[str, Any]]) -> None:
    first = counted[0]
    for one in counted:
        assert one["groups"] == first["groups"]
        assert one["store_ours"] == first["store_ours"]
        # of each group it sets what its own is, and asks for those with whom it speaks in the tree
        assert one["store_torch"] <= 2 * one["groups"] + 2 * one["connections"]


def test_it_is_connected_to_its_neighbours_in_the_tree(counted: list[dict[str, Any]]) -> None:
    for one in counted:
        assert one["connections"] <= one["gloo_groups"] * (FAN + 1)
        assert one["mesh_connections"] == one["gloo_groups"] * (one["world"] - 1)


@pytest.mark.system
@pytest.mark.parametrize("program", [RENDERER, SELF_CHECK])
def test_programs_with_limits_load_no_numbers(program: str) -> None:
    code = f"import sys, {program}; print(sorted({{'numpy', 'torch', 'pydantic'}} & set(sys.modules)))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "[]\n"
