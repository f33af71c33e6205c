"""Timeline: timed spans in columns, the same kind of thing whether predicted by a simulator or measured by a
recorder.

A span's key is (step, rank, name, seq): ``name`` is an op's text form (``attn3.F0``), ``seq`` its occurrence
within the step (micro-batches repeat names). Predicted and measured timelines join on the key.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from plait.core.base.errors import DataError
from plait.core.record.columns import read_columns, write_columns

if TYPE_CHECKING:
    import numpy as np

SCHEMA_VERSION = "2"
SpanKind = Literal[
    "compute", "wait", "comm", "idle", "transfer", "data", "optimizer", "checkpoint", "evaluation"
]  # fmt: skip
Direction = Literal["forward", "backward", ""]
PLANNED: frozenset[SpanKind] = frozenset(("compute", "wait", "comm", "idle", "transfer"))
"""Kinds of which a plan predicts spans."""


class SpanKey(NamedTuple):
    """What two timelines of one job join on."""

    step: int
    rank: int
    kind: str
    name: str
    seq: int


@dataclass(frozen=True, slots=True)
class Span:
    """One timed thing. start, end: seconds. bytes: sent by this rank.

    kind: ``comm`` a collective, ``wait`` the part of it that computation did not hide. In a pipeline, where
    layer is the stage and slice the micro-batch: ``transfer`` a tensor on its way to another stage, ``idle``
    a stage waiting for one (the bubble is part of it). ``data``, ``optimizer``, ``checkpoint`` and
    ``evaluation`` are what a rank does beside the ops of its plan; they have no direction, and layer and
    slice are -1.
    """

    step: int
    rank: int
    kind: SpanKind
    name: str
    seq: int
    site: str
    layer: int
    slice: int
    direction: Direction
    start: float
    end: float
    bytes: int = 0

    @property
    def key(self) -> SpanKey:
        """The span's identity across timelines."""
        return SpanKey(self.step, self.rank, self.kind, self.name, self.seq)

    @property
    def lane(self) -> Literal["processor", "network"]:
        """Which of a rank's two resources it occupies; a wait keeps the processor idle."""
        return "network" if self.kind in ("comm", "transfer") else "processor"

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.start


class NamedOp(Protocol):
    """An op of a schedule, a segment or a unit; its text form is its span's name."""

    @property
    def site(self) -> str:
        """What it works on."""
        ...

    @property
    def layer(self) -> int:
        """Of the model; of an op of a schedule, the stage."""
        ...

    @property
    def slice(self) -> int:
        """Of an op of a schedule, the micro-batch."""
        ...

    @property
    def forward(self) -> bool:
        """Whether it belongs to the forward pass."""
        ...


class OpSpan(NamedTuple):
    """An op that took from ``start`` to ``end``, not yet a span: its occurrence within the step is not
    known."""

    op: NamedOp
    kind: SpanKind
    start: float
    end: float
    bytes: int = 0


def spans_of(step: int, rank: int, found: Iterable[OpSpan]) -> list[Span]:
    """The spans of one step on one rank, in order of their start. The one place where keys are made, so that
    prediction and measurement have the same."""
    seen: Counter[tuple[str, str]] = Counter()
    spans: list[Span] = []
    for one in sorted(found, key=lambda each: each.start):
        name, direction = str(one.op), "forward" if one.op.forward else "backward"
        seq = seen[one.kind, name]
        seen[one.kind, name] += 1
        where = (one.op.site, one.op.layer, one.op.slice)
        spans.append(Span(step, rank, one.kind, name, seq, *where, direction, one.start, one.end, one.bytes))
    return spans


_COLUMNS = {f.name: {"int": "int64", "float": "float64"}.get(str(f.type), "string") for f in fields(Span)}
_NUMPY = {"int64": "int64", "float64": "float64", "string": "str"}
_TIMES = {"start": "start_ns", "end": "end_ns"}
"""Seconds in memory, whole nanoseconds in files."""


@dataclass(frozen=True)
class Timeline:
    """Spans, and the hash of the plan they belong to."""

    spans: tuple[Span, ...]
    plan_hash: str = ""

    def columns(self) -> dict[str, np.ndarray]:
        """One array per field of ``Span``, for arithmetic over many spans."""
        import numpy as np

        return {
            name: np.array([getattr(span, name) for span in self.spans], dtype=_NUMPY[kind])
            for name, kind in _COLUMNS.items()
        }

    def write_parquet(self, path: Path) -> None:
        """Columns as in ``Span``, times in ns; schema version and plan hash in the file's metadata. Appears
        whole or not at all."""
        columns: dict[str, Sequence[Any]] = {name: [getattr(span, name) for span in self.spans] for name in _COLUMNS}
        for name, stored in _TIMES.items():
            columns[stored] = [round(seconds * 1e9) for seconds in columns.pop(name)]
        write_spans(path, columns, self.plan_hash)

    @staticmethod
    def read_parquet(path: Path) -> Timeline:
        """Raises DataError for a file that is missing, truncated, foreign, or of another schema version."""
        columns, metadata = read_columns(path, "plait.timeline.version")
        stored = [_TIMES.get(name, name) for name in _COLUMNS]
        missing = [name for name in stored if name not in columns]
        version = metadata["plait.timeline.version"]
        if version != SCHEMA_VERSION or missing:
            lacks = f", without {', '.join(missing)}" if missing else ""
            raise DataError(
                f"{path} is a timeline of version {version}{lacks}; this Plait reads version {SCHEMA_VERSION}"
            )
        for name, in_file in _TIMES.items():
            columns[name] = [ns / 1e9 for ns in columns[in_file]]
        rows = zip(*(columns[name] for name in _COLUMNS), strict=True)
        return Timeline(tuple(Span(*row) for row in rows), metadata.get("plait.plan", ""))

    @staticmethod
    def concat(parts: Sequence[Timeline]) -> Timeline:
        """All spans of several timelines of one plan."""
        hashes = {part.plan_hash for part in parts}
        if len(hashes) > 1:
            raise DataError(f"these timelines belong to {len(hashes)} different plans")
        return Timeline(tuple(span for part in parts for span in part.spans), hashes.pop() if hashes else "")


def write_spans(path: Path, columns: Mapping[str, Any], plan_hash: str, began: int = 0) -> None:
    """A timeline from columns as they stand in its file. began: when the rank started, ns of the wall clock:
    of a step that was done twice, the later start counts."""
    stored = {_TIMES.get(name, name): "int64" if name in _TIMES else kind for name, kind in _COLUMNS.items()}
    metadata = {"plait.timeline.version": SCHEMA_VERSION, "plait.plan": plan_hash, "plait.began": str(began)}
    write_columns(path, {name: (kind, columns[name]) for name, kind in stored.items()}, metadata)
