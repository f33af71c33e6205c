"""Compute slices on a small fixed pool of streams: a GPU may then run kernels of several slices at
once (Domino, arXiv 2409.15241, section 4.2: many small kernels leave the GPU idle).

Slice s runs on stream s modulo the pool's size. Ops that belong to no single slice run on the
thread's stream, after all earlier work and before all later work: sharded units, stage ends, skip
connections. ``ComputeStreams`` explains order and memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from plait.core.step.segments import LAYERS, Action, Kind, SegmentGraph, needs_table
from plait.core.step.traffic import UnitAction
from plait.train.machine.device import Fork, RankDevice

StreamIndex: TypeAlias = int | None
"""A stream of the pool; None: the thread's stream."""


class Submission(NamedTuple):
    """One entry of a list: its stream, and the entries of other streams that it waits for. ends:
    True if other entries wait for it."""

    lane: StreamIndex
    after: tuple[int, ...]
    ends: bool


def submissions(graph: SegmentGraph, listed: Sequence[Action | UnitAction], streams: int) -> list[Submission]:
    """Return the submission of every entry of a phase's list, and of one more that ends the phase
    on the thread's stream. Entry -1 stands for the thread's earlier work.

    >>> from plait.core.step.orders.overlap import sync_order
    >>> graph = SegmentGraph(num_layers=1, p1=2, communicates=False, backward=False)
    >>> [one.lane for one in submissions(graph, sync_order(graph), 2)]
    [None, None, None, 0, 0, None, 1, 1, 0, 0, 0, 1, 1, 1, None, None, None, None, None, None, None]
    """
    needs, at = needs_table(graph), {action: number for number, action in enumerate(listed)}
    last, seen = (
        dict[StreamIndex, int](),
        dict[StreamIndex, dict[StreamIndex, int]](),
    )  # by stream: last entry; entries it comes after
    last[None] = -1
    found = list[tuple[StreamIndex, list[int]]]()
    lanes = [*(_lane(graph, action, streams) for action in listed), None]

    def wants(number: int, lane: StreamIndex) -> Iterator[tuple[StreamIndex, int]]:
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


def _lane(graph: SegmentGraph, action: Action | UnitAction, streams: int) -> StreamIndex:
    """Return the stream of an action: a pool stream if the op belongs to the layers of one
    slice."""
    if isinstance(action, UnitAction) or action.op.site not in LAYERS:
        return None
    ends = graph.before(action.op)[0] not in LAYERS and action.op.kind in (Kind.NORM, Kind.NORM_BACKWARD)
    return None if ends else action.op.slice % streams


Act = Callable[[Any], object]
Acts = Sequence[tuple[Act, int, int]]


@dataclass
class ComputeStreams:
    """Puts a phase's ops on streams of a device. ends: by entry, the event at its end; of the
    current phase.

    A stream waits, by events, for the ops of other streams that its own ops need: gradients of
    weights, to which slices add one after the other. The list is unchanged, and so is the order of
    the host's submissions and of collectives. So a tensor is allocated, read and freed on its
    slice's stream alone, and its memory returns to that stream. Tensors that cross between slices
    are read between two points at which all streams wait.
    """

    device: RankDevice
    streams: int
    ends: dict[int, Fork] = field(default_factory=dict[int, Fork])

    def spread(self, graph: SegmentGraph, listed: Sequence[Action | UnitAction], acts: Acts) -> Iterator[Any]:
        """Yield the functions of a phase, with switches of streams and waits between them."""
        told = submissions(graph, listed, self.streams)
        yield self._end(-1), 0, 0
        lane: StreamIndex = None
        for number, one in enumerate(told):
            if one.lane != lane or one.after:
                yield self._begin(one.lane, one.after), 0, 0
            lane = one.lane
            yield from acts[number : number + 1]
            if one.ends:
                yield self._end(number), 0, 0
        yield self._forget, 0, 0

    def _begin(self, lane: StreamIndex, after: Iterable[int]) -> Act:
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
