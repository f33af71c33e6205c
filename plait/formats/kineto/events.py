"""Events of the PyTorch profiler's traces (Kineto's JSON) as arrays, and the collectives in them.

| content                                                              | handling                           |
|----------------------------------------------------------------------|------------------------------------|
| events ``X`` of ``kernel``, ``gpu_memcpy``, ``gpu_memset``           | read: work of the device           |
| events ``X`` of ``cpu_op`` and ranges such as ``gloo:all_reduce``    | read: work in a trace without      |
|                                                                      | kernels; the launcher of a kernel  |
| ``cuda_runtime``, ``cuda_driver``: ``correlation``                   | read: launch time of a kernel      |
| ``user_annotation``, ``gpu_user_annotation``: ``ProfilerStep#N``     | read: steps; if absent, one step   |
| ``args``: "Collective name", "Process Group ...", "Seq", "dtype",    | read, on kernels and on            |
| "In msg nelems", "Group size", "Rank", "Src Rank", "Dst Rank"        | ``record_param_comms``             |
| ``distributedInfo``, ``baseTimeNanoseconds``                         | read                               |
| other phases (``M``, ``i``, ``s``, ``f``, ``C``), ``python_function``| ignored                            |
| ``overhead``, ``Trace``, ``cuda_sync`` and the rest of ``UNNEEDED``  |                                    |
| events that are no objects; kernels, operators and steps with an     | ignored, counted                   |
| impossible time, duration, name or number; begin and end events;     |                                    |
| events of unknown categories                                         |                                    |
| a bare array of events, as Chrome's format allows                    | read                               |
| a file without kernels and operators; a file that is not Kineto's    | refused                            |
"""

from __future__ import annotations

import re
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import numpy as np

from plait.core.base.codec.json_text import is_list, is_table
from plait.core.base.ignored_input import IgnoredInput
from plait.core.base.numbers import LARGEST, as_number, is_number
from plait.formats.base.recordings import LATEST, bytes_of_dtype, checked_rank, members_of

STEP = re.compile(r"^ProfilerStep#(\d+)$")
EVENT_KINDS = {
    "kernel": "kernels", "gpu_memcpy": "copies", "gpu_memset": "copies", "cpu_op": "operators",
    "gpu_user_annotation": "device ranges", "user_annotation": "ranges", "cuda_runtime": "launches",
    "cuda_driver": "launches", "privateuse1_runtime": "launches", "xpu_runtime": "launches",
    "Kernel": "kernels", "Memcpy": "copies", "Memset": "copies", "Operator": "operators", "Runtime": "launches",
}  # fmt: skip
"""The kind of events by their category; categories with capitals are of PyTorch before 1.13."""
UNNEEDED = {
    "python_function", "overhead", "Trace", "cuda_sync", "cuda_event", "cuda_profiler_range", "cpu_instant_event",
    "user_defined", "glow_runtime", "xpu_overhead", "async_cpu_to_gpu", "async_gpu",
}  # fmt: skip
"""Known categories that are not needed."""
RANGES = ("ranges", "device ranges")
WORK = ("kernels", "copies", "operators")
CODES = {kind: code for code, kind in enumerate(dict.fromkeys(EVENT_KINDS.values()))}
LONGEST_NAME = 60
LONGEST_KEPT = 200
"""Number of characters to which the names of events are cut."""
MOST_EVENTS, MOST_COLLECTIVES = 1_000_000, 300_000
"""The largest numbers of events and collectives in a trace; reading and analysis then take five
seconds and 600 MB."""
MOST_NAMES = 200_000
MOST_NON_SPANS, NON_SPANS_PER_SPAN = 1_000_000, 8
"""A trace is refused from ``MOST_NON_SPANS`` events that are no spans, if these are more than
``NON_SPANS_PER_SPAN`` times the spans."""
DAMAGED = 100_000
"""A trace is refused from this number of unusable events, if these outnumber the usable events."""
PAIRS = "begin and end events, which are not read"
RANGE = re.compile(r"^(nccl|ncclx|rccl|rcclx|gloo|mpi|ucc|xccl|hccl|mccl|oneccl|ccl|cncl|eccl|bkcl):", re.IGNORECASE)
"""Names of the ranges that process groups write around a collective: ``BACKEND:operation``."""
MESSAGE = re.compile(r"^(\w+::?)*_?(i?send|i?recv)(_any_source)?_?( \d+(->|<-)\d+)?$", re.IGNORECASE)
"""Names of point-to-point operations."""
MOST = 2**53
"""The largest number of elements in a message, and the largest sequence number."""


class Comm(NamedTuple):
    """A collective or message as recorded in a trace. group, label, ranks: name, description and
    members of the process group, empty if unknown. rank: global rank that recorded the event, None
    if unknown. source, target: the ranks of a message. bytes, bytes_out: input and output bytes, 0
    if unknown."""

    name: str
    group: str
    label: str
    ranks: tuple[int, ...]
    rank: int | None
    source: int | None
    target: int | None
    bytes: int
    bytes_out: int


class Listed(NamedTuple):
    """A process group in a trace's header."""

    label: str
    ranks: tuple[int, ...]


class Ops(NamedTuple):
    """A trace's events as arrays. start, length: microseconds. kind: as in ``CODES``. name, comm:
    index into ``names`` and ``comms``, -1 for no collective. external, correlation, seq: -1 if
    unknown. comms: distinct collectives. groups: process groups by name."""

    start: np.ndarray
    length: np.ndarray
    kind: np.ndarray
    name: np.ndarray
    thread: np.ndarray
    external: np.ndarray
    correlation: np.ndarray
    comm: np.ndarray
    seq: np.ndarray
    names: list[str]
    comms: list[Comm]
    groups: Mapping[str, Listed]
    over: IgnoredInput

    def rows(self, kind: str) -> np.ndarray:
        """Return the indices of a kind's events."""
        return np.flatnonzero(self.kind == CODES[kind])

    def name_of(self, row: int) -> str:
        """Return an event's name."""
        return self.names[int(self.name[row])]

    def comm_of(self, row: int) -> Comm | None:
        """Return an event's collective; None if it records none."""
        number = int(self.comm[row]) if row >= 0 else -1
        return self.comms[number] if number >= 0 else None

    def named(self, words: re.Pattern[str]) -> np.ndarray:
        """Return for every event whether the pattern occurs in its name."""
        return np.array([bool(words.search(name)) for name in self.names] or [False])[self.name]


COLUMNS = Ops._fields[:9]


class TraceFacts(NamedTuple):
    """A trace's job. rank, world: rank and number of ranks, None if unknown. groups: number of
    listed groups."""

    rank: int | None
    world: int | None
    groups: int


class ComputeEvents(NamedTuple):
    """The events with a rank's computation: kind, number, and how many of them are unreadable."""

    kind: str
    count: int  # pyright: ignore[reportIncompatibleMethodOverride]: tuple's is of no use here
    unread: int


class TraceEvents:
    """Events of one rank's trace while it is read; kinds, names and threads become numbers.

    over: ignored input. kept: kinds of events that are kept. operator: called with name and
    ``args`` of every operator.
    """

    def __init__(
        self,
        over: IgnoredInput,
        kinds: Collection[str] = frozenset(CODES),
        operator: Callable[[Any, Mapping[str, Any]], None] | None = None,
    ) -> None:
        self.over, self.kept, self.operator = over, kinds, operator
        self.columns: dict[str, array[Any]] = {
            name: array("q" if column > 1 else "d") for column, name in enumerate(COLUMNS)
        }
        self.count = 0
        self.names: dict[str, int] = {}
        self.threads: dict[str, int] = {}
        self.comms: dict[Comm, int] = {}
        self.damaged = self.others = self.collectives = 0
        self.unusable = ""
        self.unread: Counter[str] = Counter()

    def add(self, event: Any) -> None:
        """Add one of ``traceEvents``. Raises ValueError if the trace is too long, or is mostly
        unusable."""
        if not is_table(event):
            return self._damaged("events that are no objects")
        if event.get("ph") != "X":
            return self._other(event.get("ph"))
        name, category = event.get("name"), event.get("cat")
        kind = EVENT_KINDS.get(category) if type(category) is str else None
        if kind is None or kind in RANGES:
            if type(name) is not str or not (RANGE.match(name) or STEP.match(name)):
                if kind is None and category not in UNNEEDED:
                    self.over.note("events of other categories", str(category)[:LONGEST_NAME])
                return None
            kind = kind or "ranges"
        args = event.get("args")
        args = args if is_table(args) else {}
        if kind == "operators" and self.operator:
            self.operator(name, args)
        if kind in self.kept:
            self._keep(event, kind, args)
        return None

    def _keep(self, event: dict[str, Any], kind: str, args: dict[str, Any]) -> None:
        start, length, name = as_number(event.get("ts")), as_number(event.get("dur")), event.get("name")
        if type(name) is not str or not _possible(start, length):
            self.unread[kind] += 1
            if kind in WORK and not self.unusable:
                self.unusable = f"of '{name!s:.60}' the time is {start!r:.40}, the length {length!r:.40}"
            return self._damaged(f"{kind} of which name, time or length cannot be", name)
        number = self.names.setdefault(name[:LONGEST_KEPT], len(self.names))
        if self.count >= MOST_EVENTS or number >= MOST_NAMES:
            raise ValueError(
                f"it has more than {MOST_EVENTS} kernels and operators, or {MOST_NAMES} names of them, the most that "
                "are read: profile fewer steps"
            )
        self.count += 1
        thread = f"{event.get('pid')}/{event.get('tid')}"[:100]
        comm = self._comm(args) if "Collective name" in args else None
        values = (
            start, length, CODES[kind], number, self.threads.setdefault(thread, len(self.threads)),
            _whole(args.get("External id", args.get("external id"))), _whole(args.get("correlation")),
            -1 if comm is None else self.comms.setdefault(comm, len(self.comms)),
            -1 if comm is None else _whole(args.get("Seq")),
        )  # fmt: skip
        for column, value in zip(self.columns.values(), values, strict=True):
            column.append(value)
        return None

    def _comm(self, args: dict[str, Any]) -> Comm | None:
        self.collectives += 1
        if self.collectives > MOST_COLLECTIVES:
            raise ValueError(
                f"it has more than {MOST_COLLECTIVES} collectives, the most that are read: profile fewer steps"
            )
        return comm_of(args, self.over)

    def _other(self, phase: Any) -> None:
        """Count an event that is no span: a process name, a flow arrow, a counter."""
        if phase in ("B", "E"):
            self.over.note(PAIRS)
        if type(phase) is not str:
            return self._damaged("events without a phase")
        self.others += 1
        if self.others >= MOST_NON_SPANS and self.others > NON_SPANS_PER_SPAN * self.count:
            raise ValueError(f"of its first {self.others + self.count} events {self.count} are of use")
        return None

    def _damaged(self, what: str, name: Any = "") -> None:
        self.over.note(what, str(name)[:LONGEST_NAME])
        self.damaged += 1
        if self.damaged >= DAMAGED and self.damaged > self.count:
            raise ValueError(f"of its first {self.damaged + self.count} events {self.damaged} cannot be used")

    # ---- after all events are read ----

    @property
    def work(self) -> ComputeEvents:
        """The kernels, or, in a trace without kernels, the operators."""
        kinds = self.columns["kind"]
        kind = "kernels" if self.unread["kernels"] or CODES["kernels"] in kinds else "operators"
        return ComputeEvents(kind, self.unread[kind] + kinds.count(CODES[kind]), self.unread[kind])

    def facts(self, header: Mapping[str, Any]) -> TraceFacts:
        """Return the trace's rank and world size from its header, else from the group members and
        the rank's place in the groups. Raises DataError for an impossible rank."""
        info = header.get("distributedInfo")
        info = info if is_table(info) else {}
        groups = info.get("pg_config")
        rank = None if info.get("rank") is None else checked_rank(info["rank"])
        recorders = {recorder for comm in self.comms if (recorder := comm.rank) is not None}
        if rank is None and len(recorders) == 1:
            rank = recorders.pop()
        world = info.get("world_size")
        if not (isinstance(world, int) and 0 < world <= LARGEST):
            world = 1 + max((max(comm.ranks) for comm in self.comms if comm.ranks), default=-1)
        return TraceFacts(rank, world or None, len(groups) if is_list(groups) else 0)

    def why_nothing(self) -> str:
        """Return why a trace has no usable events, after all are read."""
        if count := sum(self.unread[kind] for kind in WORK):
            return f"none of its {count} kernels and operators can be read: {self.unusable} (microseconds are numbers)"
        pairs = self.over.counts.get(PAIRS, 0)
        return f"it has neither kernels nor operators{f' that are whole: {pairs} {PAIRS}' if pairs else ''}"

    def ops(self, header: Mapping[str, Any]) -> Ops:
        """Return all events as arrays. header: the rest of the file."""
        columns = {name: np.array(column) for name, column in self.columns.items()}
        return Ops(**columns, names=list(self.names), comms=list(self.comms), groups=_groups(header), over=self.over)


def _possible(start: Any, length: Any) -> bool:
    """True if both are possible numbers of microseconds; False for NaN."""
    known = type(start) in (int, float) and type(length) in (int, float)
    return known and abs(start) <= LATEST * 1e6 and 0 <= length <= LATEST * 1e6


def _whole(value: Any) -> int:
    value = as_number(value)
    return value if type(value) is int and 0 <= value < MOST else -1


def _groups(header: Mapping[str, Any]) -> dict[str, Listed]:
    """Return the process groups in the header by name."""
    info = header.get("distributedInfo")
    config = info.get("pg_config") if is_table(info) else None
    found: dict[str, Listed] = {}
    for one in config if is_list(config) else ():
        if is_table(one) and (ranks := members_of(one.get("ranks"))):
            found[str(one.get("pg_name"))] = Listed(str(one.get("pg_desc") or ""), ranks)
    return found


def comm_of(args: Mapping[str, Any], over: IgnoredInput) -> Comm | None:
    """Return the collective in an event's ``args``; None if there is none."""
    name = args.get("Collective name")
    if not isinstance(name, str) or not name:
        return None
    ranks = members_of(args.get("Process Group Ranks")) or ()
    if not ranks and args.get("Process Group Ranks") and "..." not in str(args["Process Group Ranks"])[-9:]:
        over.note("groups with impossible members, taken as unknown", "Process Group Ranks")
    if "Seq" in args and not (isinstance(seq := as_number(args["Seq"]), int) and 0 <= seq <= MOST):
        over.note("impossible sequence numbers, taken as unknown", "Seq")
    counts = [as_number(args.get(f"{side} msg nelems")) for side in ("In", "Out")]
    item = bytes_of_dtype(str(args.get("dtype")))
    if any(is_number(count) and not 0 <= count <= MOST for count in counts):
        over.note("impossible sizes, taken as unknown", "In msg nelems")
    sent, came = (int(count) * item if is_number(count) and 0 <= count <= MOST else 0 for count in counts)
    group_rank, source, target = (_whole(args.get(key)) for key in ("Rank", "Src Rank", "Dst Rank"))
    known = not MESSAGE.match(name) and 0 <= group_rank < len(ranks)
    return Comm(
        name=name[:200], group=str(args.get("Process Group Name") or "")[:200],
        label=str(args.get("Process Group Description") or "")[:200], ranks=ranks,
        rank=ranks[group_rank] if known else None, source=source if source >= 0 else None,
        target=target if target >= 0 else None, bytes=sent, bytes_out=came,
    )  # fmt: skip
