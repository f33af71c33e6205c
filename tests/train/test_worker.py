"""What a rank does between its start and its first step: whom it meets, what it plans, what it refuses."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore

from plait.core.base.env import RankEnv, this_host
from plait.core.base.errors import DO_NOT_RETRY, JobError, LaunchError, NotFinite, PlaitError, RankFailure, RunLost
from plait.core.cluster.hardware import HERE
from plait.core.job.plan import Plan
from plait.core.job.spec import Job
from plait.core.runs.attempts import read_attempts
from plait.core.runs.lock import RunLock
from plait.core.runs.parts import ask, asked
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
TOML = """
[model]
family = "gpt"
num_layers = 1
hidden = 8
num_heads = 2
max_sequence = 8
[data]
sequence_length = 8
[train]
global_batch_size = 2
micro_batch_size = 1
[strategy]
tp = 2
"""
ENV = RankEnv(rank=0, world_size=2, local_rank=0, local_world_size=2)
SECOND = replace(ENV, rank=1, local_rank=1)


def a_plan(**run: Any) -> Plan:
    return make_plan(Job.from_dict(JOB | {"run": run}), HERE, vocab=16)


class Trained:
    """What a rank comes to: its world, its links, its watchdog, its session. links: what is found of them."""

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
        self.done.append(("links", device, self.control.at))
        return self.links

    @contextmanager
    def _reporter(self, folder: Path, *, speaks: bool, steps: int) -> Iterator[Any]:
        self.done.append(("reports", speaks, steps))
        yield SimpleNamespace(warn=self.done.append)

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
            assert self.watchdog.note == "look"
            self.done.append("trains")
            return self.status

        return SimpleNamespace(recorder=SimpleNamespace(look="look"), train=train)

    def names(self) -> list[str]:
        return [one if isinstance(one, str) else one[0] for one in self.done]


class Dog:
    """A watchdog."""

    note = ""

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
    ask(tmp_path)
    assert worker._train(ENV, trained.control, tmp_path, "store") == 143  # type: ignore[arg-type]
    job = plan.job
    assert job is not None
    assert trained.done[:3] == [("collects", 0, 2, True), ("joined", 0, "store"), ("reports", True, job.train.steps)]
    assert trained.names()[3:] == ["watches", "session", "trains", "watches no more"]
    assert trained.watchdog.made == (0, job.run.call_deadline, "towards 127.0.0.1:29500")
    assert trained.given[0] == plan and trained.given[1:4] == (tmp_path, ENV, "device")
    assert not asked(tmp_path)  # what an earlier start has left
    assert [one.world for one in read_attempts(tmp_path)] == [2]


def test_another_rank_keeps_no_history_and_reports_nothing(trained: Trained, tmp_path: Path) -> None:
    run_in(tmp_path)
    ask(tmp_path)
    assert worker._train(SECOND, trained.control, tmp_path, None) == 0
    assert trained.done[0] == ("joined", 1, None) and trained.done[1][:2] == ("reports", False)
    assert asked(tmp_path) and not read_attempts(tmp_path)


def test_under_a_launcher_that_keeps_all_this(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_in(tmp_path)
    ask(tmp_path)
    monkeypatch.setattr(Control, "launched", True)
    worker._train(ENV, trained.control, tmp_path, None)
    assert "collects" not in trained.names() and asked(tmp_path) and not read_attempts(tmp_path)


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


# ---- before it trains ----


class Started:
    """Ranks of one store, whose training is only noted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.store, self.trains, self.planned = HashStore(), list[tuple[Any, ...]](), list[list[str]]()
        self.met, self.status, self.stderr = list[float](), 0, ""
        self.file = folder / "job.toml"
        self.file.write_text(TOML)
        self.folder = folder / "run"
        self.control = Control()
        monkeypatch.setattr(worker, "_train", lambda *what: self.trains.append(what) or 7)
        monkeypatch.setattr(worker, "_meet", lambda rank, timeout: self.met.append(timeout) or self.store)
        monkeypatch.setattr(subprocess, "run", self._run)
        monkeypatch.setattr(worker, "name_process", lambda name: None)

    def _run(self, argv: list[str], **options: Any) -> Any:
        assert options == {"stderr": subprocess.PIPE, "text": True, "check": False}
        assert self.control.at == "planning" and self.control.patient
        self.planned.append(argv[-4:])
        return SimpleNamespace(returncode=self.status, stderr=self.stderr)

    def arguments(self, *more: str) -> list[str]:
        return [str(self.file), f'run.folder="{self.folder.parent}"', 'run.name="run"', *more]

    def start(self, rank: RankEnv, *more: str) -> int:
        return worker._run(rank, self.control, self.arguments(*more))


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Started:
    return Started(monkeypatch, tmp_path)


def test_rank_0_plans_and_tells_the_others_the_folder(started: Started) -> None:
    assert started.start(ENV) == 7
    assert started.planned[0][-3:] == started.arguments()
    assert started.store.get(worker.RUN).decode() == str(started.folder.resolve())
    assert started.start(SECOND) == 7
    assert started.control.at == "waiting for rank 0 to plan" and started.control.patient
    assert [(rank.rank, folder) for rank, _, folder, _ in started.trains] == [(0, started.folder), (1, started.folder)]
    assert all(store is not None for *_, store in started.trains)
    assert len(started.planned) == 1 and started.met[0] > 0


def test_ranks_of_another_job_are_refused_by_the_key(started: Started) -> None:
    started.start(ENV)
    with pytest.raises(JobError, match=r"data\.seed: rank 1 was given 5 and rank 0 "):
        started.start(SECOND, "data.seed=5")
    assert len(started.trains) == 1


def test_one_alone_meets_nobody(started: Started) -> None:
    assert started.start(RankEnv(), "strategy.tp=1") == 7
    assert not started.met and started.trains[0][3] is None


def test_where_rank_0_has_refused_the_others_end(started: Started) -> None:
    started.status, started.stderr = 2, "plait: no such key.\n"
    with pytest.raises(LaunchError, match=r"^no such key\.$") as refused:
        started.start(ENV)
    assert refused.value.exit_status == 2
    assert started.store.get(worker.RUN) == b""
    assert started.start(SECOND) == LaunchError.exit_status
    assert not started.trains


def test_a_plan_that_fails_ends_with_its_status(started: Started) -> None:
    started.status = 1
    with pytest.raises(LaunchError) as refused:
        started.start(RankEnv(), "strategy.tp=1")
    assert refused.value.exit_status == 1


def test_under_a_launcher_the_folder_is_there(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Control, "launched", True)
    assert worker._run(ENV, started.control, ["somewhere"]) == 7
    assert started.trains == [(ENV, started.control, Path("somewhere"), None)] and not started.met


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-x", "job.toml"]])
def test_without_a_job_the_usage_is_told(started: Started, arguments: list[str]) -> None:
    with pytest.raises(LaunchError, match="Start a rank with a run's folder, a plan, or a job file"):
        worker._run(ENV, started.control, arguments)


@pytest.mark.parametrize(
    ("more", "world", "says"),
    [((), 3, "the job needs 2 ranks, and 3 were started"), ((), 2, None), (("strategy.tp=1",), 1, None)],
)
def test_as_many_ranks_as_the_job_needs(started: Started, more: tuple[str, ...], world: int, says: str | None) -> None:
    env = RankEnv(world_size=world, local_world_size=world)
    if says is None:
        assert started.start(env, *more) == 7
    else:
        with pytest.raises(JobError, match=says):
            started.start(env, *more)


def test_a_job_that_leaves_ranks_open_is_planned_for_as_many_as_there_are(started: Started) -> None:
    started.file.write_text(TOML.partition("[strategy]")[0])
    job = Job.read(started.file, [])
    started.start(replace(ENV, world_size=2))
    assert job.leaves_ranks_open and started.planned[0][-1] == "cluster.ranks=2"


def test_a_folder_or_a_plan_is_gone_on_with(started: Started, tmp_path: Path) -> None:
    plan = run_in(tmp_path / "run", folder=str(tmp_path), name="run")
    with ExitStack() as held:
        assert worker._plan(ENV, started.control, held, [str(tmp_path / "run")]) == (tmp_path / "run").resolve()
        with pytest.raises(PlaitError), RunLock(tmp_path / "run"):
            pytest.fail("it is locked")
    assert not started.planned
    (tmp_path / "plan.json").write_text(plan.to_json())
    with ExitStack() as held:
        worker._plan(ENV, started.control, held, [str(tmp_path / "plan.json")])
    assert len(started.planned) == 1
    (tmp_path / "bare.json").write_text(replace(plan, job=None).to_json())
    with (
        pytest.raises(JobError, match="was made without a job file and says nothing of data or steps"),
        ExitStack() as held,
    ):
        worker._plan(ENV, started.control, held, [str(tmp_path / "bare.json")])


def test_what_was_asked_is_known_of_job_files_alone(started: Started, tmp_path: Path) -> None:
    asked_for = worker._settings(started.arguments("data.seed=5"))
    assert asked_for["data.seed"] == 5 and asked_for["strategy.tp"] == 2
    assert worker._settings([str(tmp_path)]) == worker._settings([str(tmp_path / "plan.json")]) == {}
    (tmp_path / "plan.json").write_text("{}")
    assert worker._settings([str(tmp_path / "plan.json")]) == {}
    worker._compare(1, {}, {"a": 1})
    worker._compare(1, {"a": 1}, {})
    worker._compare(1, {"a": 1, "b": None}, {"a": 1})
    with pytest.raises(JobError, match=r"^a: rank 1 was given None and rank 0 2\."):
        worker._compare(1, {"b": 1}, {"a": 2, "b": 1})


@pytest.mark.parametrize(
    ("error", "launched", "status"),
    [
        (JobError("no"), True, 2),
        (JobError("no"), False, 2),
        (NotFinite("nan"), True, DO_NOT_RETRY),
        (NotFinite("nan"), False, 1),
        (RunLost("gone"), True, DO_NOT_RETRY),
        (RankFailure("in vain"), True, 1),
        (None, True, 7),
    ],
)
def test_a_rank_ends_with_its_errors_status_or_as_one_not_to_be_tried_again(
    monkeypatch: pytest.MonkeyPatch, error: PlaitError | None, launched: bool, status: int
) -> None:
    done, told = list[str](), list[PlaitError]()

    class Quiet(Control):
        def __enter__(self) -> Quiet:
            return self

        def __exit__(self, *_: object) -> None:
            done.append("over")

        def fails(self, error: PlaitError) -> None:
            told.append(error)

    def run(rank: RankEnv, control: Control, arguments: list[str]) -> int:
        assert control.launched == launched and arguments == ["job.toml"]
        if error:
            raise error
        return 7

    for name in ("die_with_parent", "print_to_nobody", "stacks_on_signal"):
        monkeypatch.setattr(worker, name, lambda name=name: done.append(name))
    monkeypatch.setattr(worker, "take_launcher", lambda: 5 if launched else None)
    monkeypatch.setattr(worker.Channel, "inherited", staticmethod(lambda descriptor: f"line {descriptor}"))
    monkeypatch.setattr(worker, "Control", Quiet)
    monkeypatch.setattr(worker, "_run", run)
    monkeypatch.setattr(sys, "argv", ["worker", "job.toml"])
    assert worker.main() == status
    assert done == ["die_with_parent", "print_to_nobody", "stacks_on_signal", "over"]
    assert told == ([error] if error else [])
