"""What becomes of a Slurm job whose start has failed: again, given up (status 93), or cancelled."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from plait.core.base.errors import JobError, LaunchError, PlaitError, RankFailure
from plait.core.cluster.hardware import HERE
from plait.core.job.slurm_settings import SlurmSection
from plait.core.job.spec import Job
from plait.core.topology.rank_table import RankTable
from plait.launch import slurm, slurm_follow, slurm_job
from plait.launch.run_folder import DO_NOT_RETRY, ask_to_stop, hosts_given_up, write_run
from plait.plan.make import make_plan

JOB = {
    "model": {"family": "gpt", "num_layers": 2, "hidden": 32, "num_heads": 2, "max_sequence": 32, "vocab": 16},
    "data": {"sequence_length": 32},
    "strategy": {"slices": {"batch": 1, "columns": 1}},
    "run": {"name": "job", "device": "cpu"},
}
TERMINATED = 128 + signal.SIGTERM

TIER = "unit"


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """Job 7 is running; what Slurm is told."""
    told: list[tuple[str, ...]] = []
    state = slurm.SlurmJobState("RUNNING", 0, ("n1",), "")
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


@pytest.mark.parametrize(
    ("refused", "states", "status", "asked"),
    [
        (1, ["RUNNING", "RUNNING"], 1, 2),
        (1, ["RUNNING", None, "RUNNING"], 1, 2),  # it is away
        (1, ["RUNNING", "COMPLETING"], 1, 1),  # Slurm puts it back
        (2, ["RUNNING", "RUNNING"], DO_NOT_RETRY, 2),
    ],
)
def test_a_job_that_slurm_does_not_put_back_at_once_is_not_given_up(
    said: list[tuple[str, ...]], start: Callable[..., int], monkeypatch: pytest.MonkeyPatch,
    refused: int, states: list[str | None], status: int, asked: int,
) -> None:  # fmt: skip
    looks = iter(states)

    def look(job: str) -> slurm.SlurmJobState:
        if (name := next(looks)) is None:
            raise LaunchError("Slurm refused: Unable to contact slurm controller.")
        return slurm.SlurmJobState(name, 0, ("n1",), "")

    def command(*argv: str) -> str:
        said.append(argv)
        if len(said) <= refused:
            raise LaunchError("Slurm refused: Unable to contact slurm controller.")
        return ""

    monkeypatch.setattr(slurm, "state", look)
    monkeypatch.setattr(slurm, "command", command)
    assert start(RankFailure("rank 1 died")) == status
    assert said == [REQUEUE] * asked
    assert next(looks, "none") == "none"


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
    monkeypatch.setattr(slurm, "state", lambda job: slurm.SlurmJobState(state, 0, (), ""))
    assert start(TERMINATED) == TERMINATED
    assert not said


def test_a_controller_that_is_away_gives_no_job_up(
    said: list[tuple[str, ...]], start: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    away = LaunchError("Unable to contact.")
    answers, slept = iter([away, away, slurm.SlurmJobState("RUNNING", 0, ("n1",), "")]), list[float]()

    def look(job: str) -> slurm.SlurmJobState:
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


def test_a_job_that_was_asked_to_end_before_its_launcher_could_hear_starts_no_ranks(
    tmp_path: Path, said: list[tuple[str, ...]], start: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    ask_to_stop(tmp_path, "8")  # of another job
    assert start(0) == 0
    ask_to_stop(tmp_path, "7", signalled=True)
    assert start(RankFailure("never")) == 130
    assert "asked to end before its ranks were started" in capsys.readouterr().err
    assert not said


def test_a_job_that_was_asked_to_end_while_a_rank_failed_is_not_started_again(
    tmp_path: Path, said: list[tuple[str, ...]], start: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = iter([False, True])
    monkeypatch.setattr(slurm_job, "asked_to_stop", lambda folder, job, **how: next(looks))
    assert start(RankFailure("rank 1 died")) == 130
    assert not said


@pytest.mark.parametrize(
    ("lost", "refused", "asked", "words"),
    [
        ({"n2"}, False, "ReqNodeList=n1", "n2 of the rank table is lost: another node takes its place"),
        ({"n1", "n2"}, False, "ReqNodeList=", "n[1-2] of the rank table is lost"),
        (set[str](), False, "", "is pending (ReqNodeNotAvail, UnavailableNodes:n2)"),  # others have them: it waits
        ({"n2"}, True, "ReqNodeList=n1", "gets no others (Slurm refused: not permitted): cancel it (Ctrl-C)"),
    ],
)
def test_a_job_waits_for_no_lost_node_of_its_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], lost: set[str],
    refused: bool, asked: str, words: str,
) -> None:  # fmt: skip
    waits = ("PENDING", "ReqNodeNotAvail,_UnavailableNodes:n2")
    states, told = iter([("PENDING", "None"), waits, waits, ("CANCELLED", "None")]), list[tuple[str, ...]]()

    def state(job: str) -> slurm.SlurmJobState:
        name, reason = next(states)
        return slurm.SlurmJobState(name, 0, (), reason)

    def command(*argv: str) -> str:
        told.append(argv)
        if refused:
            raise LaunchError("Slurm refused: not permitted")
        return ""

    monkeypatch.setattr(slurm, "state", state)
    monkeypatch.setattr(slurm, "command", command)
    monkeypatch.setattr(slurm, "nodes_down", lambda nodes: lost)
    monkeypatch.setattr(slurm, "LOOK", 0.001)
    slurm_follow.follow(slurm.SubmittedSlurmJob("7", tmp_path / "log", hosts=("n1", "n2"), folder=tmp_path))
    assert told == ([("scontrol", "update", "JobId=7", asked)] if asked else [])
    assert hosts_given_up(tmp_path, "7") == lost and not hosts_given_up(tmp_path, "8")
    assert words in " ".join(capsys.readouterr().err.split())


def test_the_time_limits_signal_comes_as_many_seconds_before_as_the_job_says(tmp_path: Path) -> None:
    settings = SlurmSection(nodes=1, signal_time=77)
    script = slurm.Batch(folder=tmp_path, name="x", world_size=1, settings=settings).script()
    assert "#SBATCH --signal=TERM@77\n" in script


def test_ctrl_c_before_there_are_ranks_ends_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(file: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(slurm_job.Plan, "read", interrupted)
    monkeypatch.setattr("sys.argv", ["slurm_job", str(tmp_path)])
    assert slurm_job.main() == 130
    assert capsys.readouterr().err == ""


def test_a_run_that_waits_already_is_not_submitted_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    asked, queue = list[tuple[str, ...]](), [f"5|/other/slurm.sh\n6|{tmp_path}/real/slurm.sh\n", "8|\n"]

    def answer(*argv: str) -> str:
        asked.append(argv)
        return queue.pop(0) if argv[0] == "squeue" else "9\n"

    monkeypatch.setattr(slurm, "command", answer)
    table = RankTable(("n1",), 1)
    batch = slurm.Batch(folder=tmp_path / "link", name="x", world_size=1, settings=SlurmSection(nodes=1), table=table)
    with pytest.raises(JobError, match=r"Slurm job 6 is this run, and has not ended.*scancel 6.*run\.name"):
        slurm.submit(batch)
    assert [argv[0] for argv in asked] == ["squeue"]
    submitted = slurm.submit(batch)
    assert (submitted.job, submitted.hosts, submitted.written) == ("9", ("n1",), 0)
    assert RankTable.read(tmp_path / "real" / "placed_ranks.json") == table


def test_nodes_are_reached_at_their_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    told = "NodeName=n1 NodeAddr=10.0.0.1 Gres=gpu:2\n\nNodeName=n2 Arch=x\nsomething else\n"
    monkeypatch.setattr(slurm, "command", lambda *argv: told if argv[-1] == "n[1-2]" else "")
    assert slurm.node_addresses(["n1", "n2"]) == {"n1": "10.0.0.1", "n2": "n2"}


def test_a_reservation_is_for_the_tables_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[tuple[str, ...]]()
    monkeypatch.setattr(slurm, "command", lambda *argv: asked.append(argv) or "")
    slurm.reserve(RankTable(("n1", "n2"), 1), "night", start="now", duration="2:00:00", users=["a", "b"])
    assert asked == [
        ("scontrol", "create", "reservation", "ReservationName=night", "StartTime=now", "Duration=2:00:00",
         "Nodes=n[1-2]", "Users=a,b", "Flags=STATIC_ALLOC,IGNORE_JOBS"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("ended", "requeue", "words"),
    [
        (RankFailure("rank 1 died"), True, "plait: rank 1 died\n"),
        (RankFailure("rank 1 died"), False, "plait: rank 1 died\n"),
        (LaunchError("rank 1 wants no more"), True, "plait: rank 1 wants no more\n"),
        (130, True, ""),
    ],
)
def test_how_a_start_ended_is_in_the_jobs_log(
    said: list[tuple[str, ...]], start: Callable[..., int], capsys: pytest.CaptureFixture[str],
    ended: int | PlaitError, requeue: bool, words: str,
) -> None:  # fmt: skip
    start(ended, requeue=requeue)
    told = capsys.readouterr().err
    assert told.startswith(words) and (words or not told)


def test_a_plan_that_is_not_there_is_in_the_jobs_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["in_slurm", str(tmp_path)])
    assert slurm_job.main() == DO_NOT_RETRY
    assert capsys.readouterr().err.startswith(f"plait: {tmp_path}/plan.json")


def test_a_job_that_is_submitted_finds_all_that_it_needs_in_the_runs_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, folder = list[tuple[str, ...]](), tmp_path / "new" / "run"

    def command(*argv: str) -> str:
        asked.append(argv)
        return "12;cluster\n" if argv[0] == "sbatch" else "3|/elsewhere/slurm.sh\n4|\n"

    monkeypatch.setattr(slurm, "command", command)
    table = RankTable(("n2", "n1"), 1)
    for placed in (table, None):
        batch = slurm.Batch(folder=folder, name="job", world_size=2, settings=SlurmSection(nodes=2), table=placed)
        submitted = slurm.submit(batch)
        assert submitted == slurm.SubmittedSlurmJob(
            "12", folder / "logs" / "slurm-12.log", 0, placed.hosts if placed else (), folder
        )
        assert (folder / "logs").is_dir(), "Slurm makes no folder for its log"
        assert (folder / "slurm.sh").read_text() == batch.script()
        assert (folder / "placed_ranks.json").exists() == (placed is not None), "no table of a start before is followed"
    assert asked[-1] == ("sbatch", "--parsable", str(folder / "slurm.sh"))
    (folder / "logs" / "slurm-12.log").write_text("of another job")
    assert slurm.submit(batch).written == len("of another job")
