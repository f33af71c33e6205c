"""Following a Slurm job: its state, its log, Ctrl-C, a controller that is away, nodes that are
lost."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from plait.core.base.errors import LaunchError
from plait.core.job.cluster_settings import SlurmSection
from plait.launch.run_folder import abandoned_hosts, stop_requested
from plait.launch.slurm import commands as slurm
from plait.launch.slurm import follow as slurm_follow
from tests.launch.slurm.conftest import Look, ScriptedSlurm

TIER = "unit"
TO_LAUNCHER, CANCEL = ("scancel", "--batch", "--signal=2", "7"), ("scancel", "7")
HELD, RELEASE = ("PENDING", "launch_failed_requeued_held"), ("scontrol", "release", "7")


def follow(folder: Path, hosts: tuple[str, ...] = ()) -> int:
    return slurm_follow.follow(slurm.SubmittedSlurmJob("7", folder / "log", hosts=hosts, folder=folder))


@pytest.mark.parametrize(
    ("looks", "refused", "told"),
    [
        (["!PENDING", "CANCELLED"], [], [CANCEL]),
        (["!CONFIGURING", "CANCELLED"], [], [CANCEL]),
        (["!RUNNING", "CANCELLED"], [], [TO_LAUNCHER]),
        (["!RUNNING", "!RUNNING", "CANCELLED"], [], [TO_LAUNCHER, CANCEL]),
        (["!COMPLETING", "COMPLETED"], [], []),
        (["!COMPLETING", "RUNNING", "CANCELLED"], [], [TO_LAUNCHER]),  # back in no time
        (["!COMPLETING", "PENDING", "CANCELLED"], [], [CANCEL]),
        (["!SUSPENDED", "RUNNING", "CANCELLED"], [], [TO_LAUNCHER]),
        (["!REQUEUE_HOLD", "CANCELLED"], [], [CANCEL]),
        ([("!PENDING", HELD[1]), "CANCELLED"], [], [CANCEL]),  # and not released
        (["!A_STATE_OF_NEXT_YEAR", "RUNNING", "FAILED"], [], [TO_LAUNCHER]),
        (["!RUNNING", "RUNNING", "CANCELLED"], [TO_LAUNCHER], [TO_LAUNCHER]),
        (["!RUNNING", "PENDING", "PENDING", "CANCELLED"], [TO_LAUNCHER, CANCEL], [TO_LAUNCHER, CANCEL, CANCEL]),
    ],
)
def test_a_stop_reaches_the_job_whatever_it_does(
    tmp_path: Path, scripted: ScriptedSlurm, looks: list[Look], refused: list[tuple[str, ...]],
    told: list[tuple[str, ...]],
) -> None:  # fmt: skip
    scripted.looks(*looks)
    scripted.refused = list(refused)
    follow(tmp_path)
    assert scripted.told == told
    assert stop_requested(tmp_path, "7") and not stop_requested(tmp_path, "8")
    # a launcher that has heard the signal is not told twice, one that could not be sent one finds the word
    assert stop_requested(tmp_path, "7", running=True) == (TO_LAUNCHER not in told or TO_LAUNCHER in refused)


@pytest.mark.parametrize(("then", "told"), [("RUNNING", TO_LAUNCHER), ("PENDING", CANCEL)])
def test_a_stop_waits_for_a_controller_that_is_away(
    tmp_path: Path, scripted: ScriptedSlurm, monkeypatch: pytest.MonkeyPatch, then: str, told: tuple[str, ...]
) -> None:
    scripted.looks(None, None, then, "CANCELLED")
    looked = list[str]()

    def state(job: str) -> slurm.SlurmJobState:
        looked.append(job)
        if len(looked) == 1:
            signal.raise_signal(signal.SIGTERM)
        return scripted.state(job)

    monkeypatch.setattr(slurm, "state", state)
    follow(tmp_path)
    assert scripted.told == [told]


@pytest.mark.parametrize("why", ["signals", "forgotten"])
def test_a_job_that_can_be_followed_no_more_is_named(
    tmp_path: Path, scripted: ScriptedSlurm, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    def look(job: str) -> slurm.SlurmJobState:
        if why == "signals":
            signal.raise_signal(signal.SIGINT)
        raise LaunchError("Invalid job id specified." if why == "forgotten" else "Unable to contact.")

    monkeypatch.setattr(slurm, "state", look)
    with pytest.raises(LaunchError, match=r"Job 7 is no longer followed.* its output is in .*scancel 7 ends it"):
        follow(tmp_path)
    assert stop_requested(tmp_path, "7", running=True) == (why == "signals")


@pytest.mark.parametrize(
    ("looks", "refusal", "released", "said"),
    [
        ([HELD, "RUNNING", HELD, "COMPLETED"], "", 2, "it is released"),
        ([HELD, HELD, HELD, HELD, HELD, "CANCELLED"], "", 3, "3 nodes in a row could not start the job"),
        ([HELD, "COMPLETED"], "Slurm refused: no.", 1, "holds it (Slurm refused: no.): see sinfo -R, then scontrol"),
        ([("PENDING", "JobHeldUser"), "REQUEUE_HOLD", "COMPLETED"], "", 0, ""),
    ],
)
def test_a_job_that_nodes_could_not_start_is_released_some_times(
    tmp_path: Path, scripted: ScriptedSlurm, capsys: pytest.CaptureFixture[str], looks: list[Look], refusal: str,
    released: int, said: str,
) -> None:  # fmt: skip
    scripted.looks(*looks)
    scripted.refusal = refusal
    follow(tmp_path)
    assert scripted.told == [RELEASE] * released
    assert said in capsys.readouterr().err


def test_a_start_that_wrote_something_is_released_anew(tmp_path: Path, scripted: ScriptedSlurm) -> None:
    def looks() -> object:
        for _ in range(4):
            yield HELD
            with open(tmp_path / "log", "a") as log:
                log.write("a start\n")
            yield "RUNNING"
        yield "COMPLETED"

    scripted.jobs["7"] = looks()  # type: ignore[assignment]
    follow(tmp_path)
    assert scripted.told == [RELEASE] * 4


@pytest.mark.parametrize(
    ("lost", "refusal", "asked", "words"),
    [
        ({"n2"}, "", "ReqNodeList=n1", "n2 of the rank table is lost: another node takes its place"),
        ({"n1", "n2"}, "", "ReqNodeList=", "n[1-2] of the rank table is lost"),
        (set[str](), "", "", "is pending (ReqNodeNotAvail, UnavailableNodes:n2)"),  # others have them: it waits
        ({"n2"}, "not permitted", "ReqNodeList=n1", "gets no others (not permitted): cancel it (Ctrl-C)"),
    ],
)
def test_a_job_waits_for_no_lost_node_of_its_table(
    tmp_path: Path, scripted: ScriptedSlurm, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    lost: set[str], refusal: str, asked: str, words: str,
) -> None:  # fmt: skip
    waits = ("PENDING", "ReqNodeNotAvail,_UnavailableNodes:n2")
    scripted.looks("PENDING", waits, waits, "CANCELLED")
    scripted.refusal = refusal
    monkeypatch.setattr(slurm, "nodes_down", lambda nodes: lost)
    follow(tmp_path, ("n1", "n2"))
    assert scripted.told == ([("scontrol", "update", "JobId=7", asked)] if asked else [])
    assert abandoned_hosts(tmp_path, "7") == lost and not abandoned_hosts(tmp_path, "8")
    assert words in " ".join(capsys.readouterr().err.split())


def test_what_another_job_of_this_number_has_printed_is_not_shown_again(
    tmp_path: Path, scripted: ScriptedSlurm, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
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
    scripted.looks("COMPLETED")
    assert slurm_follow.follow(slurm.submit(batch)) == 0
    assert capfdbinary.readouterr().out == b"new\n"


def test_a_log_that_grows_is_shown_once(
    tmp_path: Path, scripted: ScriptedSlurm, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    def looks() -> object:
        for line, state in (("", "RUNNING"), ("one\n", "RUNNING"), ("two\n", "RUNNING"), ("three\n", "COMPLETED")):
            with (tmp_path / "log").open("a") as file:
                file.write(line)
            yield state

    scripted.jobs["7"] = looks()  # type: ignore[assignment]
    assert follow(tmp_path) == 0
    assert capfdbinary.readouterr().out == b"one\ntwo\nthree\n"


@pytest.mark.parametrize(
    ("name", "status", "ends", "told"),
    [("COMPLETED", 0, 0, False), ("FAILED", 3, 3, False), ("FAILED", 0, 1, False), ("CANCELLED", 143, 143, False),
     ("TIMEOUT", 0, 1, True), ("NODE_FAIL", 1, 1, True)],
)  # fmt: skip
def test_how_a_followed_job_ends(
    tmp_path: Path, scripted: ScriptedSlurm, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    name: str, status: int, ends: int, told: bool,
) -> None:  # fmt: skip
    looks = iter(
        [None, slurm.SlurmJobState("RUNNING", 0, ("n1",), ""), None, slurm.SlurmJobState(name, status, (), "")]
    )

    def state(job: str) -> slurm.SlurmJobState:
        if (now := next(looks)) is None:
            raise LaunchError("Slurm refused: Unable to contact slurm controller.")
        return now

    monkeypatch.setattr(slurm, "state", state)
    assert follow(tmp_path) == ends
    err = capsys.readouterr().err
    assert (f"Slurm job 7 ended as {name.lower()}" in err) == told
    assert "Slurm does not answer" in err and "Slurm answers again" in err and not scripted.told


@pytest.mark.parametrize(
    ("told", "state", "going"),
    [
        ("JobState=RUNNING Reason=None NodeList=n[1-2] ExitCode=0:0", ("RUNNING", 0, ("n1", "n2"), "None"), True),
        ("JobState=PENDING Reason=None NodeList= ExitCode=0:0", ("PENDING", 0, (), "None"), True),
        ("JobState=COMPLETING ExitCode=0:0", ("COMPLETING", 0, (), ""), True),
        ("JobState=FAILED Reason=BadExit NodeList=(null) ExitCode=3:0", ("FAILED", 3, (), "BadExit"), False),
        ("JobState=FAILED NodeList= ExitCode=0:9", ("FAILED", 137, (), ""), False),
        ("", ("UNKNOWN", 0, (), ""), False),
    ],
)  # fmt: skip
def test_what_slurm_says_of_a_job(
    told: str, state: tuple[object, ...], going: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm, "command", lambda *argv: f"JobId=7 {told}" if argv[-1] == "7" else "")
    found = slurm.state("7")
    assert found == slurm.SlurmJobState(*state) and found.going == going  # type: ignore[arg-type]
