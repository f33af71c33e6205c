"""The calls in a rank's ring that tell where it is: what is open, and the last few of every channel."""

from __future__ import annotations

from pathlib import Path

from plait.core.record.ring import RecordKind, Ring
from plait.core.runs.evidence import Call

RINGS = "rings"
"""The folder of a run's rings."""
KEPT = 4
"""Calls of a channel that are over, to compare with what others began."""
CALLS = (RecordKind.COLLECTIVE, RecordKind.SEND, RecordKind.RECEIVE)


def ring_path(folder: Path, rank: int) -> Path:
    """Where a rank's ring lies in a run's folder."""
    return folder / RINGS / f"rank-{rank:05d}.ring"


def calls_of(ring: Ring) -> tuple[Call, ...]:
    """The last calls of a rank, oldest first."""
    import numpy as np

    table = ring.table
    rows = np.flatnonzero(np.isin(table["kind"], CALLS))
    if not len(rows):
        return ()
    calls = table[rows]
    fields = [calls[name].astype(np.int64) for name in ("peer", "kind", "group")]
    order = np.lexsort(fields)  # stable: within a channel as they began
    new = np.any([np.diff(field[order], prepend=field[order[0]] - 1) != 0 for field in fields], axis=0)
    starts = np.flatnonzero(new)
    ends = np.append(starts[1:], len(order))
    over = calls["ended"][order] > 0
    after = np.append(np.cumsum(over[::-1])[::-1], 0)  # calls that are over from here on
    kept = ~over | (after[:-1] - np.repeat(after[ends], ends - starts) <= KEPT)
    found = ring.records(np.sort(rows[order[kept]]))
    return tuple(call for record in found if (call := Call.of(record, ring.rank)))


def waited_since(calls: tuple[Call, ...]) -> int:
    """When the longest of a rank's waits began, in ns: that of a channel's first open call, or the end of the
    one before it; 0 if nothing is open."""
    first: dict[tuple[int, int, int], Call] = {}
    last: dict[tuple[int, int, int], int] = {}
    for call in calls:
        key = (id(call.channel.group), call.channel.source, call.channel.target)
        if call.over:
            last[key] = max(last.get(key, 0), call.ended)
        elif key not in first or call.sequence < first[key].sequence:
            first[key] = call
    return min((max(call.enqueued, last.get(key, 0)) for key, call in first.items()), default=0)
