"""A rank's measured timeline on disk: spans of its last steps and of a sample of the others."""

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

PART = 50
"""Steps in one file of spans, at least."""
MOST = 1 << 18
"""Records that may wait to be written: 18 MB. What comes then is left out."""
SAMPLED = "sampled"
"""The folder of the spans that are kept of older steps."""


class Unusual:
    """Tells steps that took far longer than those before them: by a quarter, and by eight times the median
    absolute deviation of the last fifty."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=50)

    def __call__(self, seconds: float) -> bool:
        """Whether this step is unusual; it counts among the recent ones from now on."""
        found, recent = False, self._recent
        if len(recent) >= 10:
            middle = statistics.median(recent)
            spread = statistics.median(abs(one - middle) for one in recent)
            found = seconds > max(1.25 * middle, middle + 8 * spread)
        recent.append(seconds)
        return found


class Journal:
    """Keeps under ``folder`` the spans of a rank's last ``keep_steps`` steps, of the older ones those of one
    in ``sample`` (0: none) and those next to unusual ones. ring: where its records come from.

    lost: steps of which something could not be kept; a full disk costs the timeline only.
    """

    def __init__(self, folder: Path, ring: Header, *, keep_steps: int, sample: int = 0) -> None:
        self.folder, self.rank, self.ring, self.keep, self.sample = folder, ring.rank, ring, keep_steps, sample
        self.lost = 0
        self.last = -1
        self._unusual = Unusual()
        self._worth: set[int] = set()  # steps next to unusual ones
        self._spans: list[np.ndarray] = []  # of the part under way, or of what could not be written
        self._part: Path | None = None  # its file
        self._names: dict[int, Name] = {}
        self._groups: dict[int, RingGroup] = {}
        self._files: deque[Path] = deque(sorted(folder.glob(f"rank-{self.rank:05d}-step-*.parquet")))

    @property
    def waiting(self) -> int:
        """Records that are not in a file that stays as it is."""
        return sum(map(len, self._spans))

    def add(self, records: Records) -> None:
        """Take the records of some whole steps, at least one, which follow those before."""
        table = records.table
        self._names, self._groups = dict(records.names), dict(records.groups)
        self.last = max(self.last, int(table["step"].max()))
        for row in table[table["kind"] == RecordKind.STEP]:
            if self._unusual(float(row["ended"] - row["started"]) / 1e9):
                self._worth |= set(range(int(row["step"]) - 1, int(row["step"]) + 2))
        self._spans.append(table)

    def flush(self) -> OSError | None:
        """Write what there is; what went wrong. A part of fewer than ``PART`` steps is written once more when
        there is more of it."""
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
        """The part has a new file, which holds more."""
        if self._part is not None and self._part != path:
            self._part.unlink(missing_ok=True)
            self._files.remove(self._part)
        if path not in self._files:
            self._files.append(path)
        self._part = path

    def _let_go(self) -> None:
        """Of what could not be written only so much is kept for later."""
        while len(self._spans) > 1 and self.waiting > MOST:
            gone = self._spans.pop(0)
            self.lost += len(set(gone["step"].tolist()))
        if len(self._spans) == 1 and len(self._spans[0]) > MOST:
            self.lost += len(set(self._spans.pop()["step"].tolist()))

    def _thin_out(self, path: Path) -> OSError | None:
        """Remove an old part, all but its sample."""
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
        """What went wrong."""
        try:
            self.folder.mkdir(exist_ok=True)  # not its parents: a run folder that is gone stays gone
            write()
        except OSError as error:
            return error
        return None


def _last_step(part: Path) -> int:
    return int(part.stem.rpartition("-")[2]) - 1
