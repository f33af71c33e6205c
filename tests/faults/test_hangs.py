"""What happens to ranks and links on a lab is named: which rank, which host, what it was, and soon."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from plait.lab import Lab
from tests.faults.runs import ALLOWED, DEADLINE, SHAPES, Outcome, Shape, run

CAUSES = {
    "kill": {"crashed"}, "stop": {"stopped"}, "loop": {"host code"}, "sleep": {"host code"}, "hold": {"host code"},
    "size": {"mismatch"}, "dtype": {"mismatch"}, "order": {"mismatch"}, "deadlock": {"deadlock"},
}  # fmt: skip
SAYS = {
    "kill": "killed by SIGKILL", "stop": "is stopped", "loop": "alive and in code of its own",
    "sleep": "alive and in code of its own", "hold": "holds the interpreter's lock", "size": "must be the same on all",
    "dtype": "must be the same on all", "order": "", "deadlock": "in a deadlock",
}  # fmt: skip


BUSY = 25.0
"""Seconds beyond the deadline where a suite runs beside other work."""


def check(kind: str, rank: int, found: Outcome, *, allowed: float) -> None:
    """Whether a rank's fault was named, in time."""
    assert found.error
    assert f"ank {rank}" in found.error
    assert found.seconds <= DEADLINE + allowed
    if kind == "kill":  # known at once; nobody has to look for it
        assert "was killed by SIGKILL" in found.error
        return
    assert found.verdict
    assert found.verdict.cause in CAUSES[kind]
    named = set(found.verdict.ranks)
    tie = any(said in found.verdict.why for said in ("no majority", "Nothing tells which"))
    assert named == {rank} or (rank in named and tie)
    assert SAYS[kind] in found.error or tie


@pytest.mark.parametrize(
    ("kind", "name", "rank"),
    [("hold", "pp2-dp2", 1), ("deadlock", "dp2-tp2", 1)],
)
def test_what_happens_to_a_rank_is_named(
    kind: str, name: str, rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = SHAPES[name]
    check(kind, rank, run(tmp_path, shape, monkeypatch, fault=f"{kind} {rank} 4"), allowed=BUSY)


def check_cut(host: int, shape: Shape, found: Outcome, *, allowed: float) -> None:
    """Whether a cut link was named; of two hosts both are, since it may be either's."""
    assert found.error
    assert found.verdict
    assert found.verdict.cause == "cut off"
    hosts = {f"host {host}"} if shape.hosts > 2 else {"host 0", "host 1"}
    assert set(found.verdict.hosts) == hosts
    assert set(found.verdict.ranks) >= shape.ranks_of(host)
    assert found.seconds <= DEADLINE + allowed


def test_a_cut_link_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = SHAPES["dp3"]
    check_cut(1, shape, run(tmp_path, shape, monkeypatch, harm=lambda lab: lab.cut(1)), allowed=BUSY)


def test_a_slow_link_and_a_slow_rank_are_no_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = SHAPES["dp2-tp2"]
    found = run(tmp_path, shape, monkeypatch, fault="slow 2 0", harm=lambda lab: lab.slow(0, "20mbit"), steps=15)
    assert (found.status, found.error, found.verdict) == (0, None, None)


@pytest.mark.contract
@pytest.mark.parametrize("repeat", range(20))
@pytest.mark.parametrize("kind", CAUSES)
def test_ranks_faults_at_random_steps(kind: str, repeat: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(f"{kind}/{repeat}")
    shape = SHAPES[draw.choice(list(SHAPES))]
    rank, step = draw.randrange(shape.spec.world_size), draw.randint(1, 30)
    check(kind, rank, run(tmp_path, shape, monkeypatch, fault=f"{kind} {rank} {step}"), allowed=ALLOWED)


@pytest.mark.contract
@pytest.mark.parametrize("repeat", range(20))
def test_cut_links_at_random_steps(repeat: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(repeat)
    shape = SHAPES[draw.choice(list(SHAPES))]
    host, after = draw.randrange(shape.hosts), draw.randint(1, 30)
    found = run(tmp_path, shape, monkeypatch, harm=lambda lab: lab.cut(host), after=after)
    check_cut(host, shape, found, allowed=ALLOWED)


@pytest.mark.contract
@pytest.mark.parametrize("repeat", range(20))
def test_slow_links_are_no_hang(repeat: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(repeat)
    shape = SHAPES[draw.choice(list(SHAPES))]

    def slow(lab: Lab) -> None:
        lab.slow(draw.randrange(shape.hosts), "20mbit")

    fault = f"slow {draw.randrange(shape.spec.world_size)} 0"
    found = run(tmp_path, shape, monkeypatch, fault=fault, harm=slow, steps=60)
    assert (found.status, found.error, found.verdict) == (0, None, None)
