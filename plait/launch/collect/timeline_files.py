"""A host's part of a run's timeline on disk.

``Journal`` writes a rank's measured timeline: the spans of its last steps, and of a sample of older
steps. ``Sums`` writes the sums of all steps of a host's ranks: one file per block of steps, however
many ranks there are, and one file of its totals.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from plait.core.record.columns import copy_rows
from plait.core.record.records import Records
from plait.core.record.ring import Header, Name, RecordKind, RingGroup
from plait.core.record.timeline import write_spans

if TYPE_CHECKING:
    import numpy as np


import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from plait.core.record.rollup import BLOCK, RollupSource, joined, last_steps_of_rings, rollup_file, write_rollup

PART = 50
"""The smallest number of steps in a finished file of spans; a file with fewer steps is written
again when it has grown."""
MAX_WAITING_RECORDS = 1 << 18
"""Records that may wait to be written (18 MB); beyond that, the oldest are dropped."""
SAMPLED = "sampled"
"""Name of the folder for spans that are kept of older steps."""


class SlowStepDetector:
    """Detector of steps that took far longer than the fifty before: at least a quarter longer than
    their median, and longer by eight times their median absolute deviation."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=50)

    def __call__(self, seconds: float) -> bool:
        """Return True if a step of this many seconds is unusual; add the step to those that later
        ones are compared with."""
        found, recent = False, self._recent
        if len(recent) >= 10:
            middle = statistics.median(recent)
            spread = statistics.median(abs(one - middle) for one in recent)
            found = seconds > max(1.25 * middle, middle + 8 * spread)
        recent.append(seconds)
        return found


class Journal:
    """Writer, under ``folder``, of the spans of a rank's last ``keep_steps`` steps. Of older steps,
    one in ``sample`` (0: none) and those next to unusual steps are kept. ring: the header of the
    records' ring.

    lost: steps whose spans were dropped at least in part; a full disk costs the timeline only.
    """

    def __init__(self, folder: Path, ring: Header, *, keep_steps: int, sample: int = 0) -> None:
        self.folder, self.rank, self.ring, self.keep, self.sample = folder, ring.rank, ring, keep_steps, sample
        self.lost = 0
        self.last = -1
        self._unusual = SlowStepDetector()
        self._worth: set[int] = set()  # steps next to unusual steps
        self._spans: list[np.ndarray] = []  # of the unfinished part, or of parts that could not be written
        self._part: Path | None = None  # its file
        self._names: dict[int, Name] = {}
        self._groups: dict[int, RingGroup] = {}
        self._files: deque[Path] = deque(sorted(folder.glob(f"rank-{self.rank:05d}-step-*.parquet")))

    @property
    def waiting(self) -> int:
        """The number of records that no finished file holds yet."""
        return sum(map(len, self._spans))

    def add(self, records: Records) -> None:
        """Add the records of some whole steps, at least one, which follow the steps added
        before."""
        table = records.table
        self._names, self._groups = dict(records.names), dict(records.groups)
        self.last = max(self.last, int(table["step"].max()))
        for row in table[table["kind"] == RecordKind.STEP]:
            if self._unusual(float(row["ended"] - row["started"]) / 1e9):
                self._worth |= set(range(int(row["step"]) - 1, int(row["step"]) + 2))
        self._spans.append(table)

    def flush(self) -> OSError | None:
        """Write the waiting records to a file; return the error if writing failed, else None. A
        file with fewer than ``PART`` steps is written again when it has grown."""
        error = self._write_part()
        while not error and self._files and _last_step(self._files[0]) <= self.last - self.keep:
            error = self._thin_out(self._files.popleft())
        if error:
            self._let_go()
        return error

    def _write_part(self) -> OSError | None:
        import numpy as np

        if not self._spans:
            return None
        table = np.concatenate(self._spans)
        spans = Records(table, self._names, self._groups).spans(self.rank)
        path = self.folder / f"rank-{self.rank:05d}-step-{self.last + 1:08d}.parquet"
        if len(spans["step"]):
            if error := self._tried(path, lambda: write_spans(path, spans, self.ring.plan, self.ring.wall)):
                return error
            self._forget_part(path)
        if self.last - int(table["step"].min()) + 1 >= PART:
            self._spans, self._part = [], None
        else:
            self._spans = [table]
        return None

    def _forget_part(self, path: Path) -> None:
        """Remove the previous file of the part that grows: ``path`` holds the same spans and
        more."""
        if self._part is not None and self._part != path:
            self._part.unlink(missing_ok=True)
            self._files.remove(self._part)
        if path not in self._files:
            self._files.append(path)
        self._part = path

    def _let_go(self) -> None:
        """Drop the oldest unwritten records beyond ``MAX_WAITING_RECORDS``."""
        while len(self._spans) > 1 and self.waiting > MAX_WAITING_RECORDS:
            gone = self._spans.pop(0)
            self.lost += len(set(gone["step"].tolist()))
        if len(self._spans) == 1 and len(self._spans[0]) > MAX_WAITING_RECORDS:
            self.lost += len(set(self._spans.pop()["step"].tolist()))

    def _thin_out(self, path: Path) -> OSError | None:
        """Rewrite an old file of spans with its sample of steps only; return the error if writing
        failed."""
        error = None
        if self.sample:
            kept = self.folder / SAMPLED / path.name
            error = self._tried(kept, lambda: copy_rows(path, kept, "step", self._worth_keeping))
        with suppress(OSError):
            path.unlink(missing_ok=True)
        self._worth = {step for step in self._worth if step > _last_step(path)}
        return error

    def _worth_keeping(self, step: int) -> bool:
        return step % self.sample == 0 or step in self._worth

    def _tried(self, path: Path, write: Callable[[], None]) -> OSError | None:
        """Call ``write``; return its OSError, or None."""
        try:
            self.folder.mkdir(exist_ok=True)  # not its parents: a deleted run folder stays deleted
            write()
        except OSError as error:
            return error
        return None


def _last_step(part: Path) -> int:
    return int(part.stem.rpartition("-")[2]) - 1


STEPS = 100
"""Number of new steps after which a growing file of sums is written again."""
REWRITE_SECONDS = 60.0
"""Seconds after which a growing file of sums is written again, even with fewer new steps."""
MAX_WAITING_FILES = 4
"""Files of finished blocks that may wait for room on the disk; beyond that, the oldest are
dropped."""


@dataclass(eq=False, kw_only=True)
class SumsFile:
    """A file with the sums of a block of steps, which grows. rings: by rank, (token of its ring,
    its last step); a second ring of a rank, after a restart, gets another file. last: last step in
    ``rows``."""

    path: Path
    plan: str
    began: int
    rings: dict[int, tuple[int, int]] = field(default_factory=dict[int, tuple[int, int]])
    rows: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    last: int = -1
    written: int = -1
    """The last step that is written to the file."""
    at: float = field(default_factory=time.monotonic)
    """The time of the last write, seconds of the monotonic clock."""

    def due(self, last: bool) -> bool:
        """Return True if enough new steps wait to be written, or for ``REWRITE_SECONDS``. last:
        any number is enough."""
        new = self.last - self.written
        return new > 0 and (last or new >= STEPS or time.monotonic() - self.at >= REWRITE_SECONDS)

    def write(self) -> OSError | None:
        """Write the file; return the error if writing failed. The file is replaced as a whole: a
        reader gets the old or the new content."""
        self.rows = [joined(self.rows)]
        try:
            self.path.parents[2].mkdir(exist_ok=True)  # not its parents: a deleted run folder stays deleted
            write_rollup(self.path, self.rows[0], RollupSource(plan=self.plan, began=self.began, rings=self.rings))
        except OSError as error:
            return error
        self.written, self.at = self.last, time.monotonic()
        return None


class Sums:
    """Writer of the sums of all steps of a host's ranks (``ranks``). lost: number of steps whose
    sums were dropped."""

    def __init__(self, timeline: Path, ranks: range) -> None:
        self.timeline, self.ranks = timeline, ranks
        self.lost = 0
        self._new: dict[int, list[tuple[Header, Records]]] = {}  # by rank
        self._open: dict[tuple[int, str], SumsFile] = {}  # by block and plan
        self._over: list[SumsFile] = []  # finished files, not yet written
        self._under_way: dict[int, SumsFile] = {}  # by rank, the file that it adds to
        self._began = 0  # start of the newest file's ranks
        self._before: dict[tuple[int, int], int] | None = None

    def written(self, ring: Header) -> int:
        """Return the last step of this ring whose sums an earlier agent has written to files; -1 if
        there is none."""
        if self._before is None:
            self._before = last_steps_of_rings(self.timeline, self.ranks)
        return self._before.get((ring.rank, ring.token), -1)

    def add(self, ring: Header, records: Records) -> None:
        """Add some whole steps of a rank, which follow the steps added before. The summing is left
        to ``flush``: many steps at once take hardly longer than one."""
        self._new.setdefault(ring.rank, []).append((ring, records))

    def flush(self, *, last: bool = False, write: bool = True) -> OSError | None:
        """Sum the new records, and write files that are due; return the error if writing failed.
        last: write everything. write: False to only keep the sums for later."""
        for rank in list(self._new):
            for _, several in groupby(self._new.pop(rank), lambda one: (one[0].token, one[0].plan)):
                self._add_up([*several])
        going = list(self._under_way.values())
        for key in [key for key, part in self._open.items() if not any(part is one for one in going)]:
            self._over.append(self._open.pop(key))
        error = None
        while write and self._over and not error:
            if not (error := self._over[0].write() if self._over[0].due(last=True) else None):
                self._over.pop(0)
        while len(self._over) > MAX_WAITING_FILES:
            self.lost += _steps(self._over.pop(0))
        for part in self._open.values():
            if write and not error and part.due(last):
                error = part.write()
        return error

    def _add_up(self, several: Sequence[tuple[Header, Records]]) -> None:
        """Sum records of one ring and one plan into the files of their blocks."""
        import numpy as np

        ring, newest = several[-1]
        table = np.concatenate([records.table for _, records in several])
        blocks = table["step"] // BLOCK
        for block in sorted(set(blocks.tolist())):
            own = Records(table[blocks == block], newest.names, newest.groups).rolled_up(ring.rank)
            if not len(own["step"]):
                continue
            first, last = int(own["step"].min()), int(own["step"].max())
            part = self._part(ring, block, first)
            part.rows.append(own)
            part.rings[ring.rank] = ring.token, last
            part.last = max(part.last, last)
            self._under_way[ring.rank] = part

    def _part(self, ring: Header, block: int, first: int) -> SumsFile:
        """Return the growing file for a rank's block of steps. A restarted rank gets a new file: a
        file with several starts of a rank would not tell which one counts."""
        part = self._open.get((block, ring.plan))
        again = part is not None and part.rings.get(ring.rank, (ring.token,))[0] != ring.token
        if part is None or again:
            if part is not None:
                self._over.append(part)
            path = next(self._unused(rollup_file(self.timeline, self.ranks, first)))
            part = SumsFile(path=path, plan=ring.plan, began=self._began + again)
            self._open[block, ring.plan] = part
        part.began = self._began = max(part.began, self._began, ring.wall)
        return part

    def _unused(self, path: Path) -> Iterator[Path]:
        """Yield file names that are taken neither on the disk nor by a file to be written."""
        taken = {part.path for part in (*self._open.values(), *self._over)}
        number, found = 1, path
        while True:
            if found not in taken and not found.exists():
                yield found
            number, found = number + 1, path.with_stem(f"{path.stem}-{number + 1}")


def _steps(part: SumsFile) -> int:
    """Return the number of steps in a file's rows."""
    return len({step for rows in part.rows for step in rows["step"].tolist()})
