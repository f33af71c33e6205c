"""Supervision of a run: failed ranks are restarted from the newest checkpoint, on other hosts or
fewer; every attempt is recorded.

A failure leads to a restart if another attempt may succeed: a rank was killed, died or hangs, a
host is cut off, ranks cannot be started because the disk is full. A mistake in the job (exit status
2), non-finite numbers, a lost folder and a request to stop end the run; so does a rank that fails
by itself twice in the same way at the same step. The launcher waits between attempts, longer each
time that no new checkpoint was saved.
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
from plait.launch.hang import HangDetection
from plait.launch.local.local import RankStarter, run_ranks
from plait.launch.watch import RunGuard, catching_signals, say

FIRST_WAIT, LONGEST_WAIT = 1.0, 60.0
"""Seconds before the first restart, and at most; each restart without a new checkpoint doubles the
wait."""


@dataclass(frozen=True, kw_only=True)
class AttemptRanks:
    """The ranks of an attempt. start: starts one of ``world`` ranks. hosts: by node rank.
    suspicion: makes the attempt's hang detection. plan: the plan's hash. concurrent: makes a
    context that is open while the ranks run."""

    start: RankStarter
    world: int
    hosts: tuple[str, ...]
    suspicion: Callable[[], HangDetection | None]
    plan: str = ""
    concurrent: Callable[[], AbstractContextManager[None]] = nullcontext


class Fleet(Protocol):
    """The hosts that ranks can be started on."""

    def crew(self) -> AttemptRanks:
        """Return the ranks of the next attempt."""
        ...

    def mend(self, failure: RankFailure) -> str:
        """Exclude failed hosts from the next attempt; return a description of the change, empty if
        nothing changes. Raises RankFailure while the job cannot run on the remaining hosts."""
        ...


@dataclass(frozen=True)
class SingleHost:
    """A fleet of this machine alone, with the same ranks in each attempt. made: returns them
    anew."""

    made: Callable[[], AttemptRanks]

    def crew(self) -> AttemptRanks:
        """Return the ranks of the next attempt, made anew."""
        return self.made()

    def mend(self, failure: RankFailure) -> str:
        """Return an empty string: there is no other host."""
        return ""


def backoff(vain: int) -> float:
    """Return the seconds to wait before the next attempt. vain: consecutive restarts without a new
    checkpoint.

    >>> [backoff(vain) for vain in (0, 1, 2, 3, 9)]
    [1.0, 1.0, 2.0, 4.0, 60.0]
    """
    return min(LONGEST_WAIT, FIRST_WAIT * 2.0 ** max(0, vain - 1))


class Supervisor:
    """The supervisor of one run. restarts: the most consecutive restarts without a new checkpoint.
    The caller holds the run's lock."""

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
        """Supervise the run until it ends; return and raise as ``run_ranks`` does, for the last
        attempt. changed: a description of what changed since the previous start."""
        ended = None
        with catching_signals() as signals:
            while True:
                waited = None if ended is None else rounded(time.monotonic() - ended)
                try:
                    return self._attempt(changed, waited, signals)
                except RankFailure as failure:
                    error = failure
                except OSError as problem:  # usually a full disk, which an operator may be clearing
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
        """Run one attempt; return its exit status. Raises RankFailure or OSError if another attempt
        may succeed."""
        crew = self.fleet.crew()
        self._history.begin(crew.world, crew.hosts, crew.plan, changed=changed, wait=waited)

        def run(progress: Progress) -> int:
            try:
                with crew.concurrent():
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

        progress = Progress(crew.world, stepped=lambda one: self._history.record_restart(one, say))
        return self._history.attempt(run, progress)

    def _enough(self, error: RankFailure) -> str | None:
        """Return None if the run is to be restarted after ``error``; otherwise why it is not, as
        the beginning of a message, empty if the error says enough."""
        if not self._history.attempts:  # the run has never begun
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
        """Wait, and exclude failed hosts, until another attempt can start; return a description of
        the change, or the exit status if the run was asked to stop meanwhile."""
        while True:
            self._vain += 1
            wait, newest = backoff(self._vain), newest_checkpoint(self.folder)
            whence = f"from the checkpoint of step {newest}" if newest else "from the beginning"
            copies = "from a copy in memory, or " if has_copies(self.folder) else ""
            say(f"starting again in {wait:.0f} s {copies}{whence}: {self._vain} of {self.restarts} without a new "
                "checkpoint (Ctrl-C to give up)")  # fmt: skip
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
        """Move away the logs and verdict of a failed attempt, which the next attempt would
        overwrite. Returns the error with the logs' new path."""
        kept = self._history.put_aside(self.logs)
        return str(error).replace(f"{self.logs}/rank-", f"{kept}/rank-")
