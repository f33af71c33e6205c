"""The always-on recorder: a rank's work goes into its bounded ring, from which the host's agent
collects it. A rank that reports its steps reads the records back."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from plait.core.base.env import RankEnv
from plait.core.record.records import SPANS, Records
from plait.core.record.ring import UNSET, RecordKind
from plait.core.record.ring_writer import RingWriter, this_process
from plait.core.record.timeline import OpSpan
from plait.core.runs.evidence import ring_path
from plait.core.runs.progress import Missing
from plait.train.comm.log import Log
from plait.train.machine.device import RankDevice

if TYPE_CHECKING:
    import numpy as np


def open_recorder(folder: Path, rank: RankEnv, plan_hash: str, device: RankDevice, missing: Missing) -> Recorder:
    """Return the recorder of a rank of the run in ``folder``. If the disk is full, the run
    continues with a ring in this process's memory alone."""
    header = this_process(
        rank=rank.rank, world=rank.world_size, local_rank=rank.local_rank, attempt=rank.attempt, plan=plan_hash
    )  # fmt: skip
    try:
        return Recorder(device, RingWriter(ring_path(folder, rank.rank), header))
    except OSError as error:
        missing.failed(error, 0)
        return Recorder(device, RingWriter(None, header))


class Recorder(Log):
    """A rank's log, read step by step. A full ring overwrites its oldest records and never blocks.

    ring: None for one in this process's memory alone.
    """

    def __init__(self, device: RankDevice, ring: RingWriter | None = None) -> None:
        super().__init__(ring or RingWriter(None, this_process(rank=0, world=1)), device)
        self._since, self._left = 1, list[int]()
        self._began, self._spent = time.monotonic_ns(), time.thread_time_ns()

    def begin_step(self, step: int) -> None:
        """Begin ``step``, counted from 0: records that begin from now on belong to it."""
        self.step, self._began, self._spent = step, time.monotonic_ns(), time.thread_time_ns()
        self.ring.step(step, self._began)

    def current_step(self, *, later: bool = False) -> int:
        """Return the step of work that is handed over now. later: the next step. ``NOBODY`` while
        paused."""
        return self.step + later if self.step != UNSET else UNSET

    @contextmanager
    def paused(self) -> Generator[None]:
        """Context manager: records that begin inside belong to no step."""
        step, self.step = self.step, UNSET
        try:
            yield
        finally:
            self.step = step

    def forget(self) -> None:
        """Discard all records so far, including those of the next step; readers of the ring discard
        them too."""
        self.records()
        now = time.monotonic_ns()
        self._since = self.ring.begin(RecordKind.STEP, self.ring.name("forget"), UNSET, now, now, now) + 1
        self._left = []

    def close_step(self) -> int:
        """End the step and begin the next; return the number of the step's last record. On a CPU
        this record has the processor time of the calling thread since the step began."""
        self.resolve()
        now, spent = time.monotonic_ns(), time.thread_time_ns()
        had = spent - self._spent if self.host else 0
        last = self.ring.begin(RecordKind.STEP, self.ring.name("step"), self.step, self._began, self._began, now, had)
        self.step, self._began, self._spent = self.step + 1, now, spent
        return last

    def records(self) -> Records:
        """Close the step; return records of it and of earlier steps that have ended and were not
        read yet. Records of background threads that are still busy come with the next step."""
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
        return Records(table[over & (of <= step) & (of != UNSET)], self.ring.names, self.ring.groups)

    def take(self) -> list[OpSpan]:
        """Return the spans of ops in ``records``, in order of their start."""
        return self.spans(self.records())

    def spans(self, records: Records) -> list[OpSpan]:
        """Return the spans of ops in ``records``, in order of their start."""
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
