"""A reader that follows a rank's ring from another process: new records, and ends of earlier
records.

Each call reads only new data, a header and a few kilobytes, so that a host's ranks can be followed
many times a second. Records stay in memory until they are taken, a step at a time.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from plait.core.base.errors import DataError
from plait.core.record.ring import (
    HEADER,
    RECORD,
    UNSET,
    Header,
    Name,
    RecordKind,
    RingGroup,
    numbered,
    read_names,
    row_type,
    whole_rows,
)

if TYPE_CHECKING:
    import numpy as np

CHUNK = 2048
"""The number of records per read."""
MARGIN = 8
"""Part of a ring, as 1 / MARGIN of its records, that the follower skips after the ring has
overtaken it: the writer will overwrite these next."""
_WORD = 1 << 32


class RingFollower:
    """A reader that follows a growing ring. Raises DataError for a file that is missing, foreign,
    damaged or of another version.

    rows: records that were read and not yet taken, as in ``Ring.table``. lost: number of records
    that were overwritten before they were read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise DataError(f"{path} cannot be read as a ring: {error.strerror or error}") from None
        try:
            self.header = self._header()
            if os.fstat(self._file).st_size != HEADER + self.header.capacity * RECORD.size:
                raise DataError("it is cut off")
        except DataError as error:
            os.close(self._file)
            raise DataError(f"{path} cannot be read as a ring: {error}") from None
        self.names: dict[int, Name] = {}
        self.groups: dict[int, RingGroup] = {}
        self.lost = 0
        self.rows = self._empty()
        self._next = 1
        self._missing: list[int] = []  # numbers that threads hold but have not written yet
        self._names_read = -1

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    @property
    def replaced(self) -> bool:
        """True if another file, of a new start, has taken this file's name."""
        try:
            return not os.path.samestat(os.stat(self.path), os.fstat(self._file))
        except OSError:
            return False

    @property
    def steps(self) -> list[int]:
        """The steps that are complete and not yet taken, in order."""
        rows = self.rows
        return rows["step"][(rows["kind"] == RecordKind.STEP) & (rows["ended"] > 0)].tolist()

    def advance(self) -> int:
        """Read new records and new ends of earlier records; return the number of new records.
        Raises DataError if the file is no longer a ring."""
        import numpy as np

        self.header = self._header()
        fresh = self._fresh()
        known, again = self.rows, self._again()
        at = np.minimum(np.searchsorted(known["number"], again["number"]), max(0, len(known) - 1))
        there = known["number"][at] == again["number"] if len(known) else np.zeros(len(again), dtype=bool)
        known[at[there]] = again[there]
        rows = np.concatenate([known, again[~there], fresh])
        self.rows = rows if there.all() else rows[np.argsort(rows["number"], kind="stable")]
        self._read_names()
        forgotten = self.rows["number"][(self.rows["kind"] == RecordKind.STEP) & (self.rows["step"] == UNSET)]
        if len(forgotten):  # records before this one belong to no step: they were only timed
            self.rows = self.rows[self.rows["number"] > forgotten[-1]]
        return len(fresh)

    def take(self, first: int, last: int) -> np.ndarray:
        """Return the ended records of steps ``first`` to ``last``. Records of earlier steps, and
        open records of these steps, are discarded: no caller needs them again."""
        rows = self.rows
        due = rows["step"] <= last
        self.rows = rows[~due]
        return rows[due & (rows["step"] >= first) & (rows["ended"] != 0)]

    def keep(self, most: int) -> None:
        """Discard all but the last ``most`` records."""
        self.rows = self.rows[-most:]

    # ---- inside ----

    def _empty(self) -> np.ndarray:
        import numpy as np

        return numbered(np.empty(0, row_type()), np.empty(0, np.int64))

    def _header(self) -> Header:
        try:
            return Header.unpack(os.pread(self._file, HEADER, 0))
        except OSError as error:
            raise DataError(f"{self.path} cannot be read: {error.strerror or error}") from None

    def _rows(self, first: int, count: int) -> np.ndarray:
        """Return the records in the slots of ``count`` numbers from ``first`` on; fewer at the end
        of the ring, or if the file is cut off."""
        import numpy as np

        position = (first - 1) % self.header.capacity
        count = min(count, self.header.capacity - position)
        data = os.pread(self._file, count * RECORD.size, HEADER + position * RECORD.size)
        return np.frombuffer(data, row_type(), len(data) // RECORD.size)

    def _away(self, rows: np.ndarray, first: int) -> np.ndarray:
        """Return the differences between the record numbers found in slots and the numbers expected
        there, one for each row; negative: not yet written. first: expected number of the first
        slot."""
        import numpy as np

        awaited = (np.arange(first, first + len(rows)) % _WORD).astype(np.int64)
        return (rows["opened"].astype(np.int64) - awaited + _WORD // 2) % _WORD - _WORD // 2

    def _fresh(self) -> np.ndarray:
        import numpy as np

        found = [self._empty()]
        for _ in range(2 * (self.header.capacity // CHUNK + 2)):  # bounded: a faster writer would keep it running
            rows = self._rows(self._next, CHUNK)
            away = self._away(rows, self._next)
            if (away > 0).any():
                self._catch_up()
                continue
            written = np.flatnonzero(away == 0)
            if not len(written):
                break
            end = int(written[-1]) + 1
            numbers = np.arange(self._next, self._next + end)
            whole = (away[:end] == 0) & whole_rows(rows[:end])
            self._missing += numbers[~whole].tolist()
            found.append(numbered(rows[:end][whole], numbers[whole]))
            self._next += end
            if end < len(rows):
                break
        return np.concatenate(found)

    def _catch_up(self) -> None:
        """Move to the oldest record that will not be overwritten at once."""
        import numpy as np

        capacity = self.header.capacity
        position = (self._next - 1) % capacity
        rows = np.concatenate([self._rows(self._next, capacity), self._rows(self._next - position, position)])
        newest = self._next + int((self._away(rows, self._next) + np.arange(len(rows))).max())
        oldest = newest - capacity + 1 + capacity // MARGIN
        self.lost += max(0, oldest - self._next)
        self._next = max(self._next, oldest)

    def _again(self) -> np.ndarray:
        """Return the present rows, as in ``Ring.table``, of records that were open or missing at
        the last read."""
        import numpy as np

        wanted = self.rows["number"][self.rows["ended"] == 0].tolist() + self._missing
        found, missing = [self._empty()], list[int]()
        for number in wanted:
            row = self._rows(number, 1)
            away = int(self._away(row, number)[0]) if len(row) else 1
            if away == 0 and whole_rows(row)[0]:
                found.append(numbered(row, np.array([number])))
            elif away <= 0 and number in self._missing:
                missing.append(number)
        self._missing = missing
        return np.concatenate(found)

    def _read_names(self) -> None:
        """Read the names file again if it has grown."""
        path = self.path.with_suffix(".names")
        try:
            size = path.stat().st_size
        except OSError:
            return
        if size != self._names_read:
            names, groups, problems = read_names(path, self.header.token)
            if not problems:
                self.names, self.groups, self._names_read = names, groups, size
