"""The wait-for graph of a hung run, built from its ranks' evidence.

A waiting rank is at the first open call of a channel. The call waits for every member that has not
begun it, and for members that have begun it but are stopped or have ended since. The cause is at
awaited ranks that wait for no rank themselves; without any, the ranks wait in a cycle.
"""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

from plait.core.runs.evidence import Call, CallSequence, Cause, Evidence, Verdict, WaitLink, listed, spoken_ranks

COMMUNICATION = re.compile(
    "timed out|timeout|closed by peer|connection (reset|refused)|broken pipe|waited .* in vain|remote process", re.I
)
"""Pattern of last error messages of a rank that waited for another rank."""

Status = Literal["waits", "host", "stopped", "ended", "victim", "unknown"]
Severed = Literal["signal", "abort", "error"]


def agree(ranks: Collection[int], words: str) -> str:
    """Return words in the singular for one rank, in the plural for several. words:
    ``singular|plural``, repeated after further bars for the rest of the phrase.

    >>> agree([3], "waits|wait for it|them"), agree([3, 4], "waits|wait for it|them")
    ('waits for it', 'wait for them')
    """
    place = len(ranks) != 1
    return re.sub(r"(\w+)\|(\w+)", lambda both: both[1 + place], words)


def sentence(text: str) -> str:
    """Return the text with an initial capital."""
    return text[:1].upper() + text[1:]


class CallKey(NamedTuple):
    """The identity of a call: number of its channel (a group, or a pair of ranks), and number of
    the call there."""

    channel: int
    sequence: int


class Waits:
    """The wait-for graph of a hung run. ``heads``: by rank, the open calls in which it waits.
    ``at``: by call, the ranks that wait in it, in order."""

    def __init__(self, evidence: Iterable[Evidence], world: int) -> None:
        self.evidence = {one.rank: one for one in evidence if 0 <= one.rank < world}
        for rank in range(world):
            self.evidence.setdefault(rank, Evidence(rank=rank, recorded=False))
        self.channels: list[CallSequence] = []
        self.heads: dict[int, dict[CallKey, Call]] = {}
        self.calls: dict[CallKey, list[tuple[int, Call]]] = defaultdict(list)
        self.age: dict[tuple[int, CallKey], float] = {}
        """Seconds that a rank has been at a call: since it began, or since the end of the previous
        call."""
        self._entered: list[dict[int, int]] = []
        self._numbers: dict[tuple[int, int, int], int] = {}  # keyed by identity: hashing a group costs its length
        self._same: dict[CallSequence, int] = {}
        for rank in range(world):
            self._add(self.evidence[rank])
        self.status = {rank: self._status(one) for rank, one in self.evidence.items()}
        self.at: dict[CallKey, list[int]] = defaultdict(list)
        for rank in range(world):
            if self.status[rank] in ("waits", "victim"):
                for head in self.heads[rank]:
                    self.at[head].append(rank)
        self.missing = {at: self._missing(at) for at in self.at}
        """The members that each call waits for."""
        self._here = {at: set(ranks) for at, ranks in self.at.items()}
        self._waited: dict[int, list[CallKey]] = defaultdict(list)
        for at, missing in self.missing.items():
            for rank in missing:
                self._waited[rank].append(at)

    # ---- construction ----

    def _number(self, channel: CallSequence) -> int:
        key = (id(channel.group), channel.source, channel.target)
        number = self._numbers.get(key)
        if number is None:
            number = self._same.setdefault(channel, len(self.channels))
            if number == len(self.channels):
                self.channels.append(channel)
                self._entered.append({})
            self._numbers[key] = number
        return number

    def _add(self, one: Evidence) -> None:
        first: dict[int, Call] = {}
        last: dict[int, int] = {}
        for call in one.calls:
            number = self._number(call.channel)
            self.calls[CallKey(number, call.sequence)].append((one.rank, call))
            entered = self._entered[number]
            entered[one.rank] = max(entered.get(one.rank, 0), call.sequence + 1)
            if call.over:
                last[number] = max(last.get(number, 0), call.ended)
            elif number not in first or call.sequence < first[number].sequence:
                first[number] = call
        self.heads[one.rank] = {CallKey(number, call.sequence): call for number, call in first.items()}
        for number, call in first.items():
            since = max(call.enqueued, last.get(number, 0))
            self.age[one.rank, CallKey(number, call.sequence)] = (one.at - since) / 1e9

    def _status(self, one: Evidence) -> Status:
        if one.state == "ended":
            lost = (one.status or 0) > 0 and bool(COMMUNICATION.search(one.error))
            return "victim" if lost else "ended"
        if one.state == "stopped":
            return "stopped"
        if not one.recorded:
            return "unknown"
        if one.state == "unknown" and one.thread == "silent":
            return "unknown"
        if one.thread in ("works", "silent"):
            return "host"
        if self.heads[one.rank]:
            return "waits"
        return "unknown" if one.thread == "waits" else "host"

    def _missing(self, at: CallKey) -> list[int]:
        entered = self._entered[at.channel]
        return [rank for rank in self.members(at.channel) if entered.get(rank, 0) <= at.sequence or self._gone(rank)]

    def _gone(self, rank: int) -> bool:
        """True if a call that the rank has begun may never end because of the rank."""
        return self.status[rank] in ("stopped", "ended") or (self.status[rank] == "unknown" and self.mute(rank))

    # ---- queries ----

    def members(self, channel: int) -> Sequence[int]:
        """Return the ranks of this run that take part in a channel's calls."""
        group, source, target = self.channels[channel]
        return [rank for rank in (group.ranks if source < 0 else (source, target)) if rank in self.evidence]

    def hosts(self, ranks: Iterable[int]) -> tuple[str, ...]:
        """Return the hosts of ranks, as far as they are known."""
        return tuple(sorted({self.evidence[rank].host for rank in ranks} - {""}))

    def subject(self, ranks: Collection[int]) -> str:
        """Return ranks with their hosts as text, as in ``ranks 0-3 (host7)``."""
        hosts = self.hosts(ranks)
        return spoken_ranks(ranks) + (f" ({listed(hosts)})" if hosts else "")

    def verdict(
        self, cause: Cause, why: str, ranks: Sequence[int] = (), chain: Sequence[WaitLink] = (), differs: str = ""
    ) -> Verdict:
        """Return a verdict on ranks, with their hosts."""
        hosts = self.hosts(ranks)
        return Verdict(
            cause=cause, why=sentence(why), ranks=tuple(ranks), hosts=hosts, chain=tuple(chain), differs=differs
        )

    def mute(self, rank: int) -> bool:
        """True if a rank has not answered though others have, and its process cannot be
        observed."""
        return (self.evidence[rank].state, self.evidence[rank].thread) == ("unknown", "silent")

    def call(self, at: CallKey) -> Call:
        """Return the call as recorded by the first rank that is at it."""
        return self.heads[self.at[at][0]][at]

    def longest(self) -> float:
        """Return the seconds of the longest wait; 0 if no rank waits."""
        return max((self.age[rank, at] for at, ranks in self.at.items() for rank in ranks), default=0.0)

    def sinks(self) -> list[int]:
        """Return the ranks that others wait for and that wait for no rank themselves."""
        return sorted(rank for rank in self._waited if self.status[rank] not in ("waits", "victim"))

    def stuck(self, seconds: float) -> list[CallKey]:
        """Return the calls that all members have begun and none ends, without any progress for
        ``seconds``."""
        return [at for at, missing in self.missing.items() if not missing and self._quiet(at) >= seconds]

    def _quiet(self, at: CallKey) -> float:
        """Return the seconds since the last known progress of a member in a call."""
        ages = [self.age[rank, at] for rank in self.at[at]]
        return min(
            [*ages, *((self.evidence[r].at - (call.ended or call.enqueued)) / 1e9 for r, call in self.calls[at])]
        )

    def waiting_for(self, ranks: Iterable[int], calls: Iterable[CallKey] = ()) -> dict[int, CallKey]:
        """Return the ranks that wait, directly or through others, for ``ranks`` or in ``calls``,
        with the call of each, the nearest first."""
        found: dict[int, CallKey] = {}
        edge: deque[int] = deque()

        def take(at: CallKey) -> None:
            for rank in self.at[at]:
                if rank not in found:
                    found[rank] = at
                    edge.append(rank)

        for at in calls:
            take(at)
        seen = set(ranks)
        for rank in seen:
            for at in self._waited.get(rank, ()):
                take(at)
        while edge:
            rank = edge.popleft()
            if rank not in seen:
                seen.add(rank)
                for at in self._waited.get(rank, ()):
                    take(at)
        return found

    def circle(self, among: set[int]) -> list[tuple[int, CallKey]]:
        """Return ranks of ``among`` that wait for each other in a cycle, with their calls; empty if
        there is none."""
        start = self._in_a_circle(among)
        if start is None:
            return []
        came: dict[int, tuple[int, CallKey]] = {}
        edge, asked = deque([start]), set[CallKey]()
        while True:  # a rank in a cycle leads back to itself
            rank = edge.popleft()
            for at, other in self._steps(rank, among, asked):
                if other == start:
                    path = [(rank, at)]
                    while rank != start:
                        path.append(came[rank])
                        rank = came[rank][0]
                    return path[::-1]
                if other not in came:
                    came[other] = (rank, at)
                    edge.append(other)

    def _in_a_circle(self, among: set[int]) -> int | None:
        """Return a rank of a cycle within ``among``, found by following each rank's first awaited
        rank; None without a cycle."""
        done: set[int] = set()
        for start in sorted(among):
            path: list[int] = []
            rank: int | None = start
            while rank is not None and rank not in done:
                done.add(rank)
                path.append(rank)
                rank = next((other for _, other in self._steps(rank, among, set())), None)
            if rank in path:
                return rank
        return None

    def _steps(self, rank: int, among: set[int], asked: set[CallKey]) -> Iterator[tuple[CallKey, int]]:
        """Yield the ranks that a rank's calls lead to, except for calls in ``asked``, which were
        followed already."""
        for at in self.heads[rank]:
            if at in self.missing and at not in asked and rank in self._here[at]:
                asked.add(at)
                yield from ((at, other) for other in self.missing[at] if other in among)

    def how_ended(self, rank: int) -> Severed:
        """Return how a rank ended that waited for no rank: by a ``signal``, an ``abort`` or an
        ``error``."""
        status = self.evidence[rank].status or 0
        return "error" if status >= 0 else "abort" if status == -6 else "signal"
