"""What becomes of a Slurm job whose start has failed: again, given up (status 93), or cancelled."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from plait.core.errors import LaunchError
from plait.launch import slurm, slurm_job
from plait.launch.run_folder import DO_NOT_RETRY


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
    return told


def test_starts_in_vain_are_counted_and_end_with_status_93(tmp_path: Path, said: list[tuple[str, ...]]) -> None:
    for _ in range(2):
        assert slurm_job._again(tmp_path, 1, 0, restarts=2) == 1
    assert said == [("scontrol", "requeue", "7")] * 2
    assert slurm_job._again(tmp_path, 1, 0, restarts=2) == DO_NOT_RETRY == 93
    assert len(said) == 2


def test_a_checkpoint_begins_the_count_anew(tmp_path: Path, said: list[tuple[str, ...]]) -> None:
    assert slurm_job._again(tmp_path, 1, 0, restarts=1) == 1
    (tmp_path / "checkpoints" / "step-5").mkdir(parents=True)
    assert slurm_job._again(tmp_path, slurm_job.TERMINATED, 0, restarts=1) == slurm_job.TERMINATED
    assert slurm_job._again(tmp_path, 1, 5, restarts=1) == 1
    assert slurm_job._again(tmp_path, 1, 5, restarts=1) == DO_NOT_RETRY
    assert len(said) == 3


def test_a_job_that_was_cancelled_is_not_started_again(
    tmp_path: Path, said: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm, "state", lambda job: slurm.State("CANCELLED", 0, (), ""))
    assert slurm_job._again(tmp_path, slurm_job.TERMINATED, 0, restarts=3) == slurm_job.TERMINATED
    assert not said


def test_a_controller_that_is_away_gives_no_job_up(
    tmp_path: Path, said: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter([LaunchError("Unable to contact."), slurm.State("RUNNING", 0, ("n1",), "")])

    def look(job: str) -> slurm.State:
        if isinstance(found := next(answers), Exception):
            raise found
        return found

    monkeypatch.setattr(slurm, "state", look)
    monkeypatch.setattr(slurm, "LOOK", 0.001)
    assert slurm_job._again(tmp_path, 1, 0, restarts=2) == 1
    assert said == [("scontrol", "requeue", "7")]


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
    monkeypatch.setattr(slurm, "LOOK", 0.0)
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
    monkeypatch.setattr(slurm, "LOOK", 0.001)
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
    monkeypatch.setattr(slurm, "LOOK", 0.001)
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
