"""Watching ranks until the last has ended: failures, silent ranks, and requests to stop.

The first rank that fails ends its peers and is named. SIGINT, SIGTERM and SIGHUP become a message
to every rank over its connection, so that the rank saves and ends whatever it is doing; a second
Ctrl-C kills. Before training begins there is nothing to save, and ranks that do not end soon are
killed. A rank that is silent for the run's timeout ends the run; so does a collective that does not
end, once its cause is known (``plait.launch.hang``).
"""

from __future__ import annotations

import math
import selectors
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from plait.core.base.env import terminal_width
from plait.core.base.errors import DO_NOT_RETRY, ERROR_MARK, PlaitError, RankFailure, remote_error
from plait.core.base.process import how_it_ended
from plait.core.base.text import paragraph
from plait.core.runs.channel import ENDINGS, Beat, Channel, Error, Stop, StoreCall
from plait.core.runs.evidence import Verdict
from plait.core.runs.lock import RunLock
from plait.core.runs.progress import Progress
from plait.launch.hang import HangDetection, LocalRank, RankStatus
from plait.launch.run_store import RunStore

LOOK = 0.05
"""Seconds between two checks of all ranks."""
GRACE = 5.0
"""Seconds that ranks without anything to save get to end by themselves after a request to stop."""
STOPPED_SECONDS = 1.0
"""Seconds: after a longer pause between two checks, the launcher itself was stopped, and the pause
does not count as a rank's silence."""


class Process(Protocol):
    """A rank's process, on any machine."""

    @property
    def pid(self) -> int | None:
        """The process's pid on this machine; None if it runs elsewhere."""
        ...

    @property
    def returncode(self) -> int | None:
        """The process's exit status, -N if signal N killed it; None while it runs."""
        ...

    def poll(self) -> int | None:
        """Update and return ``returncode``."""
        ...

    def kill(self) -> None:
        """Kill the process and its children, if they still run."""
        ...

    @property
    def stopped(self) -> bool:
        """True if the process is stopped, by a signal or a debugger."""
        ...

    def log_tail(self) -> str:
        """Return the end of the process's log."""
        ...


class EventSource(Protocol):
    """A source of events besides ranks."""

    def fileno(self) -> int:
        """Return the file descriptor to poll."""
        ...

    def take(self) -> int | None:
        """Process new messages; return the number of a signal that was received elsewhere, or None.
        Raises EOFError when no more messages will come."""
        ...

    def look(self, held_up: float) -> None:
        """Check the source's silence; called repeatedly. held_up: seconds in which this process was
        stopped."""
        ...


@dataclass
class RankProcess:
    """A rank's process, and its last messages. number: of the rank. heard: when the last message
    came, in seconds of the monotonic clock. where: the machine, if it is not this one. beat: the
    last state that the rank sent. error, kind: the error that ends the rank, and its class. warned:
    True if its silence was reported."""

    number: int
    process: Process
    channel: Channel
    heard: float
    where: str = ""
    beat: Beat = field(default_factory=lambda: Beat("starting", patient=True))
    error: str = ""
    kind: str = ""
    warned: bool = False

    @property
    def name(self) -> str:
        """The rank's name in messages."""
        return f"rank {self.number}" + (f" on {self.where}" if self.where else "")

    @property
    def stopped(self) -> bool:
        """True if the rank's process is stopped."""
        return self.process.stopped

    def silent(self, now: float) -> str:
        """Return a phrase on how long the rank has been silent. now: seconds of the monotonic
        clock."""
        why = "; its process is stopped (SIGSTOP, or a debugger)" if self.stopped else ""
        return f"{self.name} has not answered for {now - self.heard:.0f} s ({self.beat.doing}{why})"


@contextmanager
def catching_signals() -> Generator[deque[int]]:
    """Catch SIGINT, SIGTERM and SIGHUP inside the block; yield the queue that collects them.
    Outside the main thread, the caller has to handle signals."""
    caught: deque[int] = deque()
    if threading.current_thread() is not threading.main_thread():
        yield caught
        return

    def handle(number: int, _frame: FrameType | None) -> None:
        caught.append(number)

    # A signal that is already ignored stays ignored: nohup relies on that.
    before = {number: signal.signal(number, handle) for number in ENDINGS if _heeded(number)}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _heeded(number: int) -> bool:
    return signal.getsignal(number) != signal.SIG_IGN


def say(text: str) -> None:
    """Print a message for the user on stderr; the terminal may be closed."""
    with suppress(OSError):
        columns = terminal_width(sys.stderr)
        print(paragraph(f"plait: {text}", columns and min(columns, 100)), file=sys.stderr, flush=True)


@dataclass(frozen=True)
class RunGuard:
    """The checks of a run besides its ranks' processes. lock: its loss ends the run. suspicion: the
    hang detection. progress: records how far ranks are. stop_requested: returns True if the ranks
    were asked to save and end by other means than a signal."""

    lock: RunLock | None = None
    suspicion: HangDetection | None = None
    progress: Progress | None = None
    stop_requested: Callable[[], bool] = lambda: False


NO_CHECKS = RunGuard()


class Watch:
    """The watcher of a run's ranks. signals: the received signals, oldest first. sources: other
    sources of events. timeout: seconds that a rank may be silent."""

    def __init__(
        self, ranks: Sequence[RankProcess], logs: Path, signals: deque[int], *, timeout: float,
        guard: RunGuard = NO_CHECKS, sources: Sequence[EventSource] = (),
    ) -> None:  # fmt: skip
        self.progress = guard.progress or Progress(len(ranks))
        self.ranks, self.logs, self.signals, self.timeout, self.lock = ranks, logs, signals, timeout, guard.lock
        self.suspicion, self.sources, self.stop_requested = guard.suspicion, sources, guard.stop_requested
        self._ended: dict[int, float] = {}
        self.store = RunStore()
        self.stop: Stop | None = None
        self._kill_at = math.inf
        self._signalled_from: set[int] = set()
        self._looked = time.monotonic()
        self._selector = selectors.DefaultSelector()
        for rank in ranks:
            self._selector.register(rank.channel, selectors.EVENT_READ, rank)
        for source in sources:
            self._selector.register(source, selectors.EVENT_READ, source)

    def until_ended(self) -> int:
        """Watch until all ranks have ended; return the run's exit status. Raises the error that
        ended the run otherwise."""
        with self._selector:
            while None in (codes := [rank.process.poll() for rank in self.ranks]):
                self._listen()
                for rank, code in zip(self.ranks, codes, strict=True):
                    if code is not None:
                        self._ended.setdefault(rank.number, time.monotonic())
                while self.signals:
                    self._signalled(self.signals.popleft())
                if self.stop is None and self.stop_requested():
                    self._ask(Stop(signal.SIGINT), "stop requested in the run's folder: ")
                if time.monotonic() > self._kill_at:
                    for rank in self.ranks:
                        rank.process.kill()
                    return self._status
                if any(code not in (None, 0, self._status) for code in codes) and self._matters:
                    raise self._failure()
                self._judge_hang()
                self._judge_silence()
                if self.lock:
                    self.lock.check()
        for rank in self.ranks:  # the ranks' last messages, if this process was stopped until they had ended
            with suppress(EOFError):
                self._hear(rank, time.monotonic())
        if any(code not in (0, self._status) for code in codes) and self._matters:
            raise self._failure()
        if any(codes):
            return self._status
        if self.suspicion:
            self.suspicion.clear()
        return 0

    @property
    def _status(self) -> int:
        return self.stop.status if self.stop else 0

    @property
    def _matters(self) -> bool:
        """True if a rank's failure has to be reported: not after a request to stop before training
        began."""
        return self.stop is None or all(rank.beat.step >= 0 for rank in self.ranks)

    def _listen(self) -> None:
        """Receive messages of ranks and sources, for up to ``LOOK`` seconds."""
        ready = self._selector.select(LOOK)
        now = time.monotonic()
        held_up = now - self._looked if now - self._looked > STOPPED_SECONDS else 0.0
        self._looked = now
        for rank in self.ranks:
            rank.heard += held_up
            rank.channel.flush()
        for source in self.sources:
            source.look(held_up)
        for key, _ in ready:
            try:
                if isinstance(key.data, RankProcess):
                    self._hear(key.data, now)
                elif (number := key.data.take()) is not None and self._is_news(key.data):
                    self.signals.append(number)
            except EOFError:  # the process has ended, or soon will
                self._selector.unregister(key.fileobj)

    def _is_news(self, source: EventSource) -> bool:
        """Return True if a signal that a source reports is a new request to stop: one Ctrl-C may
        reach every node."""
        first = self.stop is None and not self._signalled_from
        again = id(source) in self._signalled_from
        self._signalled_from.add(id(source))
        return first or again

    def _hear(self, rank: RankProcess, now: float) -> None:
        while (message := rank.channel.receive()) is not None:
            if isinstance(message, StoreCall):  # a thread of torch's may call the store though the rank hangs
                self.store.take(rank.number, message, partial(rank.channel.send, keep=True))
                continue
            rank.heard, rank.warned = now, False
            if isinstance(message, Beat):
                rank.beat = message
                self.progress.heard(rank.number, message.step, now, message.writing)
            elif isinstance(message, Error):
                rank.error, rank.kind = message.text, message.kind
            elif isinstance(message, Stop):
                self._ask(message, f"{rank.name} got ")

    def _signalled(self, number: int) -> None:
        if self.stop is None:
            self._ask(Stop(number), "")
        elif number == signal.SIGINT:
            say("ending all ranks at once; what was not saved is lost")
            self._kill_at = -math.inf

    def _ask(self, stop: Stop, who: str) -> None:
        """Ask every rank to save and end. who: who was signalled, for the message; empty for this
        machine."""
        if self.stop is not None:
            return
        self.stop = stop
        for rank in self.ranks:
            rank.channel.send(stop)
        self.progress.stop_requested(signal.Signals(stop.signal).name)
        if self._matters:
            then = "stopping after this step; the run is saved first"
        else:
            then, self._kill_at = "ending; nothing is to be saved yet", time.monotonic() + GRACE
        say(f"{who}{signal.Signals(stop.signal).name}: {then} (Ctrl-C to end it at once)")

    def _judge_hang(self) -> None:
        """End the run if ranks have waited too long for their peers, and the culprit is known."""
        if self.suspicion is None:
            return
        limit, now = self.suspicion.deadline, time.monotonic()
        silent = any(
            now - rank.heard > limit and (not rank.beat.patient or rank.stopped) and rank.process.poll() is None
            for rank in self.ranks
        )
        if verdict := self.suspicion.look(self._rank_statuses, self._nearby, silent=silent):
            raise self._hangs(verdict)

    def _hangs(self, verdict: Verdict, cause: str = "") -> RankFailure:
        """Return the error for a verdict on a hang. cause: used in place of the verdict's."""
        log = f" Its log: {self._log(self.ranks[verdict.ranks[0]])}" if verdict.ranks else ""
        why = f"{verdict.why} All ranks were ended.{log}"
        return RankFailure(why, ranks=verdict.ranks, cause=cause or verdict.cause)

    def _rank_statuses(self) -> dict[int, RankStatus]:
        """Return the launcher's records of all ranks."""
        return {rank.number: self._rank_status(rank) for rank in self.ranks}

    def _rank_status(self, rank: RankProcess) -> RankStatus:
        code, beat = rank.process.poll(), rank.beat
        told: dict[str, Any] = {"pid": rank.process.pid, **asdict(beat)}
        if code is None:
            return RankStatus(state="stopped" if rank.stopped else "runs", **told)
        at = self._ended.setdefault(rank.number, time.monotonic())
        return RankStatus(state="ended", status=code, ended_at=at, error=self._last_words(rank) if code else "", **told)

    def _nearby(self) -> dict[int, LocalRank]:
        """Return the processes of ranks on this machine."""
        processes = {rank.number: rank.process for rank in self.ranks}
        return {number: LocalRank(one.pid, one.log_tail) for number, one in processes.items() if one.pid is not None}

    def _judge_silence(self) -> None:
        """End the run if a rank that should send messages has been silent for too long. Before
        training begins, that applies only to ranks that wait for no peer at the store, and only if
        none of these is active."""
        now = time.monotonic()
        alive = [rank for rank in self.ranks if rank.process.poll() is None]
        quiet = [rank for rank in alive if now - rank.heard > self.timeout / 2]
        wrong = [rank for rank in quiet if not rank.beat.patient or rank.stopped]
        if not wrong and len(quiet) == len(alive) and self.progress.step < 0:
            waiting = self.store.waiting
            wrong = [rank for rank in quiet if rank.number not in waiting]
            late = all(now - rank.heard > self.timeout for rank in wrong)
        else:
            late = any(now - rank.heard > self.timeout for rank in wrong)
        if not wrong:
            return
        first = self._culprit(quiet)  # the culprit may be a patient rank that its peers wait for
        if late:
            verdict = self.suspicion.explain(self._rank_statuses(), self._nearby()) if self.suspicion else None
            if verdict and verdict.certain:
                raise self._hangs(verdict)
            if verdict and verdict.cause == "none" and verdict.ranks:  # no op may take this long
                why = f"{verdict.why} They have waited for {self.timeout:g} s (run.timeout)."
                raise self._hangs(replace(verdict, why=why), "silent")
            more = f" {verdict.why}" if verdict and verdict.cause == "unknown" else ""
            problem = f"{first.silent(now)}; the other ranks were ended.{more} Its log: {self._log(first)}"
            raise RankFailure(problem, ranks=[first.number], cause="stopped" if first.stopped else "silent")
        if not first.warned:
            first.warned = True
            say(f"{first.silent(now)}; after {self.timeout:g} s the run is ended (run.timeout)")

    def _culprit(self, quiet: Sequence[RankProcess]) -> RankProcess:
        """Return the silent rank that its peers wait for: a stopped one, else one that does not
        wait at the store, else the one at the earliest step."""
        waiting = self.store.waiting
        return min(quiet, key=lambda one: (not one.stopped, one.number in waiting, one.beat.step, one.heard))

    def _failure(self) -> PlaitError:
        """Return the error of the rank that failed first: one killed from outside, else a stopped
        one that its peers waited for, else one with a message for the user; among several, the
        first to end."""
        time.sleep(0.5)  # peers fail moments later because of its absence; give the true cause time to be written
        # In the recorded order, not by a new poll: peers that needed the first rank may have died since.
        ended = [rank for rank in self.ranks if rank.process.poll()]
        ended.sort(key=lambda rank: self._ended.get(rank.number, math.inf))
        ended = [rank for rank in ended if rank.process.returncode != self._status]
        killed = [rank for rank in ended if (rank.process.returncode or 0) < 0]
        stopped = [rank for rank in self.ranks if rank.process.poll() is None and rank.stopped]
        if self.suspicion and not self.stop:  # the failed rank may be a victim
            verdict = self.suspicion.explain(self._rank_statuses(), {})
            if verdict.certain and verdict.cause != "crashed":
                return self._hangs(verdict)
        if stopped and not killed:
            return RankFailure(f"{stopped[0].silent(time.monotonic())}; the other ranks waited for it in vain and were "
                               f"ended. Its log: {self._log(stopped[0])}",
                               ranks=[stopped[0].number], cause="stopped")  # fmt: skip
        first = (killed or [rank for rank in ended if self._message(rank)] or ended)[0]
        code, message = first.process.returncode or 0, self._message(first)
        if code == RankFailure.exit_status and message:  # usually a victim, which cannot name the culprit
            return RankFailure(message, cause="gave up")
        if code > 0 and message:
            error = remote_error(first.kind, message)
            error.exit_status = RankFailure.exit_status if code == DO_NOT_RETRY else code
            return error
        if code < 0:
            self.progress.died(min(self._ended.get(rank.number, time.monotonic()) for rank in killed) - LOOK)
        how = how_it_ended(code)
        problem = f"{first.name} {how}; the other ranks were ended. Its log: {self._log(first)}"
        cause = "killed" if code < 0 else "ended"
        return RankFailure(problem, ranks=[first.number], cause=cause, words=self._last_words(first))

    def _message(self, rank: RankProcess) -> str:
        with suppress(EOFError):
            self._hear(rank, time.monotonic())
        if rank.error:
            return rank.error
        _, mark, message = rank.process.log_tail().rpartition(ERROR_MARK)
        return message.strip() if mark else ""

    def _last_words(self, rank: RankProcess) -> str:
        """Return the error message that a rank sent, or else the last line of its log."""
        lines = rank.process.log_tail().strip().splitlines()
        return self._message(rank) or (lines[-1] if lines else "")

    def _log(self, rank: RankProcess) -> Path:
        return self.logs / f"rank-{rank.number}.log"


def watched(
    ranks: Sequence[RankProcess], logs: Path, *, timeout: float, guard: RunGuard = NO_CHECKS,
    sources: Sequence[EventSource] = (), signals: deque[int] | None = None,
) -> int:  # fmt: skip
    """Watch running ranks until they end; return and raise as ``local.run_ranks`` does. signals:
    the queue of signals that the caller catches."""
    with ExitStack() as held:
        caught = held.enter_context(catching_signals()) if signals is None else signals
        return Watch(ranks, logs, caught, timeout=timeout, guard=guard, sources=sources).until_ended()
