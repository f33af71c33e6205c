"""What a rank did by a trace without kernels, as of a CPU: its operators, and ranges of its process groups.

An operator of ``c10d`` and the range of its backend are one call: it begins where the operator did, which may
wait in itself (``recv``), and ends with the range, which a thread of the group may have written.
"""

from __future__ import annotations

import re
from collections import deque
from typing import Any

import numpy as np
import polars as pl

from plait.diagnose.kineto_comm import DISPATCHED, RECORDED, TracedWork, plain, row_of, table_of
from plait.diagnose.kineto_ops import RANGE, Ops

NOT_WORK = re.compile(
    r"^(autograd::|torch::autograd::|torch::dynamo|nn\.Module|ProfilerStep|profiler::)|^[^:]+$|Backward\d*$"
)
"""Scopes around operators: in them a rank may wait, and what they compute are operators within."""
INSTEAD = {"reducescatter": ("allreduce",), "recvanysource": ("recv",)}
"""What a backend does in place of an operator: gloo has no reduce-scatter of its own."""
WAITING = 256
"""Calls whose ranges may still come."""


def on_host(ops: Ops, rank: int | None) -> TracedWork:
    """Operators of a trace without kernels, and the ranges of its process groups. A range that a thread of
    the group wrote begins where the operator did that called it, if there is one."""
    operators = ops.rows("operators")
    calls = operators[(ops.named(DISPATCHED) & ~ops.named(re.compile("::(wait_tensor|monitored)")))[operators]]
    waits = ops.named(DISPATCHED) | ops.named(re.compile(RECORDED)) | ops.named(RANGE)
    work = operators[(~ops.named(NOT_WORK) & ~waits)[operators]]
    ranges = np.flatnonzero(ops.named(RANGE) & np.isin(ops.kind, [ops.codes[kind] for kind in ("ranges", "operators")]))
    rows = [_called(ops, int(one), call, rank) for one, call in _paired(ops, calls, ranges)]
    return TracedWork(_outermost(ops, work), table_of(rows), sum(ops.comm_of(int(one[0])) is None for one in rows))


def _paired(ops: Ops, calls: np.ndarray, ranges: np.ndarray) -> list[tuple[int, int]]:
    """Ranges, each with the operator that began it (-1: none): the first of its kind that began before and
    has no range yet. Operators alone, where there are no ranges at all."""
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
    """``allgather`` of ``c10d::_allgather_base_`` and of ``gloo:all_gather``."""
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
    """Of operators those that no other of their thread and of these contains."""
    order = np.lexsort((-ops.length[rows], ops.start[rows], ops.thread[rows]))
    table = pl.DataFrame({"row": rows[order], "thread": ops.thread[rows[order]], "start": ops.start[rows[order]]})
    table = table.with_columns(end=table["start"] + pl.Series(ops.length[rows[order]]))
    before = pl.col("end").cum_max().over("thread").shift(1).over("thread")
    return table.filter((pl.col("start") >= before).fill_null(value=True))["row"].to_numpy()
