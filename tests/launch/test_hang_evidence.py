"""What is gathered of ranks of a run that hangs: rings, processes, and what a launcher has seen."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from plait.core.base.process import boot_id
from plait.core.record.ring import Header, RecordKind, call_of, read_ring
from plait.core.record.ring_writer import RingWriter, this_process
from plait.core.runs.evidence import STACKS, Evidence, ring_path
from plait.core.runs.rank_reports import RankReport, write_report
from plait.launch import hang as gathering
from plait.launch.hang import RankStatus, by_stack, gather, kernel_state, print_stacks, printed_stack

TIER = "unit"


@pytest.fixture
def rings(tmp_path: Path) -> Iterator[Callable[..., Header]]:
    """Makes a rank's ring; its header."""
    open_rings = list[RingWriter]()

    def make(rank: int, world: int = 2) -> Header:
        (tmp_path / "rings").mkdir(exist_ok=True)
        ring = RingWriter(ring_path(tmp_path, rank), this_process(rank=rank, world=world, capacity=16))
        ring.begin(RecordKind.COMPUTE, ring.name("F0"), 0, time.monotonic_ns())
        open_rings.append(ring)
        return read_ring(ring_path(tmp_path, rank)).header

    yield make
    for ring in open_rings:
        ring.close()


def test_who_has_not_answered_is_silent_only_where_another_has(tmp_path: Path, rings: Callable[..., Header]) -> None:
    header, _ = rings(0), rings(1)
    (tmp_path / "hang").mkdir()
    assert [one.thread for one in gather(tmp_path).evidence] == ["unknown", "unknown"]
    write_report(tmp_path, RankReport(rank=0, token=header.token + 1, wall=0, thread="waits"))  # of another start
    assert [one.thread for one in gather(tmp_path).evidence] == ["unknown", "unknown"]
    write_report(
        tmp_path, RankReport(rank=0, token=header.token, wall=0, thread="waits", stack=("a", *"bcdefghijklmn"))
    )
    first, second = gather(tmp_path).evidence
    assert (first.thread, second.thread) == ("waits", "silent")
    assert len(first.stack) == gathering.FRAMES and first.stack[-1] == "n"


@pytest.mark.parametrize(("busy", "computes"), [(0.5, True), (0.01, False), (0.0, False)])
def test_one_that_answers_knows_whether_it_computes(
    tmp_path: Path, rings: Callable[..., Header], monkeypatch: pytest.MonkeyPatch, busy: float, computes: bool
) -> None:
    header = rings(0)
    (tmp_path / "hang").mkdir()
    monkeypatch.setattr(gathering, "progress_of", lambda ring, now: SimpleNamespace(at=1, longest=2.0, inside=True))
    assert gather(tmp_path).evidence[0].computes
    write_report(tmp_path, RankReport(rank=0, token=header.token, wall=0, thread="works", busy=busy))
    assert gather(tmp_path).evidence[0].computes == computes


def test_one_that_is_inside_of_nothing_does_not_compute(tmp_path: Path, rings: Callable[..., Header]) -> None:
    made = rings(0)
    ended = RingWriter(ring_path(tmp_path, 1), this_process(rank=1, world=2, capacity=16))
    (tmp_path / "hang").mkdir()
    for rank, token in ((0, made.token), (1, read_ring(ring_path(tmp_path, 1)).header.token)):
        write_report(tmp_path, RankReport(rank=rank, token=token, wall=0, thread="works", busy=0.9))
    assert not gather(tmp_path).evidence[1].computes
    ended.close()


def test_what_a_launcher_has_seen_stands_beside_what_a_rank_says(tmp_path: Path, rings: Callable[..., Header]) -> None:
    header = rings(0)
    (tmp_path / "hang").mkdir()
    seen = RankStatus(
        state="ended", pid=os.getpid(), status=3, ended_at=7.0, doing="saving", step=9, patient=True, first=True,
        error="It.",
    )  # fmt: skip
    one, other = gather(tmp_path, {0: seen}).evidence
    assert (one.state, one.status, one.ended_at, one.error) == ("ended", 3, 7.0, "It.")
    assert (one.doing, one.step, one.patient, one.first) == ("saving", 9, True, True)
    assert (other.recorded, other.state, other.status) == (False, "unknown", None)
    own = RankReport(
        rank=0, token=header.token, wall=0, thread="works", doing="loading", step=11, patient=True, first=True
    )
    write_report(tmp_path, own)
    one, _ = gather(tmp_path, {0: RankStatus(state="runs", pid=None, doing="saving", step=9)}).evidence
    assert (one.doing, one.step, one.patient, one.first) == ("loading", 11, True, True)


def test_rings_of_another_process_are_left_out(tmp_path: Path, rings: Callable[..., Header]) -> None:
    rings(0)
    assert gather(tmp_path, {0: RankStatus(state="runs", pid=os.getpid() + 1)}, world=1).headers == {}
    rings(1)
    assert list(gather(tmp_path, {0: RankStatus(state="runs", pid=os.getpid() + 1)}).headers) == [1]
    ring_path(tmp_path, 1).unlink()
    assert list(gather(tmp_path, {0: RankStatus(state="runs")}).headers) == [0]
    assert [one.rank for one in gather(tmp_path, world=3).evidence] == [0, 1, 2]  # though its ring knows of two


def header(**more: Any) -> Header:
    values: dict[str, Any] = {
        "rank": 0,
        "world": 1,
        "host": "h",
        "pid": os.getpid(),
        "local_rank": 0,
        "boot": boot_id(),
    }
    return Header(**(values | more))


def test_a_process_is_looked_up_on_its_own_machine_only(monkeypatch: pytest.MonkeyPatch) -> None:
    states: list[Any] = [SimpleNamespace(stopped=False), SimpleNamespace(stopped=True), None]
    monkeypatch.setattr(gathering, "process_since", lambda pid, started: states.pop(0))
    assert gathering._process(header(closed=True, boot="other")) == ("ended", 0)
    assert gathering._process(header(boot="other")) == ("unknown", None)
    assert [gathering._process(header()) for _ in range(3)] == [("runs", None), ("stopped", None), ("ended", None)]

    def unknown() -> str:
        raise OSError

    monkeypatch.setattr(gathering, "boot_id", unknown)
    assert gathering._process(header()) == ("unknown", None)


def test_now_is_the_own_clock_or_both_walls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathering, "time", SimpleNamespace(monotonic_ns=lambda: 17, time_ns=lambda: 1000))
    assert gathering._now(header()) == 17
    assert gathering._now(header(boot="other", monotonic=50, wall=900)) == 150

    def unknown() -> str:
        raise OSError

    monkeypatch.setattr(gathering, "boot_id", unknown)
    assert gathering._now(header(monotonic=50, wall=900)) == 150


def test_of_a_process_that_is_gone_the_moment_of_the_question_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rings").mkdir()
    ring = RingWriter(ring_path(tmp_path, 0), this_process(rank=0, world=1, capacity=16))
    tp = ring.group([0], "tp")
    for at in (50, 70):
        ring.begin(
            RecordKind.COLLECTIVE,
            ring.name("a"),
            0,
            at,
            at,
            0,
            64,
            tp,
            at // 20,
            -1,
            call_of("all_reduce", "float32"),
            7,
        )
    made = read_ring(ring_path(tmp_path, 0)).header
    monkeypatch.setattr(gathering, "_process", lambda header: ("ended", None))
    (one,) = gather(tmp_path).evidence
    assert (one.state, one.status, one.at) == ("unknown", None, 70)
    (tmp_path / "hang").mkdir()
    write_report(tmp_path, RankReport(rank=0, token=made.token, wall=made.wall + 10**15, thread="waits"))
    (one,) = gather(tmp_path).evidence
    assert (one.state, one.at) == ("runs", made.monotonic + 10**15)
    monkeypatch.setattr(gathering, "_process", lambda header: ("ended", 0))
    (one,) = gather(tmp_path).evidence
    assert (one.state, one.status) == ("ended", 0) and one.at < made.monotonic + 10**15
    monkeypatch.setattr(gathering, "_process", lambda header: ("unknown", None))  # of another machine
    (one,) = gather(tmp_path).evidence
    assert (one.state, one.status) == ("unknown", None) and one.at < made.monotonic + 10**15
    ring.close()


@pytest.mark.skipif(sys.platform != "linux", reason="there is no signal for stacks")
def test_a_process_is_asked_for_stacks_only_if_it_would_not_end_of_it() -> None:
    came = threading.Event()
    assert STACKS is not None
    assert not print_stacks(os.getpid())  # it would have ended this one
    assert not print_stacks(2**22 + 1)
    before = signal.signal(STACKS, lambda *_: came.set())
    try:
        assert print_stacks(os.getpid())
        assert came.wait(60)
    finally:
        signal.signal(STACKS, before)


@pytest.mark.skipif(sys.platform != "linux", reason="there is no signal for stacks")
def test_which_signals_a_process_catches_is_read_as_the_kernel_writes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    sent, caught = list[tuple[int, int]](), 0
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append((pid, number)))
    monkeypatch.setattr(Path, "read_text", lambda self: f"Name:\tx\nSigCgt:\t{caught:016x}\nSigQ:\t1/2\n")
    assert STACKS is not None
    caught = (1 << 64) - 1 - (1 << (STACKS - 1))
    assert not print_stacks(7)
    caught = 1 << (STACKS - 1)
    assert print_stacks(7) and sent == [(7, STACKS)]
    monkeypatch.setattr(gathering, "STACKS", None)
    assert not print_stacks(7)


def test_where_the_kernel_has_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kernel_state(os.getpid()) == "its main thread is running"
    assert kernel_state(2**22 + 1) == ""
    texts = {"stat": f"1 (a b) D {'2 ' * 30}", "wchan": " pipe_read\n", "cgroup": "0::/none"}
    monkeypatch.setattr(Path, "read_text", lambda self: texts.get(self.name, ""))
    assert kernel_state(1) == "its main thread is in the kernel, waiting for a device (pipe_read)"
    texts |= {"stat": f"1 (sh (x)) T {'2 ' * 30}", "wchan": "0"}
    assert kernel_state(1) == "its main thread is stopped by a signal"


def frames(count: int) -> str:
    return "".join(f'  File "/x/f{number}.py", line {number} in g\n' for number in range(count))


def test_of_printed_stacks_the_main_threads_is_taken() -> None:
    other = 'Thread 0x1 (most recent call first):\n  File "/x/other.py", line 9 in h\n'
    text = f"said before\n{other}\nCurrent thread 0x2 (most recent call first):\n{frames(2)}"
    assert printed_stack(text) == ("f1.py:1 g", "f0.py:0 g")
    assert printed_stack(other + "\nCurrent thread 0x2:\n") == ("other.py:9 h",)
    assert len(printed_stack("hread 0x1\n" + frames(20))) == gathering.FRAMES
    assert printed_stack("hread 0x1\n" + frames(20))[-1] == "f0.py:0 g"
    assert printed_stack('hread 0x1\nFile "/a/b.py", line 3 in spin\n  File "/a/b.py" line\n') == ()


@pytest.mark.parametrize(
    ("stack", "thread", "patient"),
    [
        (("wire.py:9 wait",), "waits", False),
        (("wire.py:9 waits",), "silent", False),
        (("wire.py:9 wait", "other.py:1 f"), "silent", False),
        (("threading.py:1 wait",), "silent", False),
        ((), "silent", False),
        (("<frozen importlib._bootstrap>:1 _load", "wire.py:9 wait"), "waits", True),
        (("<frozen importlib._bootstrap>:1 _load", "other.py:1 f"), "silent", True),
    ],
)
def test_a_stack_tells_who_was_only_slow_to_answer(stack: tuple[str, ...], thread: str, patient: bool) -> None:
    mute = Evidence(rank=0, state="runs", thread="silent")
    found = by_stack(mute, stack)
    assert (found.thread, found.patient, found.stack) == (thread, patient, stack)
    assert by_stack(replace(mute, patient=True), stack).patient
