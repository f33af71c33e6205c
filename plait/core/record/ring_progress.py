"""A rank's own progress by its ring: the time of its last start or end of an op, and the longest
time in one op. Waiting for other ranks does not count as its own progress."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from plait.core.base.errors import DataError
from plait.core.record.ring import HEADER, UNSET, Header, RecordKind, Ring, open_ring

WORK_KINDS = (RecordKind.COMPUTE, RecordKind.DATA, RecordKind.OPTIMIZER)
"""The record kinds of computation in the rank's own thread."""
OWN_END_KINDS = (
    *WORK_KINDS,
    RecordKind.WAIT,
    RecordKind.IDLE,
    RecordKind.STEP,
    RecordKind.CHECKPOINT,
    RecordKind.EVALUATION,
)
"""The record kinds whose ends the rank itself determines; the ends of communication also depend on
other ranks."""
INDEPENDENT_KINDS = (*WORK_KINDS, RecordKind.STEP)
"""The record kinds after whose start the rank waits for no other rank."""


class RingProgress(NamedTuple):
    """The progress of a rank. at: ns of the host's clock at the rank's last start or end of an op;
    0 if there is none. longest: the most seconds between two such moments, without waiting, in
    complete steps after the first. inside: True if the rank is inside its own work; unknown on a
    GPU, whose work the host does not run."""

    at: int
    longest: float
    inside: bool


def progress_of(ring: Ring, now: int) -> RingProgress:
    """Return a rank's progress from the records of its ring. now: ns of its host's clock; later
    records are ignored as damaged."""
    import numpy as np

    table = ring.table
    own = np.isin(table["kind"], OWN_END_KINDS)
    begun, ended = table["enqueued"], np.abs(table["ended"]) * own
    times = np.concatenate([begun, ended])
    alone = np.concatenate([np.isin(table["kind"], INDEPENDENT_KINDS), np.ones(len(table), bool)])
    known = (times > 0) & (times <= now)
    times, alone = times[known], alone[known]
    latest = max(int(times.max(initial=0)), ring.header.stepped if ring.header.stepped <= now else 0)
    working = table[own][-1:]
    inside = np.isin(working["kind"], WORK_KINDS) & (working["started"] > 0) & (working["ended"] == 0)
    steps = table[(table["kind"] == RecordKind.STEP) & (table["step"] != UNSET) & (table["ended"] > 0)]
    longest = 0
    if len(steps):
        order = np.lexsort((~alone, times))  # at equal times, a record that begins to wait comes last
        times, alone = times[order], alone[order]
        gaps = np.diff(times)[alone[:-1] & (times[:-1] >= steps["ended"][0])]
        longest = int(gaps.max(initial=0))
    return RingProgress(latest, longest / 1e9, bool(inside.any()))


def read_headers(folder: Path) -> tuple[dict[int, Header], dict[str, str]]:
    """Return the headers of all rings of a folder by rank, and the errors of unreadable rings by
    path."""
    headers: dict[int, Header] = {}
    problems: dict[str, str] = {}
    for path in sorted(folder.glob("rank-*.ring")):
        try:
            with open_ring(path) as file:
                header = Header.unpack(file.read(HEADER))
            headers[header.rank] = header
        except OSError as error:
            problems[str(path)] = f"it cannot be read as a ring: {error.strerror or error}"
        except DataError as error:
            problems[str(path)] = f"it cannot be read as a ring: {error}"
    return headers, problems


def host_names(headers: Mapping[int, Header]) -> dict[int, str]:
    """Return the host name of each rank; numbered names if several hosts have the same name."""
    first = {rank: rank - header.local_rank for rank, header in headers.items()}
    names = {first[rank]: header.host for rank, header in headers.items()}
    if len(set(names.values())) == len(names):
        return {rank: headers[rank].host for rank in headers}
    numbers = {start: number for number, start in enumerate(sorted(names))}
    return {rank: f"host {numbers[start]}" for rank, start in first.items()}
