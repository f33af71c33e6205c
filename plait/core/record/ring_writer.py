"""The writer of a rank's ring, which needs no system calls. C code (``_ring.c``) writes the
records, or Python (``ring_plain``) if the C extension is not built.

Any thread may write. A counter gives each record a unique number and hence a unique slot, so
threads never write the same bytes at the same time. A thread that is delayed leaves a damaged
record in its slot until it has written the new one.
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
    LIVE_OFFSET,
    PLAN_OFFSET,
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
"""True if C code writes the records."""
_I64, _STEP = struct.Struct("<q"), struct.Struct("<qq")
WORD = (1 << 32) - 1
"""Mask of the 32 low bits of a record's number, which its first and last word store."""


def this_process(*, rank: int, world: int, local_rank: int = 0, attempt: int = 0, plan: str = "",
                 capacity: int = CAPACITY) -> Header:  # fmt: skip
    """Return the header of a ring that this process writes."""
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
    """The writer of a rank's ring. path: its file, which replaces an existing one; None: memory of
    this process only.

    Raises OSError if the file cannot be allocated in full, so that a full disk does no harm later.
    """

    def __init__(self, path: Path | None, header: Header) -> None:
        self.header = header
        self.names: dict[int, Name] = {}
        self.groups: dict[int, RingGroup] = {}
        self._names: dict[tuple[str, OpPlace | None], int] = {}
        self._opened: Counter[tuple[int, ...]] = Counter()
        self._lock = threading.Lock()  # guards new names and groups
        self._told = -1  # descriptor of the names file
        if path is None:
            self._map = mmap.mmap(-1, _size(header))
            self._map[: len(header.pack())] = header.pack()
        else:
            self._told = _new_names(path.with_suffix(".names"), header)
            self._map = _new_file(path, header)
        super().__init__(self._map, header.capacity)

    # ---- names and groups ----

    def name(self, text: str, place: OpPlace | None = None) -> int:
        """Return the number under which records refer to a name; equal names have the same
        number."""
        number = self._names.get((text, place))
        if number is None:
            with self._lock:
                if number := self._names.get((text, place)):
                    return number
                number = len(self._names) + 1
                self._append_name({"name": number, "text": text} | ({"place": place} if place else {}))
                self.names[number] = Name(text, place)
                self._names[text, place] = number
        return number

    def group(self, ranks: Sequence[int], label: str) -> int:
        """Return the number under which records refer to a new process group. All members must open
        it at the same point."""
        members = tuple(sorted(ranks))
        with self._lock:
            ordinal, number = self._opened[members], self._opened.total() + 1
            self._append_name({"group": number, "ranks": members, "ordinal": ordinal, "label": label})
            self.groups[number] = RingGroup(members, ordinal, label)
            self._opened[members] += 1
        return number

    # ---- live fields ----

    def step(self, number: int, at: int) -> None:
        """Record the start of a step. at: ns of the monotonic clock."""
        _STEP.pack_into(self._map, LIVE_OFFSET, number, at)

    def obeys(self, plan: str) -> None:
        """Set the hash of the plan that this rank follows from now on."""
        self.header = replace(self.header, plan=plan)
        self._map[PLAN_OFFSET : PLAN_OFFSET + 64] = plan.encode()[:64].ljust(64, b"\0")

    def close(self) -> None:
        """Mark the ring as closed in good order. Later records of other threads are not needed."""
        _I64.pack_into(self._map, LIVE_OFFSET + 16, time.monotonic_ns())
        if self._told >= 0:
            os.close(self._told)
            self._told = -1

    def rows(self, numbers: np.ndarray) -> np.ndarray:
        """Return the present records of some numbers, as in ``Ring.table``, without overwritten
        ones."""
        import numpy as np

        every = np.frombuffer(self._map, row_type(), self.header.capacity, HEADER)
        found = every[(numbers - 1) & (len(every) - 1)]
        whole = (found["opened"] == (numbers & WORD)) & (found["closed"] == found["opened"])
        return numbered(found, numbers) if whole.all() else numbered(found[whole], numbers[whole])

    def _append_name(self, line: dict[str, Any]) -> None:
        """Append a line to the names file, before the first record that needs it. If the disk is
        full, the name is lost and the run continues."""
        if self._told >= 0:
            with suppress(OSError):
                os.write(self._told, (json.dumps(line) + "\n").encode())


def _size(header: Header) -> int:
    return HEADER + header.capacity * RECORD.size


def _new_names(path: Path, header: Header) -> int:
    """Return the descriptor of the names file, which holds its first line and is open for more."""
    with replacing(path) as partial:
        partial.write_text(json.dumps({"token": header.token}) + "\n")
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)


def _new_file(path: Path, header: Header) -> mmap.mmap:
    """Return a mapped file with all of its blocks allocated: writing into a hole on a full disk
    would kill the process."""
    with replacing(path) as partial:
        handle = os.open(partial, os.O_RDWR | os.O_CLOEXEC)
        try:
            os.posix_fallocate(handle, 0, _size(header))
            os.write(handle, header.pack())
            return mmap.mmap(handle, _size(header))
        finally:
            os.close(handle)
