"""What happens to ranks and links on a lab is named: which rank, which host, what it was, and soon. A few
cases; twenty of each fault are in test_trials."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.runs import DEADLINE, SHAPES, run
from tests.faults.trials import TIES

SAYS = {"hold": ("host code", "holds the interpreter's lock"), "deadlock": ("deadlock", "in a deadlock")}
BUSY = 25.0
"""Seconds beyond the deadline where a suite runs beside other work."""


@pytest.mark.parametrize(("kind", "name"), [("hold", "pp2-dp2"), ("deadlock", "dp2-tp2")])
def test_what_happens_to_a_rank_is_named(kind: str, name: str, tmp_path: Path) -> None:
    found = run(tmp_path, SHAPES[name], fault=f"{kind} 1 4")
    cause, says = SAYS[kind]
    assert found.error
    assert "ank 1" in found.error
    assert found.seconds <= DEADLINE + BUSY
    assert found.verdict
    assert found.verdict.cause == cause
    tie = any(said in found.verdict.why for said in TIES)
    assert found.verdict.ranks == (1,) or (1 in found.verdict.ranks and tie)
    assert says in found.error or tie


def test_a_cut_link_is_named(tmp_path: Path) -> None:
    shape = SHAPES["dp3"]
    found = run(tmp_path, shape, harm=lambda lab: lab.cut(1))
    assert found.error
    assert found.verdict
    assert found.verdict.cause == "cut off"
    assert found.verdict.hosts == ("host 1",)
    assert set(found.verdict.ranks) >= shape.ranks_of(1)
    assert found.seconds <= DEADLINE + BUSY


def test_a_slow_link_and_a_slow_rank_are_no_hang(tmp_path: Path) -> None:
    shape = SHAPES["dp2-tp2"]
    found = run(tmp_path, shape, fault="slow30 2 0", harm=lambda lab: lab.slow(0, "20mbit"), steps=15)
    assert (found.status, found.error, found.verdict) == (0, None, None)
