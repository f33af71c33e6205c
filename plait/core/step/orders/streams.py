"""Simulation of one rank: a processor, and streams that communicate concurrently; list scheduling
on top.

The processor runs one op after the other. Each stream carries one collective at a time, in the
order in which they were started. While both run, computation takes ``slow[0]`` times and
communication ``slow[1]`` times as long (a finding of Galvatron and ECHO: kernels and collectives
compete for memory and multiprocessors). Streams whose collectives use the same links at the same
time share their bandwidth.

``ListScheduler`` runs at every moment the ready op that a policy prefers, or idles until one is
ready. The choice is made once per op, and there are up to 20,000 ops, so the loops here are written
out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from math import inf
from typing import NamedTuple

from plait.core.step.orders.segment_costs import NumberedOps

TP, DP = 0, 1
"""Indices of the streams."""
CP_ACCOUNT = 2
"""Account index of attention's context-parallel exchanges, which run on the stream of tensor
parallelism."""


class CollectiveFlight:
    """A collective in flight. left: remaining seconds with the links to itself. tier: the links it
    uses. account: the axis that its exposed seconds count for. began, ended: moments in seconds;
    None until then."""

    __slots__ = ("account", "began", "ended", "left", "tier")

    def __init__(self, left: float, tier: int, account: int = DP) -> None:
        self.left, self.tier, self.account = left, tier, account
        self.began: float | None = None
        self.ended: float | None = None


class Rank:
    """A processor and its streams. now: current time in seconds. compute_seconds: as if the
    processor were alone. exposed: seconds that each account added, by being waited for or by
    slowing the processor down. host: the moment until which the host, which never waits, has
    launched work. pending: collectives already queued on the stream ``DP`` at the start."""

    def __init__(self, slow: tuple[float, float], pending: Iterable[CollectiveFlight] = ()) -> None:
        self.now = self.host = 0.0
        self.slow_compute, self.slow_send = slow
        self.queues: tuple[deque[CollectiveFlight], deque[CollectiveFlight]] = (deque(), deque(pending))
        self.compute_seconds = 0.0
        self.exposed = [0.0, 0.0, 0.0]

    def start(self, stream: int, seconds: float, tier: int, account: int | None = None) -> CollectiveFlight:
        """Enqueue a collective on a stream and return it. account: default: the stream's own."""
        flight, queue = CollectiveFlight(seconds, tier, stream if account is None else account), self.queues[stream]
        if not queue:
            flight.began = self.now
        queue.append(flight)
        return flight

    def launch(self, seconds: float) -> None:
        """Advance the host by ``seconds``; the processor stands still until the host has launched
        the work."""
        self.host += seconds
        begin = self.now
        while self.now < self.host and (self.queues[TP] or self.queues[DP]):
            pace, head = self._pace(), self._next()
            passed = min(head[0].left / pace, self.host - self.now)
            until = head[0].left / pace <= self.host - self.now
            self._flow(passed, pace)
            if until:
                self._land(head)
        self.now = max(self.now, self.host)
        self.compute_seconds += self.now - begin

    def work(self, launch: float, seconds: float) -> float:
        """Advance the host by ``launch`` seconds and compute for ``seconds``; return the moment at
        which computation begins."""
        self.launch(launch)
        begin = self.now
        self.compute(seconds)
        return begin

    def compute(self, seconds: float) -> None:
        """Advance the processor by ``seconds`` of work."""
        self.compute_seconds += seconds
        work = seconds
        while self.queues[TP] or self.queues[DP]:
            pace = self._pace() / self.slow_send
            head = self._next()
            until, mine = head[0].left / pace, work * self.slow_compute
            passed = min(until, mine)
            self._account(passed - passed / self.slow_compute)
            self._flow(passed, pace)
            if mine <= until:
                return
            work -= passed / self.slow_compute
            self._land(head)
        self.now += work

    def wait(self, flight: CollectiveFlight) -> None:
        """Advance the rank without computation until a collective has ended."""
        begin = self.now
        while flight.ended is None:
            pace, head = self._pace(), self._next()
            self._flow(head[0].left / pace, pace)
            self._land(head)
        self.exposed[flight.account] += self.now - begin

    def _pace(self) -> float:
        """Return the share of its links' bandwidth that each running collective has, without
        slowdown by computation."""
        tp, dp = self.queues
        return 0.5 if tp and dp and tp[0].tier == dp[0].tier else 1.0

    def _next(self) -> deque[CollectiveFlight]:
        """Return the stream whose collective ends first."""
        tp, dp = self.queues
        return tp if tp and (not dp or tp[0].left <= dp[0].left) else dp

    def _flow(self, seconds: float, pace: float) -> None:
        self.now += seconds
        for queue in self.queues:
            if queue:
                queue[0].left = max(0.0, queue[0].left - seconds * pace)

    def _land(self, queue: deque[CollectiveFlight]) -> None:
        queue.popleft().ended = self.now
        if queue:
            queue[0].began = self.now

    def _account(self, lost: float) -> None:
        """Charge lost seconds to the accounts of the running collectives, which slow the processor
        down."""
        running = [queue[0].account for queue in self.queues if queue]
        for account in running:
            self.exposed[account] += lost / len(running)


class ListClock:
    """A simulated rank without interference between stream and processor: ``Rank`` with ``slow`` 1
    and one stream. Every moment is a maximum of sums, so thousands of orders of one list can be
    timed.

    compute, wire: seconds of the processor, and of the collective after the op, by op number.
    """

    def __init__(self, ops: NumberedOps, compute: Sequence[float], wire: Sequence[float]) -> None:
        self.compute, self.wire, self.awaits, self.travels = compute, wire, ops.awaits, ops.travels

    @property
    def bound(self) -> float:
        """Lower bound in seconds for every order: all of the computation, or all of the
        communication."""
        return max(sum(self.compute), sum(self.wire))

    def run(
        self, order: Sequence[int], arrived: list[float], now: float = 0.0, link: float = 0.0
    ) -> tuple[float, float]:
        """Run some ops from the moments ``now`` and ``link``; return when the processor and the
        link are done. arrived: when each op's collective ended; updated in place."""
        compute, wire, awaits, travels = self.compute, self.wire, self.awaits, self.travels
        for i in order:
            for source in awaits[i]:
                if arrived[source] > now:  # max() would take a third of the search's time
                    now = arrived[source]
            now += compute[i]
            if travels[i]:
                link = arrived[i] = (now if now > link else link) + wire[i]
        return now, link


# ---- list scheduling ----


class Policy(NamedTuple):
    """Preferences of the list scheduler.

    ahead: True prefers the slice that is further along, so that slices drift apart; False prefers
    the slice behind. fill: True runs a weight gradient first while the link is busy for longer than
    it takes, which loses nothing. patience: an op is held back, even if the processor idles, if its
    collective would delay an earlier slice's use of the link. The delay must exceed the share ``1 -
    patience`` of the collective's time. On a link that is the bottleneck this lets the first slice
    reach its compute-heavy backward early. That backward then overlaps the other slices' forward
    communication. 0: never.
    """

    ahead: bool
    fill: bool
    patience: float


POLICIES = tuple(
    Policy(ahead, fill, patience) for ahead in (True, False) for fill in (True, False) for patience in (0.0, 0.3, 0.7)
)


class ListScheduler:
    """A list scheduler for the ops of a graph, given as their numbers in ``NumberedOps``.

    clock: seconds of the ops. held_back: weight gradients that may be deferred before they take
    precedence.
    """

    def __init__(self, numbered: NumberedOps, clock: ListClock, held_back: int) -> None:
        self.numbered, self.clock, self.held_back = numbered, clock, held_back
        self.until_wire = self._until_wire()

    def _until_wire(self) -> list[float]:
        """Return processor seconds from the start of each op until its slice next uses the link."""
        until, travels, following = list(self.clock.compute), self.numbered.travels, self.numbered.following
        for i in reversed(range(len(until))):
            if not travels[i] and (after := following[i]):
                until[i] += until[after[0]] if len(after) == 1 else max([until[j] for j in after])
        return until

    def order(self, policy: Policy) -> list[int]:
        """Return the numbers of all ops, in the order in which they should run."""
        seconds, wire, travels = self.clock.compute, self.clock.wire, self.clock.travels
        (ahead, fill, patience), held_back = policy, self.held_back
        weight, feeds, rank = self.numbered.weight, self.numbered.feeds, self.numbered.ranks[ahead]
        missing, at = [len(sources) for sources in self.numbered.needs], [0.0] * len(seconds)
        start = [i for i, count in enumerate(missing) if not count]
        # Ready ops: forward and input gradients; weight gradients, oldest first; those awaiting a collective.
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
                soonest  # also if no op of a chain is ready
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
            now = arrived = (at[i] if at[i] > now else now) + seconds[i]  # ListClock.run for one op, written out
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
        """Return the ops whose collective would not delay an earlier slice's use of the link for
        too long; all ops if there are none."""
        slices, travels, clock = self.numbered.slices, self.numbered.travels, self.clock
        seconds, wire = clock.compute, clock.wire
        wanted = [inf] * self.numbered.graph.p1  # when each slice wants the link ...
        for i in chain:
            moment = (at[i] if at[i] > now else now) + self.until_wire[i]
            if moment < wanted[slices[i]]:
                wanted[slices[i]] = moment
        before, earliest = list[float](), inf  # ... and the earliest moment of any slice before it
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
