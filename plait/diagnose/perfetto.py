"""Write spans as a trace for ui.perfetto.dev: in its protobuf format (TrackEvent), or in the older
JSON format.

Each rank is a process with a track for computation and waits, a track for each axis' communication,
and more tracks for overlapping spans. An arrow goes from each collective or transfer to the wait
that it ended; for a transfer, to the receiver's wait.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import polars as pl

from plait.core.base.files import replacing
from plait.diagnose.measured.dependencies import WAITS, awaited
from plait.diagnose.measured.recording import rank_phrase

if TYPE_CHECKING:
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TracePacket

SEQUENCE = 1
"""Packet sequence number: the trace has one writer."""


class Track(NamedTuple):
    """A row of the trace. lane: computation and waits, or an axis' communication. number: 1, or
    more for a further row of a lane with overlapping spans."""

    rank: int
    lane: str
    number: int

    @property
    def name(self) -> str:
        """The displayed name."""
        return self.lane if self.number == 1 else f"{self.lane} ({self.number})"


class Event(NamedTuple):
    """The begin or the end of a span. at: ns since the first begin. row: index in the table of
    spans."""

    at: int
    begins: bool
    row: int
    track: Track


class SpanFacts(NamedTuple):
    """The fields of a span that the trace shows. began, ended: ns since the first begin."""

    rank: int
    label: str
    kind: str
    direction: str
    step: int
    slice: int
    layer: int
    bytes: int
    began: int
    ended: int


def write_json(spans: pl.DataFrame, path: Path, grid: pl.DataFrame | None = None) -> int:
    """Write spans in the older JSON format of traces, and return their number. grid: coordinates of
    ranks, for the process names. The file appears completely or not at all."""
    laid = _laid(spans)
    tracks = _tracks(laid)
    number = {track: at for at, track in enumerate(sorted(tracks))}
    found: list[dict[str, Any]] = [
        {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": rank_phrase(grid, rank)}}
        for rank in sorted({track.rank for track in tracks})
    ]
    found += [
        {"ph": "M", "pid": track.rank, "tid": tid, "name": "thread_name", "args": {"name": track.name}}
        for track, tid in number.items()
    ]
    placed = {event.row: number[event.track] for events in tracks.values() for event in events}
    rows = _span_facts(laid)
    for at, row in enumerate(rows):
        found.append({
            "ph": "X", "pid": row.rank, "tid": placed[at], "name": row.label, "cat": f"{row.kind},{row.direction}",
            "ts": row.began / 1e3, "dur": (row.ended - row.began) / 1e3,
            "args": {"step": row.step + 1, "slice": row.slice, "layer": row.layer, "bytes": row.bytes},
        })  # fmt: skip
    for flow, (wait, on) in enumerate(_arrows(laid)):
        since = rows[on].began
        for at, ends, when in ((on, {"ph": "s"}, since), (wait, {"ph": "f", "bp": "e"}, max(since, rows[wait].began))):
            where = {"pid": rows[at].rank, "tid": placed[at], "ts": when / 1e3}
            found.append({**ends, "id": flow, "name": "dependency", "cat": "flow", **where})
    with replacing(path) as partial:
        partial.write_text(json.dumps({"traceEvents": found, "displayTimeUnit": "ms"}))
    return laid.height


def write_perfetto(spans: pl.DataFrame, path: Path, grid: pl.DataFrame | None = None) -> int:
    """Write spans with axis, lane and meeting, as a recording has them, and return their number.
    Steps are counted from 1, as in all output for people. grid: coordinates of ranks, for the
    process names. The file appears completely or not at all."""
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace

    laid = _laid(spans)
    with replacing(path) as partial, open(partial, "wb") as file:
        for packet in _packets(laid, grid):  # a trace is the concatenation of its packets
            file.write(Trace(packet=[packet]).SerializeToString())
    return laid.height


def _packets(laid: pl.DataFrame, grid: pl.DataFrame | None) -> Iterator[TracePacket]:
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TracePacket, TrackEvent

    tracks = _tracks(laid)
    ranks = sorted({track.rank for track in tracks})
    for rank in ranks:  # track 0 is reserved for the kernel
        packet = TracePacket()
        packet.track_descriptor.uuid = packet.track_descriptor.process.pid = rank + 1
        packet.track_descriptor.process.process_name = rank_phrase(grid, rank)
        yield packet
    uuids = {track: ranks[-1] + 2 + number for number, track in enumerate(sorted(tracks))}
    for track, uuid in uuids.items():
        packet = TracePacket()
        packet.track_descriptor.uuid, packet.track_descriptor.parent_uuid = uuid, track.rank + 1
        packet.track_descriptor.name = track.name
        yield packet
    rows = _span_facts(laid)
    starts, ends = _flows(_arrows(laid))
    for number, event in enumerate(_in_order(tracks)):
        packet = TracePacket(timestamp=event.at, trusted_packet_sequence_id=SEQUENCE)
        if number == 0:
            packet.sequence_flags = TracePacket.SEQ_INCREMENTAL_STATE_CLEARED
        told = packet.track_event
        told.track_uuid = uuids[event.track]
        told.type = TrackEvent.TYPE_SLICE_BEGIN if event.begins else TrackEvent.TYPE_SLICE_END
        if event.begins:
            row = rows[event.row]
            told.name = row.label
            told.categories.append(row.kind)
            told.flow_ids.extend(starts.get(event.row, ()))
            for name, value in (
                ("step", row.step + 1), ("slice", row.slice), ("layer", row.layer), ("bytes", row.bytes),
            ):  # fmt: skip
                told.debug_annotations.add(name=name, int_value=value)
        elif (
            event.row in ends
        ):  # an arrow points forward in time: a wait may begin before its collective, but ends later
            told.terminating_flow_ids.append(ends[event.row])
        yield packet


def _laid(spans: pl.DataFrame) -> pl.DataFrame:
    """Return spans in order of time, with ``began`` and ``ended`` in ns since the first begin, and
    ``label``, the displayed text."""
    origin = spans["start"].min() or 0.0
    ns = [
        ((pl.col(name) - origin) * 1e9).round().cast(pl.Int64).alias(told)
        for name, told in (("start", "began"), ("end", "ended"))
    ]
    named = pl.when(pl.col("kind").is_in(WAITS)).then(pl.format("{} {}", "kind", "name")).otherwise("name")
    return spans.with_columns(*ns, label=named).sort("began", -pl.col("ended"), maintain_order=True)


def _span_facts(laid: pl.DataFrame) -> list[SpanFacts]:
    return [SpanFacts(*row) for row in laid.select(SpanFacts._fields).iter_rows()]


def _tracks(laid: pl.DataFrame) -> dict[Track, list[Event]]:
    """Return the events of every track, in order. Two spans on a track are disjoint or nested,
    since only the order of events matches an end to its begin."""
    found: dict[Track, list[Event]] = {}
    lanes: dict[tuple[int, str], list[tuple[Track, list[Event], list[tuple[int, int]]]]] = {}
    for row, (rank, lane, began, ended) in enumerate(laid.select("rank", "lane", "began", "ended").iter_rows()):
        own = lanes.setdefault((rank, lane), [])
        for track, events, opened in own:
            _close(track, events, opened, began)
            if not opened or opened[-1][0] >= ended:
                break
        else:
            track, events, opened = Track(rank, lane, len(own) + 1), list[Event](), list[tuple[int, int]]()
            own.append((track, events, opened))
            found[track] = events
        events.append(Event(began, True, row, track))
        opened.append((ended, row))
    for own in lanes.values():
        for track, events, opened in own:
            _close(track, events, opened, None)
    return found


def _close(track: Track, events: list[Event], opened: list[tuple[int, int]], until: int | None) -> None:
    """Append the end of every open span that ends by ``until``; None: of all open spans."""
    while opened and (until is None or opened[-1][0] <= until):
        ended, row = opened.pop()
        events.append(Event(ended, False, row, track))


def _in_order(tracks: Mapping[Track, Sequence[Event]]) -> list[Event]:
    """Return all events by time. At equal times communication comes first, so that arrows start
    before they end; the order within a track stays."""
    order = sorted(tracks, key=lambda track: (track.lane == "processor", track))
    return sorted((event for track in order for event in tracks[track]), key=lambda event: event.at)


def _arrows(laid: pl.DataFrame) -> list[tuple[int, int]]:
    """Return (row of a wait, row of the span that it waited for) pairs. Pairs whose span begins
    after the wait ended, by differing clocks, are left out."""
    began, ended = laid["began"].to_list(), laid["ended"].to_list()
    return [(wait, on) for wait, on in awaited(laid).iter_rows() if began[on] <= ended[wait]]


def _flows(arrows: Sequence[tuple[int, int]]) -> tuple[dict[int, list[int]], dict[int, int]]:
    """Return the numbers of the arrows that start at each row, and of the arrow that ends at each
    row."""
    starts: dict[int, list[int]] = {}
    for flow, (_, on) in enumerate(arrows, 1):
        starts.setdefault(on, []).append(flow)
    return starts, {wait: flow for flow, (wait, _) in enumerate(arrows, 1)}
