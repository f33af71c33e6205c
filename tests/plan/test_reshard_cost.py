"""The cost formulas against a simulation of the messages, and the bound against brute force."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.core.reshard import TensorLayout, unit_tasks
from plait.core.reshard_plan import Way, messages
from plait.plan.reshard import Fabric, even_hosts, plan_reshard
from plait.plan.reshard_cost import densest, lower_bound

MIB = 1 << 20


def one_sender(hosts: int, per_host: int) -> tuple[TensorLayout, TensorLayout, tuple[int, ...]]:
    """One device to every device of ``hosts`` others."""
    source, destination = TensorLayout.parse("(1) R"), TensorLayout.parse(f"({hosts},{per_host})@1 R")
    return source, destination, (0, *(1 + rank // per_host for rank in range(hosts * per_host)))


def simulated(way: Way, hosts: int, per_host: int, fabric: Fabric, nbytes: int) -> float:
    """Seconds by running the messages: a NIC sends one and receives one at a time, and each takes latency and
    its bytes."""
    source, destination, _ = one_sender(hosts, per_host)
    plan = plan_reshard(source, destination, (nbytes,), 1, fabric, way=way)
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
def test_the_formulas_are_what_the_messages_take(way: Way, hosts: int, per_host: int, latency: float) -> None:
    source, destination, on = one_sender(hosts, per_host)
    fabric = Fabric(hosts=on, rate=1e6, latency=latency, min_chunk=12, max_chunk=480)
    plan = plan_reshard(source, destination, (1440,), 1, fabric, way=way)
    tolerance = 0.02 if way == "local_all_gather" else 0.001  # chunks and shares are whole elements
    assert simulated(way, hosts, per_host, fabric, 1440) == pytest.approx(plan.predicted / 1e9, rel=tolerance)


@pytest.mark.parametrize(("hosts", "per_host"), [(2, 2), (3, 2), (4, 2)])
def test_an_all_gather_over_hosts_takes_about_twice_the_bound(hosts: int, per_host: int) -> None:
    _, _, on = one_sender(hosts, per_host)
    fabric = Fabric(hosts=on, rate=1e6)
    devices, t = hosts * per_host, 1440 / 1e6
    # the sender's NIC is done after t; the ring crosses into each host once a round
    assert (
        t * (1 + (devices - 2) / devices)
        <= simulated("global_all_gather", hosts, per_host, fabric, 1440)
        <= t * (2 + 1 / devices)
    )


@given(st.integers(2, 6), st.sampled_from([1e-6, 1e-5, 1e-4, 1e-3]), st.integers(1 << 12, 1 << 16))
def test_the_number_of_chunks_is_the_best(hosts: int, latency: float, nbytes: int) -> None:
    source, destination, on = one_sender(hosts, 1)
    fabric = Fabric(hosts=on, rate=1e6, latency=latency, min_chunk=1, max_chunk=1 << 30)
    (step,) = plan_reshard(source, destination, (nbytes,), 1, fabric, way="broadcast").steps

    def seconds(count: int) -> float:
        return (count + hosts - 1) * (latency + nbytes / 1e6 / count)

    best = min(seconds(count) for count in {1, *range(max(1, step.chunks // 2), 2 * step.chunks + 2)})
    assert seconds(step.chunks) == pytest.approx(step.duration / 1e9, rel=1e-6)
    assert seconds(step.chunks) <= best * (1.02 if step.chunks > 2 else 1.3)


@pytest.mark.parametrize("nbytes", [100, 10_000, 100 * MIB])
def test_the_cheapest_way_is_taken(nbytes: int) -> None:
    source, destination, on = one_sender(3, 4)
    fabric = Fabric(hosts=on, rate=1.25e9, latency=50e-6)
    ways: list[Way] = ["send_recv", "local_all_gather", "global_all_gather", "broadcast"]
    by_way = [plan_reshard(source, destination, (nbytes,), 1, fabric, way=way).predicted for way in ways]
    assert plan_reshard(source, destination, (nbytes,), 1, fabric).predicted == min(by_way)


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
