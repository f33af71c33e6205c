"""A rank's ring: what it did last, in records of 64 bytes, which anybody may read at any time.

The rank maps ``rings/rank-00000.ring`` into its memory (``ring_writer``); what it has stored there
outlives it, also after SIGKILL, and is read without asking it, also while it holds the interpreter's lock.
Beside it, ``rank-00000.names`` says in lines of JSON what the numbers in the records stand for; a line is
written before the first record that needs it.

A record is written once, when its thing begins (``enqueued``), and filled in when that has ``started`` and
``ended``: a time of 0 is still to come, a negative ``ended`` is the time of a failure. So a record without
an end is what a rank is at. Times are int64 nanoseconds of the host's monotonic clock, never floats: hosts
are compared with ``clocks``.

A record's first and last words are the low 32 bits of its number, counted from 1: where they differ, the
record is torn, and is left out. Whoever writes one damages the last word of what stood in its place first,
and writes both words when all else is there (``_ring.c``), so that a reader who takes the words in
their order takes no mixture for a record.
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
"""Bytes before the first record: a page."""
RECORD = struct.Struct("<IBBHqqqqiIIiII")
FIELDS = (
    "opened", "kind", "call", "group", "enqueued", "started", "ended", "bytes", "step", "sequence", "name", "peer",
    "signature", "closed",
)  # fmt: skip
STARTED, ENDED, BYTES = 16, 24, 32
"""Where in a record the fields are that are filled in later."""
CAPACITY = 1 << 16
"""Records of a ring unless it is told fewer: 4 MiB."""
NOBODY = -1
"""The peer of what has none; the step of what belongs to none."""
_HEADER = struct.Struct("<8sIIIIqiiiiqqqqqqqqq64s64s64s")
LIVE = 80
"""Where in the header the words are that change: step, when it began, whether the writer has ended."""

PLAN = _HEADER.size - 64
"""Where the plan's hash is."""


class RecordKind(IntEnum):
    """What a record is about.

    STEP: a whole step; its bytes are ns of processor time that the thread which trains had in it, 0 where a
    device computes. COMPUTE, WAIT, IDLE, COLLECTIVE, JOB and TRANSFER whose name has a place are spans of the
    step's timeline. JOB: what a background thread does in one go (a unit gathered, a tensor moved to another
    layout), which are several COLLECTIVE or SEND and RECEIVE records. TRANSFER: a tensor on its way to
    another stage, as the sender's pipeline sees it. SEND, RECEIVE: one message.
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
"""What a collective does; its number is the low half of a record's ``call``."""
DTYPES: tuple[str, ...] = (
    "", "float32", "float64", "bfloat16", "float16", "int64", "int32", "int16", "int8", "uint8", "bool", "complex64",
    "float8_e4m3fn", "float8_e5m2",
)  # fmt: skip
"""Types of numbers; the high half of ``call``. Others are the first."""


def call_of(verb: str, dtype: str) -> int:
    """The two in one byte."""
    return VERBS.index(verb) | (DTYPES.index(dtype) if dtype in DTYPES else 0) << 4


def verb_and_dtype(call: int) -> tuple[str, str]:
    """What ``call_of`` has put together."""
    return VERBS[call & 15], DTYPES[call >> 4]


def signature_of(verb: str, dtype: str, *sizes: int) -> int:
    """32 bits that the members of a group must agree on: what is done, to how many numbers, of which type.

    The same in every process and on every machine; two that differ collide once in four billion.
    """
    return crc32(f"{verb}/{dtype}/{'/'.join(map(str, sizes))}".encode())


class OpPlace(NamedTuple):
    """Where an op of a schedule, a segment list or a unit belongs, as in ``core.record.timeline.NamedOp``."""

    site: str
    layer: int
    slice: int
    forward: bool


@dataclass(frozen=True, slots=True)
class Name:
    """What a record's ``name`` stands for. place: None for what is no span of the timeline."""

    text: str
    place: OpPlace | None = None


@dataclass(frozen=True, slots=True)
class RingGroup:
    """Ranks that communicate. ranks: sorted. ordinal: 0 for the first group with exactly these ranks, 1 for
    the second, as all members open them. It is equal on all members; a process's own number is not.

    label: what it is for (``tp``, ``params``, ``lane 0-1``).
    """

    ranks: tuple[int, ...]
    ordinal: int
    label: str = field(default="", compare=False)

    def __str__(self) -> str:
        return f"{self.label or 'group'} {','.join(map(str, self.ranks))}#{self.ordinal}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One thing that a rank did, does, or is about to do. Times: ns; 0 is still to come.

    number: of the record on its rank, from 1 on. group, sequence, verb, dtype, signature: of collectives and
    messages; sequence counts the collectives of a group, or the messages of a group from one rank to one
    other, from 0 on. peer: of a SEND whom it goes to, of a RECEIVE whom it comes from. bytes: of the larger
    of a collective's two tensors, otherwise what this rank sends or receives.
    """

    kind: RecordKind
    name: Name
    step: int = NOBODY
    enqueued: int = 0
    started: int = 0
    ended: int = 0
    failed: bool = False
    group: RingGroup | None = None
    sequence: int = 0
    peer: int = NOBODY
    bytes: int = 0
    verb: str = ""
    dtype: str = ""
    signature: int = 0
    number: int = 0

    @property
    def open(self) -> bool:
        """Whether it is under way, or waits to be."""
        return not self.ended


@dataclass(frozen=True, kw_only=True)
class Header:
    """Who writes a ring.

    pid, process_started: tell the process from another one of its number (ticks since boot). boot: of the
    kernel, whose monotonic clock all its processes share. monotonic, wall: one moment on both clocks, ns;
    uncertain: by how much they may be apart, ns. attempt: how often the run was started before. token: of
    this file and its names alone. step, stepped: the step under way, counted from 0, and when it began, ns.
    closed: when the writer ended in good order, 0 if it has not.
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
    step: int = NOBODY
    stepped: int = 0
    closed: int = 0

    def pack(self) -> bytes:
        """As it stands in the file."""
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
        """Raises DataError for what is no ring, or one of another version."""
        if len(data) < HEADER or data[: len(MAGIC)] != MAGIC:
            raise DataError("it is no ring, or cut off within its first page")
        _, version, header, record, _, capacity, *rest = _HEADER.unpack_from(data)
        if (version, header, record) != (VERSION, HEADER, RECORD.size):
            raise DataError(f"it is a ring of version {version}; this Plait reads version {VERSION}")
        if not 1 <= capacity <= CAPACITY or capacity & (capacity - 1):
            raise DataError(f"its header is damaged: a ring of {capacity} records, where {CAPACITY} are the most")
        rank, world, local, attempt, pid, process, token, uncertain, step, stepped, closed, monotonic, wall = rest[:13]
        if not 0 <= rank < world <= MOST_RANKS or not 0 <= local < world:
            raise DataError(f"its header is damaged: rank {rank} of {world}, {local} on its host")
        host, boot, plan = (text.rstrip(b"\0").decode("utf-8", "replace") for text in rest[13:])
        return Header(
            rank=rank, world=world, host=host, pid=pid, plan=plan, local_rank=local, attempt=attempt,
            process_started=process, boot=boot, monotonic=monotonic, wall=wall, uncertain=uncertain, token=token,
            capacity=capacity, step=step, stepped=stepped, closed=closed,
        )  # fmt: skip


@dataclass(frozen=True)
class Ring:
    """A rank's ring as it was when it was read.

    table: one row per record, in the order of their beginning, with the columns ``FIELDS`` and ``number``;
    its numbers stand for ``names`` and ``groups``. torn: records that were just being written. problems: what
    else could not be read, in words.
    """

    header: Header
    table: np.ndarray
    names: dict[int, Name]
    groups: dict[int, RingGroup]
    torn: int = 0
    problems: tuple[str, ...] = ()

    @property
    def rank(self) -> int:
        """Whose it is."""
        return self.header.rank

    def records(self, rows: np.ndarray | slice = slice(None)) -> list[Record]:
        """The records of some rows, such as ``ring.table["step"] == 7``; of all, if not told."""
        return [self._record(row) for row in self.table[rows].tolist()]

    def open(self) -> list[Record]:
        """What has begun and not ended: what the rank is at, and what it has in flight."""
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
    """The ring in a file, whether its writer runs, has ended or was killed.

    Raises DataError for a file that is missing, truncated, foreign, damaged or of another version.
    """
    try:
        with open_ring(path) as file:
            data = file.read(HEADER)
            header = Header.unpack(data)
            size, there = HEADER + header.capacity * RECORD.size, os.fstat(file.fileno()).st_size
            if there != size:
                raise DataError(f"it has {there} bytes, by its header {size}")
            data += file.read(size - HEADER)  # not mapped: a file that shrinks under a map ends the process
        if len(data) != size:
            raise DataError("it has become shorter")
    except OSError as error:
        raise DataError(f"{path} cannot be read as a ring: {error.strerror or error}") from None
    except DataError as error:
        raise DataError(f"{path} cannot be read as a ring: {error}") from None
    table, torn = _table(data, header.capacity)
    names, groups, problems = read_names(path.with_suffix(".names"), header.token)
    return Ring(header, table, names, groups, torn, problems)


def open_ring(path: Path) -> BinaryIO:
    """Its file. Raises OSError, and DataError for a pipe, at which one would wait, and for a device."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise DataError("it is no file")
    return open(path, "rb")


def read_rings(folder: Path, problems: list[str]) -> Iterator[Ring]:
    """All rings of a folder by rank, one after the other: of many ranks they fill a memory. problems: gets in
    words what was left out."""
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
    """A record's, for NumPy."""
    import numpy as np

    kinds = {"I": "<u4", "B": "u1", "H": "<u2", "q": "<i8", "i": "<i4"}
    return np.dtype([(name, kinds[code]) for name, code in zip(FIELDS, RECORD.format[1:], strict=True)])


@cache
def _numbered_type() -> np.dtype[np.void]:
    import numpy as np

    return np.dtype([*row_type().descr, ("number", "<i8")])


def numbered(rows: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Records with their numbers, the form of ``Ring.table``."""
    import numpy as np

    table = np.empty(len(rows), _numbered_type())
    whole = table.view(np.uint8).reshape(len(rows), table.itemsize)  # field by field takes ten times as long
    whole[:, : RECORD.size] = np.ascontiguousarray(rows).view(np.uint8).reshape(len(rows), RECORD.size)
    table["number"] = numbers
    return table


def whole_rows(rows: np.ndarray) -> np.ndarray:
    """Which records are neither torn nor damaged."""
    whole = (rows["opened"] == rows["closed"]) & (rows["kind"] > 0) & (rows["kind"] <= max(RecordKind))
    return whole & (rows["call"] & 15 < len(VERBS)) & (rows["call"] >> 4 < len(DTYPES))


def _table(data: bytes, capacity: int) -> tuple[np.ndarray, int]:
    """The records that are whole, numbered, and how many are torn."""
    import numpy as np

    found = np.frombuffer(data, row_type(), capacity, HEADER)
    opened, slots = found["opened"].astype(np.int64), np.arange(capacity)
    whole = whole_rows(found) & ((opened - 1) % capacity == slots)
    torn = int(np.count_nonzero(~whole & ((opened != 0) | (found["closed"] != 0))))
    kept, numbers = found[whole], opened[whole]
    if len(numbers):  # words of 32 bits: those of a long run go round, so they are compared with one of them
        numbers = numbers[0] + (numbers - numbers[0] + (1 << 31)) % (1 << 32) - (1 << 31)
    order = np.argsort(numbers)
    return numbered(kept[order], numbers[order]), torn


def read_names(path: Path, token: int) -> tuple[dict[int, Name], dict[int, RingGroup], tuple[str, ...]]:
    """What the numbers of a ring with this token stand for, and in words what could not be read. A last line
    that was cut off belongs to no record yet."""
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
                    return names, groups, (f"{path} has a line that means nothing here: {other}",)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        return names, groups, (f"{path} cannot be read, so that names and groups are unknown: {error}",)
    return names, groups, ()
