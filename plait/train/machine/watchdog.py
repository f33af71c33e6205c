"""Detect in a thread of each rank when the rank has waited too long for other ranks, and write what
it knows (``core.runs.rank_reports``).

The thread reads the rank's ring, not the training thread's state, which may be blocked anywhere.
When one rank suspects a hang, all ranks answer, since the cause is a rank that waits for nobody.
Then each tries to reach the other ranks over the network: the pairs that fail locate a broken link.

``stacks_on_signal`` and ``main_stack`` show where the rank's threads are.
"""

from __future__ import annotations

import faulthandler
import linecache
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType

from plait.core.base.errors import DataError
from plait.core.record.ring import Ring, read_ring
from plait.core.runs.evidence import STACKS, Thread, calls_of, ring_path, waited_since
from plait.core.runs.rank_reports import (
    RankReport,
    clear_reports,
    has_report,
    read_reports,
    reports_requested,
    request_reports,
    write_report,
)
from plait.train.machine.control import Control

PACKAGE = str(Path(__file__).parents[2])
_WAITS = re.compile(r"\.(wait|settle|synchronize|barrier|broadcast|all_gather\w*|all_reduce)\(")
"""Pattern of Plait's own source lines in which a thread waits for other ranks."""
_WAITS_IN_C = re.compile(r"\.wait\(")
"""Pattern of any source line that waits without a further Python frame: for torch's work, or for a
collective that Plait records."""
DEEPEST = 40


def stacks_on_signal() -> None:
    """Print all stacks to the rank's log on a signal. The handler is in C, so it also runs while
    another thread holds the interpreter's lock."""
    if STACKS is not None:
        faulthandler.register(STACKS, file=sys.stderr, all_threads=True)


def main_stack() -> tuple[Thread, tuple[str, ...]]:
    """Return the main thread's state ("waits" for other ranks, or "works"), and its stack,
    innermost frame last."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    frames: list[FrameType] = []
    while frame is not None and len(frames) < DEEPEST:
        frames.append(frame)
        frame = frame.f_back
    return ("waits" if _waits(frames) else "works"), tuple(_spoken(one) for one in reversed(frames))


def importing(stack: tuple[str, ...]) -> bool:
    """Return True if a thread is importing a module, which takes as long as the disk does.
    Libraries import at their first use, in the midst of the first step."""
    return any("importlib._bootstrap" in frame for frame in stack)


def _waits(frames: list[FrameType]) -> bool:
    """Return True if the innermost line waits, or the innermost of Plait's own lines does. Any
    frames inside the latter must belong to torch's communication or Python's ``threading``."""
    if frames and _WAITS_IN_C.search(_line(frames[0])):
        return True
    for frame in frames:
        name = frame.f_code.co_filename
        if name.startswith(PACKAGE):
            return bool(_WAITS.search(_line(frame)))
        if "torch/distributed" not in name and not name.endswith(("threading.py", "c10d_logger.py")):
            return False
    return False


def _line(frame: FrameType) -> str:
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno)


def _spoken(frame: FrameType) -> str:
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}"


PAUSE = 0.25
"""Seconds between two checks whether reports of a suspected hang are requested. The ring is read
only when a call in it can be overdue."""
RENEW = 30.0
"""Seconds after which a rank writes its report of a suspected hang again."""
ANSWER = 1.0
"""Seconds to wait for the other ranks' reports, and for a connection to one of them."""
MOST = 64
"""The number of ranks that a rank tries to reach, at most."""


class Watchdog:
    """A thread that watches while the ``with`` block runs. rank: the rank whose ring it reads.
    deadline: seconds that a call may take. address: this host's address, as other hosts reach
    it."""

    def __init__(self, folder: Path, rank: int, control: Control, *, deadline: float, address: str) -> None:
        self.folder, self.rank, self.control, self.deadline, self.address = folder, rank, control, deadline, address
        self.record_finished: Callable[[], None] = lambda: None
        """Function that records finished calls in the ring while the rank's own thread is busy."""
        self._end = threading.Event()
        self._suspects, self._answered, self._due = False, -RENEW, 0
        self._listener: socket.socket | None = None
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()

    @property
    def alive(self) -> bool:
        """True while the thread watches."""
        return self._thread.is_alive()

    def _watch(self) -> None:
        while not self._end.wait(PAUSE):
            self.record_finished()
            with suppress(OSError, DataError):  # a full disk, a folder that is gone: other ranks may still answer
                self._look()
        self._hang_up()

    def _look(self) -> None:
        if reports_requested(self.folder):
            if self._suspects and not self._overdue():  # the call has ended
                clear_reports(self.folder)
                self._suspects = False
            elif time.monotonic() > self._answered + RENEW or not has_report(self.folder, self.rank):
                self._answer()
            return
        self._suspects, self._answered = False, -RENEW
        self._hang_up()
        if time.monotonic_ns() >= self._due and self._overdue():
            self._suspects = True
            request_reports(self.folder)
            self._answer()

    def _overdue(self) -> bool:
        """Return True if a call takes longer than the deadline. Otherwise set ``_due``: before that
        time no call, open or future, can be overdue."""
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
        """Write this rank's report of a suspected hang at once, and again after trying to reach the
        other ranks."""
        thread, stack = main_stack()
        control, clock = self.control, time.pthread_getcpuclockid(threading.main_thread().ident or 0)
        began, worked = time.monotonic(), time.clock_gettime(clock)
        part = RankReport(
            rank=self.rank, token=self._ring().header.token, wall=time.time_ns(), thread=thread, stack=stack,
            doing=control.activity, step=control.step,
            patient=control.patient or importing(stack), address=self._listen(),
            first=control.first,
        )  # fmt: skip
        write_report(self.folder, part)
        time.sleep(ANSWER)
        busy = (time.clock_gettime(clock) - worked) / (time.monotonic() - began)
        reached, missed = self._try(read_reports(self.folder))
        told = replace(part, wall=time.time_ns(), reached=reached, missed=missed, complete=True, busy=busy)
        write_report(self.folder, told)
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

    def _try(self, parts: dict[int, RankReport]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return (ranks that a TCP connection reaches, ranks that it does not). The kernel accepts
        a connection, whatever the process does."""
        others = [part for part in parts.values() if part.address and part.rank != self.rank]
        others = sorted(others, key=lambda part: (part.rank - self.rank) % (1 << 30))[:MOST]
        found: dict[int, bool] = {}

        def reach(part: RankReport) -> None:
            assert part.address is not None
            try:
                socket.create_connection(part.address, timeout=ANSWER).close()
                found[part.rank] = True
            except OSError as error:
                found[part.rank] = isinstance(error, ConnectionRefusedError)  # its kernel answered, so the link works

        threads = [threading.Thread(target=reach, args=(part,), daemon=True) for part in others]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * ANSWER)
        return tuple(sorted(r for r, ok in found.items() if ok)), tuple(sorted(r for r, ok in found.items() if not ok))


def address_towards(host: str, port: int) -> str:
    """Return this host's address on the route to another host; sends nothing. 127.0.0.1 without a
    route."""
    try:
        family, kind, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(where)
            return probe.getsockname()[0]
    except OSError:
        return "127.0.0.1"
