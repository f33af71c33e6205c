"""What a rank does between its start and its first step: whom it meets, what it plans, what it
refuses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from plait.core.base.cluster_env import this_host
from plait.core.base.env import RankEnv
from plait.core.base.errors import JobError, LaunchError, PlaitError, RankFailure
from plait.core.cluster.hardware import HERE
from plait.core.job.plan import Plan
from plait.core.job.spec import Job
from plait.core.runs.attempts import read_attempts
from plait.core.runs.rank_reports import reports_requested, request_reports
from plait.core.topology.rank_table import NAME, RankTable
from plait.launch.run_folder import write_run
from plait.plan.make import make_plan
from plait.train import worker
from plait.train.machine.control import Control

JOB: dict[str, Any] = {
    "model": {"family": "gpt", "num_layers": 1, "hidden": 8, "num_heads": 2, "vocab": 16, "max_sequence": 8},
    "data": {"sequence_length": 8},
    "train": {"global_batch_size": 2, "micro_batch_size": 1},
    "strategy": {"tp": 2},
}
ENV = RankEnv(rank=0, world_size=2, local_rank=0, local_world_size=2)
SECOND = replace(ENV, rank=1, local_rank=1)


def a_plan(**run: Any) -> Plan:
    return make_plan(Job.from_dict(JOB | {"run": run}), HERE, vocab=16)


class Trained:
    """What a rank comes to: its world, its links, its watchdog, its session. links: what is found
    of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done, self.links, self.status = list[Any](), list[str](), 0
        self.control = Control()
        monkeypatch.setattr("plait.train.comm.world.joined", self._joined)
        monkeypatch.setattr("plait.train.comm.selfcheck.check_links", self._links)
        monkeypatch.setattr("plait.train.report.Reporter", self._reporter)
        monkeypatch.setattr("plait.train.session.Session", self._session)
        monkeypatch.setattr(worker, "collecting", self._collecting)
        monkeypatch.setattr(worker, "Watchdog", self._watchdog)
        monkeypatch.setattr(worker, "address_towards", "towards {}:{}".format)

    @contextmanager
    def _joined(self, rank: RankEnv, run: Any, control: Control, store: Any) -> Iterator[str]:
        self.done.append(("joined", rank.rank, store))
        yield "device"

    def _links(self, rank: RankEnv, device: str) -> list[str]:
        self.done.append(("links", device, self.control.activity))
        return self.links

    @contextmanager
    def _reporter(self, folder: Path, *, speaks: bool, steps: int) -> Iterator[Any]:
        self.done.append(("reports", speaks, steps))
        yield SimpleNamespace(warn=self.done.append, say=lambda _: None)

    @contextmanager
    def _collecting(self, folder: Path, first: int, count: int, *, is_rank: bool) -> Iterator[None]:
        self.done.append(("collects", first, count, is_rank))
        yield

    def _watchdog(self, folder: Path, rank: int, control: Control, *, deadline: float, address: str) -> Any:
        self.watchdog = Dog(self.done, (rank, deadline, address))
        return self.watchdog

    def _session(self, *given: Any) -> Any:
        self.done.append("session")
        self.given = given

        def train() -> int:
            assert self.watchdog.record_finished == "look"
            self.done.append("trains")
            return self.status

        return SimpleNamespace(run=SimpleNamespace(recorder=SimpleNamespace(look="look")), train=train)

    def names(self) -> list[str]:
        return [one if isinstance(one, str) else one[0] for one in self.done]


class Dog:
    """A watchdog."""

    record_finished = ""

    def __init__(self, done: list[Any], made: tuple[Any, ...]) -> None:
        self.done, self.made = done, made

    def __enter__(self) -> Dog:
        self.done.append("watches")
        return self

    def __exit__(self, *_: object) -> None:
        self.done.append("watches no more")


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> Trained:
    return Trained(monkeypatch)


def run_in(folder: Path, /, **run: Any) -> Plan:
    plan = a_plan(**run)
    write_run(plan, folder)
    return plan


def test_a_rank_joins_watches_and_trains(trained: Trained, tmp_path: Path) -> None:
    plan = run_in(tmp_path)
    trained.status = 143
    request_reports(tmp_path)
    assert worker._train(ENV, trained.control, tmp_path, "store") == 143  # type: ignore[arg-type]
    job = plan.job
    assert job is not None
    assert trained.done[:3] == [("collects", 0, 2, True), ("joined", 0, "store"), ("reports", True, job.train.steps)]
    assert trained.names()[3:] == ["watches", "session", "trains", "watches no more"]
    assert trained.watchdog.made == (0, job.run.call_deadline, "towards 127.0.0.1:29500")
    assert trained.given[0] == plan and trained.given[1:4] == (tmp_path, ENV, "device")
    assert not reports_requested(tmp_path)  # what an earlier start has left
    assert [one.world for one in read_attempts(tmp_path)] == [2]


def test_another_rank_keeps_no_history_and_reports_nothing(trained: Trained, tmp_path: Path) -> None:
    run_in(tmp_path)
    request_reports(tmp_path)
    assert worker._train(SECOND, trained.control, tmp_path, None) == 0
    assert trained.done[0] == ("joined", 1, None) and trained.done[1][:2] == ("reports", False)
    assert reports_requested(tmp_path) and not read_attempts(tmp_path)


def test_under_a_launcher_that_keeps_all_this(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_in(tmp_path)
    request_reports(tmp_path)
    monkeypatch.setattr(Control, "launched", True)
    worker._train(ENV, trained.control, tmp_path, None)
    assert "collects" not in trained.names() and reports_requested(tmp_path) and not read_attempts(tmp_path)


def test_one_rank_alone_has_nobody_to_wait_for(trained: Trained, tmp_path: Path) -> None:
    write_run(make_plan(Job.from_dict(JOB | {"strategy": {"tp": 1}}), HERE, vocab=16), tmp_path)
    worker._train(RankEnv(), trained.control, tmp_path, None)
    assert "watches" not in trained.names() and "links" not in trained.names()


SPREAD = replace(ENV, local_world_size=1)


@pytest.mark.parametrize(
    ("how", "env", "links", "says"),
    [
        ("off", SPREAD, ["a link is slow"], None),
        ("warn", ENV, ["a link is slow"], None),
        ("warn", SPREAD, [], []),
        ("warn", SPREAD, ["a link is slow", "another"], ["warning: a link is slow", "warning: another"]),
        ("warn", replace(SPREAD, rank=1), ["a link is slow"], []),
    ],
)
def test_links_between_machines_are_tried_and_told_of(
    trained: Trained, tmp_path: Path, how: str, env: RankEnv, links: list[str], says: list[str] | None
) -> None:
    run_in(tmp_path, selfcheck=how)
    trained.links = links
    assert worker._train(env, trained.control, tmp_path, None) == 0
    assert ("links", "device", "trying the links between machines") in trained.done or says is None
    assert ("links" in trained.names()) == (says is not None)
    assert [one for one in trained.names() if one.startswith("warning")] == (says or [])


def test_links_may_stop_a_run(trained: Trained, tmp_path: Path) -> None:
    run_in(tmp_path, selfcheck="stop")
    trained.links = ["a link is slow", "another"]
    with pytest.raises(RankFailure, match=r"^a link is slow \(run.selfcheck\)$"):
        worker._train(replace(SPREAD, rank=1), trained.control, tmp_path, None)
    assert "trains" not in trained.names()


def test_what_a_rank_cannot_train_is_refused(trained: Trained, tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="rank 1 finds no run in"):
        worker._train(SECOND, trained.control, tmp_path, None)
    run_in(tmp_path)
    with pytest.raises(JobError, match=r"strategy: the job needs 2 ranks, and 3 were started\. Start 2"):
        worker._train(replace(ENV, world_size=3, local_world_size=3), trained.control, tmp_path, None)
    RankTable((f"not-{this_host()}",), 2).write(tmp_path / NAME)
    with pytest.raises(PlaitError, match="not-"):
        worker._train(ENV, trained.control, tmp_path, None)
    assert not trained.done
    RankTable((this_host(),), 2).write(tmp_path / NAME)
    assert worker._train(ENV, trained.control, tmp_path, None) == 0
