"""Two timelines side by side: what was predicted and what was measured, or two runs of one job."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from plait.core.errors import DataError
from plait.core.timeline import Hidden, Span, SpanKey, Timeline, hidden, join

What = tuple[str, str, str]
"""(kind, site, direction) of a span: the rows of a comparison."""


class Row(NamedTuple):
    """Spans that both timelines have: seconds of a rank in a step."""

    kind: str
    site: str
    direction: str
    predicted: float
    measured: float

    @property
    def ratio(self) -> float | None:
        """Measured over predicted; None where nothing was predicted to take any time."""
        return self.measured / self.predicted if self.predicted > 0 else None


class Unmatched(NamedTuple):
    """Spans that only one timeline has: how many and how many seconds of a rank in a step; the name of
    one."""

    kind: str
    site: str
    direction: str
    count: float
    seconds: float
    example: str


@dataclass(frozen=True)
class Comparison:
    """steps, ranks: in both timelines; nothing else is compared. predicted, measured: all communication of a
    rank in a step."""

    steps: tuple[int, ...]
    ranks: tuple[int, ...]
    rows: tuple[Row, ...]
    never_seen: tuple[Unmatched, ...]
    not_planned: tuple[Unmatched, ...]
    predicted: Hidden
    measured: Hidden


def compare(predicted: Timeline, measured: Timeline) -> Comparison:
    """Rows in order of their measured time. Raises DataError if no step of any rank is in both."""
    lanes = _lanes(predicted.spans) & _lanes(measured.spans)
    if not lanes:
        raise DataError("the two timelines have no step of any rank in common")
    left, right = (
        Timeline(tuple(span for span in one.spans if (span.step, span.rank) in lanes)) for one in (predicted, measured)
    )
    pairs = join(left, right)
    matched = {span.key for _, span in pairs}
    totals: defaultdict[What, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for planned, seen in pairs:
        total = totals[seen.kind, seen.site, seen.direction]
        total[0] += planned.seconds / len(lanes)
        total[1] += seen.seconds / len(lanes)
    rows = [Row(*what, *both) for what, both in totals.items()]
    return Comparison(
        steps=tuple(sorted({step for step, _ in lanes})),
        ranks=tuple(sorted({rank for _, rank in lanes})),
        rows=tuple(sorted(rows, key=lambda row: -row.measured)),
        never_seen=_unmatched(left.spans, matched, len(lanes)),
        not_planned=_unmatched(right.spans, matched, len(lanes)),
        predicted=_each(hidden(left.spans), len(lanes)),
        measured=_each(hidden(right.spans), len(lanes)),
    )


def _lanes(spans: Iterable[Span]) -> set[tuple[int, int]]:
    return {(span.step, span.rank) for span in spans}


def _each(communication: Hidden, lanes: int) -> Hidden:
    return Hidden(communication.total / lanes, communication.exposed / lanes)


def _unmatched(spans: Iterable[Span], matched: set[SpanKey], lanes: int) -> tuple[Unmatched, ...]:
    groups: defaultdict[What, list[Span]] = defaultdict(list)
    for span in spans:
        if span.key not in matched:
            groups[span.kind, span.site, span.direction].append(span)
    found = [
        Unmatched(*what, len(own) / lanes, sum(span.seconds for span in own) / lanes, own[0].name)
        for what, own in groups.items()
    ]
    return tuple(sorted(found, key=lambda one: (-one.seconds, one.example)))
