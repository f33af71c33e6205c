"""Ranks that do as a story tells, on a clock of its own, and the launcher's watch of them."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable
from pathlib import Path

from plait.core.runs.channel import Beat, Channel, Stop
from plait.core.runs.progress import Progress
from plait.launch.watch import RankProcess, RunGuard, Watch


class Clock:
    """In place of ``time``."""

    now = 1000.0
    held_up = 0.0
    """Seconds in which the launcher is stopped while it waits for what is said next."""

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Made:
    """A rank's process that does as it is told."""

    pid = None

    def __init__(self) -> None:
        self.returncode: int | None = None
        self.stopped = self.killed = False
        self.log = ""

    def poll(self) -> int | None:
        return self.returncode

    def kill(self) -> None:
        self.killed = True
        if self.returncode is None:
            self.returncode = -9

    def log_tail(self) -> str:
        return self.log


class Elsewhere:
    """Something that signals may come from."""

    def __init__(self) -> None:
        self.ours, self.theirs = socket.socketpair()
        self.held_up = 0.0

    def fileno(self) -> int:
        return self.ours.fileno()

    def take(self) -> int | None:
        if not (said := self.ours.recv(1)):
            raise EOFError
        return said[0] or None

    def look(self, held_up: float) -> None:
        self.held_up += held_up


Step = Callable[[], object] | None


class Story:
    """Ranks, and what happens to them: one step before each look of the watch."""

    def __init__(self, folder: Path, clock: Clock, world: int = 2) -> None:
        self.clock, self.steps = clock, deque[Step]()
        self.sources = [Elsewhere(), Elsewhere()]
        self.processes = [Made() for _ in range(world)]
        pairs = [Channel.pair() for _ in range(world)]
        self.ends = [Channel(theirs) for _, theirs in pairs]
        self.ranks = [RankProcess(at, self.processes[at], ours, heard=clock.now) for at, (ours, _) in enumerate(pairs)]
        self.signals = deque[int]()
        self.progress = Progress(world)
        guard, sources = RunGuard(lock=None, progress=self.progress), [self, *self.sources]
        self.watch = Watch(self.ranks, folder, self.signals, guard=guard, timeout=60, sources=sources)

    def fileno(self) -> int:
        return self.sources[0].theirs.fileno()

    def take(self) -> int | None:
        return None

    def look(self, held_up: float) -> None:
        assert self.steps, "the run goes on, and there is nothing more to tell"
        if step := self.steps.popleft():
            step()

    def run(self, *steps: Step) -> int:
        self.steps.extend([*steps, None])  # in which what was done last is seen
        return self.watch.until_ended()

    def trains(self, *at: int) -> None:
        """Each rank says its step."""
        for end, step in zip(self.ends, at, strict=True):
            end.send(Beat(f"step {step}", step))

    def ends_with(self, *codes: int | None) -> None:
        for process, code in zip(self.processes, codes, strict=True):
            process.returncode = code

    def ended(self, *codes: int | None) -> Step:
        return lambda: self.ends_with(*codes)

    def sent(self, *numbers: int) -> Step:
        """Signals to the launcher."""
        return lambda: self.signals.extend(numbers)

    def after(self, seconds: float) -> None:
        """A look at a time takes no more than ``NAP``."""
        self.clock.now += seconds

    def nap(self, seconds: int) -> list[Callable[[], object]]:
        """Looks that go by in time."""
        return [lambda: self.after(1.0)] * seconds

    def close(self) -> None:
        for end in [*self.ends, *(rank.channel for rank in self.ranks)]:
            end.close()
        for source in self.sources:
            source.ours.close()
            source.theirs.close()

    def asked(self) -> list[list[int]]:
        """What each rank was asked."""
        found: list[list[int]] = []
        for end in self.ends:
            found.append([])
            while (message := end.receive()) is not None:
                assert isinstance(message, Stop)
                found[-1].append(message.signal)
        return found
