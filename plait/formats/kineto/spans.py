"""Spans of one rank from a PyTorch profiler trace: computation, communication and waits.

Kernels that do not communicate are computation. Overlapping kernels each count from the end of the
kernel before, so that sums of computation are busy times. A collective's wait is its part without
concurrent computation. On a CPU operators are computation, but not the scopes around them (autograd
nodes, the optimizer's step), in which a rank may wait for other ranks.

A kernel communicates if one of these says so, in this order: the kernel's own "Collective name";
the operator that launched it (``record_param_comms``, ``nccl:...``, ``c10d::...``), found by
"External id", else by ``correlation`` and launch time; the device range around it
(``nccl:all_reduce``); the names of known libraries. The operator's name decides if it is a
point-to-point transfer, because NCCL runs all-to-all with send and receive kernels.

A trace without kernels, as of a CPU, has operators and ranges of process groups. A ``c10d``
operator and its backend's range are one call. It begins with the operator, which may itself wait
(``recv``), and ends with the range, which a thread of the process group may have written.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

from plait.core.base.errors import DataError
from plait.core.base.numbers import LARGEST, as_number
from plait.formats.base.recordings import FOREIGN, LATEST, NS, ForeignSpans, axis_of
from plait.formats.kineto.events import CODES, LONGEST_NAME, MESSAGE, RANGE, STEP, Comm, Ops, TraceEvents

DISPATCHED = re.compile(r"^(c10d::|_c10d_functional::|c10d_functional::)")
RECORDED = "record_param_comms"
WITHIN = re.compile(rf"^{RECORDED}$|{DISPATCHED.pattern}|^symm_mem::|{RANGE.pattern}", re.IGNORECASE)
LIBRARIES = re.compile(
    r"(?<![a-z])(n|r|x|h|m|e|one|ms|t)?cclx?(pp)?(dev)?_?(kernel|main|send|recv|::)|nvshmem|rocshmem|deep_ep|cross_device_reduce"
    r"|(?<![a-z])(all_?reduce|reduce_?scatter|all_?gather|all_?to_?all|alltoallv?|send_?recv)"
    r"|(?-i:AllReduce|ReduceScatter|AllGather|AllToAll|SendRecv)", re.IGNORECASE,
)  # fmt: skip
COMPUTES = re.compile(r"^(triton_|void at::|void cutlass|cutlass|at::|sm\d\d_)")
"""Names of kernels that always are computation; compilers name a kernel after the operations that
it fuses."""
BOTH = re.compile(r"send_?recv", re.IGNORECASE)
LOOK_BACK = 8
"""The number of nested operators of a thread that are searched for the launching operator."""
NOT_WORK = re.compile(
    r"^(autograd::|torch::autograd::|torch::dynamo|nn\.Module|ProfilerStep|profiler::)|^[^:]+$|Backward\d*$"
)
"""Names of scopes around operators; a rank may wait in a scope, and its computation is in operators
within."""
INSTEAD = {"reducescatter": ("allreduce",), "recvanysource": ("recv",)}
"""Collectives that a backend runs in place of an operator: gloo has no reduce-scatter of its
own."""
WAITING = 256
"""The largest number of calls that wait for their range."""


class TracedWork(NamedTuple):
    """A trace's work. compute: indices of computation events. comm: a row per communication, times
    in microseconds. unknown_groups: number of communication rows of unknown process group."""

    compute: np.ndarray
    comm: pl.DataFrame
    unknown_groups: int


# ---- on a device ----


def on_device(ops: Ops, device: np.ndarray, rank: int | None) -> TracedWork:
    """Return a device's computation and communication. device: for every event, True for a kernel
    or a copy."""
    rows = np.flatnonzero(device)
    kernels = ops.kind[rows] == CODES["kernels"]
    launches = _Launches(ops)
    launcher = launches.of(rows)
    within = ops.named(WITHIN)
    communicates = kernels & ((ops.comm[rows] >= 0) | ((launcher >= 0) & within[np.clip(launcher, 0, None)]))
    ranges = _ranges_around(ops, rows)
    known = ops.named(LIBRARIES)[rows] & ~ops.named(COMPUTES)[rows]
    communicates |= kernels & ((ranges >= 0) | known)
    made = [_row(ops, int(rows[at]), launches, int(ranges[at]), rank) for at in np.flatnonzero(communicates)]
    untold = sum(one[-1] for one in made)
    return TracedWork(rows[~communicates], table_of([one[:-1] for one in made]), untold)


def _by_thread(ops: Ops, rows: np.ndarray) -> dict[int, np.ndarray]:
    """Return the events of every thread, in order of their starts."""
    rows = rows[np.lexsort((ops.start[rows], ops.thread[rows]))]
    threads, first = np.unique(ops.thread[rows], return_index=True)
    return dict(zip(threads.tolist(), np.split(rows, first[1:]), strict=False))


class _Launches:
    """The operators that launched kernels."""

    def __init__(self, ops: Ops) -> None:
        self.ops = ops
        operators, ranges = ops.rows("operators"), ops.rows("ranges")
        told = np.concatenate([operators, ranges[ops.named(RANGE)[ranges]]])
        self.by_external = self._first(told, ops.external)
        self.by_correlation = self._first(ops.rows("launches"), ops.correlation)
        host = np.isin(ops.kind, (CODES["operators"], CODES["ranges"]))
        self.comms = _by_thread(ops, np.flatnonzero(host & ops.named(WITHIN)))
        self.operators = _by_thread(ops, operators)

    @staticmethod
    def _first(rows: np.ndarray, keys: np.ndarray) -> dict[int, int]:
        """Return the first event (its index) by key. rows: events. keys: the key of each; keys
        below 0 mean none."""
        rows = rows[keys[rows] >= 0][::-1]
        return dict(zip(keys[rows].tolist(), rows.tolist(), strict=True))

    def of(self, rows: np.ndarray) -> np.ndarray:
        """Return the innermost operator that launched each kernel; -1 if unknown."""
        external = self.ops.external[rows]
        found = np.array([self.by_external.get(key, -1) for key in external.tolist()], np.int64)
        for at in np.flatnonzero(external < 0):
            call = self.by_correlation.get(int(self.ops.correlation[rows[at]]), -1)
            found[at] = next(iter(self._around(self.operators, call)), -1)
        return found

    def _before(self, threads: dict[int, np.ndarray], event: int) -> list[int]:
        """Return the events of ``event``'s thread that began before ``event``, the latest first."""
        own = threads.get(int(self.ops.thread[event]), np.zeros(0, np.int64))
        at = int(np.searchsorted(self.ops.start[own], float(self.ops.start[event]), side="right"))
        return own[max(0, at - LOOK_BACK) : at][::-1].tolist()

    def _around(self, threads: dict[int, np.ndarray], event: int) -> list[int]:
        """Return the events within which ``event`` began, the innermost first; empty if ``event``
        is negative."""
        if event < 0:
            return []
        start, length = self.ops.start, self.ops.length
        return [row for row in self._before(threads, event) if start[row] + length[row] >= start[event]]

    def comm_operators(self, row: int) -> list[int]:
        """Return the communication operators around a kernel's launch, the outermost first. For a
        launch at the end of a batch of messages, return the last message before it."""
        launch = self.by_external.get(int(self.ops.external[row]), -1)
        if launch < 0:
            launch = self.by_correlation.get(int(self.ops.correlation[row]), -1)
        if launch < 0:
            return []
        last = self._before(self.comms, launch)[:1]
        messages = [one for one in last if MESSAGE.match(plain(self.ops.name_of(one)))]
        return self._around(self.comms, launch)[::-1] or messages


def _ranges_around(ops: Ops, rows: np.ndarray) -> np.ndarray:
    """Return for every kernel the communication range around it on its stream; -1 for none."""
    ranges = ops.rows("device ranges")
    found = np.full(len(rows), -1, np.int64)
    for thread, own in _by_thread(ops, ranges[ops.named(RANGE)[ranges]]).items():
        mine = np.flatnonzero(ops.thread[rows] == thread)
        at = np.searchsorted(ops.start[own], ops.start[rows[mine]], side="right") - 1
        last = own[np.clip(at, 0, None)]
        inside = (at >= 0) & (ops.start[last] + ops.length[last] > ops.start[rows[mine]])
        found[mine[inside]] = last[inside]
    return found


def _row(ops: Ops, row: int, launches: _Launches, around: int, rank: int | None) -> tuple[Any, ...]:
    """Return (row of ``table_of`` for a communication kernel, True if its process group is
    unknown). around: the communication range around it, -1 for none."""
    around_it = [] if ops.comm[row] >= 0 else launches.comm_operators(row)
    said = next((one for one in (row, *around_it) if ops.comm_of(one)), -1)
    named = [ops.name_of(one) for one in (*around_it, *([around] if around >= 0 else []))]
    own = ops.name_of(row).partition("(")[0]
    comm = ops.comm_of(said)
    name = comm.name if comm else next((plain(one) for one in named if one != RECORDED), own)
    message = bool(MESSAGE.match(name))
    if not message and comm is None and BOTH.search(name):
        ops.over.note("kernels of send and receive of an unknown operation", name[:60])
    start = float(ops.start[row])
    return (*row_of(row, (start, float(start + ops.length[row])), name, said, ops, rank), comm is None)


# ---- on a host ----


def on_host(ops: Ops, rank: int | None) -> TracedWork:
    """Return the computation and communication of a trace without kernels: its operators, and the
    ranges of its process groups. A range begins with the operator that called it, if there is
    one."""
    operators = ops.rows("operators")
    calls = operators[(ops.named(DISPATCHED) & ~ops.named(re.compile("::(wait_tensor|monitored)")))[operators]]
    waits = ops.named(DISPATCHED) | ops.named(re.compile(RECORDED)) | ops.named(RANGE)
    work = operators[(~ops.named(NOT_WORK) & ~waits)[operators]]
    ranges = np.flatnonzero(ops.named(RANGE) & np.isin(ops.kind, [CODES[kind] for kind in ("ranges", "operators")]))
    rows = [_called(ops, int(one), call, rank) for one, call in _paired(ops, calls, ranges)]
    return TracedWork(_outermost(ops, work), table_of(rows), sum(ops.comm_of(int(one[0])) is None for one in rows))


def _paired(ops: Ops, calls: np.ndarray, ranges: np.ndarray) -> list[tuple[int, int]]:
    """Return each range with its calling operator (-1 for none): the first earlier one of its kind
    that has no range yet. Without any range, return each operator with itself."""
    calls, ranges = (rows[np.argsort(ops.start[rows], kind="stable")] for rows in (_outermost(ops, calls), ranges))
    if not len(ranges):
        return [(int(one), int(one)) for one in calls]
    found: list[tuple[int, int]] = []
    waiting: deque[tuple[str, int]] = deque(maxlen=WAITING)
    comes = 0
    for one in ranges:
        while comes < len(calls) and ops.start[calls[comes]] <= ops.start[one]:
            waiting.append((_family(ops.name_of(int(calls[comes]))), int(calls[comes])))
            comes += 1
        own = _family(ops.name_of(int(one)))
        fits = next((call for call in waiting if call[0] == own or own in INSTEAD.get(call[0], ())), None)
        if fits:
            waiting.remove(fits)
        found.append((int(one), fits[1] if fits else -1))
    return found


def _family(name: str) -> str:
    """Return the kind of collective: ``allgather`` for ``c10d::_allgather_base_`` and
    ``gloo:all_gather``."""
    letters = re.sub("[^a-z]", "", plain(name).lower())
    return re.sub("(base|coalesced|intotensor|tensor|single)+", "", letters)


def _called(ops: Ops, row: int, call: int, rank: int | None) -> tuple[Any, ...]:
    said = next((one for one in (row, call) if ops.comm_of(one)), -1)
    comm = ops.comm_of(said)
    start = float(ops.start[row if call < 0 else call])
    end = float(ops.start[row] + ops.length[row])
    told = plain(ops.name_of(call)) if call >= 0 else ops.name_of(row)
    return row_of(row, (start, end), comm.name if comm else told, said, ops, rank)


def _outermost(ops: Ops, rows: np.ndarray) -> np.ndarray:
    """Return the outermost operators of each thread."""
    order = np.lexsort((-ops.length[rows], ops.start[rows], ops.thread[rows]))
    table = pl.DataFrame({"row": rows[order], "thread": ops.thread[rows[order]], "start": ops.start[rows[order]]})
    table = table.with_columns(end=table["start"] + pl.Series(ops.length[rows[order]]))
    before = pl.col("end").cum_max().over("thread").shift(1).over("thread")
    return table.filter((pl.col("start") >= before).fill_null(value=True))["row"].to_numpy()


# ---- rows ----


def row_of(
    row: int, when: tuple[float, float], name: str, comm_event: int, ops: Ops, rank: int | None
) -> tuple[Any, ...]:
    """Return an event's row of ``table_of``, by its name and its recorded collective.

    when: start and end in microseconds. comm_event: the event that records the collective, -1 for
    none. rank: of the trace, None if unknown.
    """
    (start, end), comm, seq = when, ops.comm_of(comm_event), int(ops.seq[comm_event]) if comm_event >= 0 else -1
    only = next(iter(ops.groups.values())) if len(ops.groups) == 1 else None
    listed = ops.groups.get(comm.group) if comm and comm.group else only
    ranks = (comm.ranks if comm else ()) or (listed.ranks if listed else ())
    label = (comm.label if comm else "") or (listed.label if listed else "") or (comm.group if comm else "")
    if MESSAGE.match(name):
        return row, start, end, "transfer", name, "pp", _ends(name, comm, ranks, rank), -1, comm.bytes if comm else 0
    group = ",".join(map(str, sorted(ranks))) or label or "all"
    return row, start, end, "comm", name, axis_of(label), group, seq, comm.bytes if comm else 0


def _ends(name: str, comm: Comm | None, ranks: Sequence[int], rank: int | None) -> str | None:
    """Return ``from>to`` for a message of ``rank``; None if the peer is unknown. A group of two
    implies the peer."""
    if rank is None:
        return None
    others = [one for one in ranks if one != rank]
    only = others[0] if len(ranks) == 2 and len(others) == 1 else None
    sends = "send" in name.lower()
    told = (comm.target if sends else comm.source) if comm else None
    peer = only if told is None else told
    return None if peer is None else f"{rank}>{peer}" if sends else f"{peer}>{rank}"


def plain(name: str) -> str:
    """Return an operator's name without its backend's prefix: ``all_reduce`` for
    ``nccl:all_reduce``, ``allreduce`` for ``c10d::allreduce_``."""
    return re.sub(r"^(\w+::?)+", "", name).removesuffix("_")


def table_of(rows: Sequence[tuple[Any, ...]]) -> pl.DataFrame:
    """Return a table of communication, times in microseconds; column ``row`` has the event."""
    schema = {
        "row": pl.Int64, "start": pl.Float64, "end": pl.Float64, "kind": pl.String, "name": pl.String,
        "axis": pl.String, "group": pl.String, "seq": pl.Int64, "bytes": pl.Int64,
    }  # fmt: skip
    return pl.DataFrame(rows, schema=schema, orient="row")


def spans_of(events: TraceEvents, header: Mapping[str, Any], rank: int | None) -> tuple[ForeignSpans, TracedWork]:
    """Return a trace's spans, and its computation and communication. Raises DataError if the trace
    has no usable events, or an impossible base time."""
    base = as_number(header.get("baseTimeNanoseconds"))
    if base is not None and not (type(base) is int and abs(base) <= LATEST * NS):
        raise DataError("baseTimeNanoseconds is out of range")
    ops = events.ops(header)
    device = np.isin(ops.kind, (CODES["kernels"], CODES["copies"]))
    found = on_device(ops, device, rank) if device.any() else on_host(ops, rank)
    if not len(found.compute) and not len(found.comm):
        raise DataError(events.why_nothing())
    steps = _steps(ops, device=bool(device.any()))
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


def _steps(ops: Ops, *, device: bool) -> Callable[[NDArray[np.float64]], NDArray[np.int64]]:
    """Return a function from times to step numbers, by the device's step ranges if the profiler
    wrote some."""
    numbers = np.full(len(ops.names), -1, np.int64)
    for index, name in enumerate(ops.names):
        if found := STEP.match(name):
            if len(found[1]) > 10 or int(found[1]) > LARGEST:
                ops.over.note("steps with an impossible number", name[:LONGEST_NAME])
            else:
                numbers[index] = int(found[1])
    for kind in ("device ranges", "ranges") if device else ("ranges",):
        marks = (ops.kind == CODES[kind]) & (numbers[ops.name] >= 0)
        if marks.any():
            order = np.argsort(ops.start[marks], kind="stable")
            begins, of = ops.start[marks][order], numbers[ops.name[marks]][order]
            return lambda at: of[np.clip(np.searchsorted(begins, at, side="right") - 1, 0, None)]
    return lambda at: np.zeros(len(at), np.int64)


def _computed(ops: Ops, work: TracedWork) -> pl.DataFrame:
    """Return the spans of computation, each shortened to begin at the end of the span before."""
    rows = work.compute[np.argsort(ops.start[work.compute], kind="stable")]
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


def _communicated(work: TracedWork) -> pl.DataFrame:
    return work.comm.select(
        pl.col("row").cast(pl.Int64), "start", "end", pl.col("name").str.slice(0, LONGEST_NAME), "kind",
        pl.col("name").str.slice(0, LONGEST_NAME).alias("site"), "axis", "group", "seq", "bytes",
    )  # fmt: skip


def _numbered(spans: pl.DataFrame) -> pl.DataFrame:
    """Number the communication that has no sequence number: per process group, in order of starts.
    Transfers are numbered over all steps, because their two ranks may count steps differently."""
    spans = spans.sort("start")
    keys = ["kind", "group", pl.when(pl.col("kind") == "transfer").then(pl.lit("")).otherwise("name")]
    step = pl.when(pl.col("kind") == "transfer").then(pl.lit(0, pl.Int64)).otherwise("step")
    told = (pl.col("seq") >= 0).all().over(keys) & (pl.col("kind") == "comm")
    order = pl.int_range(pl.len()).over([*keys, step])
    return spans.with_columns(seq=pl.when(told).then("seq").when(pl.col("kind") == "compute").then(-1).otherwise(order))


def _with_waits(spans: pl.DataFrame) -> pl.DataFrame:
    """Return the spans with a wait added to every collective, under the same number. The wait is
    the collective's time without concurrent computation, placed at its end; overlap with an earlier
    collective counts once."""
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
    """Return the microseconds of computation before each time. busy: computation in order, without
    overlaps."""
    if busy.is_empty():
        return np.zeros(len(at))
    begin, end = busy["start"].to_numpy(), busy["end"].to_numpy()
    total = np.concatenate([[0.0], np.cumsum(end - begin)])
    index = np.searchsorted(begin, at, side="right")
    over = np.where(index > 0, np.clip(end[np.clip(index - 1, 0, None)] - at, 0, None), 0.0)
    return total[index] - over
