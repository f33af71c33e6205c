"""Following a Slurm job: its state, its log, Ctrl-C, a controller that is away."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from plait.core.base.errors import LaunchError
from plait.core.job.slurm_settings import SlurmSection
from plait.launch import slurm, slurm_follow
from plait.launch.run_folder import asked_to_stop

TIER = "unit"


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """What Slurm is told; it is looked at without a pause."""
    told: list[tuple[str, ...]] = []
    monkeypatch.setattr(slurm, "command", lambda *argv: told.append(argv) or "")
    monkeypatch.setattr(slurm, "LOOK", 0.001)
    return told


def test_ctrl_c_while_following_asks_the_ranks_and_the_second_cancels(
    tmp_path: Path, said: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = 0

    def look(job: str) -> slurm.SlurmJobState:
        nonlocal looks
        looks += 1
        if looks in (1, 2):
            signal.raise_signal(signal.SIGINT)
        return slurm.SlurmJobState("RUNNING" if looks < 3 else "CANCELLED", 0, ("n1",), "")

    monkeypatch.setattr(slurm, "state", look)
    assert slurm_follow.follow(slurm.SubmittedSlurmJob("7", tmp_path / "log")) == 1
    assert said == [("scancel", "--batch", "--signal=2", "7"), ("scancel", "7")]


def test_a_controller_that_is_away_for_a_while_ends_nothing(
    tmp_path: Path, said: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    looks = 0

    def look(job: str) -> slurm.SlurmJobState:
        nonlocal looks
        looks += 1
        if 1 < looks < 5:
            raise LaunchError("Slurm refused: Unable to contact slurm controller.")
        return slurm.SlurmJobState("RUNNING" if looks < 6 else "COMPLETED", 0, ("n1",), "")

    monkeypatch.setattr(slurm, "state", look)
    assert slurm_follow.follow(slurm.SubmittedSlurmJob("7", tmp_path / "log")) == 0
    assert "Slurm does not answer" in capsys.readouterr().err
    assert not said


@pytest.mark.parametrize("why", ["signals", "forgotten"])
def test_a_job_that_can_be_followed_no_more_is_named(
    tmp_path: Path, said: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    def look(job: str) -> slurm.SlurmJobState:
        if why == "signals":
            signal.raise_signal(signal.SIGINT)
        raise LaunchError("Invalid job id specified." if why == "forgotten" else "Unable to contact.")

    monkeypatch.setattr(slurm, "state", look)
    job = slurm.SubmittedSlurmJob("7", tmp_path / "log", folder=tmp_path)
    with pytest.raises(LaunchError, match=r"Job 7 is no longer followed.* its output is in .*scancel 7 ends it"):
        slurm_follow.follow(job)
    assert asked_to_stop(tmp_path, "7", running=True) == (why == "signals")


AWAY = LaunchError("Slurm refused: Unable to contact slurm controller.")
TO_LAUNCHER, CANCEL = ("scancel", "--batch", "--signal=2", "7"), ("scancel", "7")


@pytest.mark.parametrize(
    ("states", "refused", "told"),
    [
        (["PENDING", "CANCELLED"], [], [CANCEL]),
        (["CONFIGURING", "CANCELLED"], [], [CANCEL]),
        (["RUNNING", "CANCELLED"], [], [TO_LAUNCHER]),
        (["COMPLETING", "COMPLETED"], [], []),
        (["COMPLETING", "RUNNING", "CANCELLED"], [], [TO_LAUNCHER]),  # back in no time
        (["COMPLETING", "PENDING", "CANCELLED"], [], [CANCEL]),
        (["SUSPENDED", "RUNNING", "CANCELLED"], [], [TO_LAUNCHER]),
        (["REQUEUE_HOLD", "CANCELLED"], [], [CANCEL]),
        (["A_STATE_OF_NEXT_YEAR", "RUNNING", "FAILED"], [], [TO_LAUNCHER]),
        ([None, "RUNNING", "CANCELLED"], [], [TO_LAUNCHER]),
        ([None, None, "PENDING", "CANCELLED"], [], [CANCEL]),
        (["RUNNING", "RUNNING", "CANCELLED"], [TO_LAUNCHER], [TO_LAUNCHER]),
        (["RUNNING", "PENDING", "PENDING", "CANCELLED"], [TO_LAUNCHER, CANCEL], [TO_LAUNCHER, CANCEL, CANCEL]),
    ],
)
def test_a_stop_reaches_the_job_whatever_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, states: list[str | None], refused: list[tuple[str, ...]],
    told: list[tuple[str, ...]],
) -> None:  # fmt: skip
    """states: at each look, None while the controller is away. refused: what fails the first time."""
    looks, said, left = iter(states), list[tuple[str, ...]](), list(refused)
    first = True

    def look(job: str) -> slurm.SlurmJobState:
        nonlocal first
        name = next(looks)
        if first:
            signal.raise_signal(signal.SIGTERM)
        first = False
        if name is None:
            raise AWAY
        return slurm.SlurmJobState(name, 0, ("n1",), "")

    def command(*argv: str) -> str:
        said.append(argv)
        if argv in left:
            left.remove(argv)
            raise LaunchError("Slurm refused: Job/step already completing or completed.")
        return ""

    monkeypatch.setattr(slurm, "state", look)
    monkeypatch.setattr(slurm, "command", command)
    monkeypatch.setattr(slurm, "LOOK", 0.001)
    slurm_follow.follow(slurm.SubmittedSlurmJob("7", tmp_path / "log", folder=tmp_path))
    assert said == told
    assert asked_to_stop(tmp_path, "7") and not asked_to_stop(tmp_path, "8")
    # a launcher that has heard the signal is not told twice, one that could not be sent one finds the word
    assert asked_to_stop(tmp_path, "7", running=True) == (TO_LAUNCHER not in told or TO_LAUNCHER in refused)


HELD, RELEASE = ("PENDING", "launch_failed_requeued_held"), ("scontrol", "release", "7")


@pytest.mark.parametrize(
    ("states", "refused", "released", "said"),
    [
        ([HELD, ("RUNNING", "None"), HELD, ("COMPLETED", "None")], False, 2, "it is released"),
        ([HELD, HELD, HELD, HELD, HELD, ("CANCELLED", "")], False, 3, "3 nodes in a row could not start the job"),
        ([HELD, "words", HELD, "words", HELD, "words", HELD, ("COMPLETED", "")], False, 4, "it is released"),
        ([HELD, ("COMPLETED", "")], True, 1, "holds it (Slurm refused: Access denied.): see sinfo -R, then scontrol"),
        ([("PENDING", "JobHeldUser"), ("REQUEUE_HOLD", "None"), ("COMPLETED", "")], False, 0, ""),
    ],
)  # fmt: skip
def test_a_job_that_nodes_could_not_start_is_released_some_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    states: list[tuple[str, str] | str], refused: bool, released: int, said: str,
) -> None:  # fmt: skip
    """states: at each look; "words" stands for a start that wrote something into the job's log."""
    looks, told = iter(states), list[tuple[str, ...]]()

    def look(job: str) -> slurm.SlurmJobState:
        if isinstance(now := next(looks), str):
            with open(tmp_path / "log", "a") as log:
                log.write("a start\n")
            now = ("RUNNING", "None")
        return slurm.SlurmJobState(now[0], 0, (), now[1])

    def command(*argv: str) -> str:
        told.append(argv)
        if refused:
            raise LaunchError("Slurm refused: Access denied.")
        return ""

    monkeypatch.setattr(slurm, "state", look)
    monkeypatch.setattr(slurm, "command", command)
    monkeypatch.setattr(slurm, "LOOK", 0.001)
    slurm_follow.follow(slurm.SubmittedSlurmJob("7", tmp_path / "log"))
    assert told == [RELEASE] * released
    assert said in capsys.readouterr().err


def test_a_job_that_is_held_and_to_be_stopped_is_cancelled(
    tmp_path: Path, said: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = iter([HELD, ("CANCELLED", "")])

    def look(job: str) -> slurm.SlurmJobState:
        name, reason = next(looks)
        if name != "CANCELLED":
            signal.raise_signal(signal.SIGTERM)
        return slurm.SlurmJobState(name, 0, (), reason)

    monkeypatch.setattr(slurm, "state", look)
    slurm_follow.follow(slurm.SubmittedSlurmJob("7", tmp_path / "log"))
    assert said == [CANCEL]


def test_what_another_job_of_this_number_has_printed_is_not_shown_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:

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
    monkeypatch.setattr(slurm, "state", lambda job: slurm.SlurmJobState("COMPLETED", 0, (), ""))
    assert slurm_follow.follow(slurm.submit(batch)) == 0
    assert capfdbinary.readouterr().out == b"new\n"


def test_a_log_that_grows_is_shown_once(
    tmp_path: Path,
    said: list[tuple[str, ...]],
    monkeypatch: pytest.MonkeyPatch,
    capfdbinary: pytest.CaptureFixture[bytes],
) -> None:
    looks = iter(["", "one\n", "two\n", "three\n"])

    def look(job: str) -> slurm.SlurmJobState:
        line = next(looks)
        with (tmp_path / "log").open("a") as file:
            file.write(line)
        return slurm.SlurmJobState("COMPLETED" if line == "three\n" else "RUNNING", 0, ("n1",), "")

    monkeypatch.setattr(slurm, "state", look)
    assert slurm_follow.follow(slurm.SubmittedSlurmJob("7", tmp_path / "log")) == 0
    assert capfdbinary.readouterr().out == b"one\ntwo\nthree\n"


@pytest.mark.parametrize(
    ("name", "status", "ends", "told"),
    [("COMPLETED", 0, 0, False), ("FAILED", 3, 3, False), ("FAILED", 0, 1, False), ("CANCELLED", 143, 143, False),
     ("TIMEOUT", 0, 1, True), ("NODE_FAIL", 1, 1, True)],
)  # fmt: skip
def test_how_a_followed_job_ends(
    tmp_path: Path, said: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    name: str, status: int, ends: int, told: bool,
) -> None:  # fmt: skip
    monkeypatch.setattr(slurm, "state", lambda job: slurm.SlurmJobState(name, status, (), ""))
    assert slurm_follow.follow(slurm.SubmittedSlurmJob("7", tmp_path / "log")) == ends
    assert (f"Slurm job 7 ended as {name.lower()}" in capsys.readouterr().err) == told


@pytest.mark.parametrize(
    ("told", "state"),
    [
        ("JobId=7 JobState=RUNNING Reason=None NodeList=n[1-2] ExitCode=0:0", ("RUNNING", 0, ("n1", "n2"), "None")),
        ("JobId=7 JobState=FAILED Reason=BadExit NodeList=(null) ExitCode=3:0", ("FAILED", 3, (), "BadExit")),
        ("JobId=7 JobState=FAILED NodeList= ExitCode=0:9", ("FAILED", 137, (), "")),
        ("JobId=7", ("UNKNOWN", 0, (), "")),
    ],
)  # fmt: skip
def test_what_slurm_says_of_a_job(told: str, state: tuple[object, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm, "command", lambda *argv: told if argv[-1] == "7" else "")
    assert slurm.state("7") == slurm.SlurmJobState(*state)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "going"), [("PENDING", True), ("COMPLETING", True), ("COMPLETED", False), ("NODE_FAIL", False)]
)
def test_whether_a_job_goes_on(name: str, going: bool) -> None:
    assert slurm.SlurmJobState(name, 0, (), "").going == going
