"""A recorded step again, with other durations: what it would have taken had a rank been as the others.

Ops depend on each other as they were seen to: an op on what ended last before it began, on its rank, in each
lane; a wait on the communication that ended it; the members of a collective, or both ends of a transfer, on
each other. Ops that run together are one *event*: it begins when the last of them is ready, and lasts as long
as the transfer itself does. So a replay with the durations that were seen gives the step that was seen, and
one with others what that step would have been. After the what-if analysis of stragglers (Lin et al., OSDI
2025, arXiv 2505.05713), which knows the dependencies of one framework; here they are read off the recording.
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
"""Seconds by which an op may seem to begin before what it needs has ended, where times are rounded: those of
published operation traces are float32."""
RECENT = 3
"""Ops of a lane that may end together, as the parts of one batch of sends and receives do."""


@dataclass(frozen=True, eq=False)
class EventGraph:
    """Events of all steps, and what each waits for.

    event: of every op. seconds: of every event, as seen. lead: what passed before an op that is alone, after
    all it needs had ended: the host's own work, unless waiting was not recorded. step: of every event, an
    index into ``steps``. waves: events in an order in which all that they need comes before. sources, gaps,
    bounds: of the edges of events in the order of ``waves``: event that is needed, seconds between its end
    and the start of who needs it (of events of several ranks; of others they are in ``lead``), and where each
    event's edges begin. first: when events may begin that need nothing. forced: events whose dependencies
    seemed to go round in a circle, and which were begun in the order in which they were seen.
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
        """Seconds of every step (rows) with these durations of events: (events,), or (events, scenarios), and
        then a column for each. gaps: keep what passed between the end of one op and the start of the next,
        as the host's own work; False where it is waiting that was not recorded."""
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
    """Of ops with columns step, rank, lane, start, end, waits and meeting.

    waits: whether it is a wait, which takes as long as what it waits for. meeting: equal for ops that run
    together, and for the wait that waits for them; null for those alone.

    clocks_agree: whether starts of different ranks can be compared; otherwise all begin their steps together.
    tolerance: seconds by which times of one rank may be wrong.
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
    # A wait's own time is what passed between the end of what it waited for and its own.
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
    """A number for every op, equal where they run together."""
    together = pl.when(~pl.col("waits")).then("meeting")
    keys = ops.select(pl.struct(together, pl.when(together.is_null()).then(pl.int_range(pl.len()))).rank("dense"))
    return keys.to_series().to_numpy().astype(np.int64) - 1


def _durations(ops: pl.DataFrame, event: Ints) -> Floats:
    """Of every event: what is left when all of it have come: the shortest of its members' (the clocks of
    ranks need not agree for that)."""
    own = (ops["end"] - ops["start"]).to_numpy().astype(np.float64)
    found = np.full(event.max(initial=-1) + 1, np.inf)
    np.minimum.at(found, event, own)
    return np.clip(found, 0, None)


def _last_ended(ops: pl.DataFrame, part: Ints, start: Floats, end: Floats, lane: str, tolerance: float) -> Ints:
    """(ops, RECENT) rows of the ops of ``lane`` that ended last before each op began; -1: none."""
    own = np.flatnonzero((ops["lane"] == lane).to_numpy())
    big = float(end.max(initial=1.0) - start.min(initial=0.0)) + 1.0
    shift = start.min(initial=0.0)
    keys = part[own] * big + (end[own] - shift)
    order = np.argsort(keys, kind="stable")
    own, keys = own[order], keys[order]
    at = np.searchsorted(keys, part * big + (start - shift) + tolerance, side="right") - 1
    rows = np.arange(len(part))
    found = np.full((len(part), RECENT), -1, np.int64)
    latest = np.full(len(part), np.nan)
    for back in range(RECENT + 1):  # one more, because an op of no length comes before itself
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
    """(ops, 1) what every wait waited for: what it names as its meeting, else the communication on its rank
    that ended last before it did; -1: none."""
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
    """Waves of events, and for each the sources, gaps and bounds of their edges; how many were forced."""
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
    """The one of every step that was seen to begin first."""
    order = events[np.lexsort((began[events], step[events]))]
    return order[np.flatnonzero(np.diff(step[order], prepend=-1))]


def _ranges(bounds: Ints, chosen: Ints) -> Ints:
    """All positions from ``bounds[i]`` to ``bounds[i + 1]`` for the chosen i, in their order."""
    sizes = bounds[chosen + 1] - bounds[chosen]
    offsets = np.repeat(bounds[chosen] - np.concatenate([[0], np.cumsum(sizes)[:-1]]), sizes)
    return np.arange(sizes.sum(), dtype=np.int64) + offsets
