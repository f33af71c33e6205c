"""What a rank says of itself."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NoReturn, TypeVar

import pytest

from plait.core.base.errors import NotFinite
from plait.core.runs.channel import Beat, Channel, Error, Stop, StoreAnswer, StoreCall
from plait.train.machine import control as module
from plait.train.machine.control import Control
from tests.support.lab import wait_until


def test_what_is_done_for_the_first_time_is_told() -> None:
    control = Control()
    said = [
        ("resuming", True), ("step 1", True), ("step 2", False), ("step 3", False),
        ("evaluating after step 3", True), ("step 4", True), ("step 5", False), ("evaluating after step 5", False),
        ("step 6", False), ("saving after step 6", True), ("step 7", True), ("step 8", False),
        ("saving after step 8", False), ("step 9", False),
    ]  # fmt: skip
    for what, first in said:
        control.set_activity(what)
        assert (what, control.first) == (what, first)


def test_what_is_said_twice_is_still_the_first() -> None:
    control = Control()
    control.set_activity("measuring")
    control.set_activity("measuring")
    assert control.first


M = TypeVar("M")


class Rank:
    """A control, the launcher's end of its line, and what it would do to its process. clock:
    processor seconds of the main thread; looks: how often it was read; rate: what all threads take
    from one look to the next; passes: set once its grace is over."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, launched: bool = True) -> None:
        self.launcher, theirs = Channel.pair()
        self.before = set(threading.enumerate())
        self.line = Channel(theirs)
        self.control = Control(self.line if launched else None)
        self.ended, self.killed = list[int](), list[tuple[int, int]]()
        self.clock, self.looks, self.waits, self.passes = 5.0, 0, threading.Event(), threading.Event()
        self.all_threads, self.rate = 0.0, 0.0
        self.handlers, self.wakeups = dict[int, Any](), list[int]()
        monkeypatch.setattr(signal, "signal", self.handlers.__setitem__)
        monkeypatch.setattr(signal, "set_wakeup_fd", lambda fd, **_: self.wakeups.append(fd))
        monkeypatch.setattr(signal, "pthread_kill", lambda thread, number: self.killed.append((thread, number)))
        monkeypatch.setattr(module, "PULSE", 0.01)
        monkeypatch.setattr(os, "_exit", self._exit)
        told = threading.excepthook
        monkeypatch.setattr(threading, "excepthook", lambda one: one.exc_type is SystemExit or told(one))
        monkeypatch.setattr(module, "time", SimpleNamespace(
            sleep=self._sleep, pthread_getcpuclockid=lambda thread: 1, clock_gettime=self._clock,
            process_time=self._process_time, monotonic=time.monotonic,
        ))  # fmt: skip

    def _exit(self, status: int) -> NoReturn:
        self.ended.append(status)
        raise SystemExit  # of the thread that does it

    def _clock(self, clock: int) -> float:
        self.looks += 1
        return self.clock

    def _process_time(self) -> float:
        self.all_threads += self.rate
        return self.all_threads

    def _sleep(self, seconds: float) -> None:
        assert seconds == module.GRACE
        self.waits.set()
        self.passes.wait(60)

    def signals(self, *numbers: int) -> None:
        """As the kernel's handler writes it."""
        os.write(self.wakeups[0], bytes(numbers))

    def heard(self, kind: type[M]) -> M:
        found = list[M]()

        def comes() -> bool:
            if isinstance(message := self.launcher.receive(), kind):
                found.append(message)
            else:
                assert message is None or isinstance(message, Beat), message
            return bool(found)

        until(comes)
        return found[0]

    def close(self) -> None:
        """End its threads, while nothing can end the process."""
        self.passes.set()
        self.launcher.close()
        for name in ("control", "stop"):  # the first starts the second
            for thread in set(threading.enumerate()) - self.before:
                if thread.name == name and (name == "stop" or self.control.launched):
                    until(lambda thread=thread: thread.ident)  # one that is being started cannot be joined
                    thread.join(60)
        self.line.close()


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rank]:
    made = Rank(monkeypatch)
    yield made
    made.close()


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rank]:
    """Without a launcher."""
    made = Rank(monkeypatch, launched=False)
    yield made
    made.close()


def until(condition: Callable[[], object]) -> None:
    wait_until(condition, "it never comes", seconds=60)


def test_signals_that_end_a_run_are_caught_unless_they_are_ignored(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    ignored = {signal.SIGHUP: signal.SIG_IGN}
    monkeypatch.setattr(signal, "getsignal", lambda number: ignored.get(number, signal.SIG_DFL))
    with rank.control:
        assert set(rank.handlers) == {signal.SIGINT, signal.SIGTERM}
        assert not os.get_blocking(rank.wakeups[0])  # a handler must not wait
    assert len(rank.wakeups) == 2 and rank.wakeups[1] == -1


def test_what_is_done_is_told_at_once_and_its_checks_are_asked(rank: Rank) -> None:
    checked = list[str]()
    with rank.control as control:
        assert rank.heard(Beat) == Beat("starting", -1, True, False, 0)
        assert (control.activity, control.step, control.patient, control.launched) == ("starting", -1, True, True)
        control.add_check(lambda: checked.append(control.activity))
        control.writing = lambda: 8
        control.set_activity("step 3", step=3)
        assert rank.heard(Beat) == Beat("step 3", 3, False, True, 8)
        assert (control.activity, control.step, control.patient, control.first) == ("step 3", 3, False, True)
        assert checked == ["step 3"]


def test_that_the_main_thread_works_is_told_now_and_then(rank: Rank) -> None:
    with rank.control as control:
        assert rank.heard(Beat).doing == "starting"
        control.set_activity("measuring")
        assert rank.heard(Beat).doing == "measuring"
        until(lambda: rank.looks)  # the first of which is where work is counted from
        rank.clock += module.WORK / 2
        for _ in range(30):  # which is too little
            assert rank.launcher.receive() is None
        rank.clock += module.WORK
        assert rank.heard(Beat).doing == "measuring"


@pytest.mark.parametrize(("patient", "rate", "tells"), [(True, 1.0, True), (False, 1.0, False), (True, 1e-3, False)])
def test_other_threads_work_for_one_that_may_take_long(rank: Rank, patient: bool, rate: float, tells: bool) -> None:
    with rank.control as control:
        assert rank.heard(Beat).doing == "starting"
        control.set_activity("preparing", patient=patient)
        assert rank.heard(Beat).doing == "preparing"
        rank.rate = rate
        looks = rank.looks
        until(lambda: rank.looks > looks + 3)
        assert (rank.launcher.receive() is not None) == tells


def test_the_launchers_store_answers_the_thread_that_asks(rank: Rank) -> None:
    answers = dict[str, StoreAnswer | None]()

    def ask(key: str, seconds: float) -> None:
        answers[key] = rank.control.call_store("wait", [key], seconds=seconds)

    with rank.control:
        threads = [threading.Thread(target=ask, args=one) for one in (("a", 60.0), ("b", 60.0))]
        for thread in threads:
            thread.start()
        calls = [rank.heard(StoreCall), rank.heard(StoreCall)]
        for call in reversed(calls):  # in any order, and several at once
            rank.launcher.send(StoreAnswer(call.number, (call.keys[0] * 2,)))
        rank.launcher.send(StoreAnswer(99))  # to nobody
        for thread in threads:
            thread.join(60)
        assert {key: one and one.values for key, one in answers.items()} == {"a": ("aa",), "b": ("bb",)}
        assert rank.control.call_store("set", ["c"], ["dg=="]) is None  # and is not waited for
        assert rank.heard(StoreCall) == StoreCall(3, "set", ("c",), ("dg==",))
        assert rank.control.call_store("wait", ["d"], seconds=0.01) is None
        assert rank.heard(StoreCall) == StoreCall(4, "wait", ("d",))
        assert rank.heard(StoreCall) == StoreCall(4, "forget")


def test_what_the_launcher_does_not_take_yet_is_sent_later(rank: Rank) -> None:
    """However much it is: a call of the store that is left out would let a rank wait for ever."""
    value = "A" * (1 << 20)
    with rank.control as control:
        assert rank.heard(Beat)
        for number in range(3):
            control.call_store("set", [f"key {number}"], [value])
        assert [rank.heard(StoreCall) for _ in range(3)] == [
            StoreCall(number + 1, "set", (f"key {number}",), (value,)) for number in range(3)
        ]  # fmt: skip


def test_a_stop_before_training_ends_the_main_thread_and_then_the_process(rank: Rank) -> None:
    with rank.control as control:
        assert not control
        rank.launcher.send(Stop(signal.SIGINT))
        rank.waits.wait(60)
        assert control and control.status == 128 + signal.SIGINT
        until(lambda: rank.killed)
        assert rank.killed == [(threading.main_thread().ident, signal.SIGTERM)]
        with pytest.raises(SystemExit) as end:  # what the signal makes of it
            rank.handlers[signal.SIGTERM](signal.SIGTERM, None)
        assert end.value.code == 128 + signal.SIGINT
        rank.launcher.send(Stop(signal.SIGTERM))  # a second is none
        assert not rank.ended
        rank.passes.set()
        until(lambda: rank.ended)
        assert rank.ended == [128 + signal.SIGINT]


def test_a_stop_in_training_is_a_wish(rank: Rank) -> None:
    with rank.control as control:
        control.save_from_now_on()
        rank.launcher.send(Stop(signal.SIGTERM))
        rank.waits.wait(60)
        rank.passes.set()
        until(lambda: control)
        rank.handlers[signal.SIGTERM](signal.SIGTERM, None)  # ends nothing
        assert control.status == 143
    assert not rank.ended


def test_a_stop_that_came_before_ends_training_before_it_begins(rank: Rank) -> None:
    with rank.control as control:
        rank.launcher.send(Stop(signal.SIGHUP))
        until(lambda: control)
        with pytest.raises(SystemExit) as end:
            control.save_from_now_on()
        assert end.value.code == 128 + signal.SIGHUP
        rank.passes.set()
    assert not rank.ended


def test_a_rank_that_has_ended_by_itself_is_not_ended(rank: Rank) -> None:
    with rank.control as control:
        rank.launcher.send(Stop(signal.SIGTERM))
        until(lambda: control)
    rank.passes.set()
    assert not rank.ended


def test_a_signal_is_told_to_the_launcher_once(rank: Rank) -> None:
    with rank.control as control:
        control.save_from_now_on()
        rank.signals(signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGINT)
        assert rank.heard(Stop) == Stop(signal.SIGTERM)
        until(lambda: control)
        control.set_activity("step 1")
        assert rank.heard(Beat)
        for _ in range(30):
            assert not isinstance(rank.launcher.receive(), Stop)
        assert control.status == 143
    assert not rank.ended


def test_a_signal_that_reaches_the_main_thread_first_is_told_as_well(rank: Rank) -> None:
    with rank.control, pytest.raises(SystemExit) as end:
        rank.handlers[signal.SIGINT](signal.SIGINT, None)
    assert end.value.code == 130
    assert rank.heard(Stop) == Stop(signal.SIGINT)


def test_without_a_launcher_a_second_ctrl_c_ends_at_once(alone: Rank) -> None:
    with alone.control as control:
        assert not control.launched
        control.save_from_now_on()
        alone.signals(signal.SIGTERM, signal.SIGTERM)
        until(lambda: control)
        assert not alone.ended
        alone.signals(signal.SIGINT)
        until(lambda: alone.ended)
    assert alone.ended == [143]


def test_a_launcher_that_is_gone_takes_its_ranks_with_it(rank: Rank) -> None:
    with rank.control:
        rank.launcher.close()
        until(lambda: rank.ended)
    assert rank.ended == [1]


def test_of_a_stop_that_another_rank_was_sent_the_status_is_sigterms() -> None:
    assert Control().status == 143


@pytest.mark.parametrize("launched", [False, True])
def test_why_a_rank_ends_is_in_its_log_and_told(
    rank: Rank, alone: Rank, capsys: pytest.CaptureFixture[str], launched: bool
) -> None:
    one = rank if launched else alone
    one.control.report_failure(NotFinite("the loss is nan"))
    assert capsys.readouterr().err == f"{'plait-error: ' if launched else 'plait: '}the loss is nan\n"
    if launched:
        assert one.heard(Error) == Error("the loss is nan", "NotFinite")
