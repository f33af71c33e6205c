"""The always-on recorder: everything a rank does goes into its ring, bounded, from where the host's agent
collects it; a rank that tells people of its steps reads them back."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from plait.core.base.env import RankEnv
from plait.core.record.records import SPANS, Records
from plait.core.record.ring import NOBODY, RecordKind
from plait.core.record.ring_writer import RingWriter, this_process
from plait.core.record.timeline import OpSpan
from plait.core.runs.missing import Missing
from plait.core.runs.ring_calls import ring_path
from plait.train.comm.log import Log
from plait.train.machine.device import RankDevice

if TYPE_CHECKING:
    import numpy as np


def open_recorder(folder: Path, rank: RankEnv, plan_hash: str, device: RankDevice, missing: Missing) -> Recorder:
    """The recorder of a rank of the run in ``folder``. A disk that is full costs the ring, not the run: it is
    then this process's alone."""
    header = this_process(
        rank=rank.rank, world=rank.world_size, local_rank=rank.local_rank, attempt=rank.attempt, plan=plan_hash
    )  # fmt: skip
    try:
        return Recorder(device, RingWriter(ring_path(folder, rank.rank), header))
    except OSError as error:
        missing.failed(error, 0)
        return Recorder(device, RingWriter(None, header))


class Recorder(Log):
    """A rank's log, read step by step; a ring that is full overwrites its oldest, and never blocks.

    ring: in this process's memory alone, if not given.
    """

    def __init__(self, device: RankDevice, ring: RingWriter | None = None) -> None:
        super().__init__(ring or RingWriter(None, this_process(rank=0, world=1)), device)
        self._since, self._left = 1, list[int]()
        self._began, self._spent = time.monotonic_ns(), time.thread_time_ns()

    def begins(self, step: int) -> None:
        """What is begun from now on belongs to ``step``, counted from 0."""
        self.step, self._began, self._spent = step, time.monotonic_ns(), time.thread_time_ns()
        self.ring.step(step, self._began)

    def ticket(self, *, later: bool = False) -> int:
        """Which step something belongs to that is handed over now. later: the next one. Nobody's while
        paused."""
        return self.step + later if self.step != NOBODY else NOBODY

    @contextmanager
    def paused(self) -> Generator[None]:
        """What starts meanwhile belongs to no step."""
        step, self.step = self.step, NOBODY
        try:
            yield
        finally:
            self.step = step

    def forget(self) -> None:
        """Everything so far, also what belongs to the next step; whoever reads the ring does too."""
        self.records()
        now = time.monotonic_ns()
        self._since = self.ring.begin(RecordKind.STEP, self.ring.name("forget"), NOBODY, now, now, now) + 1
        self._left = []

    def close_step(self) -> int:
        """The step ends here, and the next one follows; the number of its last record. Where the host
        computes, that says how much of a processor the calling thread had since the step began."""
        self.resolve()
        now, spent = time.monotonic_ns(), time.thread_time_ns()
        had = spent - self._spent if self.host else 0
        last = self.ring.begin(RecordKind.STEP, self.ring.name("step"), self.step, self._began, self._began, now, had)
        self.step, self._began, self._spent = self.step + 1, now, spent
        return last

    def records(self) -> Records:
        """``close_step``, and what belongs to that step or those before, and has not been read. What a thread
        of its own is still busy with comes with the step after."""
        import numpy as np

        step, last = self.step, self.close_step()
        oldest = last - self.ring.header.capacity
        numbers = np.arange(max(self._since, oldest + 1), last + 1)
        if left := [number for number in self._left if number > oldest]:
            numbers = np.concatenate([np.array(left, np.int64), numbers])
        table = self.ring.rows(numbers)
        of, over = table["step"], table["ended"] != 0
        later = (of > step) | ((of >= step - 1) & ~over)
        self._since, self._left = last + 1, table["number"][later].tolist()
        return Records(table[over & (of <= step) & (of != NOBODY)], self.ring.names, self.ring.groups)

    def take(self) -> list[OpSpan]:
        """The spans of ops in ``records``, in order of their start."""
        return self.spans(self.records())

    def spans(self, records: Records) -> list[OpSpan]:
        """The spans of ops, in order of their start."""
        table = records.timed
        sent = records.sent(table)
        spans = [
            OpSpan(self.ops[name], SPANS[kind], start / 1e9, end / 1e9, size)
            for kind, name, start, end, size in _rows(table, sent)
            if name in self.ops and kind in SPANS
        ]
        return sorted(spans, key=lambda span: span.start)


def _rows(table: np.ndarray, sent: np.ndarray) -> zip[tuple[RecordKind, int, int, int, int]]:
    columns = (table[name].tolist() for name in ("kind", "name", "started", "ended"))
    return zip(*columns, sent.tolist(), strict=True)
