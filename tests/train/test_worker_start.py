"""A rank before it trains: whose folder, what is planned and by whom, how it ends."""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore

from plait.core.base.env import RankEnv
from plait.core.base.errors import DO_NOT_RETRY, JobError, LaunchError, NotFinite, PlaitError, RankFailure, RunLost
from plait.core.job.spec import Job
from plait.core.runs.lock import RunLock
from plait.train import worker
from plait.train.machine.control import Control
from tests.train.test_worker import ENV, SECOND, run_in

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
        assert self.control.activity == "planning" and self.control.patient
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
    assert started.control.activity == "waiting for rank 0 to plan" and started.control.patient
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
        pytest.raises(JobError, match="was made without a job file, so its data and steps are unknown"),
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

        def report_failure(self, error: PlaitError) -> None:
            told.append(error)

    def run(rank: RankEnv, control: Control, arguments: list[str]) -> int:
        assert control.launched == launched and arguments == ["job.toml"]
        if error:
            raise error
        return 7

    for name in ("die_with_parent", "ignore_print_errors", "stacks_on_signal"):
        monkeypatch.setattr(worker, name, lambda name=name: done.append(name))
    monkeypatch.setattr(worker, "take_launcher", lambda: 5 if launched else None)
    monkeypatch.setattr(worker.Channel, "inherited", staticmethod(lambda descriptor: f"line {descriptor}"))
    monkeypatch.setattr(worker, "Control", Quiet)
    monkeypatch.setattr(worker, "_run", run)
    monkeypatch.setattr(sys, "argv", ["worker", "job.toml"])
    assert worker.main() == status
    assert done == ["die_with_parent", "ignore_print_errors", "stacks_on_signal", "over"]
    assert told == ([error] if error else [])
