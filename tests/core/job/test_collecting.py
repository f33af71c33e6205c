"""The process that collects what ranks record: who waits for it, and when a new one takes over."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from plait.core.base.errors import JobError
from plait.core.cluster.hardware import HERE
from plait.core.job import collecting as module
from plait.core.job.collecting import CollectingAgent, CollectorSettings, check_loggers, collecting
from plait.core.job.settings import RunSection
from plait.core.job.spec import Job
from plait.plan.make import make_plan
from tests.support.frozen import GROUPS, freeze, frozen_group, why_none

TIER = "system"
WRITES = "import sys; from pathlib import Path; sys.stdin.read(); Path(sys.argv[1]).write_text('all of it')"
STAYS = "import signal, sys; print('here', flush=True); sys.stdin.read(); signal.pause()"


class Started:
    """Processes of a program, in place of agents, until the test ends."""

    def __init__(self, program: str, file: Path) -> None:
        self.program, self.file, self.all = program, file, list[subprocess.Popen[bytes]]()
        self.over = False
        """Whether the test has ended: whoever follows one that is killed then ends at once."""

    def __call__(self, *_: object) -> subprocess.Popen[bytes]:
        argv = [sys.executable, "-c", "" if self.over else self.program, str(self.file)]
        self.all.append(subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        return self.all[-1]


@pytest.fixture
def started(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Started]:
    """Processes of a program are started in place of agents."""
    found = Started(getattr(request, "param", WRITES), tmp_path / "written")
    monkeypatch.setattr(module, "start_agent", found)
    yield found
    found.over = True
    for process in found.all:
        process.kill()
    until_nothing_is_left_to_do()  # before start_agent is again the one that starts an agent
    for process in found.all:
        process.wait()
        assert process.stdout
        process.stdout.close()


def until_nothing_is_left_to_do(_: CollectingAgent | None = None) -> None:
    """Wait for the threads that keep agents."""
    for thread in threading.enumerate():
        if thread.name == "agent":
            thread.join()


@pytest.mark.parametrize(("is_rank", "fails"), [(False, False), (False, True), (True, False)])
def test_what_ranks_have_recorded_is_there_when_they_have_ended(
    tmp_path: Path, started: Started, is_rank: bool, fails: bool
) -> None:
    """Also of a launcher that fails, just when somebody wants to know why."""
    try:
        with collecting(tmp_path, 0, 2, is_rank=is_rank):
            if fails:
                raise ValueError("a rank was killed")
    except ValueError:
        assert fails
    assert started.file.read_text() == "all of it"
    assert [process.poll() for process in started.all] == [0]


def test_one_that_was_stopped_goes_on_when_ranks_have_ended(tmp_path: Path, started: Started) -> None:
    with collecting(tmp_path, 0, 2):
        started.all[0].send_signal(signal.SIGSTOP)
    assert started.file.read_text() == "all of it" and started.all[0].poll() == 0


@pytest.mark.parametrize("kind", GROUPS)
@pytest.mark.parametrize("started", [STAYS], indirect=True)
def test_one_that_the_kernel_does_not_end_is_not_waited_for(
    tmp_path: Path, started: Started, kind: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """SIGKILL ends no process that the first version has frozen; the second's it does."""
    if why := why_none(kind):
        pytest.skip(why)
    with frozen_group(kind) as group:
        with collecting(tmp_path, 0, 2):
            freeze(group, started.all[0].pid)
        assert (started.all[0].poll() is None) == (kind == "v1")
    assert "what was not written yet is missing" in capfd.readouterr().err


# ---- without a process ----


class Made:
    """A process that has ended with a status, or ends well when it is told; None: not even then."""

    def __init__(self, status: int | None = 0, *, at_once: bool = True) -> None:
        self.status, self.over = status, threading.Event()
        self.killed = self.closed = False
        self.stdin, self.pid = self, 0
        if at_once:
            self.over.set()

    def close(self) -> None:
        self.closed = True
        if self.status is not None:
            self.over.set()

    def wait(self) -> int:
        self.over.wait()
        return -9 if self.killed or self.status is None else self.status

    def send_signal(self, number: int) -> None:
        assert number == signal.SIGCONT

    def poll(self) -> int | None:
        return -9 if self.killed else None

    def kill(self) -> None:
        self.killed = True
        self.over.set()


class Row:
    """Processes that are started one after the other; an error is raised instead."""

    def __init__(self, *processes: Made | OSError) -> None:
        self.left, self.all = list(processes), list[Made]()
        self.all_started = threading.Event()

    def __call__(self) -> subprocess.Popen[bytes]:
        one = self.left.pop(0)
        if isinstance(one, OSError):
            raise one
        self.all.append(one)
        if not self.left:
            self.all_started.set()
        return cast("subprocess.Popen[bytes]", one)


@pytest.fixture
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAUSE", 0.0)


@pytest.mark.unit
@pytest.mark.usefixtures("_at_once")
def test_one_that_is_killed_is_followed_by_another_and_not_for_ever(capsys: pytest.CaptureFixture[str]) -> None:
    start = Row(Made(-9), Made(-9), Made(-15), Made(-9))
    until_nothing_is_left_to_do(CollectingAgent(start))
    assert (len(start.all), start.left) == (4, [])
    said = capsys.readouterr().err.splitlines()
    assert said == [
        "plait: warning: the timeline collector was killed by SIGKILL; a new one takes over",
        "plait: warning: the timeline collector was killed by SIGKILL; a new one takes over",
        "plait: warning: the timeline collector was killed by SIGTERM; a new one takes over",
        "plait: the timeline ends here: its collector was killed by SIGKILL",
    ]
    assert all(process.closed for process in start.all[:3])


@pytest.mark.unit
@pytest.mark.usefixtures("_at_once")
def test_one_that_ends_by_itself_is_not_followed(capsys: pytest.CaptureFixture[str]) -> None:
    for status, said in ((0, ""), (3, "plait: the timeline ends here: its collector ended with status 3\n")):
        CollectingAgent(Row(Made(status))).end(wait=True)
        assert capsys.readouterr().err == said


@pytest.mark.unit
@pytest.mark.usefixtures("_at_once")
def test_another_that_cannot_be_started_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    until_nothing_is_left_to_do(CollectingAgent(Row(Made(-9), OSError(11, "Resource temporarily unavailable"))))
    assert "cannot be started (Resource temporarily unavailable)" in capsys.readouterr().err


@pytest.mark.unit
def test_one_that_follows_when_ranks_have_ended_is_told_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes on where the other was, and writes what is left."""
    first, second = Made(-9, at_once=False), Made(0, at_once=False)
    agent = CollectingAgent(start := Row(first, second))
    agent.end(wait=True)
    assert start.all == [first, second]
    assert second.closed
    assert "a new one takes over" in capsys.readouterr().err


@pytest.mark.unit
@pytest.mark.usefixtures("_at_once")
def test_one_that_was_killed_too_often_when_all_is_over_needs_no_word(capsys: pytest.CaptureFixture[str]) -> None:
    last = Made(-9, at_once=False)
    agent = CollectingAgent(start := Row(Made(-9), Made(-9), Made(-9), last))
    start.all_started.wait()
    agent.end(wait=True)
    assert "the timeline ends here" not in capsys.readouterr().err


@pytest.mark.unit
def test_one_that_takes_too_long_is_ended_and_that_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PATIENCE", 0.01)
    agent = CollectingAgent(start := Row(stuck := Made(None, at_once=False)))
    agent.end(wait=True)
    assert (stuck.killed, len(start.all)) == (True, 1)
    assert capsys.readouterr().err == (
        "plait: the timeline could not be written in time; what was not written yet is missing\n"
    )


@pytest.mark.unit
@pytest.mark.parametrize(
    ("key", "value"), [("timeline_steps", 5), ("metrics_port", 9000), ("loggers", ("tensorboard",)), (None, None)]
)
def test_what_a_job_asks_to_be_collected(key: str | None, value: Any) -> None:
    nothing = {"timeline_steps": 0, "metrics_port": 0, "loggers": ()}
    asked = CollectorSettings.of(RunSection(**(nothing | ({key: value} if key else {}))))
    assert asked.anything == (key is not None)
    assert key is None or getattr(asked, key) == value
    assert CollectorSettings.from_json(asked.to_json()) == asked


@pytest.mark.unit
def test_who_collects_nothing_starts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = RunSection(timeline_steps=0, metrics_port=0, loggers=())
    monkeypatch.setattr(module, "_settings", lambda folder: nothing)
    monkeypatch.setattr(module, "start_agent", lambda *_: pytest.fail("it was started"))
    with collecting(tmp_path, 0, 1):
        pass


@pytest.mark.unit
def test_a_logger_that_is_not_installed_is_named_before_a_rank_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None if name == "wandb" else object())
    check_loggers(("tensorboard",))
    with pytest.raises(JobError, match=r"run\.loggers: 'wandb' needs the package wandb.*pip install .plait\[wandb\]"):
        check_loggers(("tensorboard", "wandb"))
    monkeypatch.setattr(module, "_settings", lambda folder: RunSection(loggers=("wandb",)))
    with pytest.raises(JobError, match="wandb"), collecting(tmp_path, 0, 1):
        pytest.fail("it goes on")


@pytest.mark.unit
@pytest.mark.parametrize(
    ("is_rank", "fails", "waits"), [(False, False, True), (False, True, True), (True, False, True), (True, True, False)]
)
def test_only_a_rank_that_fails_does_not_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_rank: bool, fails: bool, waits: bool
) -> None:
    """One that never ends is waited for so long, and killed."""
    monkeypatch.setattr(module, "PATIENCE", 0.01)
    stuck = Made(None, at_once=False)
    start = Row(stuck, Made(0))
    monkeypatch.setattr(module, "start_agent", lambda *_: start())

    def run() -> None:
        with collecting(tmp_path, 0, 2, is_rank=is_rank):
            assert not stuck.closed
            if fails:
                raise ValueError("a rank was killed")

    if fails:
        with pytest.raises(ValueError, match="a rank was killed"):
            run()
    else:
        run()
    assert stuck.closed
    assert stuck.killed == waits
    stuck.kill()
    until_nothing_is_left_to_do()


@pytest.mark.unit
def test_what_is_collected_is_what_the_runs_plan_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a plan without a job, and of none that can be read, what a job says by itself."""
    told = list[CollectorSettings]()

    def start(folder: Path, first: int, count: int, collected: CollectorSettings) -> subprocess.Popen[bytes]:
        told.append(collected)
        return Row(Made())()

    monkeypatch.setattr(module, "start_agent", start)
    job = Job.from_dict({"model": {"preset": "gpt3-125m"}, "strategy": {}, "run": {"timeline_steps": 7}})
    plan = make_plan(job, HERE, vocab=257)
    for write, steps in (
        (plan.write, 7),
        (replace(plan, job=None).write, RunSection().timeline_steps),
        (lambda path: path.write_text("{"), RunSection().timeline_steps),
    ):  # fmt: skip
        write(tmp_path / "plan.json")
        with collecting(tmp_path, 0, 2):
            pass
        assert told[-1].timeline_steps == steps
    assert len(told) == 3
