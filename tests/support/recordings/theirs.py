"""Recordings as other tools write them, made up: the profiler's traces, the flight recorder's
dumps."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import polars as pl

from plait.core.runs.evidence import Verdict, read_hang
from plait.diagnose.measured.importing import Imported, import_traces
from plait.diagnose.measured.reading import read_run
from plait.diagnose.measured.recording import Recording

Event = dict[str, Any]
REDUCE_SCATTER = "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevComm*)"
SEND_RECEIVE = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
RUNTIME = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": 1, "ts": 105, "dur": 2}


def kernel(name: str, ts: float, dur: float, **args: Any) -> Event:
    return {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": 7, "ts": ts, "dur": dur, "args": args}


def operator(name: str, ts: float, dur: float, tid: int = 1, **args: Any) -> Event:
    return {"ph": "X", "cat": "cpu_op", "name": name, "pid": 1, "tid": tid, "ts": ts, "dur": dur, "args": args}


def annotation(name: str, ts: float, dur: float, tid: int = 1, cat: str = "user_annotation") -> Event:
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": ts, "dur": dur}


def launched(by: list[Event], /, name: str = "some_kernel", **args: Any) -> list[Event]:
    """A kernel that computes, what launched another, and that one."""
    return [kernel("gemm", 0, 10), *by, kernel(name, 200, 50, **args)]


def told(seq: int, name: str = "_reduce_scatter_base", label: str = "mesh_dp_shard", **more: Any) -> Event:
    """``args`` of a collective."""
    return {
        "Collective name": name, "In msg nelems": 1024, "dtype": "BFloat16", "Group size": 4,
        "Process Group Name": "1", "Process Group Description": label, "Process Group Ranks": "[0, 1, 2, 3]",
        "Seq": seq,
    } | more  # fmt: skip


def trace(events: list[Event], rank: int | None = None, world: int = 4, **more: Any) -> dict[str, Any]:
    info = {} if rank is None else {"distributedInfo": {"backend": "nccl", "rank": rank, "world_size": world}}
    return {"schemaVersion": 1, "baseTimeNanoseconds": 1_700_000_000_000_000_000, **info, "traceEvents": events} | more


def kineto(rank: int, *, slow: float = 1.0, late: float = 0.0, name: str = REDUCE_SCATTER) -> dict[str, Any]:
    """Ten steps of 1 ms: two kernels, then a reduce-scatter, of which the second kernel hides a
    part. slow: times that the first kernel takes. late: microseconds by which a step's first kernel
    is launched late."""
    events: list[Event] = [{"ph": "M", "name": "process_name", "args": {}}, {"ph": "X", "name": "untimed"}]
    for step in range(10):
        at = 1000.0 * step
        gemm = 300 * slow
        behind = gemm - 300 + late
        events += [
            annotation(f"ProfilerStep#{step}", at, 1000.0, cat="gpu_user_annotation"),
            kernel("gemm", at + late, gemm), kernel("gemm2", at + late + gemm, 100),
            kernel(name, at + late + gemm + 50, 350 - behind, **told(step)),
            kernel("Memcpy", at + 900, 10) | {"cat": "gpu_memcpy"},
        ]  # fmt: skip
    return trace(events, rank)


def host(rank: int, *, steps: int = 6) -> dict[str, Any]:
    """As of a CPU with gloo: an operator within another, and ranges of collectives."""
    events: list[Event] = []
    for step in range(steps):
        at = 1000.0 * step
        events += [
            annotation(f"ProfilerStep#{step + 3}", at, 900), operator("aten::linear", at, 500),
            operator("aten::addmm", at + 10, 400), annotation("gloo:all_reduce", at + 500, 200),
        ]  # fmt: skip
    return trace(events, rank, 2)


def entry(seq: int, start: int, end: int | None, **more: Any) -> dict[str, Any]:
    return {
        "record_id": seq, "pg_id": 0, "process_group": ["0", "default_pg"], "collective_seq_id": seq, "is_p2p": False,
        "profiling_name": "nccl:all_reduce", "input_sizes": [[4, 8]], "input_dtypes": ["Float"], "state": "completed",
        "time_created_ns": start - 10, "time_discovered_started_ns": start, "time_discovered_completed_ns": end,
    } | more  # fmt: skip


def waiting(seq: int, start: int, **more: Any) -> dict[str, Any]:
    """An entry that has not ended, as dumps without timing write it: 0 for all times that are not
    known."""
    zero = {"time_discovered_started_ns": 0, "time_discovered_completed_ns": 0}
    return entry(seq, start, 0, state="scheduled", retired=False, **zero) | more


def message(kind: str, seq: int, at: int, *, ended: bool, **more: Any) -> dict[str, Any]:
    """An entry of ``send 0->1`` or ``recv 1<-0``, ranks of the group."""
    done = {"time_discovered_completed_ns": at + 50} if ended else {}
    made = entry if ended else waiting
    args = (seq, at, at + 50) if ended else (seq, at)
    return made(*args, profiling_name=f"nccl:{kind}", is_p2p=True, p2p_seq_id=seq, collective_seq_id=0, **done, **more)


def dump(rank: int, *more: dict[str, Any], ended: int = 5, world: int = 2) -> dict[str, Any]:
    """Collectives that ended, then ``more``."""
    entries = [entry(n, 1000 * n + 100 * rank + 1000, 1000 * n + 1900) for n in range(ended)]
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": str(list(range(world)))}}
    return {"version": "2.9", "pg_config": config, "pg_status": {}, "rank": rank, "entries": [*entries, *more]}


def all_waiting(world: int, odd: Mapping[int, dict[str, Any]] | None = None, **usual: Any) -> list[dict[str, Any]]:
    """Dumps of ranks of which each waits in call 5, those of ``odd`` in another."""
    calls = [waiting(5, 9000, **(usual | (odd or {}).get(rank, {}))) for rank in range(world)]
    return [dump(rank, call, world=world) for rank, call in enumerate(calls)]


def grouped(content: dict[str, Any], **groups: list[int]) -> dict[str, Any]:
    """A dump that tells of more groups: members by name."""
    config = {name: {"name": name, "desc": name, "ranks": str(ranks)} for name, ranks in groups.items()}
    return content | {"pg_config": content["pg_config"] | config}


def written(folder: Path, *contents: dict[str, Any], named: str = "trace{}.json", protocol: int = 0) -> list[Path]:
    """Files as JSON; as pickles, if a protocol of theirs is told."""
    folder.mkdir(exist_ok=True)
    files = [folder / named.format(number) for number in range(len(contents))]
    for file, content in zip(files, contents, strict=True):
        file.write_bytes(pickle.dumps(content, protocol) if protocol else json.dumps(content).encode())
    return files


def imported(
    folder: Path, *contents: dict[str, Any], named: str = "trace{}.json"
) -> tuple[Recording, Imported, list[str]]:
    """Written, imported and read: the recording, what the import found, which files it skipped."""
    said: list[str] = []
    found = import_traces(written(folder, *contents, named=named), folder / "run", said.append)
    return read_run(folder / "run").recording, found, said


def spans_of(folder: Path, *events: Event, rank: int = 0, **more: Any) -> pl.DataFrame:
    """Spans of one rank's trace, with a kernel that computes."""
    gemm = [] if any(one["cat"] == "kernel" for one in events) else [kernel("gemm", 0, 10)]
    recording, _, said = imported(folder, trace([*gemm, *events], rank, 2, **more))
    assert said == []
    return recording.spans


def kinds(spans: pl.DataFrame) -> dict[str, str]:
    """Kinds by name, without waits."""
    return dict(spans.filter(pl.col("kind") != "wait").select("name", "kind").iter_rows())


def dumps_imported(folder: Path, *dumps: dict[str, Any]) -> Imported:
    return import_traces(written(folder, *dumps), folder / "run")


def verdict_of(folder: Path, *dumps: dict[str, Any]) -> Verdict:
    """What an import says of dumps, and writes into the run's folder."""
    found = dumps_imported(folder, *dumps).verdict
    assert found is not None
    assert read_hang(folder / "run" / "hang.json")[0] == found
    return found
