"""The exported trace: what begins ends, on its track; arrows have two ends."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import polars as pl
import pytest
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace, TracePacket, TrackEvent

from plait.diagnose.awaited import awaited
from plait.diagnose.perfetto import write_json, write_perfetto
from plait.diagnose.recording import grid_of
from tests.diagnose.test_stragglers import recording
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
    """Process, track, name, begin and end of every span as Perfetto takes them: what ends is what began last
    on its track."""
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


def test_every_span_once_and_in_its_place(tmp_path: Path) -> None:
    spans = recording(Job(dp=2, pp=2, steps=2)).spans
    count, trace = exported(spans, tmp_path / "t.pftrace")
    assert count == spans.height
    depth: Counter[int] = Counter()
    last = 0
    for packet in events(trace):
        assert packet.timestamp >= last
        last = packet.timestamp
        begins = packet.track_event.type == TrackEvent.TYPE_SLICE_BEGIN
        depth[packet.track_event.track_uuid] += 1 if begins else -1
        assert 0 <= depth[packet.track_event.track_uuid] <= 1
    assert set(depth.values()) == {0}
    described = {packet.track_descriptor.uuid for packet in trace.packet if packet.HasField("track_descriptor")}
    assert set(depth) <= described
    names = [packet.track_event.name for packet in events(trace) if packet.track_event.name]
    assert {"mlp0.F0", "0SEND_F0", "idle 1RECV_F0", "reduce mlp0"} <= set(names)
    processes = {p.track_descriptor.process.process_name for p in trace.packet if p.HasField("track_descriptor")}
    assert {f"rank {n}" for n in range(4)} <= processes


def test_steps_are_counted_from_one(tmp_path: Path) -> None:
    spans = recording(Job(dp=1, pp=1, steps=2)).spans
    _, trace = exported(spans, tmp_path / "t.pftrace")
    said = [one for packet in events(trace) for one in packet.track_event.debug_annotations if one.name == "step"]
    assert {one.int_value for one in said} == {1, 2}
    assert write_json(spans, tmp_path / "t.json") == spans.height
    slices = [one for one in json.loads((tmp_path / "t.json").read_text())["traceEvents"] if one["ph"] == "X"]
    assert {one["args"]["step"] for one in slices} == {1, 2}


def test_arrows_go_from_transfers_to_the_waits_for_them(tmp_path: Path) -> None:
    spans = recording(Job(dp=2, pp=3, steps=1)).spans
    _, trace = exported(spans, tmp_path / "t.pftrace")
    assert len(arrows(trace)) == spans.filter(pl.col("kind") == "idle").height


@pytest.mark.parametrize(
    "times",
    [
        [(0.0, 1.0), (0.5, 1.5)],
        [(0.0, 3.0), (1.0, 4.0), (2.0, 5.0)],
        [(0.0, 9.0), (1.0, 2.0), (1.5, 8.0), (2.0, 3.0)],
        [(0.0, 1.0), (1.0, 1.0), (1.0, 2.0), (2.0, 2.0)],
        [(0.0, 2.0), (0.0, 2.0), (0.0, 1.0), (1.0, 2.0)],
    ],
)
def test_spans_keep_their_ends_however_they_overlap(tmp_path: Path, times: list[tuple[float, float]]) -> None:
    one = recording(Job(dp=1, pp=1, steps=1)).spans.filter(pl.col("kind") == "compute").head(1)
    starts, ends = zip(*times, strict=True)
    named = {"name": [f"op {n}" for n in range(len(times))], "start": list(starts), "end": list(ends)}
    spans = pl.concat([one] * len(times)).with_columns(*(pl.Series(name, of) for name, of in named.items()))
    _, trace = exported(spans, tmp_path / "t.pftrace")
    wanted = [(f"op {n}", round(start * 1e9), round(end * 1e9)) for n, (start, end) in enumerate(times)]
    assert sorted(row[2:] for row in read_back(trace)) == wanted
    write_json(spans, tmp_path / "t.json")
    told = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    own = [
        (e["name"], e["tid"], round(e["ts"] * 1e3), round((e["ts"] + e["dur"]) * 1e3)) for e in told if e["ph"] == "X"
    ]
    assert sorted((name, start, end) for name, _, start, end in own) == wanted
    for _, tid, start, end in own:
        beside = [(s, e) for _, other, s, e in own if other == tid]
        assert not [(s, e) for s, e in beside if start < s < end < e], "what overlaps is on another row"


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
        ([(0.0, 1.0), (1.0, 2.0), (5.0, 6.0)], 1), ([(0.0, 9.0), (1.0, 2.0), (1.5, 2.0)], 1),
        ([(0.0, 2.0), (1.0, 3.0), (2.0, 4.0)], 2), ([(0.0, 3.0), (1.0, 4.0), (2.0, 5.0)], 3),
    ],
)  # fmt: skip
def test_as_few_rows_as_overlaps_ask_for(tmp_path: Path, times: list[tuple[float, float]], rows: int) -> None:
    one = recording(Job(dp=1, pp=1, steps=1)).spans.filter(pl.col("kind") == "compute").head(1)
    starts, ends = zip(*times, strict=True)
    spans = pl.concat([one] * len(times)).with_columns(pl.Series("start", starts), pl.Series("end", ends))
    names = {"processor", "processor (2)", "processor (3)"} - {f"processor ({n})" for n in range(rows + 1, 4)}
    write_json(spans, tmp_path / "t.json")
    told = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert {event["args"]["name"] for event in told if event["name"] == "thread_name"} == names
    _, trace = exported(spans, tmp_path / "t.pftrace")
    assert {row[1] for row in read_back(trace)} == names


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


def test_times_are_counted_from_the_first_begin(tmp_path: Path) -> None:
    spans = spans_of({"start": 100.5, "end": 101.0}, {"name": "mlp0.F1", "start": 102.0, "end": 102.25})
    assert [row[3:] for row in read_back(exported(spans, tmp_path / "t.pftrace")[1])] == [
        (0, 500_000_000), (1_500_000_000, 1_750_000_000),
    ]  # fmt: skip
    write_json(spans, tmp_path / "t.json")
    told = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert [(one["ts"], one["dur"]) for one in told if one["ph"] == "X"] == [(0.0, 5e5), (1.5e6, 2.5e5)]
