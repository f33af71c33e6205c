"""Traces of the PyTorch profiler (Kineto's JSON) as spans.

| what                                                                 | is                                 |
|----------------------------------------------------------------------|------------------------------------|
| events ``X`` of ``kernel``, ``gpu_memcpy``, ``gpu_memset``           | known: what a device did           |
| events ``X`` of ``cpu_op`` and ranges such as ``gloo:all_reduce``    | known: what a trace without kernels|
|                                                                      | tells, and who launched a kernel   |
| ``cuda_runtime``, ``cuda_driver``: ``correlation``                   | known: when a kernel was launched  |
| ``user_annotation``, ``gpu_user_annotation``: ``ProfilerStep#N``     | known: steps; without, all is one  |
| ``args``: "Collective name", "Process Group ...", "Seq", "dtype",    | known, on kernels and on           |
| "In msg nelems", "Group size", "Rank", "Src Rank", "Dst Rank"        | ``record_param_comms``             |
| ``distributedInfo``, ``baseTimeNanoseconds``                         | known                              |
| other phases (``M``, ``i``, ``s``, ``f``, ``C``), ``python_function``| known, not needed                  |
| ``overhead``, ``Trace``, ``cuda_sync`` and others of ``UNNEEDED``    |                                    |
| events that are no objects; kernels, operators and steps of which    | passed over, counted               |
| time, length, name or number cannot be; begin and end events; events |                                    |
| of categories that are not known                                     |                                    |
| a bare array of events, as Chrome's format allows                    | known                              |
| a file without any kernel or operator; one that is not Kineto's      | refused                            |

Communication is told by what the trace says of a kernel (``plait.diagnose.kineto_comm``); what else runs is
computation. Of kernels that run at once each counts from where the one before it ended, so that sums of
computation are times in which anything computed. A collective's wait is the part of it in which nothing did.
On a CPU operators are computation: not the scopes around them (autograd's nodes, the optimizer's step), in
which a rank may wait for others.
"""

from __future__ import annotations

import re
from array import array
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from plait.core.base.errors import DataError
from plait.core.base.numbers import LARGEST, as_number
from plait.core.base.passed_over import PassedOver
from plait.diagnose.kineto_comm import TracedWork, on_device
from plait.diagnose.kineto_host import on_host
from plait.diagnose.kineto_ops import RANGE, Comm, Listed, Ops, comm_of
from plait.diagnose.trace_columns import FOREIGN, LATEST, NS, ForeignSpans, members_of
from plait.diagnose.whose import checked_rank

STEP = re.compile(r"^ProfilerStep#(\d+)$")
KINDS = {
    "kernel": "kernels", "gpu_memcpy": "copies", "gpu_memset": "copies", "cpu_op": "operators",
    "gpu_user_annotation": "device ranges", "user_annotation": "ranges", "cuda_runtime": "launches",
    "cuda_driver": "launches", "privateuse1_runtime": "launches", "xpu_runtime": "launches",
    "Kernel": "kernels", "Memcpy": "copies", "Memset": "copies", "Operator": "operators", "Runtime": "launches",
}  # fmt: skip
"""What becomes of events, by their category; with capitals in versions of PyTorch before 1.13."""
UNNEEDED = {
    "python_function", "overhead", "Trace", "cuda_sync", "cuda_event", "cuda_profiler_range", "cpu_instant_event",
    "user_defined", "glow_runtime", "xpu_overhead", "async_cpu_to_gpu", "async_gpu",
}  # fmt: skip
"""Categories that are known and tell nothing that is asked for."""
RANGES = ("ranges", "device ranges")
WORK = ("kernels", "copies", "operators")
CODES = {kind: code for code, kind in enumerate(dict.fromkeys(KINDS.values()))}
LONGEST_NAME = 60
LONGEST_KEPT = 200
"""Characters of a name by which an event is told."""
MOST_EVENTS, MOST_COLLECTIVES = 1_000_000, 300_000
"""Of one trace that are kept: to read and explain so many takes five seconds and 600 MB."""
MOST_NAMES = 200_000
OTHERS, OTHERS_FOR_EACH = 1_000_000, 8
"""Events that are no spans from which on a trace is refused, if they are so many times the others."""
DAMAGED = 100_000
"""Events that cannot be used from which on a trace is refused, if they are more than the others."""

_NUMBERS, _LATEST = (int, float), LATEST * 1e6
_NOTHING: dict[str, Any] = {}


PAIRS = "begin and end events, which are not read"


class TraceFacts(NamedTuple):
    """What a trace says of its job. rank: None where it does not. groups: how many it lists."""

    rank: int | None
    world: int | None
    groups: int


class ComputeEvents(NamedTuple):
    """Events that tell what a rank computes: how many, and how many of them cannot be read."""

    kind: str
    count: int
    unread: int


class TraceEvents:
    """Events of one rank's trace as they are read: a number for each of its kinds, names, threads."""

    def __init__(self, over: PassedOver) -> None:
        self.over = over
        self.start, self.length = array("d"), array("d")
        self.kind, self.name, self.thread = array("b"), array("q"), array("q")
        self.external, self.correlation = array("q"), array("q")
        self.comm, self.seq = array("q"), array("q")
        self.names: dict[str, int] = {}
        self.threads: dict[str, int] = {}
        self.comms: dict[Comm, int] = {}
        self.damaged = self.others = self.collectives = 0
        self.unusable = ""
        self.unread: Counter[str] = Counter()

    def add(self, event: Any) -> None:
        """One of ``traceEvents``. Raises ValueError for a trace that is none, or too long."""
        if type(event) is not dict:
            return self._damaged("events that are no objects")
        if event.get("ph") != "X":
            return self._other(event.get("ph"))
        name, category = event.get("name"), event.get("cat")
        kind = KINDS.get(category) if type(category) is str else None
        if kind is None or kind in RANGES:
            if type(name) is not str or not (RANGE.match(name) or STEP.match(name)):
                if kind is None and category not in UNNEEDED:
                    self.over.note("events of other categories", str(category)[:LONGEST_NAME])
                return None
            kind = kind or "ranges"
        start, length = as_number(event.get("ts")), as_number(event.get("dur"))
        if type(name) is not str or not _possible(start, length):
            self.unread[kind] += 1
            if kind in WORK and not self.unusable:
                self.unusable = f"of '{name!s:.60}' the time is {start!r:.40}, the length {length!r:.40}"
            return self._damaged(f"{kind} of which name, time or length cannot be", name)
        number = self.names.setdefault(name[:LONGEST_KEPT], len(self.names))
        if len(self.start) >= MOST_EVENTS or number >= MOST_NAMES:
            raise ValueError(
                f"it has more than {MOST_EVENTS} kernels and operators, or {MOST_NAMES} names of them, the most that "
                "are read: profile fewer steps"
            )
        self.start.append(start)
        self.length.append(length)
        self.kind.append(CODES[kind])
        self.name.append(number)
        key = f"{event.get('pid')}/{event.get('tid')}"[:100]
        self.thread.append(self.threads.setdefault(key, len(self.threads)))
        args = event.get("args")
        if type(args) is not dict:
            args = _NOTHING
        self.external.append(_whole(args.get("External id", args.get("external id"))))
        self.correlation.append(_whole(args.get("correlation")))
        comm = self._comm(args) if "Collective name" in args else None
        self.comm.append(-1 if comm is None else self.comms.setdefault(comm, len(self.comms)))
        self.seq.append(-1 if comm is None else _whole(args.get("Seq")))
        return None

    def _comm(self, args: dict[str, Any]) -> Comm | None:
        self.collectives += 1
        if self.collectives > MOST_COLLECTIVES:
            raise ValueError(
                f"it has more than {MOST_COLLECTIVES} collectives, the most that are read: profile fewer steps"
            )
        return comm_of(args, self.over)

    def _other(self, phase: Any) -> None:
        """Not a span: names of processes, arrows between events, counters."""
        if phase in ("B", "E"):
            self.over.note(PAIRS)
        if type(phase) is not str:
            return self._damaged("events without a phase")
        self.others += 1
        if self.others >= OTHERS and self.others > OTHERS_FOR_EACH * len(self.start):
            raise ValueError(f"of its first {self.others + len(self.start)} events {len(self.start)} are of use")
        return None

    def _damaged(self, what: str, name: Any = "") -> None:
        self.over.note(what, str(name)[:LONGEST_NAME])
        self.damaged += 1
        if self.damaged >= DAMAGED and self.damaged > len(self.start):
            raise ValueError(f"of its first {self.damaged + len(self.start)} events {self.damaged} cannot be used")

    # ---- once all are read ----

    @property
    def work(self) -> ComputeEvents:
        """Kernels; of a trace without any, operators."""
        kind = "kernels" if self.unread["kernels"] or CODES["kernels"] in self.kind else "operators"
        return ComputeEvents(kind, self.unread[kind] + self.kind.count(CODES[kind]), self.unread[kind])

    def told(self, header: Mapping[str, Any]) -> TraceFacts:
        """Whose it is, as it says itself, or as the members of its groups and its place in them show. Raises
        DataError for a rank that cannot be."""
        info = header.get("distributedInfo")
        info = info if isinstance(info, dict) else {}
        groups = info.get("pg_config")
        rank = None if info.get("rank") is None else checked_rank(info["rank"])
        places = {place for comm in self.comms if (place := comm.place) is not None}
        if rank is None and len(places) == 1:
            rank = places.pop()
        world = info.get("world_size")
        if not (isinstance(world, int) and 0 < world <= LARGEST):
            world = 1 + max((max(comm.ranks) for comm in self.comms if comm.ranks), default=-1)
        return TraceFacts(rank, world or None, len(groups) if isinstance(groups, list) else 0)

    def spans(self, header: Mapping[str, Any], rank: int | None) -> tuple[ForeignSpans, TracedWork]:
        """Its spans, and what was found of communication. Raises DataError for a trace without events of
        use."""
        base = as_number(header.get("baseTimeNanoseconds"))
        if base is not None and not (type(base) is int and abs(base) <= LATEST * NS):
            raise DataError("baseTimeNanoseconds is out of range")
        ops = self._ops(_groups(header))
        device = np.isin(ops.kind, (CODES["kernels"], CODES["copies"]))
        found = on_device(ops, device, rank) if device.any() else on_host(ops, rank)
        if not len(found.compute) and not len(found.comm):
            raise DataError(self._nothing())
        steps = self._steps(ops, device=bool(device.any()))
        spans = pl.concat([_computed(ops, found), _communicated(found)])
        if device.any():
            copies = pl.Series((ops.kind == CODES["copies"])[spans["row"].to_numpy()], dtype=pl.Boolean)
            site = pl.when(copies).then(pl.lit("copies")).otherwise(pl.lit("kernels"))
            spans = spans.with_columns(site=pl.when(pl.col("kind") == "compute").then(site).otherwise("site"))
        spans = spans.with_columns(
            step=pl.Series(steps(spans["start"].to_numpy()), dtype=pl.Int64),
            rank=pl.lit(-1 if rank is None else rank, pl.Int32),
        )
        spans = _with_waits(_numbered(spans))
        first = float(spans["start"].min() or 0.0)  # type: ignore[arg-type]
        spans = spans.with_columns((pl.col("start", "end") - first) / 1e6)
        since = (base or 0) + round(first * 1e3)
        return ForeignSpans(spans.select([pl.col(name).cast(kind) for name, kind in FOREIGN.items()]), since), found

    def _nothing(self) -> str:
        """Why a trace has no events of use."""
        if count := sum(self.unread[kind] for kind in WORK):
            return f"none of its {count} kernels and operators can be read: {self.unusable} (microseconds are numbers)"
        pairs = self.over.counts.get(PAIRS, 0)
        return f"it has neither kernels nor operators{f' that are whole: {pairs} {PAIRS}' if pairs else ''}"

    def _ops(self, groups: Mapping[str, Listed]) -> Ops:
        arrays = (self.start, self.length, self.kind, self.name, self.thread, self.external, self.correlation)
        start, length, kind, name, thread, external, correlation = (np.array(one) for one in arrays)
        return Ops(
            start, length, kind, name, thread, external, correlation, np.array(self.comm), np.array(self.seq),
            list(self.names), list(self.comms), groups, CODES, self.over,
        )  # fmt: skip

    def _steps(self, ops: Ops, *, device: bool) -> Any:
        """The step of times: by the device's own ranges where the profiler wrote them."""
        numbers = np.full(len(ops.names), -1, np.int64)
        for index, name in enumerate(ops.names):
            if found := STEP.match(name):
                if len(found[1]) > 10 or int(found[1]) > LARGEST:
                    self.over.note("steps whose number cannot be", name[:LONGEST_NAME])
                else:
                    numbers[index] = int(found[1])
        for kind in ("device ranges", "ranges") if device else ("ranges",):
            marks = (ops.kind == CODES[kind]) & (numbers[ops.name] >= 0)
            if marks.any():
                order = np.argsort(ops.start[marks], kind="stable")
                begins, of = ops.start[marks][order], numbers[ops.name[marks]][order]
                return lambda at: of[np.clip(np.searchsorted(begins, at, side="right") - 1, 0, None)]
        return lambda at: np.zeros(len(at), np.int64)


def _possible(start: Any, length: Any) -> bool:
    """Whether both are numbers of microseconds; what is no number is neither less nor more."""
    if type(start) not in _NUMBERS or type(length) not in _NUMBERS:
        return False
    return abs(start) <= _LATEST and 0 <= length <= _LATEST


def _whole(value: Any) -> int:
    value = as_number(value)
    return value if type(value) is int and 0 <= value < 2**53 else -1


def _groups(header: Mapping[str, Any]) -> dict[str, Listed]:
    """Process groups by name, as far as the header lists them."""
    info = header.get("distributedInfo")
    config = info.get("pg_config") if isinstance(info, dict) else None
    found: dict[str, Listed] = {}
    for one in config if isinstance(config, list) else ():
        if isinstance(one, dict) and (ranks := members_of(one.get("ranks"), in_order=True)):
            found[str(one.get("pg_name"))] = Listed(str(one.get("pg_desc") or ""), tuple(map(int, ranks.split(","))))
    return found


# ---- spans ----


def _computed(ops: Ops, found: TracedWork) -> pl.DataFrame:
    """Computation, each from where the one before it ended."""
    rows = found.compute[np.argsort(ops.start[found.compute], kind="stable")]
    start, end = ops.start[rows], ops.start[rows] + ops.length[rows]
    before = np.concatenate([[-np.inf], np.maximum.accumulate(end)[:-1]]) if len(end) else end
    start = np.maximum(start, before)
    kept = end > start
    names = pl.Series([name[:LONGEST_NAME] for name in ops.names], dtype=pl.String)
    table = pl.DataFrame(
        {"row": rows[kept], "start": start[kept], "end": end[kept], "name": names[ops.name[rows[kept]]]}
    )
    return table.select(
        pl.col("row").cast(pl.Int64), "start", "end", "name", kind=pl.lit("compute"), site=pl.lit("operators"),
        axis=pl.lit(""), group=pl.lit(None, pl.String), seq=pl.lit(-1, pl.Int64), bytes=pl.lit(0, pl.Int64),
    )  # fmt: skip


def _communicated(found: TracedWork) -> pl.DataFrame:
    return found.comm.select(
        pl.col("row").cast(pl.Int64), "start", "end", pl.col("name").str.slice(0, LONGEST_NAME), "kind",
        pl.col("name").str.slice(0, LONGEST_NAME).alias("site"), "axis", "group", "seq", "bytes",
    )  # fmt: skip


def _numbered(spans: pl.DataFrame) -> pl.DataFrame:
    """Occurrences of communication that the trace does not number: in each group, in the order of starts; of
    transfers over all steps, since their ends may count steps differently."""
    spans = spans.sort("start")
    keys = ["kind", "group", pl.when(pl.col("kind") == "transfer").then(pl.lit("")).otherwise("name")]
    step = pl.when(pl.col("kind") == "transfer").then(pl.lit(0, pl.Int64)).otherwise("step")
    told = (pl.col("seq") >= 0).all().over(keys) & (pl.col("kind") == "comm")
    order = pl.int_range(pl.len()).over([*keys, step])
    return spans.with_columns(seq=pl.when(told).then("seq").when(pl.col("kind") == "compute").then(-1).otherwise(order))


def _with_waits(spans: pl.DataFrame) -> pl.DataFrame:
    """A wait for every collective, with its number: as long as nothing computed while it ran, at its end.
    What overlaps an earlier one counts once."""
    comm = spans.filter(pl.col("kind").is_in(["comm", "transfer"])).sort("start")
    if comm.is_empty():
        return spans
    busy = spans.filter(pl.col("kind") == "compute").sort("start")
    until = comm["end"].cum_max().shift(1).fill_null(-np.inf).to_numpy()
    start, end = np.maximum(comm["start"].to_numpy(), until), comm["end"].to_numpy()
    hidden = _busy_before(busy, end) - _busy_before(busy, np.minimum(start, end))
    alone = np.clip(np.clip(end - start, 0, None) - hidden, 0, None)
    waits = comm.with_columns(start=pl.Series(end - alone), kind=pl.lit("wait"), bytes=pl.lit(0, pl.Int64))
    return pl.concat([spans, waits.filter(pl.col("end") > pl.col("start")).select(spans.columns)])


def _busy_before(busy: pl.DataFrame, at: np.ndarray) -> np.ndarray:
    """Microseconds before each time in which anything computed. busy: in order, without overlaps."""
    if busy.is_empty():
        return np.zeros(len(at))
    begin, end = busy["start"].to_numpy(), busy["end"].to_numpy()
    total = np.concatenate([[0.0], np.cumsum(end - begin)])
    index = np.searchsorted(begin, at, side="right")
    over = np.where(index > 0, np.clip(end[np.clip(index - 1, 0, None)] - at, 0, None), 0.0)
    return total[index] - over
