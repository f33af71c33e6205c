"""Spans as a trace for ui.perfetto.dev, in its protobuf format (TrackEvent) with arrows along dependencies.

A process for each rank, a track for what it computes and waits for, one for each axis' communication. An
arrow goes from each collective or transfer to the wait that needed it, on the receiver for a transfer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import polars as pl

from plait.core.files import replacing
from plait.core.timeline import Span, Timeline

if TYPE_CHECKING:
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TracePacket

SEQUENCE = 1
"""Of packets: one writer."""
LANES = ("processor", "tp", "cp", "dp", "pp", "other")
CHUNK = 1000
"""Packets that are written at once."""


def write_json(spans: pl.DataFrame, path: Path) -> int:
    """Spans with the columns of ``Span``, in the older form; how many were written. Steps are counted from 1
    in a trace, as wherever people read them."""
    columns = [field.name for field in fields(Span)]
    rows = spans.select(columns).with_columns(pl.col("step") + 1).iter_rows()
    Timeline(tuple(Span(*row) for row in rows)).write_perfetto(path)
    return spans.height


def write_perfetto(spans: pl.DataFrame, path: Path) -> int:
    """Spans with axis, lane and meeting, as a recording has them; how many events were written. Appears whole
    or not at all."""
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace

    written = 0
    with replacing(path) as partial, open(partial, "wb") as file:
        batch = Trace()
        for packet in _packets(spans):
            batch.packet.append(packet)
            written += packet.HasField("track_event")
            if len(batch.packet) == CHUNK:
                batch = _flushed(batch, file)
        _flushed(batch, file)
    return written // 2


def _flushed(batch: Any, file: IO[bytes]) -> Any:
    """A trace is its packets one after the other, so parts of it may be written apart."""
    file.write(batch.SerializeToString())
    return type(batch)()


def _packets(spans: pl.DataFrame) -> Iterator[TracePacket]:
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TracePacket, TrackEvent

    tracks = _tracks(spans)
    for rank in sorted({rank for rank, _ in tracks}):
        yield _process(rank)
    for (rank, lane), uuid in tracks.items():
        packet = TracePacket()
        packet.track_descriptor.uuid = uuid
        packet.track_descriptor.parent_uuid = _process_uuid(rank)
        packet.track_descriptor.name = lane
        yield packet
    for number, row in enumerate(_events(spans).iter_rows(named=True)):
        packet = TracePacket(timestamp=row["at"], trusted_packet_sequence_id=SEQUENCE)
        if number == 0:
            packet.sequence_flags = TracePacket.SEQ_INCREMENTAL_STATE_CLEARED
        event = packet.track_event
        event.track_uuid = tracks[row["rank"], row["track"]]
        event.type = TrackEvent.TYPE_SLICE_BEGIN if row["begins"] else TrackEvent.TYPE_SLICE_END
        if row["begins"]:
            event.name = row["label"]
            event.categories.append(row["kind"])
            (event.terminating_flow_ids if row["waits"] else event.flow_ids).extend(row["flow"] or ())
            event.debug_annotations.add(name="step", int_value=row["step"] + 1)  # counted from 1
            for key in ("slice", "layer", "bytes"):
                event.debug_annotations.add(name=key, int_value=row[key])
        yield packet


def _process_uuid(rank: int) -> int:
    return rank + 1


def _process(rank: int) -> TracePacket:
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TracePacket

    packet = TracePacket()
    packet.track_descriptor.uuid = _process_uuid(rank)
    packet.track_descriptor.process.pid = rank + 1  # 0 is the kernel's
    packet.track_descriptor.process.process_name = f"rank {rank}"
    return packet


def _tracks(spans: pl.DataFrame) -> dict[tuple[int, str], int]:
    """A number for the tracks that are needed. Slices of a track may not overlap unless one is within the
    other, so what overlaps goes to a track of its own."""
    found = _laid(spans).select("rank", "track").unique().sort("rank", "track")
    first = 1 + _process_uuid(int(found["rank"].max() or 0))  # type: ignore[arg-type]
    return {(rank, track): first + number for number, (rank, track) in enumerate(found.iter_rows())}


def _laid(spans: pl.DataFrame) -> pl.DataFrame:
    """With ``track``: the lane, and a second one for what begins before an earlier span of the lane ends."""
    spans = spans.sort("rank", "lane", "start", "end")
    before = pl.col("end").cum_max().shift(1).over("rank", "lane")
    overlaps = (pl.col("start") < before).fill_null(value=False)
    parity = overlaps.cum_sum().over("rank", "lane") % 2
    return spans.with_columns(
        track=pl.when(overlaps & (parity == 1)).then(pl.col("lane") + " (overlapping)").otherwise("lane")
    )


def _events(spans: pl.DataFrame) -> pl.DataFrame:
    """Two rows for each span, in order of time. flow: numbers of arrows that start or end here."""
    origin = spans["start"].min() or 0.0
    waits = pl.col("kind").is_in(["wait", "idle"])
    needed = pl.when(pl.col("kind").is_in(["idle", "transfer"])).then("meeting").otherwise(
        pl.when(pl.col("kind").is_in(["comm", "wait"])).then(_key())
    )  # fmt: skip
    laid = _laid(spans).with_columns(
        waits=waits, needed=needed,
        label=pl.when(waits).then(pl.format("{} {}", "kind", "name")).otherwise("name"),
        began=((pl.col("start") - origin) * 1e9).round().cast(pl.Int64),
        ended=((pl.col("end") - origin) * 1e9).round().cast(pl.Int64),
    )  # fmt: skip
    pairs = laid.filter(pl.col("needed").is_not_null()).group_by("needed").agg(pl.col("waits").any().alias("awaited"))
    laid = laid.join(pairs.filter("awaited"), on="needed", how="left", maintain_order="left").with_columns(
        flow=pl.when(pl.col("awaited")).then(pl.concat_list("needed"))
    )
    keep = ["rank", "track", "kind", "label", "waits", "flow", "step", "slice", "layer", "bytes", "began", "ended"]
    begins = laid.select(*keep, at="began", begins=pl.lit(value=True), order=-pl.col("ended"))
    ends = laid.select(*keep, at="ended", begins=pl.lit(value=False), order=-pl.col("began"))
    # At one moment: first what ends, of these what began last; then what begins, of these what ends last.
    return pl.concat([begins, ends]).sort("at", "begins", "order", maintain_order=True)


def _key() -> pl.Expr:
    """Of a collective and of the wait for it: a unit is gathered and needed."""
    name = pl.col("name").str.replace(r"^need ", "gather ").str.replace(r"^gather vectors", "publish vectors")
    return pl.struct("step", "rank", "axis", name.alias("name"), "seq").hash()
