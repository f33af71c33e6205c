"""A rank's ring buffer: its latest records, of 64 bytes each, which other processes may read at any
time.

The rank maps ``rings/rank-00000.ring`` into its memory (``ring_writer``). Stored records survive
the rank, even after SIGKILL. Readers need no cooperation of the rank, not even its interpreter
lock. ``rank-00000.names``, in lines of JSON, explains the numbers in the records; each line is
written before the first record that needs it.

A record is written once, when its op is enqueued (``enqueued``); ``started`` and ``ended`` are
filled in later. A time of 0 is not reached yet; a negative ``ended`` is the time of a failure. So a
record without an end shows the op that a rank is executing. Times are int64 nanoseconds of the
host's monotonic clock, never floats; ``clocks`` compares hosts.

A record's first and last words are the low 32 bits of its number, counted from 1. If they differ,
the record is torn and skipped. A writer first damages the last word of the old record, and stores
both words after all other fields (``_ring.c``). So a reader that reads the words in their order
never accepts a mixture of two records.
"""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple
from zlib import crc32

from plait.core.base.codec.json_text import SIDE_FILE, parse_json, parse_table
from plait.core.base.errors import DataError
from plait.core.base.files import contents_within
from plait.core.base.numbers import MOST_RANKS

if TYPE_CHECKING:
    import numpy as np

VERSION = 1
MAGIC = b"PLAITRNG"
HEADER = 4096
"""The bytes before the first record: a page."""
RECORD = struct.Struct("<IBBHqqqqiIIiII")
FIELDS = (
    "opened", "kind", "call", "group", "enqueued", "started", "ended", "bytes", "step", "sequence", "name", "peer",
    "signature", "closed",
)  # fmt: skip
STARTED, ENDED, BYTES = 16, 24, 32
"""The byte offsets within a record of the fields that are filled in later."""
CAPACITY = 1 << 16
"""The default and largest number of records of a ring: 4 MiB."""
UNSET = -1
"""The peer of a record without a peer; the step of a record outside of steps."""
_HEADER = struct.Struct("<8sIIIIqiiiiqqqqqqqqq64s64s64s")
LIVE_OFFSET = 80
"""The byte offset in the header of the words that change: step, its start, and the time when the
writer closed the ring."""

PLAN_OFFSET = _HEADER.size - 64
"""The byte offset in the header of the plan's hash."""


class RecordKind(IntEnum):
    """The kind of op that a record describes.

    STEP: a whole step; its bytes are the CPU nanoseconds of the training thread in the step, 0 if a
    device computes. COMPUTE, WAIT, IDLE, COLLECTIVE, JOB and TRANSFER are spans of the step's
    timeline if their name has a place. JOB: one task of a background thread (a unit gathered, a
    tensor moved to another layout), which has several COLLECTIVE or SEND and RECEIVE records.
    TRANSFER: a tensor on its way to another stage, as seen by the sender's pipeline. SEND, RECEIVE:
    one message.
    """

    STEP = 1
    COMPUTE = 2
    WAIT = 3
    IDLE = 4
    COLLECTIVE = 5
    JOB = 6
    TRANSFER = 7
    SEND = 8
    RECEIVE = 9
    DATA = 10
    OPTIMIZER = 11
    CHECKPOINT = 12
    EVALUATION = 13


VERBS: tuple[str, ...] = (
    "", "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "rotate", "broadcast", "barrier", "message",
)  # fmt: skip
"""The collective operations; an operation's index is the low half of a record's ``call``."""
DTYPES: tuple[str, ...] = (
    "", "float32", "float64", "bfloat16", "float16", "int64", "int32", "int16", "int8", "uint8", "bool", "complex64",
    "float8_e4m3fn", "float8_e5m2",
)  # fmt: skip
"""The dtypes of tensors; an index is the high half of a record's ``call``. Unlisted dtypes have
index 0."""


def call_of(verb: str, dtype: str) -> int:
    """Return a record's ``call``: operation and dtype in one byte."""
    return VERBS.index(verb) | (DTYPES.index(dtype) if dtype in DTYPES else 0) << 4


def verb_and_dtype(call: int) -> tuple[str, str]:
    """Return operation and dtype of a record's ``call``: the inverse of ``call_of``."""
    return VERBS[call & 15], DTYPES[call >> 4]


def signature_of(verb: str, dtype: str, *sizes: int) -> int:
    """Return a 32-bit signature that all members of a group must agree on: operation, dtype and
    sizes.

    It is the same in every process and on every machine; two different signatures collide once in
    four billion.
    """
    return crc32(f"{verb}/{dtype}/{'/'.join(map(str, sizes))}".encode())


class OpPlace(NamedTuple):
    """The op that a record is about: sublayer, layer, slice or micro-batch and pass, as in
    ``core.record.timeline.NamedOp``."""

    site: str
    layer: int
    slice: int
    forward: bool


@dataclass(frozen=True, slots=True)
class Name:
    """The meaning of a record's ``name``. place: None if the record is no span of the timeline."""

    text: str
    place: OpPlace | None = None


@dataclass(frozen=True, slots=True)
class RingGroup:
    """A process group. ranks: sorted. ordinal: 0 for the first group with exactly these ranks, 1
    for the second, in the order in which all members open them. The ordinal is equal on all
    members; a process's own group number is not.

    label: the group's purpose (``tp``, ``params``, ``lane 0-1``).
    """

    ranks: tuple[int, ...]
    ordinal: int
    label: str = field(default="", compare=False)

    def __str__(self) -> str:
        return f"{self.label or 'group'} {','.join(map(str, self.ranks))}#{self.ordinal}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """An op that a rank has executed, is executing or has enqueued. Times: ns; 0 if not reached
    yet.

    number: index of the record on its rank, from 1 on. group, sequence, verb, dtype, signature: of
    collectives and messages only. sequence counts the collectives of a group, or its messages from
    one rank to another, from 0 on. peer: the receiver of a SEND, the sender of a RECEIVE. bytes:
    bytes of the larger of a collective's two tensors, otherwise bytes that this rank sends or
    receives.
    """

    kind: RecordKind
    name: Name
    step: int = UNSET
    enqueued: int = 0
    started: int = 0
    ended: int = 0
    failed: bool = False
    group: RingGroup | None = None
    sequence: int = 0
    peer: int = UNSET
    bytes: int = 0
    verb: str = ""
    dtype: str = ""
    signature: int = 0
    number: int = 0

    @property
    def open(self) -> bool:
        """True if the op has not ended."""
        return not self.ended


@dataclass(frozen=True, kw_only=True)
class Header:
    """The header of a ring: the process that writes it and its progress.

    pid, process_started: identify the process; process_started (ticks since boot) tells it from
    another process with the same pid. boot: the boot id of the kernel, whose monotonic clock all
    its processes share. monotonic, wall: the same moment on both clocks, ns; uncertain: their
    largest difference, ns. attempt: the number of earlier starts of the run. token: random number
    of this file and its names. step, stepped: the current step, counted from 0, and its start, ns.
    closed: when the writer closed the ring, ns; 0 if it has not.
    """

    rank: int
    world: int
    host: str
    pid: int
    plan: str = ""
    local_rank: int = 0
    attempt: int = 0
    process_started: int = 0
    boot: str = ""
    monotonic: int = 0
    wall: int = 0
    uncertain: int = 0
    token: int = 0
    capacity: int = CAPACITY
    step: int = UNSET
    stepped: int = 0
    closed: int = 0

    def pack(self) -> bytes:
        """Return the header as bytes of the file."""
        texts = (text.encode()[:64] for text in (self.host, self.boot, self.plan))
        return _HEADER.pack(
            MAGIC, VERSION, HEADER, RECORD.size, 0, self.capacity,
            self.rank, self.world, self.local_rank, self.attempt,
            self.pid, self.process_started, self.token, self.uncertain,
            self.step, self.stepped, self.closed,
            self.monotonic, self.wall, *texts,
        )  # fmt: skip

    @staticmethod
    def unpack(data: bytes) -> Header:
        """Return the header in the first bytes of a file. Raises DataError for data that is no
        ring, is damaged or of another version."""
        if len(data) < HEADER or data[: len(MAGIC)] != MAGIC:
            raise DataError("it is not a ring file, or its header page is truncated")
        _, version, header, record, _, capacity, *rest = _HEADER.unpack_from(data)
        if (version, header, record) != (VERSION, HEADER, RECORD.size):
            raise DataError(f"it is a ring of version {version}; this Plait reads version {VERSION}")
        if not 1 <= capacity <= CAPACITY or capacity & (capacity - 1):
            raise DataError(f"its header is damaged: capacity {capacity} is not a power of two up to {CAPACITY}")
        rank, world, local, attempt, pid, process, token, uncertain, step, stepped, closed, monotonic, wall = rest[:13]
        if not 0 <= rank < world <= MOST_RANKS or not 0 <= local < world:
            raise DataError(f"its header is damaged: rank {rank} of {world} ranks, local rank {local}")
        host, boot, plan = (text.rstrip(b"\0").decode("utf-8", "replace") for text in rest[13:])
        return Header(
            rank=rank, world=world, host=host, pid=pid, plan=plan, local_rank=local, attempt=attempt,
            process_started=process, boot=boot, monotonic=monotonic, wall=wall, uncertain=uncertain, token=token,
            capacity=capacity, step=step, stepped=stepped, closed=closed,
        )  # fmt: skip


@dataclass(frozen=True)
class Ring:
    """A snapshot of a rank's ring.

    table: one row per record, in order of their numbers, with the columns ``FIELDS`` and
    ``number``. names, groups: the meanings of the numbers in ``table``. torn: number of records
    that were just being written. problems: descriptions of other unreadable parts.
    """

    header: Header
    table: np.ndarray
    names: dict[int, Name]
    groups: dict[int, RingGroup]
    torn: int = 0
    problems: tuple[str, ...] = ()

    @property
    def rank(self) -> int:
        """The rank that wrote the ring."""
        return self.header.rank

    def records(self, rows: np.ndarray | slice = slice(None)) -> list[Record]:
        """Return the records of some rows, such as ``ring.table["step"] == 7``; by default of all
        rows."""
        return [self._record(row) for row in self.table[rows].tolist()]

    def open(self) -> list[Record]:
        """Return the records that have not ended: the ops that the rank is executing or has in
        flight."""
        return self.records(self.table["ended"] == 0)

    def _record(self, row: tuple[Any, ...]) -> Record:
        _, kind, call, group, enqueued, started, ended, size, step, sequence, name, peer, signature, _, number = row
        verb, dtype = verb_and_dtype(call)
        return Record(
            kind=RecordKind(kind), name=self.names.get(name) or Name(f"name {name}"), step=step,
            enqueued=enqueued, started=started, ended=abs(ended), failed=ended < 0,
            group=self.groups.get(group), sequence=sequence, peer=peer, bytes=size,
            verb=verb, dtype=dtype, signature=signature, number=number,
        )  # fmt: skip


def read_ring(path: Path) -> Ring:
    """Return the ring in a file, whether its writer runs, has ended or was killed.

    Raises DataError for a file that is missing, truncated, foreign, damaged or of another version.
    """
    try:
        with open_ring(path) as file:
            data = file.read(HEADER)
            header = Header.unpack(data)
            size, there = HEADER + header.capacity * RECORD.size, os.fstat(file.fileno()).st_size
            if there != size:
                raise DataError(f"it has {there} bytes, but its header requires {size}")
            data += file.read(size - HEADER)  # not mapped: if the file shrank, access to the map would kill the process
        if len(data) != size:
            raise DataError("it was truncated during reading")
    except OSError as error:
        raise DataError(f"{path} cannot be read as a ring: {error.strerror or error}") from None
    except DataError as error:
        raise DataError(f"{path} cannot be read as a ring: {error}") from None
    table, torn = _table(data, header.capacity)
    names, groups, problems = read_names(path.with_suffix(".names"), header.token)
    return Ring(header, table, names, groups, torn, problems)


def open_ring(path: Path) -> BinaryIO:
    """Open a ring's file. Raises OSError, and DataError if it is no regular file: opening a pipe
    would block."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise DataError("it is not a regular file")
    return open(path, "rb")


def read_rings(folder: Path, problems: list[str]) -> Iterator[Ring]:
    """Yield all rings of a folder, by rank; one at a time, because many rings would fill the
    memory. problems: receives descriptions of unreadable rings."""
    for path in sorted(folder.glob("rank-*.ring")):
        try:
            ring = read_ring(path)
        except DataError as error:
            problems.append(str(error))
            continue
        problems += ring.problems
        yield ring


@cache
def row_type() -> np.dtype[np.void]:
    """Return the NumPy dtype of a record of 64 bytes, as it lies in the ring's file."""
    import numpy as np

    kinds = {"I": "<u4", "B": "u1", "H": "<u2", "q": "<i8", "i": "<i4"}
    return np.dtype([(name, kinds[code]) for name, code in zip(FIELDS, RECORD.format[1:], strict=True)])


@cache
def _numbered_type() -> np.dtype[np.void]:
    import numpy as np

    return np.dtype([*row_type().descr, ("number", "<i8")])


def numbered(rows: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Return records with their numbers, in the form of ``Ring.table``."""
    import numpy as np

    table = np.empty(len(rows), _numbered_type())
    whole = table.view(np.uint8).reshape(len(rows), table.itemsize)  # copying field by field takes ten times as long
    whole[:, : RECORD.size] = np.ascontiguousarray(rows).view(np.uint8).reshape(len(rows), RECORD.size)
    table["number"] = numbers
    return table


def whole_rows(rows: np.ndarray) -> np.ndarray:
    """Return a mask of the records that were neither read while being written nor damaged."""
    whole = (rows["opened"] == rows["closed"]) & (rows["kind"] > 0) & (rows["kind"] <= max(RecordKind))
    return whole & (rows["call"] & 15 < len(VERBS)) & (rows["call"] >> 4 < len(DTYPES))


def _table(data: bytes, capacity: int) -> tuple[np.ndarray, int]:
    """Return (the whole records with their numbers, number of torn records) in a ring's bytes.
    capacity: number of records of the ring."""
    import numpy as np

    found = np.frombuffer(data, row_type(), capacity, HEADER)
    opened, slots = found["opened"].astype(np.int64), np.arange(capacity)
    whole = whole_rows(found) & ((opened - 1) % capacity == slots)
    torn = int(np.count_nonzero(~whole & ((opened != 0) | (found["closed"] != 0))))
    kept, numbers = found[whole], opened[whole]
    if len(numbers):  # the 32-bit words of a long run wrap around: they are taken relative to the first
        numbers = numbers[0] + (numbers - numbers[0] + (1 << 31)) % (1 << 32) - (1 << 31)
    order = np.argsort(numbers)
    return numbered(kept[order], numbers[order]), torn


def read_names(path: Path, token: int) -> tuple[dict[int, Name], dict[int, RingGroup], tuple[str, ...]]:
    """Return the names and groups of the ring with this token, and descriptions of unreadable
    parts. An incomplete last line is skipped: no record needs it yet."""
    names: dict[int, Name] = {}
    groups: dict[int, RingGroup] = {}
    try:
        first, *lines = contents_within(path, SIDE_FILE).split(b"\n")[:-1] or [b"{}"]
        if parse_table(first).get("token") != token:
            return names, groups, (f"{path} belongs to another ring: names and groups are unknown",)
        for line in lines:
            match parse_json(line):
                case {"name": int(number), "text": str(text), "place": [str(site), int(layer), int(slice_), forward]}:
                    names[number] = Name(text, OpPlace(site, layer, slice_, bool(forward)))
                case {"name": int(number), "text": str(text)}:
                    names[number] = Name(text)
                case {"group": int(number), "ranks": list(), "ordinal": int(ordinal), "label": str(label)} as group:
                    groups[number] = RingGroup(tuple(map(int, group["ranks"])), ordinal, label)
                case other:
                    return names, groups, (f"{path} has an unknown line: {other}",)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        return names, groups, (f"{path} cannot be read ({error}): names and groups are unknown",)
    return names, groups, ()
