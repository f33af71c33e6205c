"""Cost of bringing one box from a host that holds it to the ranks that need it, over NICs of a
given rate and latency.

Model: a NIC sends one message and receives one at a time (full duplex); hosts may have several
NICs. Links inside a host are much faster and by default cost nothing. With b bytes, t = b / rate, A
receiver hosts, B receivers on each, and latency a for each message, the seconds of each way are
(arXiv 2211.05322, section
3.1, with latency):

    send_recv          A B (a + t)
    local_all_gather   A (B a + t)
    global_all_gather  A B a + t + (A B - 1) (a + t / A B)
    broadcast          (K + A - 1) (a + t / K) in K chunks; best at K = sqrt((A - 1) t / a)

A message larger than the largest chunk is split into several, each with its latency. With several
NICs the box is striped over as many as the sender's host and every receiver host have among the
ranks concerned, and t is the time of a stripe.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil, inf, sqrt
from typing import NamedTuple

from plait.core.base.errors import ReshardError
from plait.core.base.lab_hosts import nic_of
from plait.core.reshard.layouts import UnitTask
from plait.core.reshard.plan import WAYS, Chain, TransferMethod, broadcast_hops

NANOSECONDS = 10**9


@dataclass(frozen=True, kw_only=True)
class Fabric:
    """Hosts and their NICs.

    hosts: the host of every rank. rate: bytes per second of one NIC, each way. latency: seconds for
    each message. local_rate: bytes per second between two ranks of a host. min_chunk, max_chunk:
    bytes of a chunk. The ranks of a host share its NICs in order: with 4 ranks and 2 NICs, the
    first two ranks use the first.

    >>> fabric = Fabric(hosts=(0, 0, 1, 1), rate=1.25e9, nics_per_host=2)
    >>> [fabric.nic(rank) for rank in range(4)]
    [0, 1, 2, 3]
    """

    hosts: tuple[int, ...]
    rate: float
    latency: float = 0.0
    nics_per_host: int = 1
    local_rate: float = inf
    min_chunk: int = 1 << 16
    max_chunk: int = 1 << 22

    def __post_init__(self) -> None:
        if not (0 < self.rate < inf and self.local_rate > 0 and 0 <= self.latency < inf and self.nics_per_host >= 1):
            raise ReshardError(
                f"A fabric of rate {self.rate} B/s, local rate {self.local_rate} B/s, latency {self.latency} s and "
                f"{self.nics_per_host} NICs a host cannot be. Rates must be positive, the latency not negative, "
                "and a host needs a NIC."
            )

    @cached_property
    def _nics(self) -> tuple[int, ...]:
        ranks_on, seen = Counter(self.hosts), Counter[int]()
        found: list[int] = []
        for host in self.hosts:
            found.append(host * self.nics_per_host + nic_of(seen[host], ranks_on[host], self.nics_per_host))
            seen[host] += 1
        return tuple(found)

    def nic(self, rank: int) -> int:
        """Return the number of the NIC that ``rank`` uses; host h has NICs h n to h n + n - 1,
        where n is ``nics_per_host``."""
        return self._nics[rank]

    def host(self, rank: int) -> int:
        """Return the host of ``rank``. Raises ReshardError if the fabric does not have that
        rank."""
        if rank >= len(self.hosts):
            raise ReshardError(
                f"Rank {rank} has no host: the fabric has {len(self.hosts)} ranks. "
                "Name a host for every rank of both meshes."
            )
        return self.hosts[rank]


class Option(NamedTuple):
    """One way to do a task, from one sender host.

    chains: as in the plan. sends: NICs of the senders. out, into: all NICs that send, and that
    receive, during the task. duration: nanoseconds.
    """

    way: TransferMethod
    chains: tuple[Chain, ...]
    chunks: int
    duration: int
    sends: frozenset[int]
    out: frozenset[int]
    into: frozenset[int]


class _Reach(NamedTuple):
    """Counts of one unit task for the cost formulas. remote_hosts: hosts that must receive the box.
    remote: ranks on these. near: ranks on the sender's host that must receive it. widest: receivers
    on the fullest host."""

    remote_hosts: int
    remote: int
    near: int
    widest: int


def options(task: UnitTask, nbytes: int, fabric: Fabric, way: TransferMethod | None = None) -> tuple[Option, ...]:
    """Return the ways to do a unit task: one for each host that holds the box, the host of the
    lowest rank first. way: the communication method; None: the cheapest for each host."""
    by_host: dict[int, list[int]] = {}
    for holder in task.holders:
        by_host.setdefault(fabric.host(holder), []).append(holder)
    return tuple(_option(task, nbytes, fabric, host, senders, way) for host, senders in by_host.items())


def _option(
    task: UnitTask, nbytes: int, fabric: Fabric, home: int, senders: list[int], way: TransferMethod | None
) -> Option:
    groups: dict[int, list[int]] = {}
    for receiver in sorted(task.receivers, key=lambda rank: (fabric.host(rank) != home, fabric.host(rank), rank)):
        groups.setdefault(fabric.host(receiver), []).append(receiver)
    remote = {host: group for host, group in groups.items() if host != home}
    rails = min(len({fabric.nic(r) for r in ranks}) for ranks in (senders, *remote.values()))
    chains = tuple(
        Chain(
            _on_rail(senders, rail, fabric)[0],
            tuple(r for group in groups.values() for r in _on_rail(group, rail, fabric)),
        )
        for rail in range(rails)
    )
    near = len(groups.get(home, ()))
    reach = _Reach(len(remote), sum(map(len, remote.values())), near, max(map(len, groups.values())))
    share = -(-nbytes // rails)
    tried: tuple[TransferMethod, ...] = WAYS if way is None else (way,)
    costs = {
        each: ceil(seconds(each, share, reach, fabric) * NANOSECONDS) for each in tried
    }  # never below the lower bound
    best = min(tried, key=lambda each: (costs[each], -WAYS.index(each)))  # ties: the later in WAYS
    uses = [nics_used(best, chain, fabric) for chain in chains]
    return Option(
        best,
        chains,
        chunks(best, share, reach, fabric),
        max(1, costs[best]),
        frozenset(fabric.nic(chain.sender) for chain in chains) if remote else frozenset(),
        frozenset().union(*(out for out, _ in uses)),
        frozenset().union(*(into for _, into in uses)),
    )


def _on_rail(ranks: Sequence[int], rail: int, fabric: Fabric) -> list[int]:
    """Return ``ranks`` of one host, rotated so that a rank on its ``rail``-th NIC comes first; the
    stripe enters and leaves by that NIC."""
    nics = sorted({fabric.nic(rank) for rank in ranks})
    at = next(i for i, rank in enumerate(ranks) if fabric.nic(rank) == nics[rail % len(nics)])
    return [*ranks[at:], *ranks[:at]]


def nics_used(way: TransferMethod, chain: Chain, fabric: Fabric) -> tuple[set[int], set[int]]:
    """Return (NICs that send, NICs that receive) while a chain runs."""
    if way == "broadcast":
        pairs = broadcast_hops(chain, fabric.hosts)
    else:
        pairs = [(chain.sender, receiver) for receiver in chain.receivers]
        if way == "global_all_gather":
            pairs += zip(chain.receivers, (*chain.receivers[1:], chain.receivers[0]), strict=True)
    crossing = [(a, b) for a, b in pairs if fabric.host(a) != fabric.host(b)]
    return {fabric.nic(a) for a, _ in crossing}, {fabric.nic(b) for _, b in crossing}


def seconds(way: TransferMethod, nbytes: int, reach: _Reach, fabric: Fabric) -> float:
    """Return the seconds to send one stripe of ``nbytes`` by the formulas of this module's
    docstring, plus the time of links inside hosts if their rate is given."""
    t, near, a = nbytes / fabric.rate, nbytes / fabric.local_rate, fabric.latency
    hosts, remote, local, widest = reach
    everyone, count = remote + local, chunks(way, nbytes, reach, fabric)
    if way == "send_recv":
        return remote * (count * a + t) + local * (count * a + near)
    if way == "local_all_gather":
        parts = -(
            -count // widest
        )  # of each share; exchanging all parts but the last overlaps with receiving the next ones
        return hosts * (parts * widest * a + t) + (widest - 1) / widest * near / parts
    if way == "global_all_gather":
        parts, ring = -(-count // everyone), t if hosts + (local > 0) > 1 else near
        latencies = parts * (everyone + (everyone - 1) * (ring is t)) * a
        return latencies + t * remote / everyone + ring * (everyone - 1) / everyone
    inside = local if hosts == 0 else widest - 1  # the last chunk's hops in the last host; all hops if none is remote
    return (count + hosts - 1) * (a + t / count) * (hosts > 0) + inside * near / count + near * (hosts == 0)


def chunks(way: TransferMethod, nbytes: int, reach: _Reach, fabric: Fabric) -> int:
    """Return the number of chunks in which a broadcast sends ``nbytes`` fastest (K in this module's
    formulas), within the bounds on a chunk's size; for other ways the smallest number allowed."""
    fewest, most = max(1, ceil(nbytes / fabric.max_chunk)), max(1, nbytes // fabric.min_chunk)
    if way != "broadcast":
        return fewest
    hops = max(0, reach.remote_hosts - 1) * nbytes / fabric.rate
    hops += (reach.widest - 1) * nbytes / fabric.local_rate
    best = inf if hops and not fabric.latency else sqrt(hops / fabric.latency) if fabric.latency else 1
    return max(1, fewest, min(most, round(min(best, most))))


def densest(loads: dict[frozenset[int], int]) -> tuple[int, int]:
    """Return (load, size) of the set H of resources with the highest load per resource, counting
    loads that only resources of H can carry.

    load / size is the least time in which resources of speed 1 can carry all loads, if each load
    may be spread freely over its own set. Found by Dinkelbach's iteration. Each step is one maximum
    closure, that is one minimum cut (Picard 1976), in integers, so it is exact and fast for any
    number of hosts.
    """
    loads = {chosen: load for chosen, load in loads.items() if load and chosen}
    if not loads:
        return 0, 1
    best = frozenset[int]().union(*loads)
    while True:
        load, size = sum(weight for chosen, weight in loads.items() if chosen <= best), len(best)
        better = _closure({chosen: weight * size for chosen, weight in loads.items()}, load)
        if not better:
            return load, size
        best = better


def _closure(profits: dict[frozenset[int], int], cost: int) -> frozenset[int]:
    """Return the resources (each for ``cost``) that earn the most by completing sets of
    ``profits``; empty if none earns anything."""
    sets, left = list(profits), list(profits.values())
    room = dict.fromkeys(sorted(frozenset[int]().union(*sets)), cost)
    flow: list[dict[int, int]] = [{} for _ in sets]

    def push(at: int) -> bool:
        """Send flow from set ``at`` to a resource with room, rerouting other sets' flow if
        necessary; True if flow was sent."""
        seen = {at}
        came: dict[int, tuple[int, int]] = {}  # set -> (previous set, resource between them)
        queue = [at]
        for current in queue:
            for resource in sorted(sets[current]):
                if room[resource]:
                    amount, back, via = min(left[at], room[resource]), current, resource
                    node = current
                    while node != at:
                        before, between = came[node]
                        amount = min(amount, flow[node][between])
                        node = before
                    room[via] -= amount
                    left[at] -= amount
                    while True:
                        flow[back][via] = flow[back].get(via, 0) + amount
                        if back == at:
                            return True
                        before, between = came[back]
                        flow[back][between] -= amount
                        back, via = before, between
                for other in range(len(sets)):
                    if other not in seen and flow[other].get(resource):
                        seen.add(other)
                        came[other] = (current, resource)
                        queue.append(other)
        return False

    for at in range(len(sets)):
        while left[at] and push(at):
            pass
    reached = [at for at in range(len(sets)) if left[at]]
    for at in reached:
        for resource in sets[at]:
            reached += [other for other in range(len(sets)) if flow[other].get(resource) and other not in reached]
    return frozenset[int]().union(*(sets[at] for at in reached))


def lower_bound(tasks: Sequence[tuple[UnitTask, int]], fabric: Fabric) -> int:
    """Return a lower bound, in nanoseconds, on every plan in which holders send and receivers
    forward: every box leaves a holder once and enters a host once.

    tasks: each with its bytes. A box may use any NIC of its holders, and in each host any NIC of
    its receivers.
    """
    sent: dict[frozenset[int], int] = {}
    received: dict[frozenset[int], int] = {}
    for task, nbytes in tasks:
        homes = {fabric.host(holder) for holder in task.holders}
        remote: dict[int, set[int]] = {}
        for receiver in task.receivers:
            if fabric.host(receiver) not in homes:
                remote.setdefault(fabric.host(receiver), set()).add(fabric.nic(receiver))
        if remote:
            nics = frozenset(map(fabric.nic, task.holders))
            sent[nics] = sent.get(nics, 0) + nbytes
        for entered in map(frozenset, remote.values()):
            received[entered] = received.get(entered, 0) + nbytes
    if not received:
        return 0
    most = max(load / size for load, size in (densest(sent), densest(received)))
    return int((most / fabric.rate + fabric.latency) * NANOSECONDS)


def even_hosts(ranks: int, per_host: int) -> tuple[int, ...]:
    """Return the host of every rank if each host has ``per_host`` ranks, in order.

    >>> even_hosts(5, 2)
    (0, 0, 1, 1, 2)
    """
    return tuple(rank // per_host for rank in range(ranks))
