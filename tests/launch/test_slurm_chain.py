"""Jobs of Slurm that follow each other: who submits the next, and who takes it back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from plait.core.base.errors import LaunchError, PlaitError, RankFailure
from plait.core.runs.lock import RunLock
from plait.launch import slurm, slurm_chain, slurm_follow
from plait.launch.slurm_chain import begin_next, cancelled_before, lock_in_turn, next_job, take_back
from tests.launch.test_slurm_restarts import TERMINATED, said, start

TIER = "unit"
__all__ = ["said", "start"]
NEXT = ("sbatch", "--parsable", "--dependency=afterany:7")


@pytest.fixture
def told(said: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str, ...]]:
    """What Slurm is told; the next job is 8."""
    (tmp_path / slurm.SCRIPT).write_text("#!/bin/bash\n")

    def command(*argv: str) -> str:
        said.append(argv[:3] if argv[0] == "sbatch" else argv)
        return "8;cluster\n" if argv[0] == "sbatch" else ""

    monkeypatch.setattr(slurm, "command", command)
    monkeypatch.setattr(slurm, "LOOK", 0.001)
    return said


@pytest.mark.parametrize(
    ("ended", "status", "follows"),
    [
        (0, 0, False),
        (RankFailure("rank 1 died"), 1, True),
        (TERMINATED, TERMINATED, True),  # the time limit is near
        (LaunchError("a mistake"), 93, False),
        (130, 130, False),  # Ctrl-C
    ],
)
def test_the_next_job_is_taken_back_if_the_run_is_over(
    told: list[tuple[str, ...]], start: Callable[..., int], ended: int | PlaitError, status: int, follows: bool
) -> None:
    assert start(ended, chain=True) == status
    assert told == [NEXT, *([] if follows else [("scancel", "8")])]


def test_starts_in_vain_of_all_jobs_are_counted(told: list[tuple[str, ...]], start: Callable[..., int],
                                                monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    for job, status in (("7", 1), ("8", 1), ("9", 93)):
        monkeypatch.setenv("SLURM_JOB_ID", job)
        assert start(RankFailure("rank 1 died"), chain=True, restarts=2) == status


def test_a_job_whose_predecessor_was_cancelled_ends_at_once(
    tmp_path: Path, told: list[tuple[str, ...]], start: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    begin_next(tmp_path, "7")
    monkeypatch.setenv("SLURM_JOB_ID", "8")
    monkeypatch.setattr(slurm, "state", lambda job: slurm.SlurmJobState("CANCELLED", 0, (), ""))
    assert start(0, chain=True) == 130
    assert told == [NEXT]
    assert not cancelled_before(tmp_path, "9")


def test_who_follows_goes_on_with_the_next_job(
    tmp_path: Path, told: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    begin_next(tmp_path, "7")
    for job in "78":
        (tmp_path / f"slurm-{job}.log").write_text(f"of {job}\n")
    states = {"7": iter(["RUNNING", "TIMEOUT"]), "8": iter(["PENDING", "RUNNING", "COMPLETED"])}
    monkeypatch.setattr(slurm, "state", lambda job: slurm.SlurmJobState(next(states[job]), 0, (), ""))
    job = slurm.SubmittedSlurmJob("7", tmp_path / "slurm-7.log", folder=tmp_path)
    assert slurm_follow.follow(job) == 0
    out, err = capfd.readouterr()
    assert out == "of 7\nof 8\n"
    assert "Slurm job 7 ended as timeout" in err


def test_who_looks_late_follows_what_has_begun_meanwhile(
    tmp_path: Path, told: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Jobs 8 and 9 begin between two looks at 7; 10 is taken back."""
    for job in "789":
        monkeypatch.setattr(slurm, "command", lambda *argv, following=int(job) + 1: f"{following}\n")
        begin_next(tmp_path, job)
        (tmp_path / f"slurm-{job}.log").write_text(f"of {job}\n")
    states = {"7": iter(["TIMEOUT"]), "8": iter(["", "TIMEOUT", "TIMEOUT"]), "10": iter(["CANCELLED"]),
              "9": iter(["RUNNING", "RUNNING", "COMPLETED"])}  # fmt: skip

    def look(job: str) -> slurm.SlurmJobState:
        if not (name := next(states[job])):
            raise LaunchError("Slurm refused: Unable to contact slurm controller.")
        return slurm.SlurmJobState(name, 0, (), "")

    monkeypatch.setattr(slurm, "state", look)
    assert slurm_follow.follow(slurm.SubmittedSlurmJob("7", tmp_path / "slurm-7.log", folder=tmp_path)) == 0
    out, err = capfd.readouterr()
    assert out == "of 7\nof 8\nof 9\n"
    assert "Slurm does not answer" in err


def test_a_chain_that_begins_anew_forgets_the_one_before(
    tmp_path: Path, told: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    begin_next(tmp_path, "7")
    monkeypatch.setattr(slurm, "command", lambda *argv: "13\n")
    begin_next(tmp_path, "12")
    assert (next_job(tmp_path, "7"), next_job(tmp_path, "12"), next_job(tmp_path, "13")) == ("", "13", "")


def test_what_is_damaged_says_nothing(tmp_path: Path, told: list[tuple[str, ...]]) -> None:
    for content in ("", "[]", '{"jobs": 7}', '{"jobs": []}', '{"jobs": ["7"]}', '{"jobs": [["7"], "8"]}'):
        (tmp_path / slurm_chain.FILE).write_text(content)
        assert next_job(tmp_path, "7") == "" and not cancelled_before(tmp_path, "8")
        take_back(tmp_path, "7")
    assert not told


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
