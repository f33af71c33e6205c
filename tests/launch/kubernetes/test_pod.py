"""What a pod does, and how it ends, without agents or a process."""

from __future__ import annotations

import gzip
import json
import os
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest

from plait.core.base.errors import JobError, LaunchError, PlacementError, RankFailure
from plait.core.cluster.hardware import HERE
from plait.core.job.plan import Plan
from plait.core.job.spec import Job
from plait.core.runs.attempts import read_attempts
from plait.core.topology.rank_table import NAME, RankTable
from plait.launch.kubernetes import pod as kubernetes_pod
from plait.launch.local.agents import Rendezvous
from plait.launch.slurm.nodes import GrantedNodes
from plait.plan.make import make_plan
from tests.support.managed import TINY as JOB

TIER = "unit"
SAID = {"world_size": 4, "name": "plait-x", "nodes": 2, "argv": ["true"], "wait": 33.0, "timeout": 60.0, "port": 29400,
        "head": "10.0.0.9", "restarts": 3}  # fmt: skip


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
    """A pod of a run, in whose place the test decides what ranks do: ``ends``, ``coming``,
    ``opening``."""

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
    for name in ("PLAIT_HOSTS", "PLAIT_BY_NODES", "SLURM_PROCID", "PLAIT_ATTEMPT"):
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

    monkeypatch.setattr(kubernetes_pod, "guarded", lambda run, index: nullcontext())  # a thread that reads variables
    monkeypatch.setattr(kubernetes_pod, "Agents", Agents)
    monkeypatch.setattr(kubernetes_pod.subprocess, "Popen", lambda *_, **__: made.own)
    monkeypatch.setattr(kubernetes_pod, "watched", lambda *_, **__: made.ends())
    return made


def test_nodes_are_ordered_at_every_start_where_a_topology_was_sent(
    pod: Pod, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pod.plan()
    (pod.files / "topology.json").write_text("{}")
    asked = list[tuple[str, ...]]()

    def order(plan: Plan, granted: GrantedNodes, file: Path) -> tuple[list[str], str]:
        assert (file, granted.each, granted.nodes) == (pod.files / "topology.json", 2, 2)
        asked.append(granted.hosts)
        if "x9" in granted.hosts:
            raise PlacementError("The topology has no node x9.")
        return sorted(granted.hosts, reverse=True), "nodes are ordered"

    found = list[tuple[str, ...]]()
    for hosts in (["n1", "n5"], ["n7", "n5"], ["x9", "n5"]):
        monkeypatch.setenv("PLAIT_AGENT", "10.0.0.9:29400 sesame")
        pod.ends = lambda hosts=hosts: found.append(pod.asked.seat(hosts).hosts) or 0
        assert kubernetes_pod.main(order=order) == 0
    assert asked == [("n1", "n5"), ("n7", "n5"), ("x9", "n5")]
    assert found == [("n5", "n1"), ("n7", "n5"), ("x9", "n5")]
    said = " ".join(capsys.readouterr().err.split())
    assert said.count("nodes are ordered") == 2
    assert "of their pod indices, because the placer found no order: The topology has no node x9." in said


def test_any_pod_but_the_first_is_an_agent_alone(pod: Pod, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "1")
    monkeypatch.setattr(
        "plait.launch.local.agent.main", lambda patience, again, credentials: 7 if patience == 33.0 and again else 8
    )
    assert kubernetes_pod.main() == 7
    assert not pod.ended.exists()


@pytest.mark.parametrize(("status", "ending"), [(0, 0), (1, 1), (143, 143), (130, 93), (2, 93), (93, 93), (129, 93)])
def test_how_ranks_end_says_what_becomes_of_the_pods(pod: Pod, status: int, ending: int) -> None:
    pod.ends = lambda: status
    assert kubernetes_pod.main() == ending
    assert pod.done == ([ending] if ending in (0, 93) else []), "agents wait for another pod 0"
    assert pod.told() == {"status": status, "message": ""}


def test_pods_are_hosts_in_the_order_of_their_numbers_or_of_the_rank_table(
    pod: Pod, monkeypatch: pytest.MonkeyPatch
) -> None:
    kubernetes_pod.main()
    assert pod.asked.table == RankTable(("gpt-0", "gpt-1"), 2) == RankTable.read(pod.folder / NAME)
    assert (pod.asked.word, pod.asked.port, pod.asked.host, pod.asked.patience) == ("sesame", 29400, "10.0.0.3", 33.0)
    assert pod.asked.seat(["gpt-1", "gpt-0"]) == RankTable(("gpt-0", "gpt-1"), 2)
    monkeypatch.setenv("PLAIT_AGENT", "10.0.0.9:29400 sesame")
    monkeypatch.setenv("PLAIT_HOSTS", "k7,k3")
    kubernetes_pod.main()
    assert pod.asked.table == RankTable(("k7", "k3"), 2)
    assert pod.asked.seat(["k9", "k7"]) == RankTable(("k7", "k9"), 2) == RankTable.read(pod.folder / NAME)
    with pytest.raises(PlacementError, match="Several pods of the run are on k7; a node has one of each run"):
        pod.asked.seat(["k7", "k7"])


def fails(error: Exception) -> Callable[..., int]:
    def fail(*_: object) -> int:
        raise error

    return fail


def test_a_mistake_ends_the_run_and_is_told(pod: Pod, capsys: pytest.CaptureFixture[str]) -> None:
    pod.ends = fails(JobError("x " * 1500, key="train.steps"))
    assert kubernetes_pod.main() == 93
    assert pod.done == [93]
    assert (pod.told()["status"], len(pod.told()["message"])) == (2, 2000)
    assert capsys.readouterr().err.startswith("plait: train.steps: x x")


@pytest.mark.parametrize("when", ["opening", "coming"])
def test_what_goes_wrong_before_ranks_start_may_go_well_on_other_nodes(pod: Pod, when: str) -> None:
    """A port that is taken, a pod that does not come."""
    setattr(pod, when, fails(LaunchError("it does not come")))
    assert kubernetes_pod.main() == RankFailure.exit_status == 1
    assert pod.told() == {"status": 1, "message": "it does not come"}
    assert pod.done == []


def test_a_first_pod_without_its_own_agent_does_not_wait_for_others(pod: Pod) -> None:
    pod.own.status = 0
    assert kubernetes_pod.main() == 1
    assert "the first pod's own agent has ended" in pod.told()["message"]


@pytest.mark.parametrize("index", ["0", "1"])
def test_no_variable_goes_while_the_guard_reads_them(pod: Pod, monkeypatch: pytest.MonkeyPatch, index: str) -> None:
    """It would die of a KeyError, and lost nodes would be nobody's."""
    there = list[bool]()

    def guarded(run: str, index: int) -> AbstractContextManager[None]:
        there.append("PLAIT_AGENT" in os.environ)
        return nullcontext()

    told = list[str]()
    monkeypatch.setenv("JOB_COMPLETION_INDEX", index)
    monkeypatch.setattr(kubernetes_pod, "guarded", guarded)
    monkeypatch.setattr("plait.launch.local.agent.main", lambda **given: told.append(given["credentials"]) or 0)
    assert kubernetes_pod.main() == 0
    assert there == [False]
    assert told == (["10.0.0.9:29400 sesame"] if index == "1" else [])


@pytest.mark.parametrize(("number", "ending"), [(signal.SIGTERM, 143), (signal.SIGINT, 93)])
def test_a_signal_that_comes_before_ranks_do_ends_the_wait(pod: Pod, number: int, ending: int) -> None:
    def coming(still: Callable[[], None]) -> None:
        still()
        signal.raise_signal(number)
        still()
        pytest.fail("it waits on")

    pod.coming = coming
    pod.plan()
    assert kubernetes_pod.main() == ending
    assert (pod.done, pod.told()["status"]) == ([93] if ending == 93 else [], 128 + number)
    [attempt] = read_attempts(pod.folder)
    assert (attempt.outcome, attempt.step) == ("stopped", -1)


def test_an_agent_that_does_not_end_is_killed(pod: Pod) -> None:
    pod.own.stays = True
    assert kubernetes_pod.main() == 0
    assert pod.own.killed


def story(pod: Pod, *ends: Callable[[], int]) -> None:
    """How ranks end, start after start."""
    left = iter(ends)

    def ended() -> int:
        return next(left)()

    pod.ends = ended


def saves(pod: Pod, step: int, status: int = 143) -> Callable[[], int]:
    def ends() -> int:
        (pod.folder / "checkpoints" / f"step-{step}").mkdir(parents=True)
        return status

    return ends


DIES = fails(RankFailure("rank 1 died", ranks=[1], cause="killed"))


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Between two starts, which take no time."""
    found = list[float]()
    monkeypatch.setattr(kubernetes_pod, "backoff", lambda vain: found.append(vain) or 0.0)
    return found


def test_ranks_that_fail_are_started_again_in_the_pods_that_are_there(pod: Pod, waits: list[float]) -> None:
    """No pod fails, so that the cluster has nothing to count and nothing to wait for."""
    pod.plan()
    story(pod, DIES, saves(pod, 5, 1), DIES, lambda: 0)
    assert kubernetes_pod.main() == 0
    assert pod.done == [0] and pod.told()["status"] == 0
    assert waits == [1, 0, 1]
    assert (pod.folder / "plan.json").is_file() and (pod.folder / "job.toml").is_file()
    attempts = read_attempts(pod.folder)
    assert [one.outcome for one in attempts] == ["failed", "finished", "failed", "finished"]
    assert (attempts[0].cause, attempts[0].hosts, attempts[0].world) == ("killed", ("gpt-0", "gpt-1"), 4)
    assert attempts[-1].wait_seconds is not None


def test_a_start_of_another_pod_goes_on_in_the_same_history(
    pod: Pod, waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    pod.plan()
    story(pod, DIES, DIES, DIES, DIES)
    assert kubernetes_pod.main() == 93
    monkeypatch.setenv("PLAIT_AGENT", "10.0.0.9:29400 sesame")
    story(pod, lambda: 0)
    assert kubernetes_pod.main() == 0
    assert [one.wait_seconds is not None for one in read_attempts(pod.folder)] == [False, True, True, True, True]


@pytest.mark.parametrize("restarts", [0, 1, 3])
def test_starts_in_a_row_without_a_new_checkpoint_are_counted(
    pod: Pod, waits: list[float], capsys: pytest.CaptureFixture[str], restarts: int
) -> None:
    pod.say(SAID | {"folder": str(pod.folder), "restarts": restarts})
    pod.plan()
    story(pod, *[DIES] * (restarts + 1))
    assert kubernetes_pod.main() == 93
    assert pod.done == [93] and len(waits) == restarts
    given_up = "ended without a new checkpoint; the run is given up"
    assert (given_up in capsys.readouterr().err) == (restarts > 0)


def test_another_pod_that_is_told_to_end_does_not_end_this_one(
    pod: Pod, waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node is drained: ranks have saved, and go on where a pod is made in place of that one."""
    taken = list[int]()

    def watched(*_: object, signals: Any, **__: object) -> int:
        if not taken:
            signals.append(signal.SIGTERM)  # by its agent
            taken.append(signals.popleft())
            return 143
        signal.raise_signal(signal.SIGTERM)
        taken.append(signals.popleft())
        return 143

    pod.plan()
    monkeypatch.setattr(kubernetes_pod, "watched", watched)
    assert kubernetes_pod.main() == 143
    assert taken == [15, 15] and len(waits) == 1
    assert pod.done == [], "agents wait for a pod 0 in place of this one"


def test_what_is_no_training_is_tried_as_often_as_the_cluster_likes(pod: Pod, monkeypatch: pytest.MonkeyPatch) -> None:
    pod.ends = fails(RankFailure("rank 1 died"))
    for _ in range(5):
        monkeypatch.setenv("PLAIT_AGENT", "10.0.0.9:29400 sesame")
        assert kubernetes_pod.main() == 1
