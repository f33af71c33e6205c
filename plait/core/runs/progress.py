"""The progress of an attempt at a run, by its ranks' messages: when all ranks trained, when the
first step was complete, when the last progress was made. Times are seconds of the launcher's
monotonic clock."""

from __future__ import annotations

import time
from collections.abc import Callable


class Progress:
    """The progress of ``world`` ranks that are starting now. stepped: called once, when all ranks
    have completed a step."""

    def __init__(self, world: int, *, stepped: Callable[[Progress], object] | None = None) -> None:
        self.world, self._stepped = world, stepped
        self.began = time.monotonic()
        self.training: float | None = None
        """The time when all ranks were about to train."""
        self.first_step: float | None = None
        """The time when all ranks had completed a step."""
        self.last = self.began
        """The time when any rank last completed a step."""
        self.writing = 0
        """The step of the checkpoint that was being written when the last step began; 0 if none."""
        self.stopping = False
        """True if the ranks were asked to stop."""
        self.on_stop_request: Callable[[str], object] = lambda by: None
        """The callback for a request to stop; its argument is the source of the request."""
        self._first: dict[int, int] = {}
        self._now: dict[int, int] = {}
        self._died: float | None = None

    def heard(self, rank: int, step: int, now: float, writing: int = 0) -> None:
        """Record that a rank has completed ``step`` steps of the run; -1: it does not train yet.
        writing: as in ``Beat``."""
        if step >= self.step >= 0:
            self.writing = writing
        if step <= self._now.get(rank, -1):
            return
        self._first.setdefault(rank, step)
        self._now[rank] = step
        self.last = now
        if self.training is None and len(self._first) == self.world:
            self.training = now
        if self.training is not None and self.first_step is None and min(self._now.values()) > self.start:
            self.first_step = now
            if self._stepped:
                self._stepped(self)

    def stop_requested(self, by: str) -> None:
        """Record that the ranks were asked to save and end. by: a signal's name, or a
        description."""
        self.stopping = True
        self.on_stop_request(by)

    def died(self, at: float) -> None:
        """Record that a rank's process was gone at time ``at`` but present at the previous
        check."""
        self._died = at

    @property
    def start(self) -> int:
        """The completed steps at the start of the attempt; -1 if it never trained."""
        return min(self._first.values(), default=-1)

    @property
    def step(self) -> int:
        """The completed steps, including earlier attempts'; -1 if it never trained."""
        return max(self._now.values(), default=-1)

    @property
    def steps(self) -> int:
        """The completed steps of this attempt."""
        return self.step - self.start

    def unnoticed(self, now: float) -> float:
        """Return the most seconds for which a failure that is detected at ``now`` went unnoticed:
        since the process was last observed if one died, else since the last progress."""
        return now - (self.last if self._died is None else max(self._died, self.began))


class Missing:
    """A count of steps for which the file named ``what`` (such as ``metrics.jsonl``), was not
    written. warn: prints a line for the user."""

    def __init__(self, what: str, warn: Callable[[str], None] = lambda _: None) -> None:
        self.what, self.warn = what, warn
        self.steps = 0
        self._failing = False

    def failed(self, error: OSError, steps: int = 1) -> None:
        """Record that ``steps`` steps of the file could not be written."""
        self.steps += steps
        if not self._failing:
            self.warn(f"warning: {self.what} cannot be written ({error.strerror or error}); training goes on without")
        self._failing = True

    def worked(self) -> None:
        """Record that the file was written again, after which a later failure is reported anew."""
        if self._failing:
            self.warn(f"{self.what} is written again; missing: {self}")
        self._failing = False

    def __str__(self) -> str:
        return f"{self.what} of {self.steps} step{'' if self.steps == 1 else 's'}"
