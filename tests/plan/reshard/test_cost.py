"""The cost formulas against a simulation of the messages, and the bound against brute force."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.core.base.errors import ReshardError
from plait.core.reshard.layouts import Box, Reshard, TensorLayout, UnitTask, unit_tasks
from plait.core.reshard.plan import Chain, ReshardStep, TransferMethod, messages
from plait.plan.reshard.boundary import Fabric, even_hosts, plan_reshard
from plait.plan.reshard.cost import densest, lower_bound, nics_used

MIB = 1 << 20


def one_sender(hosts: int, per_host: int) -> tuple[TensorLayout, TensorLayout, tuple[int, ...]]:
    """One device to every device of ``hosts`` others."""
    source, destination = TensorLayout.parse("(1) R"), TensorLayout.parse(f"({hosts},{per_host})@1 R")
    return source, destination, (0, *(1 + rank // per_host for rank in range(hosts * per_host)))


def simulated(way: TransferMethod, hosts: int, per_host: int, fabric: Fabric, nbytes: int) -> float:
    """Seconds by running the messages: a NIC sends one and receives one at a time, and each takes
    latency and its bytes."""
    source, destination, _ = one_sender(hosts, per_host)
    plan = plan_reshard(Reshard(source, destination, (nbytes,), 1), fabric, way=way)
    sending, receiving = [0.0] * (hosts + 1), [0.0] * (hosts + 1)
    there: dict[tuple[int, int], float] = {}
    for message in messages(plan):
        a, b = fabric.host(message.src), fabric.host(message.dst)
        start = (
            max((there[message.src, at] for at in range(message.start, message.stop)), default=0.0)
            if message.src
            else 0.0
        )
        end = start
        if a != b:
            start = max(start, sending[a], receiving[b])
            end = start + fabric.latency + (message.stop - message.start) / fabric.rate
            sending[a] = receiving[b] = end
        for at in range(message.start, message.stop):
            there[message.dst, at] = end
    return max(there.values())


@pytest.mark.parametrize("way", ["send_recv", "local_all_gather", "broadcast"])
@pytest.mark.parametrize(("hosts", "per_host"), [(1, 1), (1, 4), (2, 2), (3, 2), (4, 3)])
@pytest.mark.parametrize("latency", [0.0, 1e-4])
def test_the_formulas_are_what_the_messages_take(
    way: TransferMethod, hosts: int, per_host: int, latency: float
) -> None:
    source, destination, on = one_sender(hosts, per_host)
    fabric = Fabric(hosts=on, rate=1e6, latency=latency, min_chunk=12, max_chunk=480)
    plan = plan_reshard(Reshard(source, destination, (1440,), 1), fabric, way=way)
    tolerance = 0.02 if way == "local_all_gather" else 0.001  # chunks and shares are whole elements
    assert simulated(way, hosts, per_host, fabric, 1440) == pytest.approx(plan.predicted / 1e9, rel=tolerance)


@given(st.integers(2, 6), st.sampled_from([1e-6, 1e-5, 1e-4, 1e-3]), st.integers(1 << 12, 1 << 16))
def test_the_number_of_chunks_is_the_best(hosts: int, latency: float, nbytes: int) -> None:
    source, destination, on = one_sender(hosts, 1)
    fabric = Fabric(hosts=on, rate=1e6, latency=latency, min_chunk=1, max_chunk=1 << 30)
    (step,) = plan_reshard(Reshard(source, destination, (nbytes,), 1), fabric, way="broadcast").steps

    def seconds(count: int) -> float:
        return (count + hosts - 1) * (latency + nbytes / 1e6 / count)

    best = min(seconds(count) for count in {1, *range(max(1, step.chunks // 2), 2 * step.chunks + 2)})
    assert seconds(step.chunks) == pytest.approx(step.duration / 1e9, rel=1e-6)
    assert seconds(step.chunks) <= best * (1.02 if step.chunks > 2 else 1.3)


@pytest.mark.parametrize("nbytes", [100, 10_000, 100 * MIB])
def test_the_cheapest_way_is_taken(nbytes: int) -> None:
    source, destination, on = one_sender(3, 4)
    fabric = Fabric(hosts=on, rate=1.25e9, latency=50e-6)
    ways: list[TransferMethod] = ["send_recv", "local_all_gather", "global_all_gather", "broadcast"]
    by_way = [plan_reshard(Reshard(source, destination, (nbytes,), 1), fabric, way=way).predicted for way in ways]
    assert plan_reshard(Reshard(source, destination, (nbytes,), 1), fabric).predicted == min(by_way)


resources = st.frozensets(st.integers(0, 6), min_size=1, max_size=4)


@given(st.dictionaries(resources, st.integers(0, 50), max_size=8))
def test_the_densest_set_is_the_best_of_all_subsets(loads: dict[frozenset[int], int]) -> None:
    everything = sorted(frozenset().union(*loads))
    best = 0.0
    for size in range(1, len(everything) + 1):
        for chosen in combinations(everything, size):
            best = max(best, sum(load for needs, load in loads.items() if needs <= set(chosen)) / size)
    load, size = densest(loads)
    assert load / size == pytest.approx(best)


def test_the_bound_of_many_hosts() -> None:
    """512 hosts whose replicas overlap in every way that a mesh can make them."""
    source, destination = TensorLayout.parse("(64,32) S0 R"), TensorLayout.parse("(48,32) S01 R", first_rank=2048)
    fabric = Fabric(hosts=even_hosts(2048 + 48 * 32, 6), rate=1e9)
    tasks = [(task, task.box.elements) for task in unit_tasks(source, destination, (1 << 16, 64))]
    whole, received = (1 << 16) * 64, 48 * 32 // 6
    assert lower_bound(tasks, fabric) >= whole / received * 0.99


BYTES = 1200
SLOW = {"rate": 100.0, "local_rate": 400.0, "latency": 0.5, "min_chunk": 1, "max_chunk": 500}
"""Twelve seconds from host to host, three inside one; three messages."""


def one_task(hosts: tuple[int, ...], way: TransferMethod, **fabric: float) -> ReshardStep:
    """From rank 0 to all others."""
    source, destination = TensorLayout.parse("(1) R"), TensorLayout.parse(f"({len(hosts) - 1})@1 R")
    given: Any = {**SLOW, **fabric}
    (step,) = plan_reshard(Reshard(source, destination, (BYTES,), 1), Fabric(hosts=hosts, **given), way=way).steps
    return step


@pytest.mark.parametrize(
    ("hosts", "way", "seconds"),
    [
        # One message after the other: to three remote receivers, to one near.
        ((0, 0, 1, 1, 2), "send_recv", 3 * (3 * 0.5 + 12) + (3 * 0.5 + 3)),
        ((0, 0, 0), "send_recv", 2 * (3 * 0.5 + 3)),
        # A share each of the fullest host's receivers, in as many parts as keep messages small.
        ((0, 1, 1, 2, 2), "local_all_gather", 2 * (2 * 2 * 0.5 + 12) + 1 / 2 * 3 / 2),
        ((0, 0, 0, 0, 1), "local_all_gather", 1 * (1 * 3 * 0.5 + 12) + 2 / 3 * 3),
        # A share each of all, then round a ring that crosses hosts, if there are several.
        ((0, 1, 1, 2, 2), "global_all_gather", (4 + 3) * 0.5 + 12 + 12 * 3 / 4),
        ((0, 0, 1), "global_all_gather", 2 * (2 + 1) * 0.5 + 12 / 2 + 12 / 2),
        ((0, 1, 1), "global_all_gather", 2 * 2 * 0.5 + 12 + 3 / 2),
        ((0, 0, 0), "global_all_gather", 2 * 2 * 0.5 + 3 / 2),
    ],
)
def test_seconds_of_a_way_by_hand(hosts: tuple[int, ...], way: TransferMethod, seconds: float) -> None:
    assert one_task(hosts, way).duration == pytest.approx(seconds * 1e9, abs=2)


@pytest.mark.parametrize(
    ("hosts", "fabric", "chunks"),
    [
        ((0, 1, 2, 3), {}, 7),  # sqrt(2 x 12 / 0.5)
        ((0, 1, 2, 3), {"latency": 24.0}, 3),  # no chunk is larger than a message
        ((0, 1, 2, 3), {"latency": 24.0, "max_chunk": 5000}, 1),
        ((0, 1, 2, 3), {"min_chunk": 300}, 4),
        ((0, 1, 2, 3), {"latency": 0.0, "min_chunk": 100}, 12),
        ((0, 1), {"latency": 0.0, "max_chunk": 5000}, 1),  # nothing is passed on
        ((0, 1), {"latency": 0.0, "max_chunk": 5000, "local_rate": float("inf")}, 1),
        ((0, 1, 1, 1), {"latency": 0.5, "max_chunk": 5000}, 3),  # two more hops inside, of three seconds
        ((0, 0, 0), {"latency": 0.75, "max_chunk": 5000}, 2),  # sqrt(3 / 0.75)
        ((0, 1, 2), {"min_chunk": 5000, "max_chunk": 5000}, 1),
    ],
)  # fmt: skip
def test_chunks_of_a_broadcast(hosts: tuple[int, ...], fabric: dict[str, float], chunks: int) -> None:
    step = one_task(hosts, "broadcast", **fabric)
    assert step.chunks == chunks
    told: Any = {**SLOW, **fabric}
    latency, t, near = told["latency"], BYTES / told["rate"], BYTES / told["local_rate"]
    remote = set(hosts) - {0}
    inside = max(hosts.count(host) for host in remote) - 1 if remote else len(hosts) - 1
    seconds = (chunks + len(remote) - 1) * (latency + t / chunks) if remote else near
    assert step.duration == pytest.approx((seconds + inside * near / chunks) * 1e9, abs=2)


@pytest.mark.parametrize("way", ["send_recv", "local_all_gather", "global_all_gather"])
def test_other_ways_have_as_few_messages_as_their_size_allows(way: TransferMethod) -> None:
    assert one_task((0, 1, 2), way).chunks == 3
    assert one_task((0, 1, 2), way, max_chunk=1200).chunks == 1


def test_which_nics_are_busy() -> None:
    """Of two hosts with two NICs for four ranks each."""
    fabric = Fabric(hosts=even_hosts(12, 4), rate=1.0, nics_per_host=2)
    assert [fabric.nic(rank) for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert Fabric(hosts=(0, 0, 1), rate=1.0, nics_per_host=4).nic(2) == 4
    assert nics_used("send_recv", Chain(0, (1, 4, 6)), fabric) == ({0}, {2, 3})
    assert nics_used("global_all_gather", Chain(0, (2, 4, 8)), fabric) == ({0, 1, 2, 4}, {1, 2, 4})
    assert nics_used("broadcast", Chain(0, (4, 6, 8)), fabric) == ({0, 2}, {2, 4})


def bounded(*tasks: tuple[tuple[int, ...], tuple[int, ...], int], fabric: Fabric) -> int:
    """holders, receivers, bytes of each."""
    whole = UnitTask(Box((0,), (1,)), (0,), (1,))
    return lower_bound([(whole._replace(holders=h, receivers=r), nbytes) for h, r, nbytes in tasks], fabric)


def test_every_box_leaves_a_holder_and_enters_each_host_once() -> None:
    fabric = Fabric(hosts=(0, 0, 1, 1, 2, 2), rate=100.0, latency=0.25)
    second = 10**9
    assert bounded(((0,), (2, 3), 200), fabric=fabric) == 2.25 * second
    assert bounded(((0,), (2, 4), 200), fabric=fabric) == 2.25 * second
    assert bounded(((0,), (2,), 200), ((1,), (4,), 100), fabric=fabric) == 3.25 * second  # one NIC sends both
    assert bounded(((0,), (4,), 200), ((2,), (4,), 100), fabric=fabric) == 3.25 * second  # one receives both
    assert bounded(((0, 2), (4,), 200), ((0,), (5,), 100), fabric=fabric) == 3.25 * second
    assert bounded(((0,), (1,), 200), fabric=fabric) == 0  # within a host
    assert bounded(((0, 2), (1, 3), 200), fabric=fabric) == 0
    assert bounded(fabric=fabric) == 0
    two = Fabric(hosts=(0, 0, 1, 1), rate=100.0, nics_per_host=2)
    assert bounded(((0, 1), (2, 3), 200), fabric=two) == second  # half by each
    assert bounded(((0,), (2, 3), 200), fabric=two) == 2 * second


@pytest.mark.parametrize(
    "changed",
    [
        {"rate": 0.0}, {"rate": -1.0}, {"rate": float("inf")}, {"rate": float("nan")}, {"local_rate": 0.0},
        {"latency": -1e-9}, {"latency": float("inf")}, {"nics_per_host": 0},
    ],
)  # fmt: skip
def test_a_fabric_that_cannot_be_is_refused(changed: dict[str, Any]) -> None:
    Fabric(hosts=(0,), rate=0.5, local_rate=0.5, latency=0.0, nics_per_host=1)
    with pytest.raises(ReshardError, match="must be positive"):
        Fabric(**{"hosts": (0,), "rate": 1.0, **changed})
