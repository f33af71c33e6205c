"""Clocks of hosts, led to each other by what a recording holds: the ends of common collectives.

A collective ends at one moment for all, up to the time in which the last message travels. So the median of
the differences of ends on two hosts is the offset between their clocks, and their spread says how sure that
is. Where rings are at hand, ``core.record.clocks`` also knows drift and a bound; this serves runs of
which only the timeline was kept.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import polars as pl

from plait.diagnose.noise import SIGMA
from plait.diagnose.recording import Recording

LEAST = 8
"""Common collectives without which two clocks are not compared."""
MOST = 200_000
"""Rows that are looked at, the last ones."""


class Alignment(NamedTuple):
    """offsets: seconds to be added to times of a rank, of ranks whose clock was compared. error: seconds by
    which two ranks may still be apart (three times the spread of ends), 0 where all have one clock. lost:
    hosts whose clocks could not be compared."""

    offsets: dict[int, float]
    error: float
    lost: tuple[str, ...] = ()


def aligned(recording: Recording) -> Alignment:
    """Every host's clock led to that of the host with the lowest rank. One clock: nothing to do."""
    if recording.clocks_agree:
        return Alignment({}, 0.0)
    hosts = dict(recording.grid.drop_nulls("host").sort("rank").select("rank", "host").iter_rows())
    meetings = recording.meetings.filter(pl.col("axis") != "pp").tail(MOST)
    ends = meetings.join(recording.grid.select("rank", "host"), on="rank").group_by("meeting", "host").agg(
        pl.col("end").max()
    )  # fmt: skip
    both = ends.join(ends, on="meeting", suffix="_other").filter(pl.col("host") != pl.col("host_other"))
    apart = pl.col("end_other") - pl.col("end")
    pairs = both.group_by("host", "host_other").agg(
        n=pl.len(), offset=apart.median(), spread=(apart - apart.median()).abs().median() * SIGMA
    ).filter(pl.col("n") >= LEAST)  # fmt: skip
    edges: dict[str, list[tuple[str, float, float]]] = {}
    for host, other, _, offset, spread in pairs.sort("host", "host_other").iter_rows():
        edges.setdefault(host, []).append((other, offset, spread))
    names = list(dict.fromkeys(hosts.values()))
    led: dict[str, tuple[float, float]] = {}
    reached: dict[str, tuple[float, float]] = {names[0]: (0.0, 0.0)} if names else {}
    while reached:  # the surest first, so that every host is led along the pairs that are compared best
        host = min(reached, key=lambda name: reached[name][1])
        led[host] = offset, error = reached.pop(host)
        for other, ahead, spread in edges.get(host, []):
            if other not in led and (other not in reached or error + spread < reached[other][1]):
                reached[other] = offset - ahead, error + spread
    errors = [error for _, error in led.values()]
    return Alignment(
        {rank: led[host][0] for rank, host in hosts.items() if host in led}, 3 * float(np.max(errors, initial=0.0)),
        tuple(name for name in names if name not in led),
    )  # fmt: skip
