"""Runs on a lab to which something happens go on by themselves, and end as if nothing had
happened."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from plait.core.runs.attempts import Attempt, read_attempts
from plait.core.runs.host_memory import memory_of
from plait.lab import running
from tests.faults.runs import JOB, ROOT
from tests.faults.trials import lost_by
from tests.support.runs import rank_pids

pytestmark = pytest.mark.slow

STEPS, EVERY = 60, 5
LAYERS = 4
"""As many as the deepest pipeline has places."""
PATIENT = 30.0
"""The deadline that half of the job's ``run.timeout`` would be."""
SOON = "run.hang_deadline=4"
"""For what is told by its silence alone; elsewhere a busy machine is not to be mistaken for a hung
one."""


@dataclass
class Run:
    """A run on a lab. on: such as 3x1."""

    folder: Path
    on: str
    strategy: str
    settings: tuple[str, ...] = ()
    micro: int = 1

    @property
    def home(self) -> Path:
        return self.folder / "runs" / "job"

    def start(self) -> subprocess.Popen[str]:
        text = self.folder / "text"
        text.mkdir(parents=True)
        (text / "a.txt").write_text("".join(f"line {i} says {i * i % 97}\n" for i in range(3000)))
        (self.folder / "job.toml").write_text(JOB.format(steps=STEPS, strategy=self.strategy, deadline=PATIENT))
        argv = [sys.executable, "-m", "plait.cli.main", "train", "job.toml", "--on", f"lab:{self.on}@200mbit"]
        own = [f"train.micro_batch_size={self.micro}", f"train.checkpoint_every={EVERY}", "train.log_every=1"]
        own.append(f"model.num_layers={LAYERS}")
        return subprocess.Popen(
            [*argv, *own, *self.settings], cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)}, start_new_session=True,
        )  # fmt: skip

    def to_the_end(self, harm: Callable[[subprocess.Popen[str]], object] | None = None, after: int = 0) -> str:
        """Train; harm: done once ``after`` steps are. What was said."""
        process = self.start()
        if harm:
            threading.Thread(target=self._later, args=(process, harm, after), daemon=True).start()
        try:
            output, errors = process.communicate(timeout=400)
        finally:
            if process.poll() is None:
                process.kill()
        assert process.returncode == 0, output + errors
        return " ".join(errors.split())

    def _later(self, process: subprocess.Popen[str], harm: Callable[[subprocess.Popen[str]], object], after: int) -> \
            None:  # fmt: skip
        while process.poll() is None and len(self.metrics) < after:
            time.sleep(0.02)
        if process.poll() is None:
            harm(process)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        file = self.home / "metrics.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    @property
    def curve(self) -> list[tuple[int, float, float]]:
        return [(m["step"], m["loss"], m["norm"]) for m in self.metrics]

    @property
    def weights(self) -> dict[str, list[int]]:
        """Sizes and checksums of the last checkpoint's files."""
        return json.loads((self.home / "checkpoints" / "step-00000060" / "manifest.json").read_text())["files"]

    @property
    def attempts(self) -> list[Attempt]:
        return read_attempts(self.home)


def kill(rank: int) -> Callable[[subprocess.Popen[str]], None]:
    """SIGKILL for a rank of a launcher."""

    def harm(process: subprocess.Popen[str]) -> None:
        os.kill(rank_pids(process)[rank], signal.SIGKILL)

    return harm


def cut(host: int) -> Callable[[subprocess.Popen[str]], None]:
    """Pull a host's cable."""

    def harm(process: subprocess.Popen[str]) -> None:
        next(entry for entry in running() if entry.pid == process.pid).network.cut(host)

    return harm


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Run]:
    """What a strategy gives on a lab where nothing happens; done once for each."""
    known: dict[tuple[str, str], Run] = {}

    def of(on: str, strategy: str) -> Run:
        if (on, strategy) not in known:
            known[on, strategy] = Run(tmp_path_factory.mktemp("undisturbed"), on, strategy)
            known[on, strategy].to_the_end()
        return known[on, strategy]

    return of


def check_as_undisturbed(run: Run, good: Run) -> tuple[Attempt, Attempt]:
    """Whether it ended as the other, with one restart that lost no more than an interval."""
    assert run.curve == good.curve
    assert run.weights == good.weights
    first, second = run.attempts
    assert (first.outcome, second.outcome, second.step) == ("failed", "finished", 60)
    lost, late = lost_by(first, second)
    assert 0 <= lost - late <= EVERY
    assert None not in (first.detection_seconds, second.wait_seconds, second.restart_seconds, second.first_step_seconds)
    return first, second


def test_a_killed_rank_moves_to_a_spare(tmp_path: Path, undisturbed: Callable[[str, str], Run]) -> None:
    run = Run(tmp_path / "run", "3x1", "dp = 2")
    said = run.to_the_end(kill(1), after=12)
    first, second = check_as_undisturbed(run, undisturbed("2x1", "dp = 2"))
    assert (first.cause, first.ranks, first.hosts, second.hosts) == (
        "killed", (1,), ("host0", "host1"), ("host0", "host2")
    )  # fmt: skip
    assert "host2 takes the place of host1 (node 1)" in said
    assert "the run goes on from step" in said


def test_a_host_that_is_cut_off_is_replaced(tmp_path: Path, undisturbed: Callable[[str, str], Run]) -> None:
    """Of two hosts that cannot reach each other either may be to blame; the spare tells which."""
    run = Run(tmp_path / "run", "3x1", "dp = 2", settings=(SOON,))
    run.to_the_end(cut(0), after=12)
    first, second = check_as_undisturbed(run, undisturbed("2x1", "dp = 2"))
    assert (first.cause, second.hosts) == ("cut off", ("host2", "host1"))


def test_without_a_spare_a_killed_rank_comes_back_where_it_was(
    tmp_path: Path, undisturbed: Callable[[str, str], Run]
) -> None:
    run = Run(tmp_path / "run", "2x1", "dp = 2")
    run.to_the_end(kill(0), after=12)
    _, second = check_as_undisturbed(run, undisturbed("2x1", "dp = 2"))
    assert second.hosts == ("host0", "host1")


def test_with_too_few_hosts_the_run_goes_on_with_fewer_replicas(
    tmp_path: Path, undisturbed: Callable[[str, str], Run]
) -> None:
    run = Run(tmp_path / "run", "2x1", "dp = 2", settings=(SOON,))
    said = run.to_the_end(cut(1), after=12)
    first, second = run.attempts
    assert (first.world, second.world, second.hosts) == (2, 1, ("host0",))
    assert "Planned anew for 1 rank" in said
    good = undisturbed("2x1", "dp = 2")
    assert [m["step"] for m in run.metrics] == list(range(1, 61))
    for mine, its in zip(run.curve, good.curve, strict=True):  # sums in another order
        assert mine[1] == pytest.approx(its[1], rel=1e-4)


def test_what_a_lost_host_had_in_memory_its_neighbour_has(
    tmp_path: Path, undisturbed: Callable[[str, str], Run]
) -> None:
    settings = (SOON, "run.memory_every=3", "train.checkpoint_every=0")
    run = Run(tmp_path / "run", "3x1", "dp = 2", settings=settings)
    run.to_the_end(cut(0), after=12)
    _, second = check_as_undisturbed(run, undisturbed("2x1", "dp = 2"))
    assert second.hosts == ("host2", "host1")
    assert second.resumed >= 9  # of which there is nothing on disk
    assert not memory_of(run.home).exists()


@pytest.mark.contract
@pytest.mark.parametrize("strategy", ["pp = 2\ndp = 2\ntp = 2", "dp = 4\ntp = 2", "pp = 4\ntp = 2"])
@pytest.mark.parametrize("what", [kill, cut])
@pytest.mark.parametrize("where", [0, 2])
def test_larger_jobs(
    tmp_path: Path, undisturbed: Callable[[str, str], Run], strategy: str, where: int,
    what: Callable[[int], Callable[[subprocess.Popen[str]], None]],
) -> None:  # fmt: skip
    run = Run(tmp_path / "run", "5x2", strategy, settings=(SOON,))
    run.to_the_end(what(where * 2 if what is kill else where), after=12)
    _, second = check_as_undisturbed(run, undisturbed("4x2", strategy))
    assert "host4" in second.hosts
    assert f"host{where}" not in second.hosts
