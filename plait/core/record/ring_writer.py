"""Writing a rank's ring: no system calls. Records themselves are written in C (``_ring.c``), or in Python
where that is not built (``ring_plain``).

Any thread may write. A record gets its number, and with it its place, from a counter that hands out each
once; so writers never touch the same bytes, and a thread that is held up leaves a damaged record where its
new one will be.
"""

from __future__ import annotations

import json
import mmap
import os
import secrets
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait.core.base.files import replacing
from plait.core.base.process import boot_id, process_state
from plait.core.record.ring import (
    CAPACITY,
    HEADER,
    LIVE,
    PLAN,
    RECORD,
    Header,
    Name,
    OpPlace,
    RingGroup,
    numbered,
    row_type,
)

if TYPE_CHECKING:
    import numpy as np

    from plait.core.record._ring import Flight as Flight
    from plait.core.record._ring import Line as Line
    from plait.core.record._ring import Pace as Pace
    from plait.core.record._ring import Writer
else:
    try:
        from plait.core.record import _ring as records
    except ImportError:
        from plait.core.record import ring_plain as records
    Flight, Line, Pace, Writer = records.Flight, records.Line, records.Pace, records.Writer

NATIVE = Writer.__module__.endswith("._ring")
"""Whether records are written in C."""
_I64, _STEP = struct.Struct("<q"), struct.Struct("<qq")
WORD = (1 << 32) - 1
"""What of a number is in a record."""


def this_process(*, rank: int, world: int, local_rank: int = 0, attempt: int = 0, plan: str = "",
                 capacity: int = CAPACITY) -> Header:  # fmt: skip
    """The header of a ring that this process writes."""
    state, boot = process_state(os.getpid()), ""
    with suppress(OSError):
        boot = boot_id()
    before, wall, after = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
    return Header(
        rank=rank, world=world, local_rank=local_rank, attempt=attempt, plan=plan, capacity=capacity,
        host=socket.gethostname(), pid=os.getpid(), process_started=state.started if state else 0, boot=boot,
        monotonic=(before + after) // 2, wall=wall, uncertain=after - before, token=secrets.randbits(62),
    )  # fmt: skip


class RingWriter(Writer):
    """A rank's ring. path: its file, which takes the place of one that is there; None: memory of this process
    alone.

    Raises OSError if the file cannot be made, all of it, so that a full disk does no harm later.
    """

    def __init__(self, path: Path | None, header: Header) -> None:
        self.header = header
        self.names: dict[int, Name] = {}
        self.groups: dict[int, RingGroup] = {}
        self._names: dict[tuple[str, OpPlace | None], int] = {}
        self._opened: Counter[tuple[int, ...]] = Counter()
        self._lock = threading.Lock()  # for new names and groups
        self._told = -1  # their file
        if path is None:
            self._map = mmap.mmap(-1, _size(header))
            self._map[: len(header.pack())] = header.pack()
        else:
            self._told = _new_names(path.with_suffix(".names"), header)
            self._map = _new_file(path, header)
        super().__init__(self._map, header.capacity)

    # ---- what numbers stand for ----

    def name(self, text: str, place: OpPlace | None = None) -> int:
        """The number of a name; the same for the same."""
        number = self._names.get((text, place))
        if number is None:
            with self._lock:
                if number := self._names.get((text, place)):
                    return number
                number = len(self._names) + 1
                self._tell({"name": number, "text": text} | ({"place": place} if place else {}))
                self.names[number] = Name(text, place)
                self._names[text, place] = number
        return number

    def group(self, ranks: Sequence[int], label: str) -> int:
        """The number of a group of ranks that is being opened, on all of them at the same point."""
        members = tuple(sorted(ranks))
        with self._lock:
            ordinal, number = self._opened[members], self._opened.total() + 1
            self._tell({"group": number, "ranks": members, "ordinal": ordinal, "label": label})
            self.groups[number] = RingGroup(members, ordinal, label)
            self._opened[members] += 1
        return number

    # ---- what is alive ----

    def step(self, number: int, at: int) -> None:
        """A step begins."""
        _STEP.pack_into(self._map, LIVE, number, at)

    def obeys(self, plan: str) -> None:
        """Another plan is this rank's from now on."""
        self.header = replace(self.header, plan=plan)
        self._map[PLAN : PLAN + 64] = plan.encode()[:64].ljust(64, b"\0")

    def close(self) -> None:
        """The writer ends in good order. What threads still write goes nowhere that matters."""
        _I64.pack_into(self._map, LIVE + 16, time.monotonic_ns())
        if self._told >= 0:
            os.close(self._told)
            self._told = -1

    def rows(self, numbers: np.ndarray) -> np.ndarray:
        """The records of these numbers as they are now, as in ``Ring.table``; without those that were
        overwritten."""
        import numpy as np

        every = np.frombuffer(self._map, row_type(), self.header.capacity, HEADER)
        found = every[(numbers - 1) & (len(every) - 1)]
        whole = (found["opened"] == (numbers & WORD)) & (found["closed"] == found["opened"])
        return numbered(found, numbers) if whole.all() else numbered(found[whole], numbers[whole])

    def _tell(self, line: dict[str, Any]) -> None:
        """Before the first record that needs it. A full disk costs the name, not the run."""
        if self._told >= 0:
            with suppress(OSError):
                os.write(self._told, (json.dumps(line) + "\n").encode())


def _size(header: Header) -> int:
    return HEADER + header.capacity * RECORD.size


def _new_names(path: Path, header: Header) -> int:
    """The file of names with its first line, open for more."""
    with replacing(path) as partial:
        partial.write_text(json.dumps({"token": header.token}) + "\n")
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)


def _new_file(path: Path, header: Header) -> mmap.mmap:
    """A mapped file, with all of its blocks: to write into a hole on a full disk would end the process."""
    with replacing(path) as partial:
        handle = os.open(partial, os.O_RDWR | os.O_CLOEXEC)
        try:
            os.posix_fallocate(handle, 0, _size(header))
            os.write(handle, header.pack())
            return mmap.mmap(handle, _size(header))
        finally:
            os.close(handle)
