"""What a pod does, and how it ends, without agents or a process."""

from __future__ import annotations

import gzip
import json
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest

from plait.core.base.errors import JobError, LaunchError, RankFailure
from plait.core.cluster.hardware import HERE
from plait.core.job.spec import Job
from plait.core.runs.attempts import read_attempts
from plait.core.topology.rank_table import NAME, RankTable
from plait.launch import kubernetes_pod
from plait.launch.agents import Rendezvous
from plait.plan.make import make_plan
from tests.launch.test_slurm_restarts import JOB

TIER = "unit"
SAID = {"world_size": 4, "nodes": 2, "argv": ["true"], "wait": 33.0, "timeout": 60.0, "port": 29400, "head": "10.0.0.9"}


class Own:
    """The first pod's own agent."""

    status: int | None = None
    stays = killed = False

    def poll(self) -> int | None:
        return self.status

    def wait(self, seconds: float | None = None) -> int:
        if self.stays and not self.killed:
            raise kubernetes_pod.subprocess.TimeoutExpired("agent", seconds or 0.0)
        return 0

    def kill(self) -> None:
        self.killed = True


class Pod:
    """A pod of a run, in whose place the test decides what ranks do: ``ends``, ``coming``, ``opening``."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.files, self.ended = folder / "run", folder / "files", folder / "ended"
        self.files.mkdir()
        self.own, self.done, self.asked = Own(), list[int](), SimpleNamespace()
        self.ends: Callable[[], int] = lambda: 0
        self.coming: Callable[[Callable[[], None]], None] = lambda still: still()
        self.opening: Callable[[], None] = lambda: None
        self.say(SAID | {"folder": str(self.folder)})

    def say(self, values: dict[str, Any]) -> None:
        (self.files / "run.json").write_text(json.dumps(values))

    def plan(self, **settings: Any) -> None:
        plan = make_plan(Job.from_dict({**JOB, **settings}), HERE, vocab=16)
        plan.write(self.files / "plan.json")
        (self.files / "plan.json.gz").write_bytes(gzip.compress((self.files / "plan.json").read_bytes()))

    def told(self) -> dict[str, Any]:
        return json.loads(self.ended.read_text())


@pytest.fixture
def pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pod:
    made = Pod(tmp_path)
    for name, value in {
        "PLAIT_RUN": "gpt", "PLAIT_POD_ADDRESS": "10.0.0.3", "PLAIT_FILES": str(made.files),
        "PLAIT_ENDED": str(made.ended), "PLAIT_AGENT": "10.0.0.9:29400 sesame", "JOB_COMPLETION_INDEX": "0",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    for name in ("PLAIT_HOSTS", "SLURM_PROCID", "PLAIT_ATTEMPT"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)

    class Agents:
        variables: dict[str, str] = {}  # noqa: RUF012
        agents: dict[str, object] = {}  # noqa: RUF012

        def __init__(self, table: RankTable, argv: list[str], logs: Path, at: Rendezvous, **options: Any) -> None:
            made.opening()
            made.asked = SimpleNamespace(table=table, argv=argv, logs=logs, **vars(at), **options)

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None: ...

        def ranks(self, still: Callable[[], None]) -> list[object]:
            made.coming(still)
            return []

        def done(self, status: int) -> None:
            made.done.append(status)

    monkeypatch.setattr(kubernetes_pod, "Agents", Agents)
    monkeypatch.setattr(kubernetes_pod.subprocess, "Popen", lambda *_, **__: made.own)
    monkeypatch.setattr(kubernetes_pod, "watched", lambda *_, **__: made.ends())
    return made


def test_any_pod_but_the_first_is_an_agent_alone(pod: Pod, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "1")
    monkeypatch.setattr("plait.launch.agent.main", lambda patience: 7 if patience == 33.0 else 8)
    assert kubernetes_pod.main() == 7
    assert not pod.ended.exists()


@pytest.mark.parametrize(("status", "ending"), [(0, 0), (1, 1), (143, 143), (130, 93), (2, 93), (93, 93), (129, 93)])
def test_how_ranks_end_says_what_becomes_of_the_pods(pod: Pod, status: int, ending: int) -> None:
    pod.ends = lambda: status
    assert kubernetes_pod.main() == ending
    assert pod.done == [ending]
    assert pod.told() == {"status": status, "message": ""}


def test_pods_are_hosts_in_the_order_of_their_numbers_or_of_the_rank_table(
    pod: Pod, monkeypatch: pytest.MonkeyPatch
) -> None:
    kubernetes_pod.main()
    assert pod.asked.table == RankTable(("gpt-0", "gpt-1"), 2) == RankTable.read(pod.folder / NAME)
    assert (pod.asked.word, pod.asked.port, pod.asked.host, pod.asked.patience) == ("sesame", 29400, "10.0.0.3", 33.0)
    assert (pod.asked.addresses, pod.asked.numbered) == ({"gpt-0": "10.0.0.9"}, True)
    monkeypatch.setenv("PLAIT_AGENT", "10.0.0.9:29400 sesame")
    monkeypatch.setenv("PLAIT_HOSTS", "k7,k3")
    kubernetes_pod.main()
    assert pod.asked.table == RankTable(("k7", "k3"), 2)


def fails(error: Exception) -> Callable[..., int]:
    def fail(*_: object) -> int:
        raise error

    return fail


def test_a_mistake_ends_the_run_and_is_told(pod: Pod, capsys: pytest.CaptureFixture[str]) -> None:
    pod.ends = fails(JobError("x" * 3000, key="train.steps"))
    assert kubernetes_pod.main() == 93
    assert pod.done == [93]
    assert (pod.told()["status"], len(pod.told()["message"])) == (2, 2000)
    assert capsys.readouterr().err.startswith("plait: train.steps: xxx")


@pytest.mark.parametrize("when", ["opening", "coming"])
def test_what_goes_wrong_before_ranks_start_may_go_well_on_other_nodes(pod: Pod, when: str) -> None:
    """A port that is taken, a pod that does not come."""
    setattr(pod, when, fails(LaunchError("it does not come")))
    assert kubernetes_pod.main() == RankFailure.exit_status == 1
    assert pod.told() == {"status": 1, "message": "it does not come"}
    assert pod.done == ([1] if when == "coming" else [])


def test_a_first_pod_without_its_own_agent_does_not_wait_for_others(pod: Pod) -> None:
    pod.own.status = 0
    assert kubernetes_pod.main() == 1
    assert "the first pod's own agent has ended" in pod.told()["message"]


@pytest.mark.parametrize(("number", "ending"), [(signal.SIGTERM, 143), (signal.SIGINT, 93)])
def test_a_signal_that_comes_before_ranks_do_ends_the_wait(pod: Pod, number: int, ending: int) -> None:
    def coming(still: Callable[[], None]) -> None:
        still()
        signal.raise_signal(number)
        still()
        pytest.fail("it waits on")

    pod.coming = coming
    assert kubernetes_pod.main() == ending
    assert (pod.done, pod.told()["status"]) == ([ending], 128 + number)


def test_an_agent_that_does_not_end_is_killed(pod: Pod) -> None:
    pod.own.stays = True
    assert kubernetes_pod.main() == 0
    assert pod.own.killed


def test_of_a_training_every_start_is_written_down(pod: Pod) -> None:
    pod.plan()
    pod.ends = fails(RankFailure("rank 1 died", ranks=[1], cause="killed"))
    assert kubernetes_pod.main() == 1
    assert (pod.folder / "plan.json").is_file() and (pod.folder / "job.toml").is_file()
    (attempt,) = read_attempts(pod.folder)
    assert (attempt.outcome, attempt.cause, attempt.hosts, attempt.world) == ("failed", "killed", ("gpt-0", "gpt-1"), 4)


def test_three_starts_in_vain_are_the_last(
    pod: Pod, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pod.plan()

    def start(ends: Callable[[], int]) -> int:
        monkeypatch.setenv("PLAIT_AGENT", "10.0.0.9:29400 sesame")
        pod.ends = ends
        return kubernetes_pod.main()

    def saves(step: int) -> Callable[[], int]:
        def ends() -> int:
            (pod.folder / "checkpoints" / f"step-{step}").mkdir(parents=True)
            return 143

        return ends

    dies = fails(RankFailure("rank 1 died"))
    assert [start(dies), start(dies), start(saves(5)), start(dies), start(dies)] == [1, 1, 143, 1, 1]
    assert "given up" not in capsys.readouterr().err
    assert start(dies) == 93
    assert "3 starts in a row ended without a new checkpoint; the run is given up" in capsys.readouterr().err
    waits = [one.wait_seconds is not None for one in read_attempts(pod.folder)]
    assert waits == [False, True, True, False, True, True]  # the third was stopped, and the fourth waited for nothing


def test_what_is_no_training_is_tried_as_often_as_the_cluster_likes(pod: Pod, monkeypatch: pytest.MonkeyPatch) -> None:
    pod.ends = fails(RankFailure("rank 1 died"))
    for _ in range(5):
        monkeypatch.setenv("PLAIT_AGENT", "10.0.0.9:29400 sesame")
        assert kubernetes_pod.main() == 1
