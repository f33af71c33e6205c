"""What happens to ranks and links on a lab is named: which rank, which host, what it was. A few
cases; twenty of each fault, and how soon it is named, are in test_trials."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.runs import DEADLINE, SHAPES, rank_process, run
from tests.faults.trials import TIES
from tests.support.frozen import freeze, frozen_group, why_none

SAYS = {"hold": ("host code", "holds the interpreter's lock"), "deadlock": ("deadlock", "in a deadlock")}


@pytest.mark.parametrize(("kind", "name"), [("hold", "pp2-dp2"), ("deadlock", "dp2-tp2")])
def test_what_happens_to_a_rank_is_named(kind: str, name: str, tmp_path: Path) -> None:
    found = run(tmp_path, SHAPES[name], fault=f"{kind} 1 4")
    cause, says = SAYS[kind]
    assert found.error
    assert "ank 1" in found.error
    assert found.verdict
    assert found.verdict.cause == cause
    tie = any(said in found.verdict.why for said in TIES)
    assert found.verdict.ranks == (1,) or (1 in found.verdict.ranks and tie)
    assert says in found.error or tie


@pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning")
@pytest.mark.parametrize("kind", ["v1", "v2", "unified"])
def test_a_frozen_rank_is_named_and_the_run_ends_without_it(
    kind: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """SIGKILL ends no process that the first version has frozen; the second's it does."""
    if why := why_none(kind):
        pytest.skip(why)
    with frozen_group(kind) as group:
        found = run(tmp_path, SHAPES["dp2"], harm=lambda lab: freeze(group, rank_process(tmp_path, 1)))
    assert found.error and "Rank 1 (host 1) is stopped: its main thread is frozen with its control group" in found.error
    assert found.verdict and (found.verdict.cause, found.verdict.ranks) == ("stopped", (1,))
    assert ("rank 1 (process" in capfd.readouterr().err) == (kind == "v1")


def test_a_cut_link_is_named(tmp_path: Path) -> None:
    shape = SHAPES["dp3"]
    found = run(tmp_path, shape, harm=lambda lab: lab.cut(1))
    assert found.error
    assert found.verdict
    assert found.verdict.cause == "cut off"
    assert found.verdict.hosts == ("host 1",)
    assert set(found.verdict.ranks) >= shape.ranks_of(1)


def test_a_slow_link_and_a_slow_rank_are_no_hang(tmp_path: Path) -> None:
    shape = SHAPES["dp2-tp2"]
    found = run(tmp_path, shape, fault="slow30 2 0", harm=lambda lab: lab.slow(0, "20mbit"), steps=15)
    assert (found.status, found.error, found.verdict) == (0, None, None)


@pytest.fixture
def crowded() -> Iterator[None]:
    """Two processes that take all the processor's time they can get."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    yield
    for process in busy:
        process.kill()
        process.wait()


@pytest.mark.parametrize(("kind", "step"), [("many", 4), ("one", 1), ("one", 4)])
def test_a_step_that_is_longer_than_the_deadline_is_no_hang(
    kind: str, step: int, tmp_path: Path, crowded: None
) -> None:
    """Where every rank is held up by other work; a rank at its first step, one that goes from op to
    op, one that computes."""
    found = run(tmp_path, SHAPES["dp2"], fault=f"{kind} 1 {step}", steps=6)
    assert (found.status, found.error, found.verdict) == (0, None, None)


def test_a_hang_in_the_first_step_is_named(tmp_path: Path, crowded: None) -> None:
    found = run(tmp_path, SHAPES["dp2"], fault="sleep 1 1")
    assert found.verdict
    assert (found.verdict.cause, found.verdict.ranks) == ("host code", (1,))
    assert found.seconds > DEADLINE
