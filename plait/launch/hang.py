"""The launcher's part in finding out why a run hangs: noticing, asking, collecting, keeping."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from plait.core.base.process import main_thread_seconds
from plait.core.runs.evidence import Evidence, Verdict, write_hang
from plait.core.runs.parts import ask, asked, forget_hang, read_parts
from plait.launch.gather import BUSY, Seen, by_stack, deaf, gather, kernel_says, print_stacks, printed_stack

ANSWERS = 3.0
"""Seconds in which ranks answer: longer than a rank's watchdog needs to notice, and to try the others."""
PRINTED = 1.0
"""Seconds in which a stack is printed, at most."""
AGAIN = 2.0
"""Seconds until another look where the first has named nobody."""

Localise = Callable[[Sequence[Evidence]], Verdict]


@dataclass(frozen=True)
class Nearby:
    """A rank's process on this machine, and the way to its log."""

    pid: int
    log: Callable[[], str]


class Suspicion:
    """Of one run. deadline: seconds that nobody is suspected. localise: makes a verdict of all evidence.

    ``look`` is called again and again; it takes no time until there is something to suspect.
    """

    def __init__(self, folder: Path, world: int, *, deadline: float, localise: Localise) -> None:
        self.folder, self.world, self.deadline, self.localise = folder, world, deadline, localise
        self._since: float | None = None
        self._next = 0.0
        forget_hang(folder)

    def look(self, seen: Callable[[], Mapping[int, Seen]], processes: Callable[[], Mapping[int, Nearby]], *,
             silent: bool) -> Verdict | None:  # fmt: skip
        """A verdict that names a cause; None as long as there is none. silent: whether a rank has said
        nothing for the deadline."""
        now = time.monotonic()
        if now < self._next:
            return None
        self._next = now + 0.5
        if self._since is None:
            if not silent and not asked(self.folder):
                return None
            self._since = now
            with suppress(OSError):
                ask(self.folder)
        if now - self._since < ANSWERS and not self._complete(seen()):
            return None
        verdict = self.explain(seen(), processes())
        if verdict.certain:
            return verdict
        self._next = now + AGAIN
        if verdict.cause == "none":  # it has gone on
            self.clear()
        return None

    def clear(self) -> None:
        """The run has gone on, or ended well: nobody was at fault, whatever was said meanwhile."""
        forget_hang(self.folder)
        self._since = None

    def explain(self, seen: Mapping[int, Seen], processes: Mapping[int, Nearby]) -> Verdict:
        """What can be said now; kept in the run's folder if it names somebody."""
        gathered = gather(self.folder, seen, world=self.world)
        evidence = self._stacks(gathered.evidence, seen, processes)
        verdict = self.localise(evidence)
        if verdict.cause != "none":
            with suppress(OSError):  # of a full disk people learn otherwise
                write_hang(self.folder, verdict, evidence)
        return verdict

    def _complete(self, seen: Mapping[int, Seen]) -> bool:
        """Whether all who can have answered."""
        parts = read_parts(self.folder)
        running = [rank for rank, one in seen.items() if one.state == "runs"]
        return all(rank in parts and parts[rank].complete for rank in running)

    @staticmethod
    def _stacks(evidence: Sequence[Evidence], seen: Mapping[int, Seen], processes: Mapping[int, Nearby]) -> \
            list[Evidence]:  # fmt: skip
        """Stacks of those that run on this machine and have not answered, and whether they use its
        processor; those that the kernel keeps from running are stopped."""
        mute = {one.rank for one in evidence if (one.state, one.thread) == ("runs", "silent")} & processes.keys()
        before: dict[int, int] = {}
        inside = {one.rank: main_thread_seconds(processes[one.rank].pid) for one in evidence
                  if one.rank in mute and one.computes}  # fmt: skip
        began = time.monotonic()
        for rank in mute:
            size = len(processes[rank].log())
            if print_stacks(processes[rank].pid):
                before[rank] = size
        stacks: dict[int, tuple[str, ...]] = {}
        end = time.monotonic() + PRINTED
        while (inside or before.keys() - stacks.keys()) and time.monotonic() < end:
            time.sleep(0.05)
            for rank in before.keys() - stacks.keys():
                if stack := printed_stack(processes[rank].log()[before[rank] :]):
                    stacks[rank] = stack
        stopped = {rank for rank in before.keys() - stacks.keys() if deaf(processes[rank].pid)}
        for rank in mute - stacks.keys():
            if says := kernel_says(processes[rank].pid):
                stacks[rank] = (says,)
        found = [by_stack(one, stacks[one.rank]) if one.rank in stacks else one for one in evidence]
        found = [replace(one, state="stopped") if one.rank in stopped else one for one in found]
        least = BUSY * (time.monotonic() - began)
        idle = {rank for rank, at in inside.items() if main_thread_seconds(processes[rank].pid) - at <= least}
        return [replace(one, computes=False) if one.rank in idle else one for one in found]
