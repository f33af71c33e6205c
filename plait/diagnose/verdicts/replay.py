"""Replay recorded steps with other durations: how long a step would have taken if a rank had been
like its peers.

Dependencies follow from the recording. An op depends on the last op that ended before it, on its
rank, in each lane. A wait depends on the communication that ended it. Members of a collective, or
both ends of a transfer, depend on each other. Ops that run together form one *event*: it begins
when its last member is ready and lasts as long as the transfer itself. So a replay with recorded
durations reproduces the step.

After the what-if analysis of stragglers (Lin et al., OSDI 2025, arXiv 2505.05713), which knows one
framework's dependencies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]

TOLERANCE = 5e-4
"""Seconds by which an op may seem to begin before its dependency ends, for rounded times: published
operation traces use float32."""
RECENT = 3
"""The largest number of a lane's ops that may end together, as a batch of sends and receives
does."""


@dataclass(frozen=True, eq=False)
class EventGraph:
    """The events of all steps with their dependencies.

    event: of every op. seconds: recorded duration of every event. lead: time before a single op
    after its dependencies ended; the host's own work, unless waiting was not recorded. step: of
    every event, an index into ``steps``. waves: events in topological order.

    sources, gaps, bounds: the edges of events in the order of ``waves``. sources: the event that is
    needed. gaps: seconds between its end and the start of the dependent event, for events of
    several ranks; other events have them in ``lead``. bounds: first edge of each event. first:
    earliest begin of events without dependencies. forced: number of events in seemingly cyclic
    dependencies, begun in their recorded order.
    """

    steps: Ints
    event: Ints
    seconds: Floats
    lead: Floats
    step: Ints
    waves: tuple[Ints, ...]
    sources: tuple[Ints, ...]
    gaps: tuple[Floats, ...]
    bounds: tuple[Ints, ...]
    first: Floats
    forced: int = 0

    def replay(self, seconds: Floats, *, gaps: bool = True) -> Floats:
        """Return the seconds of every step (rows) for given durations of events: (events,), or
        (events, scenarios) with a result column for each. gaps: True to keep the time between ops,
        as the host's own work; False if it is unrecorded waiting."""
        wanted = seconds[:, None] if seconds.ndim == 1 else seconds
        ends = np.zeros_like(wanted, dtype=np.float64)
        for wave, sources, gap, bounds in zip(self.waves, self.sources, self.gaps, self.bounds, strict=True):
            ready = self.first[wave][:, None] * np.ones(wanted.shape[1])
            if sources.size:
                arrivals = ends[sources] + (gap[:, None] if gaps else 0.0)
                some = np.flatnonzero(np.diff(bounds))
                ready[some] = np.maximum(ready[some], np.maximum.reduceat(arrivals, bounds[:-1][some], axis=0))
            ends[wave] = ready + wanted[wave]
        found = np.zeros((self.steps.size, wanted.shape[1]))
        np.maximum.at(found, self.step, ends)
        return found[:, 0] if seconds.ndim == 1 else found


def graph_of(ops: pl.DataFrame, *, clocks_agree: bool = True, tolerance: float = 0.0) -> EventGraph:
    """Return the event graph of ops with columns step, rank, lane, start, end, waits and meeting.

    waits: True for a wait, which lasts as long as its dependency. meeting: equal for ops that run
    together, and for the wait for them; null for single ops.

    clocks_agree: True if starts of different ranks can be compared; otherwise all ranks begin a
    step together. tolerance: possible error of one rank's times, in seconds.
    """
    ops = ops.with_row_index("row").sort("step", "rank", "start", "row")
    step_names, step = np.unique(ops["step"].to_numpy(), return_inverse=True)
    part = ops.select(pl.struct("step", "rank").rle_id()).to_series().to_numpy().astype(np.int64)
    start, end = (ops[name].to_numpy().astype(np.float64) for name in ("start", "end"))
    waits = ops["waits"].to_numpy()
    event = _events(ops)
    seconds = _durations(ops, event)
    needs = [_last_ended(ops, part, start, end, lane, tolerance) for lane in ops["lane"].unique(maintain_order=True)]
    sources = np.concatenate([*needs, _ended_by(ops, part, end, waits)], axis=1)
    latest = np.where(sources >= 0, end[sources], -np.inf).max(axis=1)
    alone = ~np.isfinite(latest)
    # A wait's own time lasts from the end of its dependency to its own end.
    own = np.where(waits, np.clip(end - np.maximum(start, np.where(alone, start, latest)), 0, None), seconds[event])
    if not clocks_agree:  # the other end of a transfer has another clock
        own[waits & ops["meeting"].is_not_null().to_numpy()] = 0.0
    seconds[event[waits]] = own[waits]
    gap = np.where(alone | waits, 0.0, np.clip(start - latest, 0, None))
    single = np.bincount(event, minlength=seconds.size)[event] == 1
    lead = np.zeros(seconds.size)
    lead[event[single]] = gap[single]
    gap[single] = 0.0
    origin = np.full(step_names.size, np.inf)
    np.minimum.at(origin, step, start)
    first = np.zeros(seconds.size)
    if clocks_agree:
        np.maximum.at(first, event[alone], (start - origin[step])[alone])
    to, which = np.nonzero(sources >= 0)
    edges = np.stack([event[sources[to, which]], event[to]])
    of_event = np.zeros(seconds.size, np.int64)
    of_event[event] = step
    began = np.zeros(seconds.size)
    np.maximum.at(began, event, start)
    found = _ordered(edges, gap[to], began, of_event)
    in_order = np.empty(len(ops), np.int64)
    in_order[ops["row"].to_numpy()] = event
    return EventGraph(step_names, in_order, seconds, lead, of_event, *found[:-1], first, found[-1])


def _events(ops: pl.DataFrame) -> Ints:
    """Return the event number of every op; equal for ops that run together."""
    together = pl.when(~pl.col("waits")).then("meeting")
    keys = ops.select(pl.struct(together, pl.when(together.is_null()).then(pl.int_range(pl.len()))).rank("dense"))
    return keys.to_series().to_numpy().astype(np.int64) - 1


def _durations(ops: pl.DataFrame, event: Ints) -> Floats:
    """Return the seconds of every event after its last member has arrived: those of its shortest
    member. Clocks of ranks need not agree."""
    own = (ops["end"] - ops["start"]).to_numpy().astype(np.float64)
    found = np.full(event.max(initial=-1) + 1, np.inf)
    np.minimum.at(found, event, own)
    return np.clip(found, 0, None)


def _last_ended(ops: pl.DataFrame, part: Ints, start: Floats, end: Floats, lane: str, tolerance: float) -> Ints:
    """Return an array (ops, RECENT): the rows of the last ops of ``lane`` that ended before each op
    began; -1: none."""
    own = np.flatnonzero((ops["lane"] == lane).to_numpy())
    big = float(end.max(initial=1.0) - start.min(initial=0.0)) + 1.0
    shift: float = start.min(initial=0.0)
    keys = part[own] * big + (end[own] - shift)
    order = np.argsort(keys, kind="stable")
    own, keys = own[order], keys[order]
    at = np.searchsorted(keys, part * big + (start - shift) + tolerance, side="right") - 1
    rows = np.arange(len(part))
    found = np.full((len(part), RECENT), -1, np.int64)
    latest = np.full(len(part), np.nan)
    for back in range(RECENT + 1):  # one more, because an op of zero length precedes itself
        index = at - back
        candidate = own[np.clip(index, 0, None)]
        valid = (index >= 0) & (part[candidate] == part) & (candidate < rows)
        latest = np.where(np.isnan(latest) & valid, end[candidate], latest)
        valid &= end[candidate] >= latest - tolerance
        for slot in range(RECENT):
            free = valid & (found[:, slot] < 0)
            found[free, slot] = candidate[free]
            valid &= ~free
    return found


def _ended_by(ops: pl.DataFrame, part: Ints, end: Floats, waits: NDArray[np.bool_]) -> Ints:
    """Return an array (ops, 1) with the row that every wait waited for: the op in its meeting, or
    else the last communication on its rank that ended before the wait did; -1: none."""
    found = np.full((len(part), 1), -1, np.int64)
    named = (ops["meeting"].is_not_null()).to_numpy() & waits
    network = np.flatnonzero((ops["lane"] != "processor").to_numpy())
    asking = np.flatnonzero(waits & ~named)
    if named.any():
        meeting = ops["meeting"].fill_null(0).to_numpy()
        met = network[np.argsort(meeting[network], kind="stable")]
        at = np.searchsorted(meeting[met], meeting[named])
        there = at < met.size
        there[there] = meeting[met[at[there]]] == meeting[named][there]
        found[np.flatnonzero(named)[there], 0] = met[at[there]]
    if not network.size or not asking.size:
        return found
    shift = float(end.min())
    big = float(end.max() - shift) + 1.0
    keys = part[network] * big + (end[network] - shift)
    order = np.argsort(keys, kind="stable")
    network, keys = network[order], keys[order]
    at = np.searchsorted(keys, part[asking] * big + (end[asking] - shift), side="right") - 1
    source = network[np.clip(at, 0, None)]
    good = (at >= 0) & (part[source] == part[asking])
    found[asking[good], 0] = source[good]
    return found


def _ordered(
    edges: Ints, gaps: Floats, began: Floats, step: Ints
) -> tuple[tuple[Ints, ...], tuple[Ints, ...], tuple[Floats, ...], tuple[Ints, ...], int]:
    """Return waves of events, with the sources, gaps and bounds of their edges, and the number of
    forced events."""
    events = began.size
    apart = edges[0] != edges[1]
    source, target, gaps = edges[0][apart], edges[1][apart], gaps[apart]
    leaving, arriving = np.argsort(source, kind="stable"), np.argsort(target, kind="stable")
    out_bounds = np.searchsorted(source[leaving], np.arange(events + 1))
    in_bounds = np.searchsorted(target[arriving], np.arange(events + 1))
    left = np.diff(in_bounds).copy()
    open_ = np.ones(events, bool)
    waves: list[tuple[Ints, Ints, Floats, Ints]] = []
    forced = 0
    while open_.any():
        wave = np.flatnonzero(open_ & (left <= 0))
        if not wave.size:
            wave = _first_of_each(np.flatnonzero(open_), began, step)
            forced += wave.size
        while wave.size:
            rows = arriving[_ranges(in_bounds, wave)]
            bounds = np.concatenate([[0], np.cumsum(in_bounds[wave + 1] - in_bounds[wave])])
            waves.append((wave, source[rows], gaps[rows], bounds))
            open_[wave] = False
            reached, times = np.unique(target[leaving[_ranges(out_bounds, wave)]], return_counts=True)
            left[reached] -= times
            wave = reached[(left[reached] <= 0) & open_[reached]]
    return *(tuple(column) for column in zip(*waves, strict=True)), forced  # type: ignore[return-value]


def _first_of_each(events: Ints, began: Floats, step: Ints) -> Ints:
    """Return the event that began first in every step."""
    order = events[np.lexsort((began[events], step[events]))]
    return order[np.flatnonzero(np.diff(step[order], prepend=-1))]


def _ranges(bounds: Ints, chosen: Ints) -> Ints:
    """Return all positions from ``bounds[i]`` to ``bounds[i + 1]`` for the chosen i, in order."""
    sizes = bounds[chosen + 1] - bounds[chosen]
    offsets = np.repeat(bounds[chosen] - np.concatenate([[0], np.cumsum(sizes)[:-1]]), sizes)
    return np.arange(sizes.sum(), dtype=np.int64) + offsets
