"""The exported trace: what begins ends, on its track; arrows have two ends."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import polars as pl
import pytest
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace, TracePacket, TrackEvent

from plait.diagnose.measured.dependencies import awaited
from plait.diagnose.measured.recording import grid_of
from plait.diagnose.perfetto import write_json, write_perfetto
from tests.diagnose.verdicts.test_stragglers import recording
from tests.support.recordings.made import Job, plan_of, spans_of
from tests.support.recordings.simulated import NAMES, simulated


def exported(spans: pl.DataFrame, path: Path) -> tuple[int, Trace]:
    count = write_perfetto(spans, path)
    return count, Trace.FromString(path.read_bytes())


def events(trace: Trace) -> list[TracePacket]:
    return [packet for packet in trace.packet if packet.HasField("track_event")]


def arrows(trace: Trace) -> dict[int, tuple[int, int]]:
    """When each starts and ends; every one does both, once, in this order."""
    found = [
        (flow, packet.timestamp)
        for packet in events(trace)
        for flow in (*packet.track_event.flow_ids, *packet.track_event.terminating_flow_ids)
    ]
    assert set(Counter(flow for flow, _ in found).values()) <= {2}
    ends = {flow for packet in events(trace) for flow in packet.track_event.terminating_flow_ids}
    assert ends == {flow for packet in events(trace) for flow in packet.track_event.flow_ids}
    both: dict[int, tuple[int, int]] = {}
    for flow, at in found:
        both[flow] = (both[flow][0], at) if flow in both else (at, at)
    return both


def read_back(trace: Trace) -> list[tuple[str, str, str, int, int]]:
    """Process, track, name, begin and end of every span as Perfetto takes them: what ends is what
    began last on its track."""
    described = {one.track_descriptor.uuid: one.track_descriptor for one in trace.packet if one.track_descriptor.uuid}
    opened: dict[int, list[tuple[str, int]]] = {}
    found: list[tuple[str, str, str, int, int]] = []
    for packet in events(trace):
        event = packet.track_event
        if event.type == TrackEvent.TYPE_SLICE_BEGIN:
            opened.setdefault(event.track_uuid, []).append((event.name, packet.timestamp))
        else:
            name, began = opened[event.track_uuid].pop()
            track = described[event.track_uuid]
            process = described[track.parent_uuid].process.process_name
            found.append((process, track.name, name, began, packet.timestamp))
    assert not any(opened.values())
    return found


def test_steps_are_counted_from_one(tmp_path: Path) -> None:
    spans = recording(Job(dp=1, pp=1, steps=2)).spans
    _, trace = exported(spans, tmp_path / "t.pftrace")
    said = [one for packet in events(trace) for one in packet.track_event.debug_annotations if one.name == "step"]
    assert {one.int_value for one in said} == {1, 2}
    assert write_json(spans, tmp_path / "t.json") == spans.height
    slices = [one for one in json.loads((tmp_path / "t.json").read_text())["traceEvents"] if one["ph"] == "X"]
    assert {one["args"]["step"] for one in slices} == {1, 2}


@pytest.mark.parametrize("name", NAMES)
def test_under_every_strategy_spans_keep_their_ends_and_arrows_have_both(tmp_path: Path, name: str) -> None:
    plan, spans = simulated(name)
    write_perfetto(spans, tmp_path / "t.pftrace", grid_of(plan.layout))
    trace = Trace.FromString((tmp_path / "t.pftrace").read_bytes())
    first = spans["start"].min()
    assert isinstance(first, float)
    waits = pl.col("kind").is_in(["wait", "idle"])
    wanted = spans.select(
        label=pl.when(waits).then(pl.format("{} {}", "kind", "name")).otherwise("name"),
        began=((pl.col("start") - first) * 1e9).round().cast(pl.Int64),
        ended=((pl.col("end") - first) * 1e9).round().cast(pl.Int64),
    )  # fmt: skip
    assert Counter(row[2:] for row in read_back(trace)) == Counter(wanted.iter_rows())
    assert len(arrows(trace)) == awaited(spans).height
    write_json(spans, tmp_path / "t.json")
    told = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    ends = {phase: {e["id"]: e["ts"] for e in told if e["ph"] == phase} for phase in "sf"}
    assert ends["s"].keys() == ends["f"].keys()
    assert len(ends["s"]) == awaited(spans).height
    assert all(ends["s"][flow] <= at for flow, at in ends["f"].items())


def test_a_process_is_named_by_where_its_rank_stands(tmp_path: Path) -> None:
    grid = grid_of(plan_of(Job(dp=2, pp=2)).layout, ["h0", "h0", "h1", None])
    spans = recording(Job(dp=2, pp=2, steps=1)).spans
    write_perfetto(spans, tmp_path / "t.pftrace", grid)
    trace = Trace.FromString((tmp_path / "t.pftrace").read_bytes())
    names = {p.track_descriptor.process.process_name for p in trace.packet if p.HasField("track_descriptor")}
    assert {
        "rank 0 (stage 0, dp 0) on h0", "rank 1 (stage 0, dp 1) on h0", "rank 2 (stage 1, dp 0) on h1",
        "rank 3 (stage 1, dp 1)",
    } <= names  # fmt: skip


@pytest.mark.parametrize("count", [0, 1])
def test_few(tmp_path: Path, count: int) -> None:
    spans = recording(Job(dp=1, pp=1, steps=1)).spans.head(count)
    assert exported(spans, tmp_path / "t.pftrace")[0] == count


@pytest.mark.parametrize(
    ("times", "rows"),
    [
        ([(0.0, 1.0), (1.0, 1.0), (1.0, 2.0), (5.0, 6.0)], 1), ([(0.0, 9.0), (1.0, 2.0), (1.5, 2.0)], 1),
        ([(0.0, 2.0), (0.0, 2.0), (0.0, 1.0), (1.0, 2.0)], 1), ([(0.0, 2.0), (1.0, 3.0), (2.0, 4.0)], 2),
        ([(0.0, 9.0), (1.0, 2.0), (1.5, 8.0), (2.0, 3.0)], 2), ([(0.0, 3.0), (1.0, 4.0), (2.0, 5.0)], 3),
    ],
)  # fmt: skip
def test_as_few_rows_as_overlaps_ask_for(tmp_path: Path, times: list[tuple[float, float]], rows: int) -> None:
    one = recording(Job(dp=1, pp=1, steps=1)).spans.filter(kind="compute").head(1)
    starts, ends = zip(*times, strict=True)
    named = {"name": [f"op {n}" for n in range(len(times))], "start": list(starts), "end": list(ends)}
    spans = pl.concat([one] * len(times)).with_columns(*(pl.Series(name, of) for name, of in named.items()))
    wanted = [(f"op {n}", round(start * 1e9), round(end * 1e9)) for n, (start, end) in enumerate(times)]
    names = {"processor", "processor (2)", "processor (3)"} - {f"processor ({n})" for n in range(rows + 1, 4)}
    write_json(spans, tmp_path / "t.json")
    told = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert {event["args"]["name"] for event in told if event["name"] == "thread_name"} == names
    own = [(e["name"], e["tid"], e["ts"] * 1e3, (e["ts"] + e["dur"]) * 1e3) for e in told if e["ph"] == "X"]
    assert sorted((name, start, end) for name, _, start, end in own) == wanted
    for _, tid, start, end in own:
        assert not [s for _, other, s, e in own if other == tid and start < s < end < e], "what overlaps is apart"
    found = read_back(exported(spans, tmp_path / "t.pftrace")[1])
    assert {row[1] for row in found} == names and sorted(row[2:] for row in found) == wanted


@pytest.mark.parametrize(("begins", "count"), [(0.0, 1), (1.0, 1), (1.5, 0)])
def test_an_arrow_goes_from_what_had_begun_before_a_wait_was_over(tmp_path: Path, begins: float, count: int) -> None:
    usual = {"axis": "tp", "name": "mlp0.R0", "start": 0.0, "end": 1.0}
    spans = spans_of(
        usual | {"kind": "wait", "lane": "processor"},
        usual | {"kind": "comm", "lane": "tp", "meeting": 3, "start": begins, "end": 2.0},
    )
    assert awaited(spans).height == 1
    _, trace = exported(spans, tmp_path / "t.pftrace")
    assert len(arrows(trace)) == count
