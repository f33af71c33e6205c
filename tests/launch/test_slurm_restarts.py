"""What becomes of a Slurm job whose start has failed: again, given up (status 93), or cancelled."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from plait.core.cluster import HERE
from plait.core.errors import LaunchError, PlaitError, RankFailure
from plait.core.job import Job
from plait.launch import slurm, slurm_job
from plait.launch.run_folder import DO_NOT_RETRY, write_run
from plait.plan.make import make_plan

JOB = {
    "model": {"family": "gpt", "num_layers": 2, "hidden": 32, "num_heads": 2, "max_sequence": 32, "vocab": 16},
    "data": {"sequence_length": 32},
    "strategy": {"slices": {"p1": 1, "p2": 1}},
    "run": {"name": "job", "device": "cpu"},
}
TERMINATED = 128 + signal.SIGTERM

TIER = "unit"


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """Job 7 is running; what Slurm is told."""
    told: list[tuple[str, ...]] = []
    state = slurm.State("RUNNING", 0, ("n1",), "")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n1")
    monkeypatch.setattr(slurm, "state", lambda job: state)
    monkeypatch.setattr(slurm, "command", lambda *argv: told.append(argv) or "")
    monkeypatch.setattr(signal, "pause", lambda: None)
    monkeypatch.setattr(slurm, "LOOK", 0.001)
    return told


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """A start of the job whose ranks end like that; its exit status. saves: the step of a checkpoint."""

    def start(ended: int | PlaitError, saves: int = 0, **settings: Any) -> int:
        def run(folder: Path, *arguments: object, **options: object) -> int:
            if saves:
                (folder / "checkpoints" / f"step-{saves}").mkdir(parents=True)
            if isinstance(ended, PlaitError):
                raise ended
            return ended

        write_run(make_plan(Job.from_dict({**JOB, "slurm": settings}), HERE, vocab=16), tmp_path)
        monkeypatch.setattr(slurm_job, "run", run)
        monkeypatch.setattr("sys.argv", ["in_slurm", str(tmp_path)])
        return slurm_job.main()

    return start


REQUEUE = ("scontrol", "requeue", "7")


@pytest.mark.parametrize(
    ("ended", "requeue", "status", "again"),
    [
        (0, True, 0, False),
        (RankFailure("rank 1 died"), True, 1, True),
        (RankFailure("rank 1 died"), False, DO_NOT_RETRY, False),
        (LaunchError("rank 1 wants no more"), True, DO_NOT_RETRY, False),
        (LaunchError("rank 1 wants no more"), False, DO_NOT_RETRY, False),
        (TERMINATED, True, TERMINATED, True),  # the time limit is near
        (TERMINATED, False, TERMINATED, False),
        (130, True, 130, False),  # Ctrl-C
    ],
)
def test_what_becomes_of_a_job_follows_from_how_its_ranks_ended(
    said: list[tuple[str, ...]],
    start: Callable[..., int],
    ended: int | PlaitError,
    requeue: bool,
    status: int,
    again: bool,
) -> None:
    assert start(ended, requeue=requeue) == status
    assert said == [REQUEUE] * again


def test_starts_in_vain_are_counted_and_end_with_status_93(
    said: list[tuple[str, ...]], start: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        assert start(RankFailure("rank 1 died"), restarts=2) == 1
    assert said == [REQUEUE] * 2
    assert start(RankFailure("rank 1 died"), restarts=2) == DO_NOT_RETRY == 93
    assert len(said) == 2
    assert "3 starts in a row ended without a new checkpoint" in capsys.readouterr().err


def test_a_checkpoint_begins_the_count_anew(said: list[tuple[str, ...]], start: Callable[..., int]) -> None:
    failure = RankFailure("rank 1 died")
    assert start(failure, restarts=1) == 1
    assert start(TERMINATED, saves=5, restarts=1) == TERMINATED
    assert start(failure, restarts=1) == 1
    assert start(failure, restarts=1) == DO_NOT_RETRY
    assert len(said) == 3


@pytest.mark.parametrize("state", ["CANCELLED", "COMPLETING"])
def test_a_job_that_was_cancelled_or_that_slurm_takes_back_is_not_requeued(
    said: list[tuple[str, ...]], start: Callable[..., int], monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    monkeypatch.setattr(slurm, "state", lambda job: slurm.State(state, 0, (), ""))
    assert start(TERMINATED) == TERMINATED
    assert not said


def test_a_controller_that_is_away_gives_no_job_up(
    said: list[tuple[str, ...]], start: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    away = LaunchError("Unable to contact.")
    answers, slept = iter([away, away, slurm.State("RUNNING", 0, ("n1",), "")]), list[float]()

    def look(job: str) -> slurm.State:
        if isinstance(found := next(answers), Exception):
            raise found
        return found

    monkeypatch.setattr(slurm, "state", look)
    monkeypatch.setattr(slurm.time, "sleep", slept.append)
    assert start(RankFailure("rank 1 died"), restarts=2) == 1
    assert said == [REQUEUE]
    assert slept == [slurm.LOOK] * 2  # and not asked without a pause


def test_a_plan_that_cannot_be_read_is_not_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "plan.json").write_text("{")
    monkeypatch.setattr("sys.argv", ["in_slurm", str(tmp_path)])
    assert slurm_job.main() == DO_NOT_RETRY
    assert "plan.json" in capsys.readouterr().err


def test_a_stop_that_comes_while_the_job_goes_back_into_the_queue_cancels_it_there(
    tmp_path: Path, said: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node has failed: there are no ranks to be asked while Slurm takes the job back."""
    states = iter(["RUNNING", "COMPLETING", "COMPLETING", "PENDING", "CANCELLED"])
    asked = False

    def look(job: str) -> slurm.State:
        nonlocal asked
        name = next(states)
        if name == "COMPLETING" and not asked:
            asked = True
            signal.raise_signal(signal.SIGTERM)
        return slurm.State(name, 0, ("n1",), "")

    def answer(*argv: str) -> str:
        said.append(argv)
        if "--batch" in argv:
            raise LaunchError("Slurm refused: Job/step already completing or completed.")
        return ""

    monkeypatch.setattr(slurm, "state", look)
    monkeypatch.setattr(slurm, "command", answer)
    assert slurm.follow(slurm.Submitted("7", tmp_path / "log")) == 1
    assert said == [("scancel", "--batch", "--signal=2", "7"), ("scancel", "7")]


def test_a_job_that_waits_for_a_lost_node_of_its_table_says_what_can_be_done(
    tmp_path: Path, said: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    states = iter([("PENDING", "None"), ("PENDING", "ReqNodeNotAvail,_UnavailableNodes:n2"), ("CANCELLED", "None")])
    monkeypatch.setattr(slurm, "state", lambda job: slurm.State(*(lambda one: (one[0], 0, (), one[1]))(next(states))))
    slurm.follow(slurm.Submitted("7", tmp_path / "log", hosts=("n1", "n2")))
    told = " ".join(capsys.readouterr().err.split())
    assert "Slurm job 7 is pending plait:" in told
    assert "is pending (ReqNodeNotAvail, UnavailableNodes:n2). Its rank table asks for these nodes by name" in told


def test_ctrl_c_while_following_asks_the_ranks_and_the_second_cancels(
    tmp_path: Path, said: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = 0

    def look(job: str) -> slurm.State:
        nonlocal looks
        looks += 1
        if looks in (1, 2):
            signal.raise_signal(signal.SIGINT)
        return slurm.State("RUNNING" if looks < 3 else "CANCELLED", 0, ("n1",), "")

    monkeypatch.setattr(slurm, "state", look)
    assert slurm.follow(slurm.Submitted("7", tmp_path / "log")) == 1
    assert said == [("scancel", "--batch", "--signal=2", "7"), ("scancel", "7")]


def test_the_time_limits_signal_comes_as_many_seconds_before_as_the_job_says(tmp_path: Path) -> None:
    from plait.core.slurm_settings import SlurmSection

    settings = SlurmSection(nodes=1, grace=77)
    script = slurm.Batch(folder=tmp_path, name="x", world_size=1, settings=settings).script()
    assert "#SBATCH --signal=TERM@77\n" in script


def test_a_controller_that_is_away_for_a_while_ends_nothing(
    tmp_path: Path, said: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    looks = 0

    def look(job: str) -> slurm.State:
        nonlocal looks
        looks += 1
        if 1 < looks < 5:
            raise LaunchError("Slurm refused: Unable to contact slurm controller.")
        return slurm.State("RUNNING" if looks < 6 else "COMPLETED", 0, ("n1",), "")

    monkeypatch.setattr(slurm, "state", look)
    assert slurm.follow(slurm.Submitted("7", tmp_path / "log")) == 0
    assert "Slurm does not answer" in capsys.readouterr().err
    assert not said


@pytest.mark.parametrize("why", ["patience", "signal", "forgotten"])
def test_a_job_that_can_be_followed_no_more_is_named(
    tmp_path: Path, said: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    def look(job: str) -> slurm.State:
        if why == "signal":
            signal.raise_signal(signal.SIGINT)
        raise LaunchError("Invalid job id specified." if why == "forgotten" else "Unable to contact.")

    monkeypatch.setattr(slurm, "state", look)
    monkeypatch.setattr(slurm, "PATIENCE", 0.01 if why == "patience" else 1e9)
    with pytest.raises(LaunchError, match=r"Job 7 is no longer followed.* its output is in .*scancel 7 ends it"):
        slurm.follow(slurm.Submitted("7", tmp_path / "log"))


def test_ctrl_c_before_there_are_ranks_ends_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(file: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(slurm_job.Plan, "read", interrupted)
    monkeypatch.setattr("sys.argv", ["slurm_job", str(tmp_path)])
    assert slurm_job.main() == 130
    assert capsys.readouterr().err == ""


def test_what_another_job_of_this_number_has_printed_is_not_shown_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    from plait.core.slurm_settings import SlurmSection

    batch = slurm.Batch(folder=tmp_path, name="x", world_size=1, settings=SlurmSection(nodes=1))
    batch.log("7").parent.mkdir()
    batch.log("7").write_text("old\n")

    def answer(*argv: str) -> str:
        if argv[0] == "squeue":
            return "6|/elsewhere/slurm.sh\n"
        with batch.log("7").open("a") as file:
            file.write("new\n")  # it has begun before sbatch was done
        return "7;cluster\n"

    monkeypatch.setattr(slurm, "command", answer)
    monkeypatch.setattr(slurm, "state", lambda job: slurm.State("COMPLETED", 0, (), ""))
    assert slurm.follow(slurm.submit(batch)) == 0
    assert capfdbinary.readouterr().out == b"new\n"
