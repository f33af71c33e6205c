"""The sums of what a host's ranks do, of all steps: one file for a block of steps, however many ranks there
are, and one of its totals."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from plait.core.record.records import Records
from plait.core.record.ring import Header
from plait.core.record.rollup import BLOCK, RollupSource, joined, last_steps_of_rings, rollup_file, write_rollup

STEPS = 100
"""Steps after which a file is written anew."""
SECONDS = 60.0
"""Or so long after the last time, whichever comes first."""
WAITING = 4
"""Files of blocks that are over that may wait for room on the disk. What comes then is left out."""


@dataclass(eq=False, kw_only=True)
class SumsFile:
    """A file that grows. rings: by rank, its ring's token and the last step of it; of a rank one ring
    alone."""

    path: Path
    plan: str
    began: int
    rings: dict[int, tuple[int, int]] = field(default_factory=dict[int, tuple[int, int]])
    rows: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    last: int = -1
    written: int = -1
    """The last step that is in the file."""
    at: float = field(default_factory=time.monotonic)
    """When it was written."""

    def due(self, last: bool) -> bool:
        """Whether there is anything new, and enough of it."""
        new = self.last - self.written
        return new > 0 and (last or new >= STEPS or time.monotonic() - self.at >= SECONDS)

    def write(self) -> OSError | None:
        """What went wrong. It grows whole: a reader finds all of it or what there was before."""
        self.rows = [joined(self.rows)]
        try:
            self.path.parents[2].mkdir(exist_ok=True)  # not its parents: a run folder that is gone stays gone
            write_rollup(self.path, self.rows[0], RollupSource(plan=self.plan, began=self.began, rings=self.rings))
        except OSError as error:
            return error
        self.written, self.at = self.last, time.monotonic()
        return None


class Sums:
    """Of these ranks of a run. lost: steps of which they could not be kept."""

    def __init__(self, timeline: Path, ranks: range) -> None:
        self.timeline, self.ranks = timeline, ranks
        self.lost = 0
        self._new: dict[int, list[tuple[Header, Records]]] = {}  # by rank
        self._open: dict[tuple[int, str], SumsFile] = {}  # by block and plan
        self._over: list[SumsFile] = []  # of earlier starts of ranks, not yet written
        self._under_way: dict[int, SumsFile] = {}  # by rank, what it adds to
        self._began = 0  # of the newest part
        self._before: dict[tuple[int, int], int] | None = None

    def written(self, ring: Header) -> int:
        """The last step of this ring that is in files already, of an earlier agent; -1 if there is none."""
        if self._before is None:
            self._before = last_steps_of_rings(self.timeline, self.ranks)
        return self._before.get((ring.rank, ring.token), -1)

    def add(self, ring: Header, records: Records) -> None:
        """Some whole steps of a rank, which follow those before. They are added up when they are written:
        many steps at once take hardly longer than one."""
        self._new.setdefault(ring.rank, []).append((ring, records))

    def flush(self, *, last: bool = False, write: bool = True) -> OSError | None:
        """Add up what is new, and write it, if it pays or is the last time; what went wrong. write: False to
        keep it for later."""
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
        while len(self._over) > WAITING:
            self.lost += _steps(self._over.pop(0))
        for part in self._open.values():
            if write and not error and part.due(last):
                error = part.write()
        return error

    def _add_up(self, several: Sequence[tuple[Header, Records]]) -> None:
        """Of one ring and one plan."""
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
        """Where a rank's block goes: a file of several starts of a rank would not tell which of them
        counts."""
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
        """Names that no file has, neither on the disk nor one that is to be written."""
        taken = {part.path for part in (*self._open.values(), *self._over)}
        number, found = 1, path
        while True:
            if found not in taken and not found.exists():
                yield found
            number, found = number + 1, path.with_stem(f"{path.stem}-{number + 1}")


def _steps(part: SumsFile) -> int:
    """How many it has."""
    return len({step for rows in part.rows for step in rows["step"].tolist()})
