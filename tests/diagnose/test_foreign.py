"""Recordings of other tools: PyTorch profiler traces, flight recorder dumps; whatever else is refused."""

from __future__ import annotations

import gzip
import json
import pickle
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from plait.core.errors import DataError, JobError
from plait.core.timeline import Timeline
from plait.diagnose.explain import explain
from plait.diagnose.foreign import axis_of, import_traces
from plait.diagnose.reading import read_run
from plait.diagnose.recording import Recording
from plait.diagnose.tables import MOST_RANKS


def kernel(name: str, ts: float, dur: float, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": 7, "ts": ts, "dur": dur, "args": args}


def collective(ts: float, dur: float, seq: int, name: str, label: str = "mesh_dp_shard") -> dict[str, Any]:
    return kernel(
        name, ts, dur, **{
            "Collective name": "_reduce_scatter_base", "In msg nelems": 1024, "dtype": "BFloat16", "Group size": 4,
            "Process Group Name": "1", "Process Group Description": label, "Process Group Ranks": "[0, 1, 2, 3]",
            "Seq": seq,
        },
    )  # fmt: skip


def kineto(
    rank: int, *, slow: float = 1.0, name: str = "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevComm*)"
) -> dict[str, Any]:
    """Ten steps of 1 ms: two kernels, then a reduce-scatter, of which the second kernel hides a part."""
    events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "args": {}}, {"ph": "X", "name": "untimed"}]
    for step in range(10):
        at = 1000.0 * step
        mark = {"ph": "X", "cat": "gpu_user_annotation", "name": f"ProfilerStep#{step}", "ts": at, "dur": 1000.0}
        gemm, late = 300 * slow, 300 * (slow - 1)
        events += [
            mark, kernel("gemm", at, gemm), kernel("gemm2", at + gemm, 100),
            collective(at + gemm + 50, 350 - late, step, name), kernel("Memcpy", at + 900, 10) | {"cat": "gpu_memcpy"},
        ]  # fmt: skip
    return {
        "schemaVersion": 1, "baseTimeNanoseconds": 1_700_000_000_000_000_000,
        "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": 4}, "traceEvents": events,
    }  # fmt: skip


def imported(tmp_path: Path, *contents: dict[str, Any], named: str = "trace{}.json") -> tuple[Recording, list[str]]:
    files = []
    for number, content in enumerate(contents):
        files.append(tmp_path / named.format(number))
        files[-1].write_text(json.dumps(content))
    said: list[str] = []
    import_traces(files, tmp_path / "run", said.append)
    return read_run(tmp_path / "run").recording, said


@pytest.mark.parametrize("name", ["ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(x)", "ncclKernel_ReduceScatter(x)"])
def test_a_profilers_traces(tmp_path: Path, name: str) -> None:
    found, said = imported(tmp_path, *(kineto(rank, slow=1.3 if rank == 2 else 1.0, name=name) for rank in range(4)))
    assert said == []
    assert (found.ranks, found.steps) == (4, list(range(10)))
    comm = found.spans.filter(pl.col("kind") == "comm")
    assert set(comm["axis"]) == {"dp"}
    assert set(comm["group"]) == {"0,1,2,3"}
    assert set(comm["bytes"]) == {2048}
    assert set(comm["direction"]) == {"backward"}
    assert set(found.meetings.group_by("meeting").len()["len"]) == {4}
    waits = found.spans.filter(pl.col("kind") == "wait", pl.col("rank") == 0)
    exposed = (waits["end"] - waits["start"]).to_list()
    assert exposed == pytest.approx([300e-6] * 10, abs=2e-6), "50 us of 350 are hidden"
    report = explain(found, "run")
    assert [(one.what, one.ranks) for one in report.stragglers] == [("slow processor", (2,))]
    assert report.stragglers[0].seconds == pytest.approx(90e-6, abs=5e-6)


def test_a_timeline_of_another_tool_is_a_timeline(tmp_path: Path) -> None:
    imported(tmp_path, kineto(0), kineto(1))
    part = next((tmp_path / "run" / "timeline").glob("rank-00001-*"))
    spans = Timeline.read_parquet(part).spans
    assert {span.rank for span in spans} == {1}
    assert min(span.start for span in spans) == pytest.approx(0.0, abs=1e-3)


def test_without_kernels_a_profilers_operators(tmp_path: Path) -> None:
    """As on a CPU with gloo: outermost operators, and ranges of collectives."""

    def host(rank: int) -> dict[str, Any]:
        events = []
        for step in range(6):
            at = 1000.0 * step
            op = {"ph": "X", "pid": 1, "tid": 1}
            events += [
                op | {"cat": "user_annotation", "name": f"ProfilerStep#{step + 3}", "ts": at, "dur": 900},
                op | {"cat": "cpu_op", "name": "aten::linear", "ts": at, "dur": 500},
                op | {"cat": "cpu_op", "name": "aten::addmm", "ts": at + 10, "dur": 400},
                op | {"cat": "user_annotation", "name": "gloo:all_reduce", "ts": at + 500, "dur": 200},
            ]
        return {"traceEvents": events, "distributedInfo": {"rank": rank}}

    found, _ = imported(tmp_path, host(0), host(1))
    computes = found.spans.filter(pl.col("kind") == "compute")
    assert set(computes["name"]) == {"aten::linear"}
    assert found.steps == [3, 4, 5, 6, 7, 8]
    assert found.spans.filter(pl.col("kind") == "comm").height == 12


def entry(seq: int, start: int, end: int | None, **more: Any) -> dict[str, Any]:
    return {
        "record_id": seq, "pg_id": 0, "process_group": ["0", "default_pg"], "collective_seq_id": seq, "is_p2p": False,
        "profiling_name": "nccl:all_reduce", "input_sizes": [[4, 8]], "input_dtypes": ["Float"], "state": "completed",
        "time_created_ns": start - 10, "time_discovered_started_ns": start, "time_discovered_completed_ns": end,
    } | more  # fmt: skip


def dump(rank: int) -> dict[str, Any]:
    entries = [entry(n, 1000 * n + 100 * rank, 1000 * n + 900) for n in range(5)]
    entries.append(entry(5, 6000, None, state="started", time_discovered_completed_ns=None))
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}}
    return {"version": "2.9", "pg_config": config, "pg_status": {}, "rank": rank, "entries": entries}


def test_flight_recorder_dumps(tmp_path: Path) -> None:
    found, said = imported(tmp_path, dump(0), dump(1))
    assert all("1 operations had not ended" in line for line in said)
    assert len(said) == 2
    assert found.spans.height == 10
    assert set(found.spans["group"]) == {"0,1"}
    assert set(found.spans["bytes"]) == {128}
    report = explain(found, "run")
    arrival = report.verdicts.arrivals[0]
    assert (arrival.axis, arrival.rank, arrival.lateness) == ("dp", 1, pytest.approx(100e-9, abs=1e-9))


def test_the_rank_may_stand_in_the_files_name(tmp_path: Path) -> None:
    content = kineto(0)
    del content["distributedInfo"]
    packed = tmp_path / "trace_rank_5.json.gz"
    packed.write_bytes(gzip.compress(json.dumps(content).encode()))
    import_traces([packed], tmp_path / "run")
    assert read_run(tmp_path / "run").recording.spans["rank"].unique().to_list() == [5]


def test_whatever_else_is_told_and_skipped_and_never_unpickled(tmp_path: Path) -> None:
    good = tmp_path / "good.json"
    good.write_text(json.dumps(kineto(0)))
    bad = {
        "pickled": pickle.dumps({"entries": [], "version": "2.9"}), "cut.json": json.dumps(kineto(1)).encode()[:-9],
        "list.json": b"[1]", "other.json": b'{"a": 1}', "norank.json": json.dumps({"traceEvents": []}).encode(),
        "empty_rank_1.json": json.dumps({"traceEvents": []}).encode(), "cut.json.gz": gzip.compress(b"{}" * 99)[:20],
        "open_rank_1.json": json.dumps({"version": "2.9", "entries": [entry(0, 5, None)], "rank": 1}).encode(),
        "strange_rank_2.json": json.dumps({"version": "2.9", "rank": 2, "entries": [1, {"process_group": 3}]}).encode(),
    }  # fmt: skip
    for name, data in bad.items():
        (tmp_path / name).write_bytes(data)
    said: list[str] = []
    files = [good, *(tmp_path / name for name in bad), tmp_path / "missing.json"]
    assert import_traces(files, tmp_path / "run", said.append)[0] == 1
    assert len(said) == len(bad) + 1
    assert any("looks like a pickle" in line for line in said)
    with pytest.raises(DataError, match="none of 1 files could be used"):
        import_traces([tmp_path / "list.json"], tmp_path / "none")
    assert not (tmp_path / "none").exists()
    with pytest.raises(JobError, match="is not empty"):
        import_traces([good], tmp_path / "run")


def odd(content: dict[str, Any], at: int, **values: Any) -> dict[str, Any]:
    """With other values in one event or entry, those of an event's ``args`` among them."""
    one = content["traceEvents" if "traceEvents" in content else "entries"][at]
    for key, value in values.items():
        (one["args"] if key in one.get("args", {}) else one)[key] = value
    return content


HUGE = 10**400
RANKS = (MOST_RANKS, 10**12, 2**40, 2**31 - 1, -1, True, 1.5, "1")
ODD = {
    "ts 1e30": odd(kineto(1), 3, ts=1e30), "ts huge": odd(kineto(1), 3, ts=HUGE),
    "ts -1e30": odd(kineto(1), 3, ts=-1e30),
    "dur 1e25": odd(kineto(1), 3, dur=1e25), "dur nan": odd(kineto(1), 3, dur=float("nan")),
    "ts inf": odd(kineto(1), 3, ts=float("inf")), "ts of a step": odd(kineto(1), 2, ts=HUGE),
    "all of them late": kineto(1) | {"baseTimeNanoseconds": 4 * 10**18},
    "base": kineto(1) | {"baseTimeNanoseconds": HUGE},
    "elements": odd(kineto(1), 5, **{"In msg nelems": 10**30}), "seq": odd(kineto(1), 5, Seq=10**30),
    "step": odd(kineto(1), 2, name="ProfilerStep#" + "9" * 30),
    "long step": odd(kineto(1), 2, name="ProfilerStep#" + "9" * 5000),
    "members": odd(kineto(1), 5, **{"Process Group Ranks": f"[{'9' * 5000}]"}),
    "half a character": odd(kineto(1), 3, name="gemm \ud800"),
    "half of a label": odd(kineto(1), 5, **{"Process Group Ranks": None, "Process Group Description": "\udfff"}),
    **{f"rank {n}": kineto(1) | {"distributedInfo": {"rank": rank}} for n, rank in enumerate(RANKS)},
    "dump's rank": dump(1) | {"rank": 10**20}, "dump's rank -1": dump(1) | {"rank": -1},
    "dump's rank is true": dump(1) | {"rank": True}, "dump's name": odd(dump(1), 0, profiling_name="\ud800"),
    "sequence": odd(dump(1), 0, collective_seq_id=10**30),
    "endless sequence": odd(dump(1), 0, collective_seq_id=float("inf")),
    "end": odd(dump(1), 0, time_discovered_completed_ns=HUGE),
    "late end": odd(dump(1), 0, time_discovered_completed_ns=10**30),
    "length": odd(dump(1), 0, time_discovered_completed_ns=None, duration_ms=HUGE),
    "length nan": odd(dump(1), 0, time_discovered_completed_ns=None, duration_ms=float("nan")),
    "sizes": odd(dump(1), 0, input_sizes=[[10**10] * 3]),
}  # fmt: skip


@pytest.mark.parametrize("content", ODD.values(), ids=ODD)
def test_an_odd_value_costs_its_file_and_no_other(tmp_path: Path, content: dict[str, Any]) -> None:
    found, said = imported(tmp_path, kineto(0), content, kineto(3))
    assert set(found.spans["rank"]) == {0, 3}
    assert len(said) == 1
    assert said[0].startswith(f"{tmp_path / 'trace1.json'} was skipped: ")
    assert len(said[0]) < 400
    said[0].encode()
    with pytest.raises(DataError, match="none of 1 files could be used"):
        import_traces([tmp_path / "trace1.json"], tmp_path / "none")


def test_a_damaged_archive_costs_no_other_file(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.json", tmp_path / "bad.json.gz"
    good.write_text(json.dumps(kineto(0)))
    data = bytearray(gzip.compress(json.dumps(kineto(1)).encode()))
    data[20:40] = b"\xff" * 20
    bad.write_bytes(bytes(data))
    said: list[str] = []
    assert import_traces([bad, good], tmp_path / "run", said.append)[0] == 1
    assert [str(bad) in line for line in said] == [True]


def test_of_two_files_of_a_rank_the_first_counts(tmp_path: Path) -> None:
    found, said = imported(tmp_path, kineto(0), kineto(1), dump(0))
    first, again = tmp_path / "trace0.json", tmp_path / "trace2.json"
    assert said == [f"{again} was skipped: it is of rank 0, as is {first}"]
    assert found.ranks == 2
    assert "nccl:all_reduce" not in set(found.spans["name"])


def test_the_last_that_a_timeline_holds(tmp_path: Path) -> None:
    content = odd(kineto(1), 2, name=f"ProfilerStep#{2**31 - 1}")
    content["distributedInfo"]["rank"] = MOST_RANKS - 1
    found, said = imported(tmp_path, kineto(0), odd(content, 5, **{"In msg nelems": 2**53}))
    assert said == []
    assert set(found.spans["rank"]) == {0, MOST_RANKS - 1}
    assert 2**31 - 1 in found.steps
    explain(found, "run")


def test_axes_by_what_groups_are_called() -> None:
    labels = {
        "TENSOR_MODEL_PARALLEL_GROUP": "tp", "PIPELINE_MODEL_PARALLEL_GROUP": "pp", "DATA_PARALLEL_GROUP": "dp",
        "CONTEXT_PARALLEL_GROUP": "cp", "mesh_tp": "tp", "mesh_pp": "pp", "mesh_dp_replicate": "dp", "mesh_cp": "cp",
        "default_pg": "dp", "undefined": "other", "": "other",
    }  # fmt: skip
    assert {label: axis_of(label) for label in labels} == labels
