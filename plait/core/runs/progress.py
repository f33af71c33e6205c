"""How far an attempt at a run has come, by what its ranks say: when all of them trained, when the first step
was done, when the last sign of progress came. Times are the launcher's monotonic clock."""

from __future__ import annotations

import time
from collections.abc import Callable


class Progress:
    """Of ``world`` ranks that are being started now. stepped: called once, when all ranks have done a
    step."""

    def __init__(self, world: int, *, stepped: Callable[[Progress], object] | None = None) -> None:
        self.world, self._stepped = world, stepped
        self.began = time.monotonic()
        self.training: float | None = None
        """When all ranks were about to train."""
        self.first_step: float | None = None
        """When all of them had done a step."""
        self.last = self.began
        """When the last step was done, anywhere."""
        self.writing = 0
        """Step of the checkpoint that was being written when the last step began; 0 if none was."""
        self.stopping = False
        """Whether somebody has asked the ranks to stop."""
        self.when_asked: Callable[[str], object] = lambda by: None
        """Called when somebody does, with who it is."""
        self._first: dict[int, int] = {}
        self._now: dict[int, int] = {}
        self._died: float | None = None

    def heard(self, rank: int, step: int, now: float, writing: int = 0) -> None:
        """A rank has done ``step`` steps of the run; -1: it does not train yet. writing: as in ``Beat``."""
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

    def asked(self, by: str) -> None:
        """The ranks were asked to save and end. by: a signal's name, or other words."""
        self.stopping = True
        self.when_asked(by)

    def died(self, at: float) -> None:
        """A rank's process was gone at this moment at the latest, and was there a look before."""
        self._died = at

    @property
    def start(self) -> int:
        """The steps with which it began; -1 if it never trained."""
        return min(self._first.values(), default=-1)

    @property
    def step(self) -> int:
        """The steps that are done; those of an earlier attempt count. -1 if it never trained."""
        return max(self._now.values(), default=-1)

    @property
    def steps(self) -> int:
        """Steps that this attempt has done."""
        return self.step - self.start

    def unnoticed(self, now: float) -> float:
        """For how long, at most, a failure that is known ``now`` went unnoticed: since the process was last
        seen, where one died, else since the last sign of progress."""
        return now - (self.last if self._died is None else max(self._died, self.began))
