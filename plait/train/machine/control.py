"""What a rank is asked from outside, and what it says of itself.

A request to stop comes from the launcher, or as a signal where there is none (torchrun) or somebody sent one
to this rank. Until training begins there is nothing to save, and it ends the process, whatever that is doing:
by an exception in the main thread, so that files half written are removed, and if that does not answer, at
once. From then on it is a wish: true for the step loop, which agrees with the other ranks, saves and ends. No
torch here, so that it works while that is imported.
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
"""Seconds between two looks at whether the main thread works."""
FLUSH = 0.02
"""Seconds between two tries to send what the launcher has not taken yet."""
WORK, WORKS = 1e-3, 0.02
"""Seconds of processor time between two looks that count as work, of the main thread and of all threads:
waiting for other ranks takes less. Others work for the main thread where it may take long."""


def _kind(what: str) -> str:
    return what.rstrip("0123456789")


class Control:
    """Listens inside the ``with`` block, in a thread; true when asked to stop. Made by the main thread."""

    def __init__(self, channel: Channel | None = None) -> None:
        self._channel = channel
        self._stop: Stop | None = None
        self._saves = False
        self._beat = Beat("starting", patient=True)
        self._known: set[tuple[str, str]] = set()
        self.writing: Callable[[], int] = lambda: 0
        """The step of the checkpoint that is being written, which is told with what the main thread does."""
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
            if signal.getsignal(number) != signal.SIG_IGN:  # that is how nohup and background jobs work
                signal.signal(number, self._in_main_thread)
        self.doing("starting", patient=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._saves = True  # what ends now ends by itself
        signal.set_wakeup_fd(-1)

    def __bool__(self) -> bool:
        return self._stop is not None

    @property
    def status(self) -> int:
        """The exit status of a rank that was stopped; SIGTERM's where only another rank knows the signal."""
        return (self._stop or Stop(signal.SIGTERM)).status

    @property
    def launched(self) -> bool:
        """Whether a launcher listens, which holds the run's lock and passes errors on to people."""
        return self._channel is not None

    def fails(self, error: PlaitError) -> None:
        """Say why this rank ends: in its log, and to the launcher."""
        print(f"{ERROR_MARK if self._channel else 'plait: '}{error}", file=sys.stderr, flush=True)
        if self._channel:
            self._channel.send(Error(str(error), type(error).__name__))

    @property
    def at(self) -> str:
        """What the main thread does, in its own words."""
        return self._beat.doing

    @property
    def step(self) -> int:
        """The step that it trains; -1 before."""
        return self._beat.step

    @property
    def patient(self) -> bool:
        """Whether what it does may rightly take very long."""
        return self._beat.patient

    @property
    def first(self) -> bool:
        """Whether it does that for the first time."""
        return self._beat.first

    def doing(self, what: str, *, step: int = -1, patient: bool = False) -> None:
        """Say what the main thread does from now on; ``patient`` if that may rightly take very long without
        any work of the thread itself. Raises what the checks raise.

        What is called the same, but for numbers, is the same. The first of its kind takes longer by nature,
        as things are made, loaded and compiled when they are needed first; so does the first that follows
        something else, such as a step after a checkpoint. Who watches is told.
        """
        before, kind = _kind(self._beat.doing), _kind(what)
        first = (before, kind) not in self._known if before != kind else self._beat.first and what == self._beat.doing
        self._known.add((before, kind))
        self._beat = Beat(what, step, patient, first, self.writing())
        if self._channel:
            self._channel.send(self._beat)
        for check in self._checks:
            check()

    def always(self, check: Callable[[], None]) -> None:
        """Call ``check``, which raises if the run cannot go on, whenever the main thread says what it
        does."""
        self._checks.append(check)

    def tell_store(
        self, verb: StoreVerb, keys: Sequence[str], values: Sequence[str] = (), *, amount: int = 0,
        seconds: float | None = None,
    ) -> StoreAnswer | None:  # fmt: skip
        """Call the launcher's store (``StoreCall``). seconds: until there must be an answer; None: there is
        none. Returns None where none has come. Any thread may call it."""
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
        """Training begins: a request is now a wish that the step loop sees."""
        with self._lock:
            self._saves = True
        if self._stop:
            raise SystemExit(self.status)

    # ---- inside ----

    def _in_main_thread(self, number: int, _frame: FrameType | None) -> None:
        if not self._saves:
            if self._stop is None:
                self._tell(Stop(number))
            raise SystemExit((self._stop or Stop(number)).status)

    def _listen(self) -> None:
        selector = selectors.DefaultSelector()
        selector.register(self._wake, selectors.EVENT_READ, self._signalled)
        if self._channel:
            selector.register(self._channel, selectors.EVENT_READ, self._told)
        works = self._work()
        next(works)  # from now on
        while True:
            pause = None if not self._channel else PULSE if self._channel.flush() else FLUSH
            for key, _ in selector.select(pause):
                key.data()
            if self._channel and next(works):
                self._channel.send(self._beat)

    def _work(self) -> Iterator[bool]:
        """Whether this process has worked since that was last so: its main thread, or where that may take
        long any other, within a pulse."""
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
                self._tell(Stop(number))
                self._ask(Stop(number))
            elif number == signal.SIGINT and not self._channel:  # a second Ctrl-C
                self._end()

    def _told(self) -> None:
        assert self._channel is not None
        try:
            while (message := self._channel.receive()) is not None:
                if isinstance(message, StoreAnswer) and (answers := self._answers.get(message.number)):
                    answers.put(message)
                elif isinstance(message, Stop) and self._stop is None:
                    self._ask(message)
                    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
        except EOFError:  # the launcher was killed, and its lock may already be another run's
            os._exit(1)

    def _tell(self, stop: Stop) -> None:
        """Let the launcher know, before this rank can end of it: all ranks are to stop, and it should say
        why."""
        if self._channel:
            self._channel.send(stop)

    def _ask(self, stop: Stop) -> None:
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
