"""What one rank of a measurement is asked, measures, says and writes; nothing is measured."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from plait.core.base.env import RankEnv
from plait.core.base.errors import JobError, PlaitError
from plait.train import profiler
from plait.train.machine.control import Control

JOB = """
[model]
family = "gpt"
num_layers = 1
hidden = 8
num_heads = 2
max_sequence = 64
[data]
sequence_length = 16
[train]
global_batch_size = 16
micro_batch_size = 8
precision = "bf16-mixed"
[strategy]
dp = 2
[run]
device = "cpu"
"""


class Measured:
    """A rank that measures. wide: columns of its terminal; asked: what was to be measured, and by
    when."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.out, self.control, self.wide = folder / "profile.json", Control(), 40
        self.live, self.asked, self.runs = list[str](), list[Any](), list[Any]()
        self.now = 107.0
        monkeypatch.setattr("plait.train.comm.world.joined", self._joined)
        monkeypatch.setattr("plait.train.profile.measure.measure_profile", self._profile)
        monkeypatch.setattr("plait.train.profile.measure.measure_spreads", self._spreads)
        monkeypatch.setattr(
            "plait.train.screen.Screen", lambda out: SimpleNamespace(width=self.wide, live=self.live.append)
        )
        monkeypatch.setattr(profiler, "usable_cores", lambda: 6)
        monkeypatch.setattr(profiler, "time", SimpleNamespace(monotonic=lambda: self.now))

    @contextmanager
    def _joined(self, rank: RankEnv, run: Any, control: Control) -> Iterator[str]:
        assert self.control.activity == "importing" and self.control.patient
        self.runs.append(run)
        yield "device"

    def _result(self, say: Any) -> Any:
        say("sums of 4 KiB")
        assert self.control.activity == "measuring: sums of 4 KiB"
        return SimpleNamespace(write=lambda path: path.write_text("it"))

    def _profile(self, order: Any, rank: RankEnv, device: str, *, deadline: float, cores: int, say: Any) -> Any:
        self.asked.append(("profile", order, device, deadline, cores))
        return self._result(say)

    def _spreads(self, pod: int, rank: RankEnv, device: str, *, deadline: float, cores: int, say: Any) -> Any:
        self.asked.append(("spreads", pod, device, deadline, cores))
        return self._result(say)

    def run(self, *arguments: str, rank: int = 0) -> int:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["profiler", "--out", str(self.out), *arguments])
            asked = profiler._arguments()
        return profiler._run(RankEnv(rank=rank, world_size=2, local_world_size=2), self.control, asked, 100.0)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Measured:
    return Measured(monkeypatch, tmp_path)


def test_rank_0_says_what_is_measured_and_writes_it(measured: Measured) -> None:
    assert measured.run() == 0
    ((what, order, device, deadline, cores),) = measured.asked
    assert (what, device, deadline, cores) == ("profile", "device", 160.0, 6)
    assert (order.seconds, order.nodes_per_minipod) == (60.0, 0)
    assert measured.live == ["   7 s of about 60  sums of 4 KiB", ""]
    assert measured.out.read_text() == "it"
    assert measured.runs[0].device == "auto"


def test_lines_fit_the_terminal(measured: Measured) -> None:
    """With a column to spare."""
    measured.wide = 20
    measured.run("--seconds", "5")
    assert measured.live[0] == "   7 s of about 5  "
    assert measured.asked[0][3] == 105.0


@pytest.mark.parametrize(("rank", "more"), [(1, ()), (0, ("--quiet",))])
def test_others_say_nothing(measured: Measured, rank: int, more: tuple[str, ...]) -> None:
    measured.run(*more, rank=rank)
    assert measured.live == [""]
    assert measured.out.exists() == (rank == 0)


def test_what_minipods_cost_has_its_time_from_when_ranks_have_met(measured: Measured) -> None:
    measured.run("--placement", "--nodes-per-minipod", "16", "--seconds", "30")
    assert measured.asked == [("spreads", 16, "device", 137.0, 6)]
    measured.run("--nodes-per-minipod", "3")
    assert measured.asked[1][1].nodes_per_minipod == 3


def test_a_jobs_layer_is_measured_on_its_sequences_and_device(measured: Measured, tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(JOB)
    measured.run("--job", str(tmp_path / "job.toml"))
    order = measured.asked[0][1]
    assert (order.model.hidden, order.model.max_sequence, order.batch, order.precision) == (8, 16, 8, "bf16-mixed")
    assert measured.runs[0].device == "cpu"
    (tmp_path / "job.toml").write_text(JOB.replace("micro_batch_size = 8", "micro_batch_size = 2"))
    measured.run("--job", str(tmp_path / "job.toml"))
    assert measured.asked[1][1].batch == 2


def test_a_profile_that_cannot_be_written_is_one_paragraph(measured: Measured) -> None:
    measured.out = measured.out.parent / "no" / "such" / "profile.json"
    with pytest.raises(PlaitError, match=r"profile\.json cannot be written"):
        measured.run()


@pytest.mark.parametrize("launched", [False, True])
def test_it_ends_with_its_errors_status(monkeypatch: pytest.MonkeyPatch, launched: bool) -> None:
    done, told = list[str](), list[str]()

    class Quiet(Control):
        def __enter__(self) -> Quiet:
            return self

        def __exit__(self, *_: object) -> None:
            done.append("over")

        def report_failure(self, error: PlaitError) -> None:
            told.append(str(error))

    def run(rank: RankEnv, control: Control, asked: Any, started: float) -> int:
        assert control.launched == launched and asked.seconds == 60.0
        raise JobError("no.")

    for name in ("die_with_parent", "ignore_print_errors"):
        monkeypatch.setattr(profiler, name, lambda name=name: done.append(name))
    monkeypatch.setattr(profiler, "take_launcher", lambda: 5 if launched else None)
    monkeypatch.setattr(profiler.Channel, "inherited", staticmethod(lambda descriptor: f"line {descriptor}"))
    monkeypatch.setattr(profiler, "Control", Quiet)
    monkeypatch.setattr(profiler, "_run", run)
    monkeypatch.setattr(sys, "argv", ["profiler", "--out", "x"])
    assert profiler.main() == 2
    assert done == ["die_with_parent", "ignore_print_errors", "over"] and told == ["no."]
