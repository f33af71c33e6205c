"""A rank in virtual time: a processor, and beside it streams that communicate.

The processor does one thing after the other. Each stream carries one collective at a time, in the order in
which they were started. While both run, computation takes ``slow[0]`` times and communication ``slow[1]``
times as long (Galvatron's and ECHO's finding: kernels and collectives fight over memory and multiprocessors);
streams whose collectives use the same links at the same time share their rate.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from plait.core.step.seconds.segment_costs import NumberedOps

TP, DP = 0, 1
"""The streams."""
CP = 2
"""Account of what attention exchanges with ranks that share its sequences, on the stream of tensor
parallelism."""


class CollectiveFlight:
    """A collective under way. left: seconds that it still needs of links it has for itself. tier: which
    links. account: whom it costs seconds. began, ended: when, None as long as it has not."""

    __slots__ = ("account", "began", "ended", "left", "tier")

    def __init__(self, left: float, tier: int, account: int = DP) -> None:
        self.left, self.tier, self.account = left, tier, account
        self.began: float | None = None
        self.ended: float | None = None


class Rank:
    """A processor and its streams. ``now``: the time. compute_seconds: as if the processor were alone.
    exposed: what each account added to them, by being waited for or by slowing the processor down. host: the
    moment at which the host, which waits for nothing, has launched all so far. pending: what the stream
    ``dp`` has to carry from the start."""

    def __init__(self, slow: tuple[float, float], pending: Iterable[CollectiveFlight] = ()) -> None:
        self.now = self.host = 0.0
        self.slow_compute, self.slow_send = slow
        self.queues: tuple[deque[CollectiveFlight], deque[CollectiveFlight]] = (deque(), deque(pending))
        self.compute_seconds = 0.0
        self.exposed = [0.0, 0.0, 0.0]

    def start(self, stream: int, seconds: float, tier: int, account: int | None = None) -> CollectiveFlight:
        """Hand a collective to a stream. account: if it is not the stream's own."""
        flight, queue = CollectiveFlight(seconds, tier, stream if account is None else account), self.queues[stream]
        if not queue:
            flight.began = self.now
        queue.append(flight)
        return flight

    def launch(self, seconds: float) -> None:
        """Let the host launch something; the processor stands still until it has."""
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
        """Let the host launch something, and the processor work on it; the moment at which it begins."""
        self.launch(launch)
        begin = self.now
        self.compute(seconds)
        return begin

    def compute(self, seconds: float) -> None:
        """Let the processor work."""
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
        """Stand still until a collective is over."""
        begin = self.now
        while flight.ended is None:
            pace, head = self._pace(), self._next()
            self._flow(head[0].left / pace, pace)
            self._land(head)
        self.exposed[flight.account] += self.now - begin

    def _pace(self) -> float:
        """Rate of collectives, where computation does not disturb them."""
        tp, dp = self.queues
        return 0.5 if tp and dp and tp[0].tier == dp[0].tier else 1.0

    def _next(self) -> deque[CollectiveFlight]:
        """The stream whose collective ends first."""
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
        """Charge lost seconds to the streams that slow the processor down."""
        running = [queue[0].account for queue in self.queues if queue]
        for account in running:
            self.exposed[account] += lost / len(running)


class ListClock:
    """A rank in virtual time whose stream and processor do not disturb each other: ``Rank`` with ``slow`` 1
    and one stream. Every moment is a maximum of sums, so thousands of orders of one list can be timed.

    compute, wire: by number of an op, seconds of the processor, and of the collective that follows it.
    """

    def __init__(self, ops: NumberedOps, compute: Sequence[float], wire: Sequence[float]) -> None:
        self.compute, self.wire, self.awaits, self.travels = compute, wire, ops.awaits, ops.travels

    @property
    def bound(self) -> float:
        """No order takes less: all of the computation, or all of the communication."""
        return max(sum(self.compute), sum(self.wire))

    def run(
        self, order: Sequence[int], arrived: list[float], now: float = 0.0, link: float = 0.0
    ) -> tuple[float, float]:
        """Run some ops; when the processor and the link are done, from when they were before. arrived: when
        each op's collective ended, is kept up to date."""
        compute, wire, awaits, travels = self.compute, self.wire, self.awaits, self.travels
        for i in order:
            for source in awaits[i]:
                if arrived[source] > now:  # max() would take a third of the time that orders take to be found
                    now = arrived[source]
            now += compute[i]
            if travels[i]:
                link = arrived[i] = (now if now > link else link) + wire[i]
        return now, link
