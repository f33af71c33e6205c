"""The exported trace: what begins ends, on its track; arrows have two ends."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import polars as pl
import pytest
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace, TracePacket, TrackEvent

from plait.diagnose.perfetto import write_json, write_perfetto
from tests.diagnose.made import Job
from tests.diagnose.test_stragglers import recording


def exported(spans: pl.DataFrame, path: Path) -> tuple[int, Trace]:
    count = write_perfetto(spans, path)
    return count, Trace.FromString(path.read_bytes())


def events(trace: Trace) -> list[TracePacket]:
    return [packet for packet in trace.packet if packet.HasField("track_event")]


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
    begins: Counter[int] = Counter()
    ends: Counter[int] = Counter()
    for packet in events(trace):
        begins.update(packet.track_event.flow_ids)
        ends.update(packet.track_event.terminating_flow_ids)
    assert set(begins) == set(ends)
    assert len(ends) == spans.filter(pl.col("kind") == "idle").height


def test_what_overlaps_is_on_a_track_of_its_own(tmp_path: Path) -> None:
    spans = recording(Job(dp=1, pp=1, steps=1, micro_batches=2)).spans.filter(pl.col("kind") == "compute").head(2)
    both = spans.with_columns(start=pl.Series([0.0, 0.5]), end=pl.Series([1.0, 1.5]))
    _, trace = exported(both, tmp_path / "t.pftrace")
    assert len({packet.track_event.track_uuid for packet in events(trace)}) == 2


@pytest.mark.parametrize("count", [0, 1])
def test_few(tmp_path: Path, count: int) -> None:
    spans = recording(Job(dp=1, pp=1, steps=1)).spans.head(count)
    assert exported(spans, tmp_path / "t.pftrace")[0] == count
