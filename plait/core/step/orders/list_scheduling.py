"""List scheduling of segment ops: at every moment run the ready op that a policy prefers, or idle until one
is ready.

Time is that of ``clock.streams.ListClock``: one processor, one link. What is chosen next is looked at once
per op, and there are up to 20,000 of them, so the loops here are written out.
"""

from __future__ import annotations

from collections import deque
from math import inf
from typing import NamedTuple

from plait.core.step.clock.streams import ListClock
from plait.core.step.seconds.segment_costs import NumberedOps


class Policy(NamedTuple):
    """A way in which the list scheduler chooses.

    ahead: the slice that is further along goes first, so that slices drift apart; otherwise the one behind.
    fill: while the link has work for longer than a weight gradient takes, that goes first: nothing is lost by
    it. patience: a slice holds an op back, even if the processor idles, when its collective would block the
    link for more than the share ``1 - patience`` of its time after a slice before it wants the link. On a
    link that is the bottleneck this lets the first slice reach its compute-heavy backward early, beside which
    the others' forward communication hides. 0: never.
    """

    ahead: bool
    fill: bool
    patience: float


POLICIES = tuple(
    Policy(ahead, fill, patience) for ahead in (True, False) for fill in (True, False) for patience in (0.0, 0.3, 0.7)
)


class ListScheduler:
    """Makes orders of the ops of a graph, given as their numbers in ``NumberedOps``.

    clock: on which ops take their time. held_back: weight gradients that may wait before they take
    precedence.
    """

    def __init__(self, numbered: NumberedOps, clock: ListClock, held_back: int) -> None:
        self.numbered, self.clock, self.held_back = numbered, clock, held_back
        self.until_wire = self._until_wire()

    def _until_wire(self) -> list[float]:
        """Processor seconds from the start of an op until its slice next has something for the link."""
        until, travels, following = list(self.clock.compute), self.numbered.travels, self.numbered.following
        for i in reversed(range(len(until))):
            if not travels[i] and (after := following[i]):
                until[i] += until[after[0]] if len(after) == 1 else max([until[j] for j in after])
        return until

    def order(self, policy: Policy) -> list[int]:
        """The numbers of all ops, in the order in which they should run."""
        seconds, wire, travels = self.clock.compute, self.clock.wire, self.clock.travels
        (ahead, fill, patience), held_back = policy, self.held_back
        weight, feeds, rank = self.numbered.weight, self.numbered.feeds, self.numbered.ranks[ahead]
        missing, at = [len(sources) for sources in self.numbered.needs], [0.0] * len(seconds)
        start = [i for i, count in enumerate(missing) if not count]
        # Ready: what chains wait for; weight gradients, oldest first; such as wait for a collective.
        chain, weights, later = [i for i in start if not weight[i]], deque(i for i in start if weight[i]), list[int]()
        order, now, link = list[int](), 0.0, 0.0
        while chain or weights or later:
            free = self._free(chain, at, now, link, 1 - patience) if patience else chain
            first, soonest = -1, inf
            for i in free:
                delay = at[i] - now if at[i] > now else 0.0
                if delay < soonest or (delay == soonest and rank[i] < rank[first]):
                    first, soonest = i, delay
            if weights and (
                soonest  # also where no op of a chain is ready
                or len(weights) > held_back
                or (fill and link - now > seconds[weights[0]] + seconds[first])
            ):
                i = weights.popleft()
            elif first >= 0:
                i = first
                chain.remove(i)
            else:
                i = min(later, key=at.__getitem__)
                later.remove(i)
            order.append(i)
            now = arrived = (at[i] if at[i] > now else now) + seconds[i]  # as the clock runs one op, written out
            if travels[i]:
                link = arrived = (now if now > link else link) + wire[i]
            if later:
                weights.extend(sorted((j for j in later if at[j] <= now), key=at.__getitem__))
                later = [j for j in later if at[j] > now]
            for fed, collective in feeds[i]:
                if collective and arrived > at[fed]:
                    at[fed] = arrived
                missing[fed] = left = missing[fed] - 1
                if not left:
                    (chain if not weight[fed] else weights if at[fed] <= now else later).append(fed)
        assert len(order) == len(seconds), "the segment graph has a cycle"
        return order

    def _free(self, chain: list[int], at: list[float], now: float, link: float, share: float) -> list[int]:
        """Ops whose collective would not keep a slice before their own from the link for too long; all, if
        there are none."""
        slices, travels, clock = self.numbered.slices, self.numbered.travels, self.clock
        seconds, wire = clock.compute, clock.wire
        wanted = [inf] * self.numbered.graph.p1  # when each slice wants the link ...
        for i in chain:
            moment = (at[i] if at[i] > now else now) + self.until_wire[i]
            if moment < wanted[slices[i]]:
                wanted[slices[i]] = moment
        before, earliest = list[float](), inf  # ... and when the first of those before it does
        for moment in wanted:
            before.append(earliest)
            if moment < earliest:
                earliest = moment
        free = list[int]()
        for i in chain:
            if travels[i]:
                end = (at[i] if at[i] > now else now) + seconds[i]
                end = (end if end > link else link) + wire[i]
                if end > before[slices[i]] + share * wire[i]:
                    continue
            free.append(i)
        return free or chain
