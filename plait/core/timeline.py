"""Timeline: timed spans in columns, the same kind of thing whether predicted by a simulator or measured by a recorder.

A span's key is (step, rank, name, seq): ``name`` is an op's text form (``attn3.F0``), ``seq`` its occurrence within the step
(micro-batches repeat names). Predicted and measured timelines join on the key.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

from plait.core.errors import DataError

SCHEMA_VERSION = "1"
SpanKind = Literal["compute", "wait", "comm"]


class SpanKey(NamedTuple):
    """What two timelines of one job join on."""

    step: int
    rank: int
    kind: str
    name: str
    seq: int


@dataclass(frozen=True, slots=True)
class Span:
    """One timed thing. start, end: seconds. bytes: sent by this rank, for collectives. wait: exposed communication."""

    step: int
    rank: int
    kind: SpanKind
    name: str
    seq: int
    site: str
    layer: int
    slice: int
    direction: Literal["forward", "backward"]
    start: float
    end: float
    bytes: int = 0

    @property
    def key(self) -> SpanKey:
        """The span's identity across timelines."""
        return SpanKey(self.step, self.rank, self.kind, self.name, self.seq)

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.start


_COLUMNS = tuple(f.name for f in fields(Span))


@dataclass(frozen=True)
class Timeline:
    """Spans, and the hash of the plan they belong to."""

    spans: tuple[Span, ...]
    plan_hash: str = ""

    def write_parquet(self, path: Path) -> None:
        """Columns as in ``Span``; schema version and plan hash in the file's metadata. Written in one step."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        columns = {name: [getattr(span, name) for span in self.spans] for name in _COLUMNS}
        table = pa.table(columns).replace_schema_metadata({"plait.timeline.version": SCHEMA_VERSION, "plait.plan": self.plan_hash})
        partial = path.with_suffix(".partial")
        pq.write_table(table, partial)
        partial.replace(path)

    @staticmethod
    def read_parquet(path: Path) -> Timeline:
        """Raises DataError for a truncated or foreign file."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            table = pq.read_table(path)
        except (OSError, pa.ArrowException) as error:
            raise DataError(f"{path} cannot be read as a timeline: {error}") from None
        metadata = {k.decode(): v.decode() for k, v in (table.schema.metadata or {}).items()}
        version = metadata.get("plait.timeline.version")
        if version != SCHEMA_VERSION:
            raise DataError(f"{path} is not a timeline of version {SCHEMA_VERSION} (found {version})")
        rows = zip(*(table.column(name).to_pylist() for name in _COLUMNS), strict=True)
        return Timeline(tuple(Span(*row) for row in rows), metadata.get("plait.plan", ""))

    @staticmethod
    def concat(parts: Sequence[Timeline]) -> Timeline:
        """All spans of several timelines of one plan."""
        hashes = {part.plan_hash for part in parts}
        if len(hashes) > 1:
            raise DataError(f"these timelines belong to {len(hashes)} different plans")
        return Timeline(tuple(span for part in parts for span in part.spans), hashes.pop() if hashes else "")

    def write_perfetto(self, path: Path) -> None:
        """A trace for ui.perfetto.dev: a process per rank, a track for computation and waiting, one for the network, and an
        arrow from each collective to the wait that needed it."""
        path.write_text(json.dumps({"traceEvents": list(_trace_events(self.spans)), "displayTimeUnit": "ms"}))


def _trace_events(spans: Sequence[Span]) -> Iterable[dict[str, Any]]:
    origin = min((span.start for span in spans), default=0.0)
    for rank in sorted({span.rank for span in spans}):
        yield {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}"}}
        for track, name in enumerate(("processor", "network")):
            yield {"ph": "M", "pid": rank, "tid": track, "name": "thread_name", "args": {"name": name}}
    flows = {key._replace(kind="wait"): number for number, key in enumerate(span.key for span in spans if span.kind == "comm")}
    for span in spans:
        track, at = int(span.kind == "comm"), (span.start - origin) * 1e6
        name = f"wait {span.name}" if span.kind == "wait" else span.name
        args: dict[str, Any] = {"step": span.step, "slice": span.slice, "layer": span.layer, "bytes": span.bytes}
        yield {"ph": "X", "pid": span.rank, "tid": track, "name": name, "cat": f"{span.kind},{span.direction}", "ts": at, "dur": span.seconds * 1e6, "args": args}
        flow = flows.get(span.key._replace(kind="wait"))
        if flow is not None and span.kind != "compute":
            ends = {"ph": "f", "bp": "e"} if span.kind == "wait" else {"ph": "s"}
            yield {**ends, "id": flow, "pid": span.rank, "tid": track, "name": "collective", "cat": "flow", "ts": (span.end - origin) * 1e6 - 0.001}


class Hidden(NamedTuple):
    """Communication of one step on one rank, seconds; ``fraction`` = 1 - exposed / total, None without communication."""

    total: float
    exposed: float

    @property
    def fraction(self) -> float | None:
        """Share of the communication that computation hid."""
        return max(0.0, 1.0 - self.exposed / self.total) if self.total > 0 else None


def hidden(spans: Iterable[Span]) -> Hidden:
    """Total busy time of the network and the time computation waited for it, over ``spans`` of one rank."""
    total = exposed = 0.0
    for span in spans:
        if span.kind == "comm":
            total += span.seconds
        elif span.kind == "wait":
            exposed += span.seconds
    return Hidden(total, exposed)


def join(predicted: Timeline, measured: Timeline) -> list[tuple[Span, Span]]:
    """Pairs of spans with equal keys, in the measured order."""
    found = {span.key: span for span in predicted.spans}
    return [(found[span.key], span) for span in measured.spans if span.key in found]


def as_kind(text: str) -> SpanKind:
    """A checked span kind."""
    assert text in ("compute", "wait", "comm"), text
    return cast(SpanKind, text)
