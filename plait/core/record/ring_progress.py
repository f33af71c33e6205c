"""How a rank gets on by itself, as its ring tells: when it last began or ended something, and for how long it
was ever at one thing. What it waits for is not its own."""

from __future__ import annotations

from typing import NamedTuple

from plait.core.record.ring import NOBODY, RecordKind, Ring

WORK = (RecordKind.COMPUTE, RecordKind.DATA, RecordKind.OPTIMIZER)
"""What a rank's own thread is inside of as long as it computes."""
ENDS = (*WORK, RecordKind.WAIT, RecordKind.IDLE, RecordKind.STEP, RecordKind.CHECKPOINT, RecordKind.EVALUATION)
"""What it ends itself: how communication ends is up to others, too."""
ALONE = (*WORK, RecordKind.STEP)
"""After whose beginning it waits for nobody."""


class RingProgress(NamedTuple):
    """at: ns of the host's clock when the rank last began or ended something; 0 if never. longest: the most
    seconds between two such moments, waiting left out, in whole steps after the first. inside: whether it is
    inside a piece of its own work (on a GPU that is not the host's, and is not told)."""

    at: int
    longest: float
    inside: bool


def moved(ring: Ring, now: int) -> RingProgress:
    """By the records of a ring up to ``now``, ns of its host's clock: later ones are damage."""
    import numpy as np

    table = ring.table
    own = np.isin(table["kind"], ENDS)
    begun, ended = table["enqueued"], np.abs(table["ended"]) * own
    times = np.concatenate([begun, ended])
    alone = np.concatenate([np.isin(table["kind"], ALONE), np.ones(len(table), bool)])
    known = (times > 0) & (times <= now)
    times, alone = times[known], alone[known]
    latest = max(int(times.max(initial=0)), ring.header.stepped if ring.header.stepped <= now else 0)
    working = table[own][-1:]
    inside = np.isin(working["kind"], WORK) & (working["started"] > 0) & (working["ended"] == 0)
    steps = table[(table["kind"] == RecordKind.STEP) & (table["step"] != NOBODY) & (table["ended"] > 0)]
    longest = 0
    if len(steps):
        order = np.lexsort((~alone, times))  # of one moment: who begins to wait then is the last
        times, alone = times[order], alone[order]
        gaps = np.diff(times)[alone[:-1] & (times[:-1] >= steps["ended"][0])]
        longest = int(gaps.max(initial=0))
    return RingProgress(latest, longest / 1e9, bool(inside.any()))
