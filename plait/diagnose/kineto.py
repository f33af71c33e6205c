"""Traces of the PyTorch profiler (Kineto's JSON, also gzipped) as spans.

Of a device's kernels, those of NCCL (``ncclDevKernel_*``, formerly ``ncclKernel*``) are communication, what
else runs is computation, and the part of the former in which nothing of the latter ran is waiting. Without
kernels, as on a CPU, the profiler's ``gloo:`` ranges and outermost operators are taken. Steps are those of
``ProfilerStep#N``; a trace without is one step.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from plait.core.errors import DataError
from plait.diagnose.foreign import FOREIGN, LATEST, NS, axis_of, members_of, number, rank_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

COMMUNICATES = re.compile(r"^nccl(Dev)?Kernel|^(gloo|nccl):")
POINT_TO_POINT = re.compile(r"send|recv", re.IGNORECASE)
STEP = re.compile(r"^ProfilerStep#(\d+)$")
COPIES = ("gpu_memcpy", "gpu_memset")
LONGEST_NAME = 60
MOST = 2**53
"""Of what is counted: numbers of a sequence, elements of a message."""


def is_kineto(content: Mapping[str, Any]) -> bool:
    """Whether a JSON object is such a trace."""
    return isinstance(content.get("traceEvents"), list)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file, gzipped or not. Raises DataError for anything else; never unpickles."""
    try:
        data = path.read_bytes()
        content = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {error}") from None
    except (ValueError, RecursionError) as error:
        pickle = data[:2] in (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
        more = (
            " It looks like a pickle, which would run what somebody else wrote: dump as JSON instead" if pickle else ""
        )
        raise DataError(f"{path} is no JSON: {error}.{more}") from None
    if not isinstance(content, dict):
        raise DataError(f"{path} holds no JSON object")
    return content


def kineto_spans(content: Mapping[str, Any], rank: int | None) -> pl.DataFrame:
    """Columns ``FOREIGN``; times are seconds since 1970. rank: where the trace does not tell. Raises
    DataError for one that has no events of use."""
    told = content.get("distributedInfo")
    rank = rank_of(told.get("rank") if isinstance(told, dict) else None, rank, "no distributedInfo.rank")
    since = content.get("baseTimeNanoseconds")
    base = number(since, "baseTimeNanoseconds", LATEST * NS) if isinstance(since, int) else 0
    events = [one for one in content["traceEvents"] if isinstance(one, dict) and one.get("ph") == "X" and _timed(one)]
    kernels = [one for one in events if one.get("cat") == "kernel" or one.get("cat") in COPIES]
    chosen = kernels or [one for one in events if _on_host(one)]
    if not chosen:
        raise DataError("it has neither kernels nor operators")
    table = pl.DataFrame([_row(one) for one in chosen], schema=_ROW, orient="row")
    if not kernels:
        table = _outermost(table)
    table = table.with_columns(
        start=(pl.col("ts") * 1e3 + base) / NS,
        end=((pl.col("ts") + pl.col("dur")) * 1e3 + base) / NS,
        rank=pl.lit(rank, pl.Int32),
        step=pl.Series(_steps(events, table["ts"].to_numpy(), device=bool(kernels)), dtype=pl.Int64),
    )
    return pl.concat([table.select(list(FOREIGN)), _exposed(table)])


_ROW = {
    "ts": pl.Float64, "dur": pl.Float64, "kind": pl.String, "name": pl.String, "site": pl.String, "axis": pl.String,
    "group": pl.String, "seq": pl.Int64, "bytes": pl.Int64, "thread": pl.String,
}  # fmt: skip


def _timed(event: Mapping[str, Any]) -> bool:
    """Whether it has a time and a name. Raises DataError for a time out of range."""
    if not isinstance(event.get("name"), str):
        return False
    for key in ("ts", "dur"):
        if not isinstance(event.get(key), int | float):
            return False
        number(event[key], key, LATEST * 1e6)
    return True


def _on_host(event: Mapping[str, Any]) -> bool:
    return event.get("cat") == "cpu_op" or bool(COMMUNICATES.match(event["name"]))


def _row(event: Mapping[str, Any]) -> tuple[Any, ...]:
    found = event.get("args")
    args: Mapping[str, Any] = found if isinstance(found, dict) else {}
    name = str(event["name"])
    thread = f"{event.get('pid')}/{event.get('tid')}"
    if not COMMUNICATES.match(name):
        site = "copies" if event.get("cat") in COPIES else "kernels" if event.get("cat") == "kernel" else "operators"
        return event["ts"], event["dur"], "compute", name[:LONGEST_NAME], site, "", None, -1, 0, thread
    what = str(args.get("Collective name") or name.partition("(")[0])
    group = members_of(args.get("Process Group Ranks"))
    label = str(args.get("Process Group Description") or args.get("Process Group Name") or "")
    kind = "transfer" if POINT_TO_POINT.search(what) else "comm"
    sequence = args.get("Seq")
    size = args.get("In msg nelems")
    itemsize = 2 if "16" in str(args.get("dtype")) or "Half" in str(args.get("dtype")) else 4
    return (
        event["ts"], event["dur"], kind, what[:LONGEST_NAME], what[:LONGEST_NAME],
        "pp" if kind == "transfer" else axis_of(label), group or label or "all",
        number(sequence, "Seq", MOST) if isinstance(sequence, int) else -1,
        number(size, "In msg nelems", MOST) * itemsize if isinstance(size, int) else 0, thread,
    )  # fmt: skip


def _outermost(table: pl.DataFrame) -> pl.DataFrame:
    """Operators that no other of their thread contains."""
    table = table.sort("thread", "ts", "dur", descending=[False, False, True])
    over = (pl.col("ts") + pl.col("dur")).cum_max().over("thread")
    before = table.with_columns(before=over).with_columns(before=pl.col("before").shift(1).over("thread"))
    inside = (pl.col("ts") < pl.col("before")).fill_null(value=False)
    return before.filter(~inside | (pl.col("kind") != "compute")).drop("before")


def _steps(events: Sequence[Mapping[str, Any]], at: NDArray[np.float64], *, device: bool) -> NDArray[np.int64]:
    """The step of each time: by the device's own ranges where the profiler wrote them."""
    for kind in ("gpu_user_annotation", "user_annotation") if device else ("user_annotation",):
        marks = sorted(
            (float(one["ts"]), number(int(found[1]), "the number of a ProfilerStep"))
            for one in events
            if one.get("cat") == kind and (found := STEP.match(one["name"]))
        )
        if marks:
            begins = np.array([mark[0] for mark in marks])
            numbers = np.array([mark[1] for mark in marks])
            return numbers[np.clip(np.searchsorted(begins, at, side="right") - 1, 0, None)]
    return np.zeros(len(at), np.int64)


def _exposed(table: pl.DataFrame) -> pl.DataFrame:
    """A wait for every collective: as long as nothing computed while it ran, at its end. What overlaps an
    earlier one counts once."""
    comm = table.filter(pl.col("kind").is_in(["comm", "transfer"])).sort("start")
    if comm.is_empty():
        return comm.select(list(FOREIGN))
    busy = table.filter(pl.col("kind") == "compute").sort("start")
    until = comm["end"].cum_max().shift(1).fill_null(-np.inf).to_numpy()
    start, end = np.maximum(comm["start"].to_numpy(), until), comm["end"].to_numpy()
    hidden = _busy_before(busy, end) - _busy_before(busy, np.minimum(start, end))
    alone = np.clip(np.clip(end - start, 0, None) - hidden, 0, None)
    return (
        comm.with_columns(start=pl.Series(end - alone), kind=pl.lit("wait"), bytes=pl.lit(0, pl.Int64))
        .filter(pl.col("end") > pl.col("start"))
        .select(list(FOREIGN))
    )


def _busy_before(busy: pl.DataFrame, at: NDArray[np.float64]) -> NDArray[np.float64]:
    """Seconds before each time in which anything computed."""
    if busy.is_empty():
        return np.zeros(len(at))
    start, end = busy["start"].to_numpy(), busy["end"].to_numpy()
    reach = np.maximum.accumulate(end)
    begin = np.maximum(start, np.concatenate([[-np.inf], reach[:-1]]))
    length = np.clip(end - begin, 0, None)
    total = np.concatenate([[0.0], np.cumsum(length)])
    index = np.searchsorted(begin, at, side="right")
    last = np.clip(index - 1, 0, None)
    over = np.where(index > 0, np.clip((begin + length)[last] - at, 0, None), 0.0)
    return total[index] - over
