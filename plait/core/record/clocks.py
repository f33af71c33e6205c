"""Clocks of hosts, compared: their offsets, drifts and error bounds.

Two methods compare a pair of clocks. In the first, a group's collective ends on all members at the
same moment, up to the latency of the last message and of the thread's wake-up. A line through many
ends gives offset and drift. Its error is bounded, not guessed: no rank has the result before every
rank has begun, so each collective bounds the offset from both sides. This is the method of
Cristian, "Probabilistic clock synchronization", 1989, with the collective in place of his message
and its answer. The second method is a ping: a message there and back, whose middle is taken as the
moment on the other side. Its error is at most half of the round trip (RFC 5905, section 8).

Every host's clock is converted to that of a reference host, along the pairs with the smallest
errors; errors add up along the way. Events that are closer together than the error have no order,
and ``order`` returns 0.
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
"""The fewest common collectives for a comparison of two clocks."""
MOST = 512
"""The most collectives of a group that are used, the last ones."""
SYNCHRONISING = tuple(VERBS.index(verb) for verb in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"))
"""Collectives whose result no rank has before every rank has begun."""
DRIFT_ERROR = 1e-4
"""The assumed error of a clock's drift (ns per ns) without a better estimate."""
MAD_TO_DEVIATION = 1.4826
"""The standard deviation of normal errors, in units of their median absolute deviation."""


class Moment(NamedTuple):
    """A time on the reference clock and its largest error, in ns."""

    at: int
    error: int


@dataclass(frozen=True, kw_only=True)
class HostClock:
    """A host's monotonic clock: reference = time + offset + drift * (time - origin), all in ns;
    drift is a ratio.

    error: the largest error at ``origin``, ns; drift_error: its growth for each ns away from
    ``origin``.
    """

    offset: int = 0
    drift: float = 0.0
    origin: int = 0
    error: int = 0
    drift_error: float = 0.0

    def moment(self, time: int) -> Moment:
        """Return a time of this clock on the reference clock."""
        away = time - self.origin
        return Moment(time + self.offset + round(self.drift * away), self.error + round(self.drift_error * abs(away)))

    def after(self, nearer: HostClock) -> HostClock:
        """Return this clock, which refers to the host of ``nearer``, with that host's reference
        instead. Errors add up."""
        at = nearer.moment(self.origin + self.offset)
        return HostClock(
            offset=at.at - self.origin, drift=self.drift + nearer.drift, origin=self.origin,
            error=self.error + at.error, drift_error=self.drift_error + nearer.drift_error,
        )  # fmt: skip


REFERENCE = HostClock()


def order(a: Moment, b: Moment) -> Literal[-1, 0, 1]:
    """Return -1 if moment ``a`` was certainly before moment ``b``, 1 if certainly after; 0 if their
    errors overlap.

    >>> order(Moment(100, 5), Moment(120, 5)), order(Moment(100, 5), Moment(109, 5))
    (-1, 0)
    """
    apart = abs(a.at - b.at)
    if apart <= a.error + b.error:
        return 0
    return -1 if a.at < b.at else 1


def fit_clock(reference_times: np.ndarray, local_times: np.ndarray) -> HostClock | None:
    """Return the clock that converts times of host ``local_times`` to times of host
    ``reference_times``. None for fewer than ``LEAST`` collectives.

    reference_times, local_times: starts and ends of the same collectives on each host, [n, 2], ns.
    The clock is a line through the differences of the ends. Ends more than four deviations off the
    line are dropped, because a rank was delayed. error: the larger distance of the tightest bounds
    from the line.
    """
    import numpy as np

    if len(local_times) < LEAST:
        return None
    origin, shift = int(np.median(local_times[:, 1])), int(np.median(reference_times[:, 1] - local_times[:, 1]))
    x, y = (
        (local_times[:, 1] - origin).astype(np.float64),
        (reference_times[:, 1] - local_times[:, 1] - shift).astype(np.float64),
    )
    kept, slope, level, spread = np.ones(len(x), dtype=bool), 0.0, 0.0, 0.0
    for _ in range(20):
        slope, level = _line(x[kept], y[kept])
        off = np.abs(y - level - slope * x)
        spread = max(MAD_TO_DEVIATION * float(np.median(off[kept])), 1.0)
        again = off <= 4 * spread
        if (again == kept).all() or np.count_nonzero(again) < LEAST:
            break
        kept = again
    line = level + slope * x
    low = float(np.max(reference_times[:, 0] - local_times[:, 1] - shift - line))
    high = float(np.min(reference_times[:, 1] - local_times[:, 0] - shift - line))
    error = round(max(high, -low, low, -high, 3 * spread)) + 1
    wide = float(np.sqrt(np.sum((x[kept] - x[kept].mean()) ** 2)))
    return HostClock(
        offset=shift + round(level), drift=slope, origin=origin, error=error,
        drift_error=3 * spread / wide if wide else DRIFT_ERROR,
    )  # fmt: skip


def _line(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Return slope and intercept of the least-squares line through the points."""
    middle = x.mean()
    wide = ((x - middle) ** 2).sum()
    slope = float(((x - middle) * y).sum() / wide) if wide else 0.0
    return slope, float(y.mean() - slope * middle)


@dataclass(frozen=True)
class Clocks:
    """The clocks of a run's hosts. hosts: host of each rank; ranks that share a kernel share a
    host. clocks: clock of each host that could be compared with the reference."""

    hosts: Mapping[int, str]
    clocks: Mapping[str, HostClock]

    def moment(self, rank: int, time: int) -> Moment | None:
        """Return a time of a rank's clock on the reference clock; None if its host has no clock
        here."""
        clock = self.clocks.get(self.hosts.get(rank, ""))
        return clock.moment(time) if clock else None

    def order(self, a: tuple[int, int], b: tuple[int, int]) -> Literal[-1, 0, 1]:
        """Return the order of two (rank, time) as ``order`` does: -1, 1, or 0 if it is uncertain.
        On one host, its own clock decides."""
        if self.hosts.get(a[0], "a") == self.hosts.get(b[0], "b"):
            return order(Moment(a[1], 0), Moment(b[1], 0))
        first, second = self.moment(*a), self.moment(*b)
        return order(first, second) if first and second else 0

    @property
    def error(self) -> int | None:
        """The largest error of a time near the comparison of the clocks, ns; None if some host's
        clock is unknown."""
        if set(self.hosts.values()) - set(self.clocks):
            return None
        return max((clock.error for clock in self.clocks.values()), default=0)

    def to_dict(self) -> dict[str, Any]:
        """Return the clocks as plain values for JSON."""
        clocks = {host: asdict(clock) for host, clock in self.clocks.items()}
        return {"version": 1, "hosts": {str(rank): host for rank, host in self.hosts.items()}, "clocks": clocks}

    @staticmethod
    def from_dict(values: Any) -> Clocks:
        """Return the clocks from the values of ``to_dict``. Raises DataError for anything else."""
        try:
            if values["version"] != 1:
                raise DataError(f"clocks of version {values['version']}; this Plait reads version 1")
            clocks = decode(dict[str, HostClock], values["clocks"])
            return Clocks({int(rank): str(host) for rank, host in values["hosts"].items()}, clocks)
        except (KeyError, TypeError, ValueError, AttributeError, JobError):
            raise DataError("these values are not the clocks of a run's hosts") from None


def aligned(rings: Iterable[Ring]) -> Clocks:
    """Return the clocks of the hosts of some rings, from collectives that have ended on both hosts
    of a pair. The reference is the host of the lowest rank."""
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
"""Starts and ends (ns) of collectives by the group's ranks, its ordinal and the collective's
number."""


def _collectives(rings: Sequence[Ring], hosts: Mapping[int, str]) -> dict[str, _Seen]:
    """Return the times of collectives on each host: the latest start and the earliest end of its
    ranks."""
    import numpy as np

    found: dict[str, _Seen] = {host: {} for host in hosts.values()}
    for ring in rings:
        table = ring.table[(ring.table["kind"] == RecordKind.COLLECTIVE) & (ring.table["ended"] > 0)]
        table = table[np.isin(table["call"] & 15, SYNCHRONISING)]
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


def _from_collectives(reference_times: _Seen, local_times: _Seen) -> HostClock | None:
    import numpy as np

    common = sorted(reference_times.keys() & local_times.keys(), key=lambda key: local_times[key])
    if not common:
        return None
    return fit_clock(
        *(np.array([seen[key] for key in common], dtype=np.int64) for seen in (reference_times, local_times))
    )


def _led(reference: str, hosts: set[str], pair_clocks: Mapping[tuple[str, str], HostClock]) -> dict[str, HostClock]:
    """Return every host's clock relative to the reference, by the path that Prim's algorithm finds
    with errors as weights."""
    led = {reference: REFERENCE}
    while True:
        steps = {
            host: pair_clocks[host, near].after(clock)
            for near, clock in sorted(led.items(), key=lambda one: -one[1].error)
            for host in hosts - led.keys()
            if (host, near) in pair_clocks
        }
        if not steps:
            return led
        best = min(sorted(steps), key=lambda host: steps[host].error)
        led[best] = steps[best]
