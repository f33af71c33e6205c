"""The collecting agent as a command: until when it looks, whom it tells, what it asks of the
machine."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from plait.core.base.errors import LaunchError
from plait.core.cluster.hardware import HERE
from plait.core.job.collecting import CollectorSettings
from plait.core.job.settings import RunSection
from plait.core.job.spec import Job
from plait.launch.collect import collector as module
from plait.launch.collect.collector import main
from plait.launch.collect.metrics import Live
from plait.launch.run_folder import write_run
from plait.plan.make import make_plan
from tests.launch.collect.test_live import JOB

TIER = "unit"

WANTED = CollectorSettings.of(RunSection())


class Looks:
    """A collector that is told to end after some looks. pauses: what its looks ask for."""

    made: list[tuple[Any, ...]]

    def __init__(self, pipe: int, pauses: list[float]) -> None:
        self.pipe, self.pauses, self.done, self.asked = pipe, pauses, list[str](), list[tuple[Any, ...]]()

    def __call__(self, *arguments: Any, **told: Any) -> Looks:
        self.asked.append((*arguments, told))
        return self

    def look(self) -> float:
        self.done.append("look")
        if len(self.done) == 2:
            os.write(self.pipe, b"x")  # which is no end
        if len(self.done) == 4:
            os.close(self.pipe)
        return self.pauses.pop(0)

    def finish(self) -> None:
        self.done.append("finish")


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Looks, list[Any]]]:
    """What ``main`` drives, and what it has asked of the machine."""
    ours, theirs = os.pipe()
    asked, looks = list[Any](), Looks(theirs, [0.0] * 4)
    monkeypatch.setattr(module, "Collector", looks)
    monkeypatch.setattr(signal, "signal", lambda number, handler: asked.append((number, handler)))
    monkeypatch.setattr(os, "nice", asked.append)
    monkeypatch.setattr(module, "make_room", lambda files, what: asked.append((files, what)))
    monkeypatch.setattr(module, "sweep_memory", lambda: asked.append("swept"))
    with os.fdopen(ours, "rb") as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        yield looks, asked


def test_it_collects_until_its_standard_input_ends(
    command: tuple[Looks, list[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, asked = command
    monkeypatch.setattr(sys, "argv", ["collect", str(tmp_path), "4", "8", WANTED.to_json(), "more"])
    assert main() == 0
    assert looks.asked == [(tmp_path, 4, 8, WANTED, {"live": None, "loggers": None})]
    assert looks.done == ["look"] * 4 + ["finish"]
    ignored = [(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    assert asked == [*ignored, 10, (16, "The records of 8 ranks"), "swept"]


def test_what_cannot_be_collected_is_said(
    command: tuple[Looks, list[Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    looks, _ = command
    wanted = replace(WANTED, metrics_port=1)
    assert main([str(tmp_path), "0", "1", wanted.to_json()]) == 2  # there is no plan
    assert capsys.readouterr().err.startswith("plait: ")
    assert not looks.asked
    os.close(looks.pipe)


def test_pauses_between_looks_are_kept(
    command: tuple[Looks, list[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, _ = command
    looks.pauses, waited = [0.5, 0.0, 0.25, 0.0, 0.125], list[float]()

    def select(read: list[Any], write: list[Any], other: list[Any], seconds: float) -> tuple[list[Any], ...]:
        waited.append(seconds)
        return ([sys.stdin] if len(waited) >= 5 else [], [], [])  # a word, and then the end

    monkeypatch.setattr(module, "select", SimpleNamespace(select=select))
    assert main([str(tmp_path), "0", "1", WANTED.to_json()]) == 0
    assert waited == [0.0, 0.5, 0.0, 0.25, 0.0, 0.125]


@pytest.mark.parametrize(
    ("port", "names", "first", "told"),
    [
        (0, (), True, (False, False)),
        (0, ("tensorboard",), True, (False, True)),
        (0, ("tensorboard",), False, (False, False)),
        (99, (), False, (True, False)),
        (99, ("tensorboard",), False, (True, False)),
        (99, ("tensorboard",), True, (True, True)),
    ],
)
def test_who_is_told_at_once_follows_from_the_run_and_the_first_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, port: int, names: tuple[str, ...], first: bool,
    told: tuple[bool, bool],
) -> None:  # fmt: skip
    served, closed = list[tuple[Any, ...]](), list[str]()

    def serve(self: Live, *where: Any) -> Callable[[], None]:
        served.append(where[:2])
        return lambda: closed.append("closed")

    monkeypatch.setattr(Live, "serve", serve)
    monkeypatch.setattr(module, "Loggers", lambda names, folder, plan, say: ("loggers", names, folder))
    if port or (names and first):
        write_run(make_plan(Job.from_dict({**JOB, "run": {"name": "gpt"}}), HERE, vocab=16), tmp_path)
    run = replace(WANTED, metrics_port=port, metrics_address="here", loggers=names)
    with ExitStack() as held:
        live, loggers = module._outputs(tmp_path, run, held, loggers=first)
        assert (live is not None, loggers is not None) == told
        assert loggers in (None, ("loggers", names, tmp_path))
        assert served == ([(99, "here")] if port else [])
        assert not closed
    assert closed == ["closed"] * bool(port)


def test_nobody_need_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone:
        def write(self, text: str) -> None:
            raise OSError("nobody")

    monkeypatch.setattr(sys, "stderr", Gone())
    module.say("it")


def test_room_for_files_that_cannot_be_had_is_said(
    command: tuple[Looks, list[Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def full(files: int, what: str) -> None:
        raise LaunchError(f"{what} need {files} files.")

    monkeypatch.setattr(module, "make_room", full)
    assert main([str(tmp_path), "0", "3", WANTED.to_json()]) == 2
    assert capsys.readouterr().err == "plait: The records of 3 ranks need 6 files.\n"
    os.close(command[0].pipe)
