"""Which of a trace's kernels and operators communicate, and what they do.

Told by, in this order: what the trace says of the kernel itself ("Collective name"); the operator that
launched it (``record_param_comms``, ``nccl:...``, ``c10d::...``), by "External id", else by ``correlation``
and when it was launched; the device's range in which it ran (``nccl:all_reduce``); the names of known
libraries. Whether it is a transfer between two ranks is told by the operator's name: NCCL sends all-to-all
with the kernels of send and receive.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from plait.diagnose.kineto_ops import MESSAGE, RANGE, Comm, Ops
from plait.diagnose.trace_columns import axis_of

DISPATCHED = re.compile(r"^(c10d::|_c10d_functional::|c10d_functional::)")
RECORDED = "record_param_comms"
WITHIN = re.compile(rf"^{RECORDED}$|{DISPATCHED.pattern}|^symm_mem::|{RANGE.pattern}", re.IGNORECASE)
LIBRARIES = re.compile(
    r"(?<![a-z])(n|r|x|h|m|e|one|ms|t)?cclx?(pp)?(dev)?_?(kernel|main|send|recv|::)|nvshmem|rocshmem|deep_ep|cross_device_reduce"
    r"|(?<![a-z])(all_?reduce|reduce_?scatter|all_?gather|all_?to_?all|alltoallv?|send_?recv)"
    r"|(?-i:AllReduce|ReduceScatter|AllGather|AllToAll|SendRecv)", re.IGNORECASE,
)  # fmt: skip
COMPUTES = re.compile(r"^(triton_|void at::|void cutlass|cutlass|at::|sm\d\d_)")
"""Kernels that are computation, whatever words their names have: compilers name them after what they fuse."""
BOTH = re.compile(r"send_?recv", re.IGNORECASE)
LOOK_BACK = 8
"""Operators of a thread, one around the other, among which the one that launched is looked for."""


class TracedWork(NamedTuple):
    """compute: events. comm: communication, times in microseconds, a row each. untold: how many of these say
    nothing of their groups."""

    compute: np.ndarray
    comm: pl.DataFrame
    untold: int


# ---- on a device ----


def on_device(ops: Ops, device: np.ndarray, rank: int | None) -> TracedWork:
    """Kernels that compute and those that communicate. device: whether an event is a kernel or a copy."""
    rows = np.flatnonzero(device)
    kernels = ops.kind[rows] == ops.codes["kernels"]
    launches = _Launches(ops)
    launcher = launches.of(rows)
    within = ops.named(WITHIN)
    communicates = kernels & ((ops.comm[rows] >= 0) | ((launcher >= 0) & within[np.clip(launcher, 0, None)]))
    ranges = _ranges_around(ops, rows)
    known = ops.named(LIBRARIES)[rows] & ~ops.named(COMPUTES)[rows]
    communicates |= kernels & ((ranges >= 0) | known)
    made = [_row(ops, int(row), launches, int(ranges[at]), rank) for at, row in _pick(rows, communicates)]
    untold = sum(one[-1] for one in made)
    return TracedWork(rows[~communicates], table_of([one[:-1] for one in made]), untold)


def _pick(rows: np.ndarray, chosen: np.ndarray) -> list[tuple[int, int]]:
    return [(int(at), int(rows[at])) for at in np.flatnonzero(chosen)]


class _Launches:
    """Which operators launched kernels."""

    def __init__(self, ops: Ops) -> None:
        self.ops = ops
        host = np.isin(ops.kind, (ops.codes["operators"], ops.codes["ranges"]))
        self.operators = ops.rows("operators")
        ranges = ops.rows("ranges")
        told = np.concatenate([self.operators, ranges[ops.named(RANGE)[ranges]]])
        self.by_external = self._sorted(told, ops.external)
        self.by_correlation = self._sorted(ops.rows("launches"), ops.correlation)
        mine = np.flatnonzero(host & ops.named(WITHIN))
        self.comms = {int(t): mine[ops.thread[mine] == t] for t in np.unique(ops.thread[mine])}
        for thread, own in self.comms.items():
            self.comms[thread] = own[np.argsort(ops.start[own], kind="stable")]
        self.threads: dict[int, np.ndarray] = {}

    def _sorted(self, rows: np.ndarray, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        own = rows[keys[rows] >= 0]
        own = own[np.argsort(keys[own], kind="stable")]
        return keys[own], own

    @staticmethod
    def _find(table: tuple[np.ndarray, np.ndarray], keys: np.ndarray) -> np.ndarray:
        known, rows = table
        found = np.full(len(keys), -1, np.int64)
        if len(known):
            at = np.clip(np.searchsorted(known, keys), 0, len(known) - 1)
            there = known[at] == keys
            found[there] = rows[at[there]]
        return found

    def of(self, rows: np.ndarray) -> np.ndarray:
        """The innermost operator that launched each kernel; -1 where the trace does not tell."""
        found = self._find(self.by_external, self.ops.external[rows])
        lost = np.flatnonzero(self.ops.external[rows] < 0)
        called = self._find(self.by_correlation, self.ops.correlation[rows[lost]])
        for at, call in zip(lost, called, strict=True):
            if call >= 0:
                found[at] = self._innermost(int(self.ops.thread[call]), float(self.ops.start[call]))
        return found

    def _innermost(self, thread: int, when: float) -> int:
        own = self.threads.get(thread)
        if own is None:
            own = self.operators[self.ops.thread[self.operators] == thread]
            own = self.threads[thread] = own[np.argsort(self.ops.start[own], kind="stable")]
        return next(iter(self._around(own, when)), -1)

    def _around(self, own: np.ndarray, when: float) -> list[int]:
        """Events of ``own`` in which a moment lies, the innermost first."""
        at = int(np.searchsorted(self.ops.start[own], when, side="right"))
        some = own[max(0, at - LOOK_BACK) : at][::-1]
        return [int(row) for row in some if self.ops.start[row] + self.ops.length[row] >= when]

    def told(self, row: int) -> list[int]:
        """Operators of communication around the launch of a kernel, the outermost first; the last one before
        it, where it was launched at the end of a batch of messages."""
        launch = self._find(self.by_external, self.ops.external[row : row + 1])[0]
        if launch < 0:
            launch = self._find(self.by_correlation, self.ops.correlation[row : row + 1])[0]
        if launch < 0:
            return []
        own = self.comms.get(int(self.ops.thread[launch]), np.zeros(0, np.int64))
        when = float(self.ops.start[launch])
        if around := self._around(own, when)[::-1]:
            return around
        at = int(np.searchsorted(self.ops.start[own], when, side="right"))
        before = [int(own[at - 1])] if at else []
        return [one for one in before if MESSAGE.match(plain(self.ops.name_of(one)))]


def _ranges_around(ops: Ops, rows: np.ndarray) -> np.ndarray:
    """Of every kernel the device's range of communication in which it ran, on its stream; -1: none."""
    ranges = ops.rows("device ranges")
    ranges = ranges[ops.named(RANGE)[ranges]]
    found = np.full(len(rows), -1, np.int64)
    for thread in np.unique(ops.thread[ranges]):
        own = ranges[ops.thread[ranges] == thread]
        own = own[np.argsort(ops.start[own], kind="stable")]
        mine = np.flatnonzero(ops.thread[rows] == thread)
        at = np.searchsorted(ops.start[own], ops.start[rows[mine]], side="right") - 1
        last = own[np.clip(at, 0, None)]
        inside = (at >= 0) & (ops.start[last] + ops.length[last] > ops.start[rows[mine]])
        found[mine[inside]] = last[inside]
    return found


def _row(ops: Ops, row: int, launches: _Launches, around: int, rank: int | None) -> tuple[Any, ...]:
    """A row of ``table_of``, and whether nothing tells its group."""
    around_it = [] if ops.comm[row] >= 0 else launches.told(row)
    said = next((one for one in (row, *around_it) if ops.comm_of(one)), -1)
    named = [ops.name_of(one) for one in (*around_it, *([around] if around >= 0 else []))]
    own = ops.name_of(row).partition("(")[0]
    comm = ops.comm_of(said)
    name = comm.name if comm else next((plain(one) for one in named if one != RECORDED), own)
    message = bool(MESSAGE.match(name))
    if not message and comm is None and BOTH.search(name):
        ops.over.note("kernels of send and receive of which nothing tells what for", name[:60])
    start = float(ops.start[row])
    return (*row_of(row, (start, float(start + ops.length[row])), name, said, ops, rank), comm is None)


def row_of(row: int, when: tuple[float, float], name: str, said: int, ops: Ops, rank: int | None) -> tuple[Any, ...]:
    """A row of ``table_of``: what an event is, by its name and by what the trace says of the collective.

    when: start and end. said: the event that tells of the collective, -1 for none.
    """
    (start, end), comm, seq = when, ops.comm_of(said), int(ops.seq[said]) if said >= 0 else -1
    only = next(iter(ops.groups.values())) if len(ops.groups) == 1 else None
    listed = ops.groups.get(comm.group) if comm and comm.group else only
    ranks = (comm.ranks if comm else ()) or (listed.ranks if listed else ())
    label = (comm.label if comm else "") or (listed.label if listed else "") or (comm.group if comm else "")
    if MESSAGE.match(name):
        return row, start, end, "transfer", name, "pp", _ends(name, comm, ranks, rank), -1, comm.bytes if comm else 0
    group = ",".join(map(str, sorted(ranks))) or label or "all"
    return row, start, end, "comm", name, axis_of(label), group, seq, comm.bytes if comm else 0


def _ends(name: str, comm: Comm | None, ranks: Sequence[int], rank: int | None) -> str | None:
    """``from>to`` of a message of ``rank``; None where the trace does not tell. In a group of two it does."""
    if rank is None:
        return None
    others = [one for one in ranks if one != rank]
    only = others[0] if len(ranks) == 2 and len(others) == 1 else None
    sends = "send" in name.lower()
    told = (comm.target if sends else comm.source) if comm else None
    peer = only if told is None else told
    return None if peer is None else f"{rank}>{peer}" if sends else f"{peer}>{rank}"


def plain(name: str) -> str:
    """``all_reduce`` of ``nccl:all_reduce``, ``allreduce_`` of ``c10d::allreduce_``."""
    return re.sub(r"^(\w+::?)+", "", name).removesuffix("_")


def table_of(rows: Sequence[tuple[Any, ...]]) -> pl.DataFrame:
    """Communication, times in microseconds. row: which event it is of."""
    schema = {
        "row": pl.Int64, "start": pl.Float64, "end": pl.Float64, "kind": pl.String, "name": pl.String,
        "axis": pl.String, "group": pl.String, "seq": pl.Int64, "bytes": pl.Int64,
    }  # fmt: skip
    return pl.DataFrame(rows, schema=schema, orient="row")
