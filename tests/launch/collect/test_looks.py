"""When the agent of a host's ranks looks, writes, waits and tells: by a clock of its own."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from plait.core.job.collecting import CollectorSettings
from plait.core.job.settings import RunSection
from plait.core.record.ring import Header
from plait.core.record.ring_writer import RingWriter, this_process
from plait.core.runs.evidence import ring_path
from plait.launch.collect import collector as module
from plait.launch.collect.collector import FLUSH, GRACE, LOOK, QUICK, SHARE, SOON, Collector
from plait.launch.collect.metrics import Live, Loggers
from tests.launch.collect.test_collector import open_ring, steps_of, write_step

TIER = "unit"


WANTED = CollectorSettings.of(RunSection())


NOTHING = replace(WANTED, timeline_steps=0)


class Clock(SimpleNamespace):
    """now: set by the test, and moved on by sleeping; worked: processor seconds, an entry a
    question."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def process_time(self) -> float:
        return self.worked.pop(0) if self.worked else 0.0

    def sleep(self, seconds: float) -> None:
        self.now = round(self.now + seconds, 6)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock(worked=list[float]())
    monkeypatch.setattr(module, "time", made)
    return made


class Told:
    """Who is told at once: a ``Live`` and a ``Loggers``."""

    def __init__(self) -> None:
        self.lines, self.steps, self.where = list[Any](), list[int](), list[tuple[Header, int]]()
        self.closed = 0

    def measured(self, line: Any) -> None:
        self.lines.append(line)

    def add(self, *what: Any) -> None:
        if len(what) == 1:
            self.lines.append(what[0])
        else:
            self.steps += sorted(set(what[1].table["step"].tolist()))

    def at(self, header: Header, lost: int) -> None:
        self.where.append((header, lost))

    def close(self) -> None:
        self.closed += 1

    @property
    def live(self) -> Live:
        return cast("Live", self)

    @property
    def loggers(self) -> Loggers:
        return cast("Loggers", self)


def made(folder: Path, first: int = 0, count: int = 1, run: CollectorSettings = WANTED, **told: Any) -> Collector:
    (folder / "timeline").mkdir(parents=True, exist_ok=True)
    return Collector(folder, first, count, run, **told)


@pytest.mark.parametrize(("told", "longest"), [("", LOOK), ("live", SOON), ("loggers", SOON)])
def test_where_little_is_new_looks_become_rare(tmp_path: Path, clock: Clock, told: str, longest: float) -> None:
    both: dict[str, Any] = {told: Told()} if told else {}
    one = made(tmp_path, **both)
    pauses = [one.look()]
    for _ in range(60):
        clock.now += pauses[-1]
        pauses.append(one.look())
    assert pauses[0] == pytest.approx(min(SOON / 0.9, longest))
    assert pauses == sorted(pauses) and pauses[-1] == longest
    if not told:
        assert pauses[1] == pytest.approx(SOON / 0.81)


@pytest.mark.parametrize(
    ("records", "seconds", "pause"),
    [(48, 1.0, 1.0 / 3), (48, 3.0, 1.0), (12, 3.0, 1 / 0.9), (48, 0.001, QUICK), (60, 0.05, QUICK)],
)
def test_a_quarter_of_a_ring_is_taken_at_a_look(
    tmp_path: Path, clock: Clock, records: int, seconds: float, pause: float
) -> None:
    ring, one = open_ring(tmp_path, capacity=64), made(tmp_path)
    write_step(ring, 0, records=records, ends=False)
    clock.now += seconds
    assert one.look() == pytest.approx(pause)
    ring.close()


def test_of_several_rings_the_fullest_counts_and_a_look_takes_time(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    rings = [open_ring(tmp_path, rank, capacity=64) for rank in range(3)]
    one = made(tmp_path, count=3)
    for ring, records in zip(rings, (4, 48, 8), strict=True):
        write_step(ring, 0, records=records, ends=False)
    monkeypatch.setattr(one, "_pass_on", lambda: clock.sleep(0.125))
    clock.now += 1.0
    assert one.look() == pytest.approx(1.0 / 3 - 0.125)
    for ring in rings:
        ring.close()


def files(folder: Path) -> list[str]:
    return [path.name for path in (folder / "timeline").glob("rank-*.parquet")]


def test_what_is_new_is_written_after_a_while(tmp_path: Path, clock: Clock) -> None:
    ring, one = open_ring(tmp_path), made(tmp_path)
    for number in range(3):
        write_step(ring, number)
    clock.now += FLUSH
    one.look()
    assert not files(tmp_path)
    clock.now += 0.1
    one.look()
    assert len(files(tmp_path)) == 1
    write_step(ring, 3)
    clock.now += FLUSH
    one.look()
    assert files(tmp_path) == ["rank-00000-step-00000002.parquet"]
    ring.close()


def test_much_that_waits_is_written_at_once(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_WAITING_RECORDS", 9)
    ring, one = open_ring(tmp_path), made(tmp_path)
    for number in range(2):
        write_step(ring, number)
    one.look()
    assert not files(tmp_path)  # four records
    write_step(ring, 2)
    one.look()
    assert len(files(tmp_path)) == 1  # and four more
    ring.close()


def test_who_is_long_at_writing_writes_more_rarely(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    ring, one = open_ring(tmp_path), made(tmp_path)
    for number in range(3):
        write_step(ring, number)
    one.look()
    clock.worked = [2.0, 2.0 + 4 * 30.0 * SHARE]
    one.flush()
    pause = 30.0
    write_step(ring, 3)
    clock.now += pause
    one.look()
    assert files(tmp_path) == ["rank-00000-step-00000002.parquet"]
    clock.now += 0.1
    one.look()
    assert files(tmp_path) == ["rank-00000-step-00000003.parquet"]
    ring.close()


def test_ranks_that_still_run_are_waited_for_a_while(tmp_path: Path, clock: Clock) -> None:
    ring, one = open_ring(tmp_path), made(tmp_path)
    write_step(ring, 0)
    began = clock.now
    one.finish()
    assert GRACE <= clock.now - began < GRACE + 0.1
    assert steps_of(tmp_path) == {0: 3}
    ring.close()


def test_ranks_that_have_ended_are_not_waited_for(tmp_path: Path, clock: Clock) -> None:
    ring, one = open_ring(tmp_path), made(tmp_path, count=2)  # of the other there is no ring
    write_step(ring, 0)
    ring.close()
    began = clock.now
    one.finish()
    assert clock.now == began


def test_a_rank_that_ends_meanwhile_is_waited_for_no_longer(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    rings, one = [open_ring(tmp_path, rank) for rank in range(2)], made(tmp_path, count=2)
    for ring in rings:
        write_step(ring, 0)
    rings[0].close()
    slept = list[float]()

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            rings[1].close()

    clock.sleep = sleep  # type: ignore[method-assign]
    one.finish()
    assert len(slept) == 3


def test_live_metrics_are_told_of_whole_steps_and_of_where_a_rank_is(tmp_path: Path, clock: Clock) -> None:
    told, ring = Told(), open_ring(tmp_path, capacity=16)
    one = made(tmp_path, run=NOTHING, live=told.live)
    write_step(ring, 0)
    write_step(ring, 1)
    one.look()
    assert told.steps == [0] and told.where[-1][0].step == 1
    for number in range(2, 8):
        write_step(ring, number)
    one.look()
    assert told.where[-1][1] > 0  # some were overwritten
    one.finish()
    assert told.steps[-1] == 7
    assert not list((tmp_path / "timeline").iterdir())
    ring.close()


def test_what_an_earlier_start_has_left_is_no_news(tmp_path: Path, clock: Clock) -> None:
    ring = open_ring(tmp_path)
    write_step(ring, 0)
    write_step(ring, 1)
    ring.close()
    told = Told()
    one = made(tmp_path, live=told.live)
    one.look()
    one.finish()
    assert not told.steps and not told.where
    assert steps_of(tmp_path) == {0: 3, 1: 3}


def test_without_a_timeline_and_live_metrics_no_ring_is_read(tmp_path: Path, clock: Clock) -> None:
    ring_path(tmp_path, 0).parent.mkdir()
    ring_path(tmp_path, 0).write_bytes(b"nothing")
    told = Told()
    one = made(tmp_path, run=NOTHING, loggers=told.loggers)
    one.look()
    one.finish()
    assert told.closed == 1


@pytest.mark.parametrize(("first", "told_of"), [(0, True), (1, False)])
def test_what_rank_0_measures_is_passed_on_by_its_own_agent(
    tmp_path: Path, clock: Clock, first: int, told_of: bool
) -> None:
    live, loggers = Told(), Told()
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n')
    one = made(tmp_path, first, live=live.live, loggers=loggers.loggers)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1}\n')
        file.flush()
        one.look()
        file.write('{"step": 2}\n')
    one.finish()
    lines = [{"step": 1}, {"step": 2}] if told_of else []
    assert live.lines == loggers.lines == lines
    assert loggers.closed == 1 and live.closed == 0


def test_steps_and_records_that_are_missing_are_said_each_if_there_are_any(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = list[str]()
    monkeypatch.setattr(module, "say", said.append)
    ring, one = open_ring(tmp_path), made(tmp_path)
    write_step(ring, 0)
    one.look()
    next(iter(one._ranks.values())).journal.lost = 4  # type: ignore[union-attr]
    ring.close()
    one.finish()
    assert said == ["warning: the timeline misses 4 steps, which could not be written to the disk in time"]
    one._sums.lost = 7  # type: ignore[union-attr]
    one.finish()
    assert said[1:] == ["warning: the timeline misses 7 steps, which could not be written to the disk in time"]


def hosts(folder: Path, *boots: str) -> None:
    """Rings that have ended, of these hosts."""
    for rank, boot in enumerate(boots):
        header = replace(this_process(rank=rank, world=len(boots), capacity=64), boot=boot, host=boot)
        ring = RingWriter(ring_path(folder, rank), header)
        write_step(ring, 0)
        ring.close()


@pytest.mark.parametrize(
    ("boots", "first", "run", "kept"),
    [
        (("a", "b"), 0, WANTED, True),
        (("a", "a"), 0, WANTED, False),
        (("a", "b"), 1, WANTED, False),
        (("a", "b"), 0, NOTHING, False),
    ],
)
def test_clocks_of_several_hosts_are_compared_by_the_first_agent(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch, boots: tuple[str, ...], first: int,
    run: CollectorSettings,
    kept: bool,
) -> None:  # fmt: skip
    hosts(tmp_path, *boots)
    compared = list[list[int]]()

    def aligned(rings: list[Any]) -> Any:
        compared.append([ring.rank for ring in rings])
        return SimpleNamespace(to_dict=lambda: {"it": 1})

    monkeypatch.setattr("plait.core.record.clocks.aligned", aligned)
    told = Told()
    one = made(tmp_path, first, 1, run, live=told.live)
    one.finish()
    assert compared == ([[0, 1]] if kept else [])
    from plait.core.record.clocks import FILE

    path = tmp_path / "timeline" / FILE
    assert path.exists() == kept
    if kept:
        assert json.loads(path.read_text()) == {"it": 1}


def test_of_many_rings_the_first_of_each_host_is_compared(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "MANY", 3)
    hosts(tmp_path, "a", "a", "b", "b")
    compared = list[list[int]]()

    def aligned(rings: list[Any]) -> Any:
        compared.append(sorted(ring.rank for ring in rings))
        raise OSError("the disk is full")

    monkeypatch.setattr("plait.core.record.clocks.aligned", aligned)
    made(tmp_path).finish()
    assert compared == [[0, 2]]
    assert capsys.readouterr().err == "plait: warning: the disk is full\n"
