"""Timeline: timed spans in columns, with the same format for a simulator's predictions and a
recorder's measurements.

A span's key is (step, rank, kind, name, seq). ``name`` is an op's text form (``attn3.F0``); ``seq``
is its occurrence within the step, because micro-batches repeat names. Predicted and measured
timelines join on the key.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from plait.core.base.errors import DataError
from plait.core.base.ignored_input import IgnoredInput
from plait.core.record.columns import read_columns, write_columns

if TYPE_CHECKING:
    import numpy as np

SCHEMA_VERSION = "2"
SpanKind = Literal[
    "compute", "wait", "comm", "idle", "transfer", "data", "optimizer", "checkpoint", "evaluation"
]  # fmt: skip
Direction = Literal["forward", "backward", ""]
PLANNED: frozenset[SpanKind] = frozenset(("compute", "wait", "comm", "idle", "transfer"))
"""The kinds of spans that a plan predicts."""


class SpanKey(NamedTuple):
    """The key on which two timelines of one job join."""

    step: int
    rank: int
    kind: str
    name: str
    seq: int


@dataclass(frozen=True, slots=True)
class Span:
    """A timed op or activity of a rank. start, end: seconds. bytes: bytes that this rank sent.

    kind: ``comm`` is a collective, ``wait`` the part of a collective that computation did not hide.
    ``transfer`` and ``idle`` are of a pipeline; their layer is the stage and their slice the
    micro-batch. ``transfer`` is a tensor on its way to another stage, ``idle`` a stage waiting for
    a tensor (the bubble is part of it). ``data``, ``optimizer``, ``checkpoint`` and ``evaluation``
    are activities outside of the plan's ops; they have no direction, and layer and slice are -1.
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
        """The rank's resource that the span occupies; a wait keeps the processor idle."""
        return "network" if self.kind in ("comm", "transfer") else "processor"

    @property
    def seconds(self) -> float:
        """The span's duration in seconds."""
        return self.end - self.start


class NamedOp(Protocol):
    """An op of a schedule, a segment or a unit; its text form is the name of its span."""

    @property
    def site(self) -> str:
        """The sublayer or other part that the op works on."""
        ...

    @property
    def layer(self) -> int:
        """The layer of the model; for an op of a schedule, the stage."""
        ...

    @property
    def slice(self) -> int:
        """The slice; for an op of a schedule, the micro-batch."""
        ...

    @property
    def forward(self) -> bool:
        """True if the op belongs to the forward pass."""
        ...


class OpSpan(NamedTuple):
    """An op with its start and end in seconds. It is no span yet: its occurrence within the step is
    unknown."""

    op: NamedOp
    kind: SpanKind
    start: float
    end: float
    bytes: int = 0


def spans_of(step: int, rank: int, ops: Iterable[OpSpan]) -> list[Span]:
    """Return the spans of one step on one rank, sorted by start. Only this function makes keys, so
    that predictions and measurements have the same keys."""
    seen: Counter[tuple[str, str]] = Counter()
    spans: list[Span] = []
    for one in sorted(ops, key=lambda each: each.start):
        name, direction = str(one.op), "forward" if one.op.forward else "backward"
        seq = seen[one.kind, name]
        seen[one.kind, name] += 1
        where = (one.op.site, one.op.layer, one.op.slice)
        spans.append(Span(step, rank, one.kind, name, seq, *where, direction, one.start, one.end, one.bytes))
    return spans


_COLUMNS = {f.name: {"int": "int64", "float": "float64"}.get(str(f.type), "string") for f in fields(Span)}
_NUMPY = {"int64": "int64", "float64": "float64", "string": "str"}
_TIMES = {"start": "start_ns", "end": "end_ns"}
"""Columns of times in the file of a timeline: seconds in memory, whole nanoseconds in the file."""


@dataclass(frozen=True)
class Timeline:
    """Spans and the hash of their plan."""

    spans: tuple[Span, ...]
    plan_hash: str = ""

    def columns(self) -> dict[str, np.ndarray]:
        """Return one array per field of ``Span``, for arithmetic over many spans."""
        import numpy as np

        return {
            name: np.array([getattr(span, name) for span in self.spans], dtype=_NUMPY[kind])
            for name, kind in _COLUMNS.items()
        }

    def write_parquet(self, path: Path) -> None:
        """Write the spans to a Parquet file atomically: columns as in ``Span``, times in ns, schema
        version and plan hash in the metadata."""
        columns: dict[str, Sequence[Any]] = {name: [getattr(span, name) for span in self.spans] for name in _COLUMNS}
        for name, stored in _TIMES.items():
            columns[stored] = [round(seconds * 1e9) for seconds in columns.pop(name)]
        write_spans(path, columns, self.plan_hash)

    @staticmethod
    def read_parquet(path: Path) -> Timeline:
        """Return the timeline in a file. Raises DataError if the file is missing, truncated,
        foreign, or of another schema version."""
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
        """Return all spans of several timelines of one plan. Raises DataError if their plans
        differ."""
        hashes = {part.plan_hash for part in parts}
        if len(hashes) > 1:
            raise DataError(f"these timelines belong to {len(hashes)} different plans")
        return Timeline(tuple(span for part in parts for span in part.spans), hashes.pop() if hashes else "")


def write_spans(path: Path, columns: Mapping[str, Any], plan_hash: str, began: int = 0) -> None:
    """Write a timeline from columns in the file's form. began: wall-clock time in ns when the rank
    started; if a step was repeated, the later start counts."""
    stored = {_TIMES.get(name, name): "int64" if name in _TIMES else kind for name, kind in _COLUMNS.items()}
    metadata = {"plait.timeline.version": SCHEMA_VERSION, "plait.plan": plan_hash, "plait.began": str(began)}
    write_columns(path, {name: (kind, columns[name]) for name, kind in stored.items()}, metadata)


MANY = 12
"""The number of lines of one kind from which on they are replaced by their count."""


class Notes:
    """Lines of remarks, in order, and counts of input that was left out.

    >>> notes = Notes()
    >>> notes.left_out("files that cannot be read", {"a.parquet": "it is truncated", "b.parquet": "a pipe"})
    >>> notes.lines
    ['a.parquet: it is truncated', 'b.parquet: a pipe']
    >>> notes.over.rows()
    [{'what': 'files that cannot be read', 'count': 2, 'first': 'a.parquet'}]
    """

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.over = IgnoredInput()

    def say(self, line: str) -> None:
        """Add a line about input that was not left out."""
        self.lines.append(line)

    def left_out(self, what: str, why: dict[str, str]) -> None:
        """Add input of one kind that was left out. what: a plural noun. why: reasons by name."""
        lines = [f"{name}: {reason}" for name, reason in why.items()]
        few = len(lines) < MANY
        self.lines += lines if few else [f"{len(lines)} {what} were left out, such as: {lines[0]}"]
        self.over.note(what, next(iter(why), ""), len(why))

    def count(self, line: str, what: str, count: int, first: str = "") -> None:
        """Add a line, and count the input that it describes. first: position of the first
        occurrence."""
        self.lines.append(line)
        self.over.note(what, first, count)
