"""Other tools get what rank 0 writes; what they raise costs them alone."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from plait.core.base.errors import JobError
from plait.core.cluster.hardware import HERE
from plait.core.job.collecting import check_loggers, collecting
from plait.core.job.plan import Plan
from plait.core.job.spec import Job
from plait.launch.collect.metrics import Loggers, MetricsTail
from plait.launch.run_folder import write_run
from plait.plan.make import make_plan
from tests.launch.collect.test_live import JOB

TIER = "unit"

LINES = [{"step": 1, "loss": 3.5, "skipped": None}, {"step": 2, "loss": 3.25, "hidden": 0.5}]


@pytest.fixture
def plan() -> Plan:
    return make_plan(Job.from_dict({**JOB, "run": {"name": "gpt"}}), HERE, vocab=16)


class Board(ModuleType):
    """tensorboardX, as far as it is used."""

    def __init__(self) -> None:
        super().__init__("tensorboardX")
        self.told: list[tuple[Any, ...]] = []
        board = self

        class SummaryWriter:
            def __init__(self, folder: str) -> None:
                board.told.append(("open", folder))

            def add_text(self, name: str, text: str, step: int) -> None:
                board.told.append((name, text, step))

            def add_scalar(self, name: str, value: float, step: int) -> None:
                board.told.append((name, value, step))

            def flush(self) -> None:
                board.told.append(("flush",))

            def close(self) -> None:
                board.told.append(("close",))

        self.SummaryWriter = SummaryWriter


class Biases(ModuleType):
    """wandb, as far as it is used. login: whether it has one."""

    class Error(Exception):
        """As wandb's."""

    def __init__(self, *, login: bool = True) -> None:
        super().__init__("wandb")
        self.login, self.told, self.settings = login, list[tuple[Any, ...]](), list[dict[str, Any]]()

    def init(self, **settings: Any) -> Biases:
        self.settings.append(settings)
        if not self.login and settings.get("mode") != "offline":
            raise self.Error("api_key not configured (no-tty)")
        return self

    def log(self, values: dict[str, float], step: int) -> None:
        if step < 0:
            raise ValueError("it broke")
        self.told.append((step, values))

    def finish(self) -> None:
        self.told.append(("finish",))


def test_tensorboard(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    board = Board()
    monkeypatch.setitem(sys.modules, "tensorboardX", board)
    loggers = Loggers(["tensorboard"], tmp_path, plan, pytest.fail)
    for line in LINES:
        loggers.add(line)
    loggers.close()
    assert board.told[0] == ("open", str(tmp_path / "tensorboard"))
    assert board.told[1][0::2] == ("job", 0), "its text stands before the first step"
    assert board.told[1][1].startswith("```toml\n") and board.told[1][1].endswith("```")
    assert "hidden = 8" in board.told[1][1]
    assert board.told[2:] == [
        ("loss", 3.5, 1), ("flush",), ("loss", 3.25, 2), ("hidden", 0.5, 2), ("flush",), ("close",),
    ]  # fmt: skip


def test_weights_and_biases_with_and_without_a_login(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for login in (True, False):
        biases = Biases(login=login)
        monkeypatch.setitem(sys.modules, "wandb", biases)
        loggers = Loggers(["wandb"], tmp_path, plan, pytest.fail)
        loggers.add(LINES[1])
        loggers.close()
        assert biases.told == [(2, {"loss": 3.25, "hidden": 0.5}), ("finish",)]
        assert biases.settings[-1].get("mode") == (None if login else "offline")
        assert (biases.settings[-1]["name"], biases.settings[-1]["dir"]) == (tmp_path.name, str(tmp_path))
        assert biases.settings[-1]["resume"] == "allow"
        assert biases.settings[-1]["config"]["model"]["hidden"] == 8
        assert biases.settings[-1]["id"] == (tmp_path / "wandb" / "run-id").read_text(), "a run that goes on is one"


def test_what_a_cluster_manager_is_told_is_told_to_nobody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    board, biases = Board(), Biases()
    monkeypatch.setitem(sys.modules, "tensorboardX", board)
    monkeypatch.setitem(sys.modules, "wandb", biases)
    secret = "hunter2"
    told = {"kubernetes": {"env": [f"TOKEN={secret}"]},
            "slurm": {"setup": [f"export TOKEN={secret}"], "options": [f"--export=TOKEN={secret}"]}}  # fmt: skip
    plan = make_plan(Job.from_dict({**JOB, "run": {"name": "gpt"}, **told}), HERE, vocab=16)
    Loggers(["wandb", "tensorboard"], tmp_path, plan, pytest.fail).close()
    assert secret in plan.to_json()
    assert secret not in str(board.told) and secret not in str(biases.settings)
    assert {"model", "data", "train", "strategy", "run"} <= set(biases.settings[-1]["config"])


def test_what_a_tool_raises_costs_that_tool_only(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    board, biases, said = Board(), Biases(), list[str]()
    monkeypatch.setitem(sys.modules, "tensorboardX", board)
    monkeypatch.setitem(sys.modules, "wandb", biases)
    loggers = Loggers(["wandb", "tensorboard"], tmp_path, plan, said.append)
    loggers.add({"step": -1, "loss": 1.0})
    loggers.add(LINES[0])
    loggers.close()
    assert said == ["warning: wandb gets no more metrics: it broke"]
    assert ("loss", 3.5, 1) in board.told and biases.told == []


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ({"step": 4, "loss": 2}, [(4, {"loss": 2.0})]),
        ({"step": 4, "loss": 1.5, "note": "x", "skipped": True, "ranks": [1.0]}, [(4, {"loss": 1.5})]),
        ({"step": 0}, [(0, {})]),
        ({"loss": 1.5}, []),
        ({"step": "4", "loss": 1.5}, []),
        ({"step": None, "loss": 1.5}, []),
    ],
)
def test_of_a_line_tools_get_the_numbers_of_its_step(
    line: dict[str, Any], told: list[Any], plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    biases = Biases()
    monkeypatch.setitem(sys.modules, "wandb", biases)
    Loggers(["wandb"], tmp_path, plan, pytest.fail).add(line)
    assert biases.told == told
    assert all(isinstance(value, float) for _, values in told for value in values.values())


@pytest.mark.parametrize("at", ["begins", "ends"])
def test_a_tool_that_fails_without_a_word_is_named_with_its_error(
    at: str, plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError

    biases, said = Biases(), list[str]()
    monkeypatch.setitem(sys.modules, "wandb", biases)
    monkeypatch.setattr(biases, "init" if at == "begins" else "finish", fail)
    loggers = Loggers(["wandb"], tmp_path, plan, said.append)
    loggers.add(LINES[0])
    loggers.close()
    loggers.close()
    assert said == ["warning: wandb gets no more metrics: OSError"]
    assert biases.told == ([] if at == "begins" else [(1, {"loss": 3.5})])


def test_a_file_that_is_gone_or_cannot_be_read_has_no_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n')
    tail = MetricsTail(path)
    with open(path, "a") as file:
        file.write('{"step": 2}\n')
    path.unlink()
    assert tail.lines() == []
    path.write_text('{"step": 3}\n')
    assert tail.lines() == [{"step": 3}], "another file of the name begins anew"
    path.unlink()
    path.mkdir()
    (path / "more").mkdir()  # a folder has a size
    assert tail.lines() == []


def test_a_tool_that_is_not_installed_is_said_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("plait.core.job.collecting.find_spec", lambda name: None)
    check_loggers(())
    with pytest.raises(JobError, match=r"'wandb' needs the package wandb.*pip install .plait\[wandb\]"):
        check_loggers(("wandb",))
    job = Job.from_dict({**JOB, "run": {"name": "gpt", "loggers": ["tensorboard"]}})
    write_run(make_plan(job, HERE, vocab=16), tmp_path)
    with pytest.raises(JobError, match="tensorboardX"), collecting(tmp_path, 0, 2):
        pytest.fail("no rank starts")


def test_lines_come_once_also_where_a_run_that_goes_on_cuts_them_off(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = MetricsTail(path)
    assert tail.lines() == []
    path.write_text("".join(json.dumps(line) + "\n" for line in LINES) + '{"step": 3')
    assert tail.lines() == LINES
    path.write_text("".join(json.dumps(line) + "\n" for line in LINES[:1]))
    assert tail.lines() == []
    with open(path, "a") as file:
        file.write('{"step": 2}\nnonsense\n[1]\n' + '{"a":' * 100_000 + "\n")
    assert tail.lines() == [{"step": 2}]
    assert MetricsTail(path).lines() == [], "what was there before is no news"
