"""Clocks of hosts, compared: how far apart they are, how fast they drift, and how sure that is.

Two ways to compare two clocks. The ends of a group's collectives coincide on its members, up to the time in
which the last message travels and a thread wakes up; a line through many of them tells offset and drift. How
wrong it may be is no guess: nobody has the result before everybody has begun, so that each collective bounds
the offset from both sides (Cristian, "Probabilistic clock synchronization", 1989, with the collective in
place of his message and its answer). Or a ping: a message there and back, whose middle is taken for the
moment on the other side (RFC 5905, section 8), which is wrong by half of the round trip at most.

Every host's clock is led to that of one of them, along the pairs that are compared best; errors add up on the
way. What lies closer together than the error has no order, and ``order`` gives none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from plait.core.base.codec.data import decode
from plait.core.base.errors import DataError, JobError
from plait.core.record.ring import VERBS, RecordKind, Ring

if TYPE_CHECKING:
    import numpy as np

FILE = "clocks.json"
"""The clocks of a run's hosts, in the folder of its timeline."""
LEAST = 8
"""Common collectives without which two clocks are not compared."""
MOST = 512
"""Collectives of a group that are looked at, the last ones."""
TOGETHER = tuple(VERBS.index(verb) for verb in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"))
"""Collectives of which nobody has the result before everybody has begun."""
QUARTZ = 1e-4
"""Drift of a clock of which nothing better is known."""
NORMAL = 1.4826
"""Standard deviations in a median absolute deviation, of normal errors."""


class Moment(NamedTuple):
    """A time on the reference clock, ns, and by how much it may be wrong."""

    at: int
    error: int


@dataclass(frozen=True, kw_only=True)
class HostClock:
    """A host's monotonic clock: reference = time + offset + drift * (time - origin), all in ns, drift a
    ratio.

    error: by how much that may be wrong at ``origin``; drift_error: by how much more for each ns away from
    it.
    """

    offset: int = 0
    drift: float = 0.0
    origin: int = 0
    error: int = 0
    drift_error: float = 0.0

    def moment(self, time: int) -> Moment:
        """A time of this clock on the reference's."""
        away = time - self.origin
        return Moment(time + self.offset + round(self.drift * away), self.error + round(self.drift_error * abs(away)))

    def after(self, nearer: HostClock) -> HostClock:
        """This clock, which leads to the one of ``nearer``, led on to the reference. Errors add up."""
        at = nearer.moment(self.origin + self.offset)
        return HostClock(
            offset=at.at - self.origin, drift=self.drift + nearer.drift, origin=self.origin,
            error=self.error + at.error, drift_error=self.drift_error + nearer.drift_error,
        )  # fmt: skip


REFERENCE = HostClock()


def order(a: Moment, b: Moment) -> Literal[-1, 0, 1]:
    """-1 if ``a`` was certainly before ``b``, 1 if after; 0 where their errors do not let it be said.

    >>> order(Moment(100, 5), Moment(120, 5)), order(Moment(100, 5), Moment(109, 5))
    (-1, 0)
    """
    apart = abs(a.at - b.at)
    if apart <= a.error + b.error:
        return 0
    return -1 if a.at < b.at else 1


def compared(there: np.ndarray, here: np.ndarray) -> HostClock | None:
    """The clock of ``here`` led to that of ``there``, from when each began and ended the same collectives:
    two arrays [n, 2], ns. None for too few.

    A line through the differences of the ends, without those that lie more than four deviations off it,
    because a rank was held up. error: of the tightest bounds, the one that is farther from the line.
    """
    import numpy as np

    if len(here) < LEAST:
        return None
    origin, shift = int(np.median(here[:, 1])), int(np.median(there[:, 1] - here[:, 1]))
    x, y = (here[:, 1] - origin).astype(np.float64), (there[:, 1] - here[:, 1] - shift).astype(np.float64)
    kept, slope, level, spread = np.ones(len(x), dtype=bool), 0.0, 0.0, 0.0
    for _ in range(20):
        slope, level = _line(x[kept], y[kept])
        off = np.abs(y - level - slope * x)
        spread = max(NORMAL * float(np.median(off[kept])), 1.0)
        again = off <= 4 * spread
        if (again == kept).all() or np.count_nonzero(again) < LEAST:
            break
        kept = again
    line = level + slope * x
    low = float(np.max(there[:, 0] - here[:, 1] - shift - line))
    high = float(np.min(there[:, 1] - here[:, 0] - shift - line))
    error = round(max(high, -low, low, -high, 3 * spread)) + 1
    wide = float(np.sqrt(np.sum((x[kept] - x[kept].mean()) ** 2)))
    return HostClock(
        offset=shift + round(level), drift=slope, origin=origin, error=error,
        drift_error=3 * spread / wide if wide else QUARTZ,
    )  # fmt: skip


def _line(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Slope and level at 0 of the line nearest to the points."""
    middle = x.mean()
    wide = ((x - middle) ** 2).sum()
    slope = float(((x - middle) * y).sum() / wide) if wide else 0.0
    return slope, float(y.mean() - slope * middle)


@dataclass(frozen=True)
class Clocks:
    """The clocks of a run's hosts. hosts: by rank; those that share a kernel are one host. clocks: by host; a
    host that could not be compared with the reference has none."""

    hosts: Mapping[int, str]
    clocks: Mapping[str, HostClock]

    def moment(self, rank: int, time: int) -> Moment | None:
        """A time of a rank's clock on the reference's; None where it cannot be told."""
        clock = self.clocks.get(self.hosts.get(rank, ""))
        return clock.moment(time) if clock else None

    def order(self, a: tuple[int, int], b: tuple[int, int]) -> Literal[-1, 0, 1]:
        """Which of two (rank, time) was first, as ``order`` has it: 0 where it cannot be told. On one host
        its own clock decides."""
        if self.hosts.get(a[0], "a") == self.hosts.get(b[0], "b"):
            return order(Moment(a[1], 0), Moment(b[1], 0))
        first, second = self.moment(*a), self.moment(*b)
        return order(first, second) if first and second else 0

    @property
    def error(self) -> int | None:
        """By how much a time may be wrong at most, ns, near to when clocks were compared; None where a host's
        clock could not be."""
        if set(self.hosts.values()) - set(self.clocks):
            return None
        return max((clock.error for clock in self.clocks.values()), default=0)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        clocks = {host: asdict(clock) for host, clock in self.clocks.items()}
        return {"version": 1, "hosts": {str(rank): host for rank, host in self.hosts.items()}, "clocks": clocks}

    @staticmethod
    def from_dict(values: Any) -> Clocks:
        """Known: what ``to_dict`` makes. Raises DataError for anything else."""
        try:
            if values["version"] != 1:
                raise DataError(f"clocks of version {values['version']}; this Plait reads version 1")
            clocks = decode(dict[str, HostClock], values["clocks"])
            return Clocks({int(rank): str(host) for rank, host in values["hosts"].items()}, clocks)
        except (KeyError, TypeError, ValueError, AttributeError, JobError):
            raise DataError("what should be the clocks of a run's hosts is something else") from None


def aligned(rings: Iterable[Ring]) -> Clocks:
    """The clocks of the hosts of some rings, from the collectives that both have seen to their end. The
    reference is the host of the lowest rank."""
    rings = sorted(rings, key=lambda ring: ring.rank)
    hosts = {ring.rank: ring.header.boot or ring.header.host for ring in rings}
    seen = _collectives(rings, hosts)
    pairs: set[tuple[str, str]] = set()
    for members in {key[0] for own in seen.values() for key in own}:
        first, *others = sorted({hosts[rank] for rank in members if rank in hosts})
        pairs |= {(first, other) for other in others}
    found: dict[tuple[str, str], HostClock] = {}
    for one, other in sorted(pairs):
        for there, here in ((one, other), (other, one)):
            if clock := _from_collectives(seen[there], seen[here]):
                found[here, there] = clock
    return Clocks(hosts, _led(next(iter(hosts.values()), ""), set(hosts.values()), found))


_Seen = dict[tuple[tuple[int, ...], int, int], tuple[int, int]]
"""By group and number."""


def _collectives(rings: Sequence[Ring], hosts: Mapping[int, str]) -> dict[str, _Seen]:
    """When collectives began and ended on each host: when the last of its ranks began, and the first
    ended."""
    import numpy as np

    found: dict[str, _Seen] = {host: {} for host in hosts.values()}
    for ring in rings:
        table = ring.table[(ring.table["kind"] == RecordKind.COLLECTIVE) & (ring.table["ended"] > 0)]
        table = table[np.isin(table["call"] & 15, TOGETHER)]
        own = found[hosts[ring.rank]]
        for number, group in ring.groups.items():
            last = table[table["group"] == number][-MOST:]
            for sequence, began, ended in zip(
                *(last[name].tolist() for name in ("sequence", "enqueued", "ended")), strict=True
            ):
                key = (group.ranks, group.ordinal, sequence)
                before = own.get(key, (began, ended))
                own[key] = max(before[0], began), min(before[1], ended)
    return found


def _from_collectives(there: _Seen, here: _Seen) -> HostClock | None:
    import numpy as np

    common = sorted(there.keys() & here.keys(), key=lambda key: here[key])
    if not common:
        return None
    return compared(*(np.array([seen[key] for key in common], dtype=np.int64) for seen in (there, here)))


def _led(reference: str, hosts: set[str], found: Mapping[tuple[str, str], HostClock]) -> dict[str, HostClock]:
    """Every host's clock to the reference's, nearest first: the smallest error counts (Prim's order)."""
    led = {reference: REFERENCE}
    while True:
        steps = {
            host: found[host, near].after(clock)
            for near, clock in sorted(led.items(), key=lambda one: -one[1].error)
            for host in hosts - led.keys()
            if (host, near) in found
        }
        if not steps:
            return led
        best = min(sorted(steps), key=lambda host: steps[host].error)
        led[best] = steps[best]
