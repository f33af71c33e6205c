"""The history of a run that torchrun starts: what rank 0 writes down of its starts."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from plait.core.base.cluster_env import this_host
from plait.core.base.env import RankEnv
from plait.core.base.errors import NotFinite
from plait.core.cluster.hardware import HERE
from plait.core.job.plan import CHANGED, Plan
from plait.core.job.spec import Job
from plait.core.runs.attempts import Attempt, read_attempts
from plait.plan.make import make_plan
from plait.train.machine.control import Control
from plait.train.machine.rank_process import record_attempt

JOB = {
    "model": {"family": "gpt", "num_layers": 1, "hidden": 8, "num_heads": 2, "vocab": 16, "max_sequence": 8},
    "data": {"sequence_length": 8},
    "train": {"global_batch_size": 2, "micro_batch_size": 1},
}


class Run:
    """A start in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.control = folder, Control()
        self.rank = RankEnv(world_size=2, local_world_size=2)
        self.plan = make_plan(Job.from_dict(JOB), HERE, vocab=16)

    def start(self, run: Callable[[], int]) -> int:
        return record_attempt(run, self.folder, self.plan, self.rank, self.control)

    def trains(self, *steps: int, status: int = 0) -> Callable[[], int]:
        def run() -> int:
            for step in steps:
                self.control.set_activity(f"step {step}", step=step)
            return status

        return run

    @property
    def last(self) -> Attempt:
        return read_attempts(self.folder)[-1]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def test_a_start_that_ends_well_says_from_where_to_where(run: Run) -> None:
    run.control.writing = lambda: 4
    assert run.start(run.trains(3, 4, 5)) == 0
    one = run.last
    assert (one.outcome, one.resumed, one.step, one.steps, one.world) == ("finished", 3, 5, 2, 2)
    assert (one.hosts, one.plan, one.changed, one.writing) == ((this_host(),), run.plan.key, "", 4)
    assert one.first_step_seconds is not None


def test_hosts_are_known_where_there_is_one(run: Run) -> None:
    run.rank = replace(run.rank, local_world_size=1)
    run.start(run.trains(1))
    assert run.last.hosts == ()


def test_what_was_changed_is_told_of_a_first_start_alone(run: Run) -> None:
    run.plan = replace(run.plan, notes={**run.plan.notes, CHANGED: "more ranks"})
    assert isinstance(run.plan, Plan)
    run.start(run.trains(1))
    assert run.last.changed == "more ranks"
    run.rank = replace(run.rank, attempt=1)
    run.start(run.trains(2))
    assert run.last.changed == ""


def test_a_start_that_fails_is_told_as_failed_and_the_next_goes_on(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails() -> int:
        run.trains(3, 4)()
        raise NotFinite("the loss is nan")

    with pytest.raises(NotFinite):
        run.start(fails)
    assert (run.last.outcome, run.last.step, run.last.why) == ("failed", 4, "the loss is nan")
    run.control = Control()
    run.rank = replace(run.rank, attempt=1)
    assert run.start(run.trains(4, 5)) == 0
    assert run.last.wait_seconds is not None
    assert capsys.readouterr().err.startswith("plait: the run goes on from step 4")


@pytest.mark.parametrize(("code", "status"), [(143, 143), (0, 0), ("a text", 1), (None, 1)])
def test_one_that_is_asked_to_stop_before_it_trains_is_told_as_stopped(
    run: Run, code: int | str | None, status: int
) -> None:
    def ends() -> int:
        raise SystemExit(code)

    assert run.start(ends) == status
    assert run.last.outcome == ("stopped" if status else "finished")
    assert run.last.resumed == -1


def test_one_that_is_asked_to_stop_while_it_trains_is_told_as_stopped(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Control, "__bool__", lambda self: True)
    assert run.start(run.trains(3, status=143)) == 143
    assert run.last.outcome == "stopped"


def test_what_nobody_reads_is_not_said(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone:
        def write(self, text: str) -> None:
            raise OSError

    def fails() -> int:
        raise NotFinite("the loss is nan")

    with pytest.raises(NotFinite):
        run.start(fails)
    monkeypatch.setattr(sys, "stderr", Gone())
    run.control = Control()
    run.rank = replace(run.rank, attempt=1)
    assert run.start(run.trains(4, 5)) == 0
