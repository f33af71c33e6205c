"""Slices on compute streams of a small fixed pool, so that a GPU may run kernels of several at once (Domino,
arXiv 2409.15241, section 4.2: many small kernels leave it idle).

Slice s runs on stream s modulo their number. What is not one slice's runs on the stream of the thread, after
all others and before what follows: sharded units, the ends of a stage, skip connections. A stream waits, by
events, for what its ops need of another one: gradients of weights, into which slices add one after the other.
The list is the same, and so is the order in which the host submits and collectives start. So a tensor is
allocated, read and let go of on its slice's stream alone, and its memory goes to the same stream again; what
crosses between slices is read between two of those waits for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from plait.core.step.segments import LAYERS, Action, Kind, SegmentGraph, needs_table
from plait.core.step.units import UnitAction
from plait.train.machine.device import Fork, RankDevice

Lane: TypeAlias = int | None
"""A stream of the pool; None for that of the thread."""


class Submission(NamedTuple):
    """One entry of a list: on which stream, and after which entries of other streams. ends: whether others
    wait for it."""

    lane: Lane
    after: tuple[int, ...]
    ends: bool


def submissions(graph: SegmentGraph, listed: Sequence[Action | UnitAction], streams: int) -> list[Submission]:
    """Of every entry of a phase's list, and one more that ends the phase on the thread's stream. Entry -1 is
    what the thread submitted before.

    >>> from plait.core.step.orders.segment_lists import sync_order
    >>> graph = SegmentGraph(num_layers=1, p1=2, communicates=False, backward=False)
    >>> [one.lane for one in submissions(graph, sync_order(graph), 2)]
    [None, None, None, 0, 0, None, 1, 1, 0, 0, 0, 1, 1, 1, None, None, None, None, None, None, None]
    """
    needs, at = needs_table(graph), {action: number for number, action in enumerate(listed)}
    last, seen = dict[Lane, int](), dict[Lane, dict[Lane, int]]()  # of each stream; what it is known to be after
    last[None] = -1
    found = list[tuple[Lane, list[int]]]()
    lanes = [*(_lane(graph, action, streams) for action in listed), None]

    def wants(number: int, lane: Lane) -> Iterator[tuple[Lane, int]]:
        if lane is None:
            yield from [one for one in last.items() if one[0] is not None]
            return
        yield None, last[None]
        action = listed[number]
        if action.verb == "run":
            for need in needs[action.op]:
                before = at.get(Action("wait" if need.collective else "run", need.op), -1)
                yield (lanes[before] if before >= 0 else None), before

    for number, lane in enumerate(lanes):
        knows, after = seen.setdefault(lane, {}), list[int]()
        for other, entry in wants(number, lane):
            if other != lane and knows.get(other, -2) < entry:
                knows[other] = entry
                after.append(entry)
        found.append((lane, after))
        last[lane] = number
    awaited = {entry for _, after in found for entry in after}
    return [Submission(lane, tuple(after), number in awaited) for number, (lane, after) in enumerate(found)]


def _lane(graph: SegmentGraph, action: Action | UnitAction, streams: int) -> Lane:
    """What only one slice's layers have is a stream's."""
    if isinstance(action, UnitAction) or action.op.site not in LAYERS:
        return None
    ends = graph.before(action.op)[0] not in LAYERS and action.op.kind in (Kind.NORM, Kind.NORM_GRAD)
    return None if ends else action.op.slice % streams


Act = Callable[[Any], object]
Acts = Sequence[tuple[Act, int, int]]


@dataclass
class ComputeStreams:
    """Puts a phase's acts on streams of a device. ends: by entry, where it ended; of one phase at a time."""

    device: RankDevice
    streams: int
    ends: dict[int, Fork] = field(default_factory=dict[int, Fork])

    def spread(self, graph: SegmentGraph, listed: Sequence[Action | UnitAction], acts: Acts) -> Iterator[Any]:
        """The acts, with what stands between them."""
        told = submissions(graph, listed, self.streams)
        yield self._end(-1), 0, 0
        lane: Lane = None
        for number, one in enumerate(told):
            if one.lane != lane or one.after:
                yield self._begin(one.lane, one.after), 0, 0
            lane = one.lane
            yield from acts[number : number + 1]
            if one.ends:
                yield self._end(number), 0, 0
        yield self._forget, 0, 0

    def _begin(self, lane: Lane, after: Iterable[int]) -> Act:
        def begin(_: object) -> None:
            self.device.compute_on(lane)
            for entry in after:
                self.device.join(self.ends[entry])

        return begin

    def _end(self, number: int) -> Act:
        def end(_: object) -> None:
            self.ends[number] = self.device.fork()

        return end

    def _forget(self, _: object) -> None:
        self.ends.clear()
