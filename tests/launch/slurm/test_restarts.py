"""What becomes of a Slurm job whose start has failed: again, given up (status 93), or cancelled;
jobs that follow each other."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from plait.core.base.errors import LaunchError, PlaitError, RankFailure
from plait.core.cluster.hardware import HERE
from plait.core.job.spec import Job
from plait.core.runs.lock import RunLock
from plait.launch.run_folder import DO_NOT_RETRY, request_stop, write_run
from plait.launch.slurm import commands as slurm
from plait.launch.slurm import follow as slurm_follow
from plait.launch.slurm import job as slurm_chain
from plait.launch.slurm import job as slurm_job
from plait.launch.slurm.job import begin_next, cancelled_before, lock_in_turn, next_job, take_back
from plait.plan.make import make_plan
from tests.launch.slurm.conftest import ScriptedSlurm
from tests.support.managed import TINY

TERMINATED = 128 + signal.SIGTERM
DIED, MISTAKE = RankFailure("rank 1 died"), LaunchError("rank 1 wants no more")
REQUEUE, NEXT = ("scontrol", "requeue", "7"), ("sbatch", "--parsable", "--dependency=afterany:7")
CHAIN = {"chain": True}
TIER = "unit"
Start = Callable[..., int]


@pytest.fixture
def start(scripted: ScriptedSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """A start of job 7 whose ranks end like that; its exit status. saves: the step of a
    checkpoint."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n1")
    monkeypatch.setattr(signal, "pause", lambda: None)
    (tmp_path / slurm.SCRIPT).write_text("#!/bin/bash\n")
    scripted.answers["sbatch"] = "8;cluster\n"

    def start(ended: int | BaseException, saves: int = 0, **settings: Any) -> int:
        def run(folder: Path, *arguments: object, **options: object) -> int:
            if saves:
                (folder / "checkpoints" / f"step-{saves}").mkdir(parents=True)
            if isinstance(ended, BaseException):
                raise ended
            return ended

        write_run(make_plan(Job.from_dict({**TINY, "slurm": settings}), HERE, vocab=16), tmp_path)
        monkeypatch.setattr(slurm_job, "run", run)
        monkeypatch.setattr("sys.argv", ["in_cluster", str(tmp_path)])
        return slurm_job.main()

    return start


@pytest.mark.parametrize(
    ("ended", "settings", "outcome"),
    [
        (0, {}, (0, False)),
        (DIED, {}, (1, True)),
        (DIED, {"requeue": False}, (DO_NOT_RETRY, False)),
        (MISTAKE, {}, (DO_NOT_RETRY, False)),
        (MISTAKE, {"requeue": False}, (DO_NOT_RETRY, False)),
        (TERMINATED, {}, (TERMINATED, True)),  # the time limit is near
        (TERMINATED, {"requeue": False}, (TERMINATED, False)),
        (130, {}, (130, False)),  # Ctrl-C
        (KeyboardInterrupt(), {}, (130, False)),  # before there were ranks to ask
        (0, CHAIN, (0, False)),
        (DIED, CHAIN, (1, True)),
        (TERMINATED, CHAIN, (TERMINATED, True)),
        (MISTAKE, CHAIN, (DO_NOT_RETRY, False)),
        (130, CHAIN, (130, False)),
    ],
)
def test_what_becomes_of_a_job_follows_from_how_its_ranks_ended(
    scripted: ScriptedSlurm, start: Start, capsys: pytest.CaptureFixture[str], ended: int | PlaitError,
    settings: dict[str, Any], outcome: tuple[int, bool],
) -> None:  # fmt: skip
    """outcome: the exit status, and whether it is started again. Another job of a chain follows
    each, and is taken back if the run is over."""
    status, again = outcome
    assert start(ended, **settings) == status
    if settings == CHAIN:
        assert [argv[:3] for argv in scripted.told] == [NEXT, *([] if again else [("scancel", "8")])]
    else:
        assert scripted.told == [REQUEUE] * again
    told = capsys.readouterr().err
    assert f"plait: {ended}\n" in told if isinstance(ended, PlaitError) else "rank" not in told


@pytest.mark.parametrize(
    ("refused", "looks", "status", "asked"),
    [
        (1, ["RUNNING", "RUNNING"], 1, 2),
        (1, ["RUNNING", None, "RUNNING"], 1, 2),  # it is away
        (1, ["RUNNING", "COMPLETING"], 1, 1),  # Slurm puts it back
        (2, ["RUNNING", "RUNNING"], DO_NOT_RETRY, 2),
        (0, [None, None, "RUNNING"], 1, 1),
        (0, ["CANCELLED"], 1, 0),
        (0, ["COMPLETING"], 1, 0),
    ],
)
def test_a_job_that_slurm_does_not_put_back_at_once_is_not_given_up(
    scripted: ScriptedSlurm, start: Start, monkeypatch: pytest.MonkeyPatch, refused: int, looks: list[str | None],
    status: int, asked: int,
) -> None:  # fmt: skip
    def command(*argv: str) -> str:
        scripted.told.append(argv)
        if len(scripted.told) <= refused:
            raise LaunchError("Slurm refused: Unable to contact slurm controller.")
        return ""

    slept = list[float]()
    monkeypatch.setattr(slurm, "command", command)
    monkeypatch.setattr(slurm.time, "sleep", slept.append)
    scripted.looks(*looks)
    assert start(DIED) == status
    assert scripted.told == [REQUEUE] * asked
    assert next(scripted.jobs["7"], "none") == "none"
    assert slept == [slurm.LOOK] * (looks.count(None) + bool(refused)), "it is not asked without a pause"


@pytest.mark.parametrize("chain", [False, True])
def test_starts_in_vain_are_counted_and_a_checkpoint_begins_anew(
    scripted: ScriptedSlurm, start: Start, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    chain: bool,
) -> None:  # fmt: skip
    settings = {"restarts": 2, "chain": chain}
    starts = [(DIED, 0, 1), (TERMINATED, 5, TERMINATED), (DIED, 0, 1), (DIED, 0, 1), (DIED, 0, DO_NOT_RETRY)]
    for number, (ended, saves, status) in enumerate(starts):
        if chain:  # each start is a job of its own
            monkeypatch.setenv("SLURM_JOB_ID", str(7 + number))
            scripted.looks("RUNNING", job=str(7 + number))
            scripted.jobs |= {str(6 + number): iter(["TIMEOUT", "TIMEOUT"])}
        assert start(ended, saves, **settings) == status
    assert "3 starts in a row ended without a new checkpoint" in capsys.readouterr().err
    assert chain or scripted.told == [REQUEUE] * 4


@pytest.mark.parametrize("content", ["{", None])
def test_a_plan_that_cannot_be_read_is_not_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], content: str | None
) -> None:
    if content:
        (tmp_path / "plan.json").write_text(content)
    monkeypatch.setattr("sys.argv", ["in_cluster", str(tmp_path)])
    assert slurm_job.main() == DO_NOT_RETRY
    assert capsys.readouterr().err.startswith(f"plait: {tmp_path}/plan.json")


def test_a_job_that_was_asked_to_end_before_its_launcher_could_hear_starts_no_ranks(
    tmp_path: Path, scripted: ScriptedSlurm, start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    request_stop(tmp_path, "8")  # of another job
    assert start(0) == 0
    request_stop(tmp_path, "7", signalled=True)
    assert start(RankFailure("never")) == 130
    assert "asked to end before its ranks were started" in capsys.readouterr().err
    assert not scripted.told


def test_a_job_that_was_asked_to_end_while_a_rank_failed_is_not_started_again(
    scripted: ScriptedSlurm, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = iter([False, True])
    monkeypatch.setattr(slurm_job, "stop_requested", lambda folder, job, **how: next(looks))
    assert start(DIED) == 130
    assert not scripted.told


# ---- chains ----


def test_a_job_whose_predecessor_was_cancelled_ends_at_once(
    tmp_path: Path, scripted: ScriptedSlurm, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin_next(tmp_path, "7")
    monkeypatch.setenv("SLURM_JOB_ID", "8")
    scripted.looks("CANCELLED")
    assert start(0, chain=True) == 130
    assert [argv[:3] for argv in scripted.told] == [NEXT]
    assert not cancelled_before(tmp_path, "9")


def test_who_follows_goes_on_with_the_next_job_also_if_it_looks_late(
    tmp_path: Path, scripted: ScriptedSlurm, start: Start, capfd: pytest.CaptureFixture[str]
) -> None:
    """Jobs 8 and 9 begin between two looks at 7; 10 is taken back."""
    for job in "789":
        scripted.answers["sbatch"] = f"{int(job) + 1}\n"
        begin_next(tmp_path, job)
        (tmp_path / f"slurm-{job}.log").write_text(f"of {job}\n")
    scripted.looks("RUNNING", "TIMEOUT")
    scripted.looks(None, "TIMEOUT", "TIMEOUT", job="8")
    scripted.looks("PENDING", "RUNNING", "COMPLETED", job="9")
    scripted.looks("CANCELLED", job="10")
    assert slurm_follow.follow(slurm.SubmittedSlurmJob("7", tmp_path / "slurm-7.log", folder=tmp_path)) == 0
    out, err = capfd.readouterr()
    assert out == "of 7\nof 8\nof 9\n"
    assert "Slurm job 7 ended as timeout" in err and "Slurm does not answer" in err


def test_a_chain_that_begins_anew_forgets_the_one_before(tmp_path: Path, scripted: ScriptedSlurm, start: Start) -> None:
    begin_next(tmp_path, "7")
    scripted.answers["sbatch"] = "13\n"
    begin_next(tmp_path, "12")
    assert (next_job(tmp_path, "7"), next_job(tmp_path, "12"), next_job(tmp_path, "13")) == ("", "13", "")
    scripted.told.clear()
    for content in ("", "[]", '{"jobs": 7}', '{"jobs": []}', '{"jobs": ["7"]}', '{"jobs": [["7"], "8"]}'):
        (tmp_path / slurm_chain.FILE).write_text(content)  # what is damaged says nothing
        assert next_job(tmp_path, "7") == "" and not cancelled_before(tmp_path, "8")
        take_back(tmp_path, "7")
    assert not scripted.told


def test_the_lock_of_the_job_before_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tries = list[int]()
    enter = RunLock.__enter__

    def later(lock: RunLock) -> RunLock:
        tries.append(1)
        if len(tries) < 3:
            raise LaunchError("in use.")
        return enter(lock)

    monkeypatch.setattr(RunLock, "__enter__", later)
    monkeypatch.setattr(slurm_chain.time, "sleep", lambda seconds: None)
    with lock_in_turn(tmp_path) as lock:
        assert lock.path.is_file() and len(tries) == 3
    assert not lock.path.is_file()
    monkeypatch.setattr(slurm_chain, "EXPIRES", -100.0)
    tries.clear()
    with pytest.raises(LaunchError), lock_in_turn(tmp_path):
        pass
