"""A thread of each rank that notices when the rank has waited for others for too long, and says what it knows
(``core.runs.parts``).

It looks at the rank's ring, not at the thread that trains, which waits, or may be anywhere. When one rank
suspects something all are asked, since the cause is with one that waits for nobody. Then each tries to reach
the others over the network: who reaches whom places a cut link.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from plait.core.base.errors import DataError
from plait.core.record.ring import Ring, read_ring
from plait.core.runs.parts import RankAnswer, answered, ask, asked, forget_parts, read_parts, write_part
from plait.core.runs.ring_calls import calls_of, ring_path, waited_since
from plait.train.machine.control import Control
from plait.train.machine.stacks import importing, main_stack

PAUSE = 0.25
"""Seconds between two looks at whether somebody asks. The ring is read only when a call in it can be
overdue."""
RENEW = 30.0
"""Seconds after which an answer is given anew."""
ANSWER = 1.0
"""Seconds that others have to answer, and a connection to come."""
MOST = 64
"""Ranks that one tries to reach."""


class Watchdog:
    """Watches while the ``with`` block runs. ring: of this rank. deadline: seconds that a call may take.
    address: of this host, as others see it."""

    def __init__(self, folder: Path, rank: int, control: Control, *, deadline: float, address: str) -> None:
        self.folder, self.rank, self.control, self.deadline, self.address = folder, rank, control, deadline, address
        self.note: Callable[[], None] = lambda: None
        """Has the ring say what has ended, while the rank's own thread is busy with something else."""
        self._end = threading.Event()
        self._asked, self._answered, self._due = False, -RENEW, 0
        self._listener: socket.socket | None = None
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()

    @property
    def alive(self) -> bool:
        """Whether it still watches."""
        return self._thread.is_alive()

    def _watch(self) -> None:
        while not self._end.wait(PAUSE):
            self.note()
            with suppress(OSError, DataError):  # a full disk, a folder that is gone: others may still tell
                self._look()
        self._hang_up()

    def _look(self) -> None:
        if asked(self.folder):
            if self._asked and not self._overdue():  # it has gone on
                forget_parts(self.folder)
                self._asked = False
            elif time.monotonic() > self._answered + RENEW or not answered(self.folder, self.rank):
                self._answer()
            return
        self._asked, self._answered = False, -RENEW
        self._hang_up()
        if time.monotonic_ns() >= self._due and self._overdue():
            self._asked = True
            ask(self.folder)
            self._answer()

    def _overdue(self) -> bool:
        """Whether a call takes for longer than the deadline; else neither what is open now nor what begins
        later can before ``_due``."""
        now, deadline = time.monotonic_ns(), int(self.deadline * 1e9)
        since = waited_since(calls_of(self._ring()))
        self._due = (since or now) + deadline
        return self._due < now

    def _ring(self) -> Ring:
        ring = read_ring(ring_path(self.folder, self.rank))
        if ring.header.pid != os.getpid():
            raise DataError("the ring of an earlier start")
        return ring

    def _answer(self) -> None:
        """Say what is known at once, and once more when the others have been tried."""
        thread, stack = main_stack()
        control, clock = self.control, time.pthread_getcpuclockid(threading.main_thread().ident or 0)
        began, worked = time.monotonic(), time.clock_gettime(clock)
        part = RankAnswer(
            rank=self.rank, token=self._ring().header.token, wall=time.time_ns(), thread=thread, stack=stack,
            doing=control.at, step=control.step, patient=control.patient or importing(stack), address=self._listen(),
            first=control.first,
        )  # fmt: skip
        write_part(self.folder, part)
        time.sleep(ANSWER)
        busy = (time.clock_gettime(clock) - worked) / (time.monotonic() - began)
        reached, missed = self._try(read_parts(self.folder))
        told = replace(part, wall=time.time_ns(), reached=reached, missed=missed, complete=True, busy=busy)
        write_part(self.folder, told)
        self._answered = time.monotonic()

    def _listen(self) -> tuple[str, int] | None:
        with suppress(OSError):
            if self._listener is None:
                self._listener = socket.create_server((self.address, 0), backlog=MOST)
            return self.address, self._listener.getsockname()[1]
        return None

    def _hang_up(self) -> None:
        if self._listener:
            self._listener.close()
            self._listener = None

    def _try(self, parts: dict[int, RankAnswer]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Whom a connection reaches, and whom not; the kernel answers it, whatever the process does."""
        others = [part for part in parts.values() if part.address and part.rank != self.rank]
        others = sorted(others, key=lambda part: (part.rank - self.rank) % (1 << 30))[:MOST]
        found: dict[int, bool] = {}

        def reach(part: RankAnswer) -> None:
            assert part.address is not None
            try:
                socket.create_connection(part.address, timeout=ANSWER).close()
                found[part.rank] = True
            except OSError as error:
                found[part.rank] = isinstance(error, ConnectionRefusedError)  # by its kernel

        threads = [threading.Thread(target=reach, args=(part,), daemon=True) for part in others]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * ANSWER)
        return tuple(sorted(r for r, ok in found.items() if ok)), tuple(sorted(r for r, ok in found.items() if not ok))


def address_towards(host: str, port: int) -> str:
    """This host's address on the way to another; nothing is sent."""
    try:
        family, kind, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(where)
            return probe.getsockname()[0]
    except OSError:
        return "127.0.0.1"
