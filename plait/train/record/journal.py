"""A rank's measured timeline on disk: spans of recent steps and of a sample of the others, and sums of all;
written by a thread."""

from __future__ import annotations

import errno
import statistics
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from plait.core.columns import copy_rows
from plait.core.records import Records
from plait.core.rollup import rollup_file, write_rollup
from plait.core.timeline import write_spans
from plait.train.record.missing import Missing

if TYPE_CHECKING:
    import numpy as np

PART = 50
"""Steps in one file of spans."""
MOST = 4
"""Parts that may wait for a slow disk; what comes then is left out."""
SAMPLED = "sampled"
"""The folder of the spans that are kept of older steps."""


class _Step(NamedTuple):
    number: int
    records: Records


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
    """Keeps under ``folder`` the spans of the last ``keep_steps`` steps (0: nothing at all), of the older
    ones those of one in ``sample`` (0: none) and those next to unusual ones, and the sums of all; a full disk
    costs the timeline only, as ``missing`` counts."""

    def __init__(
        self, folder: Path, *, rank: int, plan_hash: str, keep_steps: int, missing: Missing | None = None,
        sample: int = 0,
    ) -> None:  # fmt: skip
        self.folder, self.rank, self.plan_hash, self.sample = folder, rank, plan_hash, sample
        self.missing = missing or Missing("the timeline")
        self.keep = -(-keep_steps // PART)
        self._began = time.time_ns()
        self._unusual = Unusual()
        self._worth: set[int] = set()  # steps next to unusual ones
        self._steps: list[_Step] = []
        self._writer = ThreadPoolExecutor(1, "timeline")
        self._pending: Future[OSError | None] | None = None
        self._written = 0  # steps that the pending write holds
        self._sums: list[dict[str, np.ndarray]] = []  # of the block under way; the thread's alone
        self._block: Path | None = None
        self._files: deque[Path] = deque()
        if self.keep:
            self._files.extend(sorted(folder.glob(f"rank-{rank:05d}-step-*.parquet")))

    def add(self, step: int, records: Records, seconds: float) -> None:
        """Take a step's records. seconds: that it took."""
        if self._unusual(seconds):
            self._worth |= {step - 1, step, step + 1}
        if self.keep:
            self._steps.append(_Step(step, records))
            self._settle(wait=False)
            if len(self._steps) > MOST * PART:
                self.missing.failed(OSError(errno.EBUSY, "the disk is too slow"), len(self._steps))
                self._steps = []
            if (step + 1) % PART == 0:
                self._flush()

    def close(self) -> None:
        """Write what is left."""
        self._settle(wait=True)
        self._flush()
        self._settle(wait=True)
        self._writer.shutdown()

    def _flush(self) -> None:
        self._settle(wait=False)
        if self._steps and self._pending is None:  # never wait for a slow disk
            steps, self._steps = self._steps, []
            self._written = len(steps)
            self._pending = self._writer.submit(self._write, steps)

    def _settle(self, *, wait: bool) -> None:
        """Take note of how the pending write went."""
        if self._pending is not None and (wait or self._pending.done()):
            error, self._pending = self._pending.result(), None
            if error:
                self.missing.failed(error, self._written)
            else:
                self.missing.worked()

    # ---- in the thread ----

    def _write(self, steps: list[_Step]) -> OSError | None:
        import numpy as np

        last = steps[-1].records
        together = Records(np.concatenate([one.records.table for one in steps]), last.names, last.groups)
        path = self.folder / f"rank-{self.rank:05d}-step-{steps[-1].number + 1:08d}.parquet"
        spans = together.spans(self.rank)
        error = self._tried(path, lambda: write_spans(path, spans, self.plan_hash)) if len(spans["step"]) else None
        error = self._sum_up(together, steps[0].number) or error
        if error is None and path not in self._files:
            self._files.append(path)
        while len(self._files) > self.keep:
            error = self._thin_out(self._files.popleft()) or error
        return error

    def _sum_up(self, records: Records, first: int) -> OSError | None:
        """Add to the block's sums. What belongs to a block that is over goes with this one."""
        if self._block is None or self._block.parent != rollup_file(self.folder, self.rank, first).parent:
            self._block, self._sums = rollup_file(self.folder, self.rank, first), []
        self._sums.append(records.rolled_up(self.rank))
        return self._tried(self._block, self._write_sums)

    def _write_sums(self) -> None:
        import numpy as np

        assert self._block is not None
        columns = {name: np.concatenate([one[name] for one in self._sums]) for name in self._sums[0]}
        write_rollup(self._block, columns, self.plan_hash, self._began)

    def _thin_out(self, path: Path) -> OSError | None:
        """Remove an old part, all but its sample."""
        error = None
        if self.sample:
            last = int(path.stem.rpartition("-")[2])
            steps = [n for n in range(last - PART, last) if n % self.sample == 0 or n in self._worth]
            kept = self.folder / SAMPLED / path.name
            error = self._tried(kept, lambda: copy_rows(path, kept, "step", steps))
            self._worth -= set(steps)
        with suppress(OSError):
            path.unlink(missing_ok=True)
        return error

    def _tried(self, path: Path, write: Callable[[], None]) -> OSError | None:
        """What went wrong."""
        try:
            self.folder.mkdir(exist_ok=True)  # not its parents: a run folder that is gone stays gone
            write()
        except OSError as error:
            with suppress(OSError):
                path.unlink(missing_ok=True)
            return error
        return None
