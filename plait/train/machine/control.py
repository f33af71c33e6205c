"""Receive stop requests in a rank, and report its activity to the launcher.

A request to stop comes from the launcher, or as a signal: under torchrun, or if a user sends one to
this rank. Before training there is nothing to save, and the request ends the process at once: by an
exception in the main thread, so that half-written files are removed, and if that takes too long, by
``os._exit``. Once training has begun, the request only makes ``Control`` true; the step loop agrees
with the other ranks, saves and ends. No torch here: requests must be handled while torch is
imported.
"""

from __future__ import annotations

import os
import selectors
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import count
from queue import Empty, SimpleQueue
from types import FrameType, TracebackType
from typing import NoReturn, Self

from plait.core.base.errors import ERROR_MARK, PlaitError
from plait.core.runs.channel import ENDINGS, Beat, Channel, Error, Stop, StoreAnswer, StoreCall, StoreVerb

GRACE = 3.0
"""Seconds that the main thread has to end by itself."""
PULSE = 2.0
"""Seconds between two checks whether the main thread works."""
FLUSH = 0.02
"""Seconds between two attempts to send messages that the launcher has not received yet."""
WORK, WORKS = 1e-3, 0.02
"""Seconds of CPU time between two checks that count as work, of the main thread and of all threads.
Waiting for other ranks takes less. The CPU time of all threads counts only while the main thread is
``patient``."""


def _kind(what: str) -> str:
    return what.rstrip("0123456789")


class Control:
    """A listener for stop requests, in a thread, inside the ``with`` block; true once asked to
    stop. Created by the main thread."""

    def __init__(self, channel: Channel | None = None) -> None:
        self._channel = channel
        self._stop: Stop | None = None
        self._saves = False
        self._beat = Beat("starting", patient=True)
        self._known: set[tuple[str, str]] = set()
        self.writing: Callable[[], int] = lambda: 0
        """Function that returns the step of the checkpoint being written; its value is sent with
        the main thread's activity."""
        self._checks: list[Callable[[], None]] = []
        self._calls, self._answers = count(1), dict[int, SimpleQueue[StoreAnswer]]()
        self._lock = threading.Lock()
        self._wake, self._woken = os.pipe()
        self._thread = threading.Thread(target=self._listen, name="control", daemon=True)

    def __enter__(self) -> Self:
        os.set_blocking(self._woken, False)
        # The kernel's signal handler writes here at once, also while the main thread waits in a collective.
        signal.set_wakeup_fd(self._woken, warn_on_full_buffer=False)
        for number in ENDINGS:
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup and background jobs have it ignored
                signal.signal(number, self._in_main_thread)
        self.set_activity("starting", patient=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._saves = True  # the main thread ends by itself now
        signal.set_wakeup_fd(-1)

    def __bool__(self) -> bool:
        return self._stop is not None

    @property
    def status(self) -> int:
        """The exit status of a rank that was stopped; that of SIGTERM if only another rank knows
        the signal."""
        return (self._stop or Stop(signal.SIGTERM)).status

    @property
    def launched(self) -> bool:
        """True if a launcher listens, which holds the run's lock and passes errors on to the
        user."""
        return self._channel is not None

    def report_failure(self, error: PlaitError) -> None:
        """Report why this rank ends: in its log, and to the launcher."""
        print(f"{ERROR_MARK if self._channel else 'plait: '}{error}", file=sys.stderr, flush=True)
        if self._channel:
            self._channel.send(Error(str(error), type(error).__name__))

    @property
    def activity(self) -> str:
        """The main thread's activity, as given to ``set_activity``."""
        return self._beat.doing

    @property
    def step(self) -> int:
        """The step that the main thread trains; -1 outside of steps."""
        return self._beat.step

    @property
    def patient(self) -> bool:
        """True if the activity may legitimately take very long."""
        return self._beat.patient

    @property
    def first(self) -> bool:
        """True if the activity runs for the first time."""
        return self._beat.first

    def set_activity(self, what: str, *, step: int = -1, patient: bool = False) -> None:
        """Report the main thread's activity from now on to the launcher. patient: the activity may
        legitimately take very long without any work of the thread itself. Raises the errors of the
        checks (``add_check``).

        Activities that differ only in trailing numbers are of one kind. The first of its kind takes
        longer, since objects are created, loaded and compiled on first use. So does the first after
        an activity of another kind, such as a step after a checkpoint. The report tells the
        launcher of both (``first``).
        """
        before, kind = _kind(self._beat.doing), _kind(what)
        first = (before, kind) not in self._known if before != kind else self._beat.first and what == self._beat.doing
        self._known.add((before, kind))
        self._beat = Beat(what, step, patient, first, self.writing())
        if self._channel:
            self._channel.send(self._beat)
        for check in self._checks:
            check()

    def add_check(self, check: Callable[[], None]) -> None:
        """Call ``check`` at every ``set_activity``; it raises if the run cannot go on."""
        self._checks.append(check)

    def call_store(
        self, verb: StoreVerb, keys: Sequence[str], values: Sequence[str] = (), *, amount: int = 0,
        seconds: float | None = None,
    ) -> StoreAnswer | None:  # fmt: skip
        """Call the launcher's store (``StoreCall``) and return its answer. seconds: timeout for the
        answer; None: do not wait. Return None without an answer. Any thread may call this
        method."""
        assert self._channel is not None
        number = next(self._calls)
        answers = self._answers[number] = SimpleQueue[StoreAnswer]()
        self._channel.send(StoreCall(number, verb, tuple(keys), tuple(values), amount), keep=True)
        try:
            return None if seconds is None else answers.get(timeout=seconds)
        except Empty:
            self._channel.send(StoreCall(number, "forget"), keep=True)
            return None
        finally:
            del self._answers[number]

    def save_from_now_on(self) -> None:
        """Begin training: from now on a stop request does not end the process, but is left to the
        step loop."""
        with self._lock:
            self._saves = True
        if self._stop:
            raise SystemExit(self.status)

    # ---- signals and the listening thread ----

    def _in_main_thread(self, number: int, _frame: FrameType | None) -> None:
        if not self._saves:
            if self._stop is None:
                self._report_stop(Stop(number))
            raise SystemExit((self._stop or Stop(number)).status)

    def _listen(self) -> None:
        selector = selectors.DefaultSelector()
        selector.register(self._wake, selectors.EVENT_READ, self._signalled)
        if self._channel:
            selector.register(self._channel, selectors.EVENT_READ, self._read_channel)
        works = self._work()
        next(works)  # starts the clocks
        while True:
            pause = None if not self._channel else PULSE if self._channel.flush() else FLUSH
            for key, _ in selector.select(pause):
                key.data()
            if self._channel and next(works):
                self._channel.send(self._beat)

    def _work(self) -> Iterator[bool]:
        """Yield True if this process has worked since the last True, within a pulse: its main
        thread, or any thread while the main thread is ``patient``."""
        clock = time.pthread_getcpuclockid(threading.main_thread().ident or 0)
        main, all_threads, due = time.clock_gettime(clock), time.process_time(), 0.0
        while True:
            now, other = time.clock_gettime(clock), False
            if time.monotonic() >= due:
                before, all_threads, due = all_threads, time.process_time(), time.monotonic() + PULSE
                other = self.patient and all_threads - before > WORKS
            if works := now - main > WORK or other:
                main = now
            yield works

    def _signalled(self) -> None:
        for number in os.read(self._wake, 64):
            if number not in ENDINGS:
                continue
            if self._stop is None:
                self._report_stop(Stop(number))
                self._request_stop(Stop(number))
            elif number == signal.SIGINT and not self._channel:  # a second Ctrl-C
                self._end()

    def _read_channel(self) -> None:
        assert self._channel is not None
        try:
            while (message := self._channel.receive()) is not None:
                if isinstance(message, StoreAnswer) and (answers := self._answers.get(message.number)):
                    answers.put(message)
                elif isinstance(message, Stop) and self._stop is None:
                    self._request_stop(message)
                    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
        except EOFError:  # the launcher was killed, and its lock may already be another run's
            os._exit(1)

    def _report_stop(self, stop: Stop) -> None:
        """Report a stop to the launcher before this rank can end: all ranks must stop, and the
        launcher prints the reason."""
        if self._channel:
            self._channel.send(stop)

    def _request_stop(self, stop: Stop) -> None:
        self._stop = stop
        threading.Thread(target=self._insist, name="stop", daemon=True).start()

    def _insist(self) -> None:
        time.sleep(GRACE)
        with self._lock:
            if not self._saves:
                self._end()

    def _end(self) -> NoReturn:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
        os._exit(self.status)
