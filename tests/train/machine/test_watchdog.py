"""A rank's own thread notices that a call does not end, and says what it knows; so do those that
are asked."""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from plait.core.record.ring import RecordKind
from plait.core.record.ring_writer import Line, Pace, RingWriter, this_process
from plait.core.runs.evidence import ring_path
from plait.core.runs.rank_reports import (
    RankReport,
    clear_reports,
    read_reports,
    reports_requested,
    request_reports,
    write_report,
)
from plait.train.machine.control import Control
from plait.train.machine.watchdog import RENEW, Watchdog, address_towards, importing, main_stack


def until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def writer(folder: Path, rank: int = 0) -> RingWriter:
    (folder / "rings").mkdir(exist_ok=True)
    return RingWriter(ring_path(folder, rank), this_process(rank=rank, world=2, capacity=64))


def complete(folder: Path, rank: int, *reached: int) -> bool:
    """Whether a rank has said all, and whom it reaches."""
    parts = read_reports(folder)
    return rank in parts and parts[rank].complete and {*reached} <= {*parts[rank].reached}


def test_a_call_that_does_not_end_is_noticed_and_one_that_does_takes_it_back(tmp_path: Path) -> None:
    ring = writer(tmp_path)
    group, name = ring.group([0, 1], "tp"), ring.name("op")
    control = Control()
    control.set_activity("step 3", step=2)
    with Watchdog(tmp_path, 0, control, deadline=0.6, address="127.0.0.1") as watchdog:
        time.sleep(1.0)
        assert not reports_requested(tmp_path)  # nothing is open
        began = time.monotonic_ns()
        number = ring.begin(RecordKind.COLLECTIVE, name, 2, began, group=group)
        until(lambda: reports_requested(tmp_path))
        assert time.monotonic_ns() - began > 0.6e9
        until(lambda: complete(tmp_path, 0))
        part = read_reports(tmp_path)[0]
        assert (part.doing, part.step, part.patient, part.token) == ("step 3", 2, False, ring.header.token)
        assert part.thread == "works"  # this thread sleeps in code that is not Plait's
        assert any("test_watchdog.py" in frame for frame in part.stack)
        ring.end(number, time.monotonic_ns())
        until(lambda: not reports_requested(tmp_path))
    until(lambda: not watchdog.alive)


def test_who_is_asked_answers_and_says_whom_it_reaches(tmp_path: Path) -> None:
    for rank in range(2):
        writer(tmp_path, rank)
    control = Control()
    request_reports(tmp_path)
    write_report(
        tmp_path, RankReport(rank=7, token=1, wall=0, thread="waits", address=("255.255.255.255", 9))
    )  # no host
    with (
        Watchdog(tmp_path, 0, control, deadline=60, address="127.0.0.1") as first,
        Watchdog(tmp_path, 1, control, deadline=60, address="127.0.0.1") as second,
    ):
        # One that has answered before the other listened answers once more.
        until(lambda: complete(tmp_path, 0, 1) and complete(tmp_path, 1, 0), 2 * RENEW)
    until(lambda: not first.alive and not second.alive)
    parts = read_reports(tmp_path)
    assert parts[0].missed == parts[1].missed == (7,)
    clear_reports(tmp_path)


def test_a_question_that_is_taken_back_and_put_again_at_once_is_answered_again(tmp_path: Path) -> None:
    writer(tmp_path)
    request_reports(tmp_path)
    with Watchdog(tmp_path, 0, Control(), deadline=60, address="127.0.0.1"):
        until(lambda: complete(tmp_path, 0))
        clear_reports(tmp_path)
        request_reports(tmp_path)
        until(lambda: complete(tmp_path, 0), RENEW / 3)


def test_a_run_without_rings_and_one_without_a_folder_disturb_nobody(tmp_path: Path) -> None:
    with Watchdog(tmp_path / "gone", 0, Control(), deadline=0.1, address="127.0.0.1") as watchdog:
        time.sleep(1.2)
        assert watchdog.alive


def test_what_was_open_in_an_earlier_start_is_no_hang_of_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rings").mkdir()
    header = this_process(rank=0, world=2, capacity=64)
    ring = RingWriter(ring_path(tmp_path, 0), replace(header, pid=header.pid + 1))
    ring.begin(RecordKind.COLLECTIVE, ring.name("op"), 2, 1, group=ring.group([0, 1], "tp"))
    module, looks = importlib.import_module("plait.train.machine.watchdog"), list[Path]()
    read = module.read_ring
    monkeypatch.setattr(module, "PAUSE", 0.01)
    monkeypatch.setattr(module, "read_ring", lambda path: looks.append(path) or read(path))
    with Watchdog(tmp_path, 0, Control(), deadline=0.01, address="127.0.0.1") as watchdog:
        until(lambda: len(looks) > 3)
        assert not reports_requested(tmp_path)
    until(lambda: not watchdog.alive)


def looked_at(wait: Callable[[], object], end: Callable[[], object]) -> str:
    """What is said of this thread while it waits; then the wait is ended."""
    seen = list[str]()

    def look() -> None:
        until = time.monotonic() + 20
        while (told := main_stack()[0]) != "waits" and time.monotonic() < until:
            time.sleep(0.01)  # it has not begun to wait
        seen.append(told)
        end()

    thread = threading.Thread(target=look)
    thread.start()
    wait()
    thread.join()
    assert main_stack()[0] == "works"
    return seen[0]


def test_whether_a_thread_waits_for_others_is_told_by_its_stack() -> None:
    from plait.train.comm.background import BackgroundHandle

    handle = BackgroundHandle()
    assert looked_at(handle.wait, lambda: handle.finish(None)) == "waits"
    assert address_towards("127.0.0.1", 29500) == "127.0.0.1"


def test_who_waits_for_a_collective_from_code_that_is_not_plaits_waits_for_others(tmp_path: Path) -> None:
    ring, lock = writer(tmp_path), threading.Lock()
    work: Any = SimpleNamespace(wait=lock.acquire, is_completed=lambda: False)
    flight = Line(ring, ring.group([0, 1], "tp")).depart(Pace(), 0, ring.name("op"), 8, 0, 0)
    flight.fly(work, False)
    lock.acquire()

    def waits() -> None:
        flight.wait()

    assert looked_at(waits, lock.release) == "waits"


def test_an_import_may_take_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = "from tests.train.machine import test_watchdog as test\ntest.SEEN.append(test.main_stack())\n"
    (tmp_path / "imports_slowly.py").write_text(module)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("imports_slowly")
    thread, stack = SEEN.pop()
    assert thread == "works"
    assert importing(stack)
    assert not importing(main_stack()[1])


SEEN: list[tuple[str, tuple[str, ...]]] = []
