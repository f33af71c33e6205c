"""Keeping a run going: when its ranks fail they are started again, on other hosts or fewer, from the newest
checkpoint; every attempt is written down.

What is restarted is what another attempt may mend: a rank that was killed, died or hangs, a host that is cut
off, ranks that cannot be started because the disk is full. A mistake in the job (exit status 2), numbers that
are not finite, a lost folder and a wish to stop end the run, and so does a rank that fails twice by itself in
the same way at the same step. Between two attempts the launcher waits, longer each time that no new
checkpoint was saved meanwhile.
"""

from __future__ import annotations

import os
import signal
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from plait.core.base.errors import RankFailure
from plait.core.runs.channel import Stop
from plait.core.runs.history import History, newest_checkpoint, rounded
from plait.core.runs.host_memory import has_copies
from plait.core.runs.lock import RunLock
from plait.core.runs.progress import Progress
from plait.launch.hang import Suspicion
from plait.launch.local import RankStarter, run_ranks
from plait.launch.watch import RunGuard, catching_signals, say

FIRST_WAIT, LONGEST_WAIT = 1.0, 60.0
"""Seconds before the first restart, and at most; each in between that follows one in vain waits twice as
long."""


@dataclass(frozen=True, kw_only=True)
class Crew:
    """Who is started in an attempt. hosts: by node rank. plan: its hash. beside: what goes on as long as the
    ranks do."""

    start: RankStarter
    world: int
    hosts: tuple[str, ...]
    suspicion: Callable[[], Suspicion | None]
    plan: str = ""
    beside: Callable[[], AbstractContextManager[None]] = nullcontext


class Fleet(Protocol):
    """Hosts that ranks can be started on."""

    def crew(self) -> Crew:
        """Whom to start next."""
        ...

    def mend(self, failure: RankFailure) -> str:
        """See to it that the next crew leaves out what has failed; what was changed, in words. Raises
        RankFailure as long as the job cannot run on what is left."""
        ...


@dataclass(frozen=True)
class OneHost:
    """Always the same crew, of this machine."""

    made: Callable[[], Crew]

    def crew(self) -> Crew:
        """As it is made, anew for each attempt."""
        return self.made()

    def mend(self, failure: RankFailure) -> str:
        """There is no other host."""
        return ""


def backoff(vain: int) -> float:
    """Seconds to wait before the next attempt. vain: restarts in a row that have saved nothing new.

    >>> [backoff(vain) for vain in (0, 1, 2, 3, 9)]
    [1.0, 1.0, 2.0, 4.0, 60.0]
    """
    return min(LONGEST_WAIT, FIRST_WAIT * 2.0 ** max(0, vain - 1))


class Supervisor:
    """Of one run. restarts: in a row without a new checkpoint, at most. The caller holds the run's lock."""

    def __init__(
        self, fleet: Fleet, folder: Path, logs: Path, *, timeout: float, restarts: int, lock: RunLock | None = None
    ) -> None:
        self.fleet, self.folder, self.logs = fleet, folder, logs
        self.timeout, self.restarts, self.lock = timeout, restarts, lock
        self._history = History(folder)
        self._vain = 0
        self._before = newest_checkpoint(folder)
        self._manner: tuple[str, int] | None = None
        self._stopping = False

    def run(self, changed: str = "") -> int:
        """See the run to its end; returns and raises what ``run_ranks`` does, for the last attempt. changed:
        since the start before, in words."""
        ended = None
        with catching_signals() as signals:
            while True:
                waited = None if ended is None else rounded(time.monotonic() - ended)
                try:
                    return self._attempt(changed, waited, signals)
                except RankFailure as failure:
                    error = failure
                except OSError as problem:  # a full disk, most often, which somebody may be clearing
                    error = RankFailure(f"Ranks cannot be started: {problem}")
                ended = time.monotonic()
                reason = self._enough(error)
                if reason is not None:
                    raise RankFailure(f"{reason}{error}", ranks=error.ranks, cause=error.cause) from None
                say(self._put_aside(error))
                found = self._mended(error, signals)
                if isinstance(found, int):
                    return found
                changed = found

    def _attempt(self, changed: str, waited: float | None, signals: deque[int]) -> int:
        """The exit status of an attempt; raises RankFailure or OSError where another may do better."""
        crew = self.fleet.crew()
        self._history.begin(crew.world, crew.hosts, crew.plan, changed=changed, wait=waited)

        def run(progress: Progress) -> int:
            try:
                with crew.beside():
                    return run_ranks(
                        crew.start,
                        crew.world,
                        self.logs,
                        guard=RunGuard(lock=self.lock, suspicion=crew.suspicion(), progress=progress),
                        timeout=self.timeout,
                        signals=signals,
                    )
            finally:
                self._stopping = progress.stopping

        progress = Progress(crew.world, stepped=lambda one: self._history.goes_on(one, say))
        return self._history.attempt(run, progress)

    def _enough(self, error: RankFailure) -> str | None:
        """Why the run is not started again, in a sentence or without a word; None if it is."""
        if not self._history.attempts:  # it never began
            return ""
        newest, step = newest_checkpoint(self.folder), self._history.last.step
        self._vain = 0 if newest > self._before else self._vain
        before, self._before = self._manner, newest
        self._manner = (error.words, step) if error.cause == "ended" else None
        gone = not os.path.isdir(self.folder) or (self.lock is not None and not os.path.isfile(self.lock.path))
        if self.restarts == 0 or self._stopping or gone:
            return ""
        if self._manner and self._manner == before:
            return "The run failed twice in the same way at the same step and is given up: "
        if self._vain >= self.restarts:
            many = f"{self._vain} restarts in a row" if self._vain > 1 else "A restart"
            return f"{many} saved no new checkpoint, and the run is given up (run.restarts): "
        return None

    def _mended(self, error: RankFailure, signals: deque[int]) -> str | int:
        """What was changed for the next attempt, once there can be one; an exit status if the run was asked
        to stop meanwhile."""
        while True:
            self._vain += 1
            wait, newest = backoff(self._vain), newest_checkpoint(self.folder)
            whence = f"from the checkpoint of step {newest}" if newest else "from the beginning"
            copies = "from a copy in memory, or " if has_copies(self.folder) else ""
            say(f"starting again in {wait:.0f} s {copies}{whence}: {self._vain} of {self.restarts} without a new "
                "checkpoint (Ctrl-C to leave it)")  # fmt: skip
            end = time.monotonic() + wait
            while time.monotonic() < end and not signals:
                time.sleep(0.05)
                if self.lock:
                    self.lock.check()
            try:
                changed = "" if signals else self.fleet.mend(error)
            except RankFailure as still:
                if self._vain >= self.restarts:
                    raise
                say(str(still))
                continue
            if signals:
                stop = Stop(signals.popleft())
                say(f"{signal.Signals(stop.signal).name}: not started again; the same command goes on {whence}")
                return stop.status
            if changed:
                say(changed)
            return changed

    def _put_aside(self, error: RankFailure) -> str:
        """Keep the logs and the verdict of an attempt that has failed, which the next would write over.
        Returns the error with the logs' new place."""
        kept = self._history.put_aside(self.logs)
        return str(error).replace(f"{self.logs}/rank-", f"{kept}/rank-")
