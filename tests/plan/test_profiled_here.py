"""A machine from its own profile: tiers, peaks and rates; and which points count."""

from __future__ import annotations

import math
from typing import Any

import pytest

from plait.core.base.errors import JobError
from plait.core.cluster.hardware import MEMORY_RATE, Cluster
from plait.core.cluster.mfu import dense_peak
from plait.core.cluster.profile import Curve, Group, Machine, MemoryPass, Overlap, Point, Product, Profile
from plait.plan.calibrate.profiled import cluster_from_profile, with_profile

NODE = Group(ranks=8, per_node=8, nodes=1)
PAIRS = Group(ranks=2, per_node=1, nodes=2, stride=8, at_once=8)
WHOLE = Group(ranks=16, per_node=8, nodes=2)


def curve(kind: Any, group: Group, *points: tuple[int, float]) -> Curve:
    return Curve(kind=kind, group=group, points=tuple(Point(bytes=size, seconds=each) for size, each in points))


def product(seconds: float, precision: Any = "bf16-mixed") -> Product:
    return Product(m=1000, k=1000, n=1000, precision=precision, seconds=seconds)


def profile(*collectives: Curve, machine: dict[str, Any] | None = None, **more: Any) -> Profile:
    told = {"device": "X1", "kind": "cuda", "memory": 80 << 30, "ranks": 16, "ranks_per_node": 8, "backend": "nccl"}
    given = {"products": (product(1e-4),), "passes": (MemoryPass(bytes=10**9, seconds=1e-3),)}
    return Profile(
        machine=Machine(**told | (machine or {})), date="2026-03-04", collectives=collectives, **given | more
    )


INSIDE = curve("all_gather", NODE, (1 << 10, 3e-5), (1 << 28, 4e-3))


def test_peaks_are_the_best_of_each_precision_and_the_rate_of_memory_too() -> None:
    passes = (MemoryPass(bytes=10**9, seconds=1e-3), MemoryPass(bytes=10**9, seconds=5e-4))
    products = (product(1e-4), product(5e-5), product(2e-4, "fp32"), product(4e-4, "fp32"))
    found = cluster_from_profile(profile(INSIDE, products=products, passes=passes))
    assert {name: one.value for name, one in found.device.peak.items()} == pytest.approx(
        {"bf16-mixed": 4e13, "fp32": 1e13}
    )
    assert found.device.memory_rate.value == 2e12
    assert cluster_from_profile(profile(INSIDE, passes=())).device.memory_rate.value == MEMORY_RATE
    assert found.device.peak["fp32"].source == "profile of 2026-03-04"
    assert (found.name, found.device.name, found.device.memory.value) == ("here", "X1", 80 << 30)
    named = cluster_from_profile(profile(INSIDE, machine={"name": "attic", "device": "", "ranks": 17}))
    assert (named.name, named.device.name, named.nodes) == ("attic", "cuda", 3)


def test_no_utilisation_is_taken_of_rates_that_were_measured() -> None:
    device = cluster_from_profile(profile(INSIDE, machine={"kind": "cuda", "device": "NVIDIA H200"})).device
    assert device.kind == "cuda" and device.peak and {dense_peak(device, one) for one in device.peak} == {None}


def test_a_device_of_unknown_memory_is_not_described() -> None:
    with pytest.raises(JobError, match="memory size is unknown") as caught:
        cluster_from_profile(profile(INSIDE, machine={"memory": 0}))
    assert caught.value.key == "machine.memory"


def tiers(*collectives: Curve, **machine: Any) -> list[tuple[str, int, float, float]]:
    found = cluster_from_profile(profile(*collectives, machine=machine))
    return [(one.name, one.ranks, one.rate.value, one.latency.value) for one in found.tiers]


def test_a_tier_has_the_best_rate_and_the_shortest_message_that_were_measured() -> None:
    slow = curve("all_gather", NODE, (1 << 10, 6e-5), (1 << 28, 8e-3))
    pairs = curve("all_gather", PAIRS, (1 << 10, 4e-5), (1 << 28, 9e-3))
    whole = curve("all_gather", WHOLE, (1 << 10, 1e-4), (1 << 28, 2e-2))
    found = tiers(INSIDE, slow, pairs, whole)
    assert [(name, ranks) for name, ranks, *_ in found] == [("node", 8), ("network", 0)]
    assert found[0][2:] == pytest.approx((INSIDE.bandwidth, INSIDE.latency / 3))  # of eight ranks, in halves
    rate = max(pairs.bandwidth, whole.bandwidth / 8)  # whose ranks share a node's links
    assert found[1][2:] == pytest.approx((rate, min(pairs.latency / 1, whole.latency / 4)))


def test_minipods_are_a_tier_of_their_own() -> None:
    far = Group(ranks=4, per_node=1, nodes=4, minipods=2, stride=8, at_once=8)
    wide = Group(ranks=48, per_node=8, nodes=6, minipods=2)
    pairs = curve("all_gather", PAIRS, (1 << 10, 4e-5), (1 << 28, 9e-3))
    beyond = [curve("all_gather", group, (1 << 10, 9e-5), (1 << 28, 2e-2)) for group in (far, wide)]
    found = tiers(INSIDE, pairs, *beyond, ranks=48)
    assert [(name, ranks) for name, ranks, *_ in found] == [("node", 8), ("network", 24), ("core", 0)]
    assert found[2][2:] == pytest.approx((max(beyond[0].bandwidth, beyond[1].bandwidth / 8),
                                          min(beyond[0].latency / 2, beyond[1].latency / math.log2(48))))  # fmt: skip
    only = tiers(INSIDE, *beyond, ranks=48)
    assert [(name, ranks) for name, ranks, *_ in only] == [("node", 8), ("core", 0)]


def test_a_machine_without_links_has_its_memorys_rate() -> None:
    assert tiers(ranks=1, ranks_per_node=1) == [("node", 0, 1e12, 0.0)]


@pytest.mark.parametrize(("groups", "refused"), [((NODE,), False), ((PAIRS,), True), ((NODE, PAIRS), True)])
def test_nodes_of_another_size_matter_where_something_crosses_them(groups: tuple[Group, ...], refused: bool) -> None:
    cluster = Cluster.preset("h100")
    one = profile(*(curve("all_gather", each, (1 << 20, 1e-3)) for each in groups), machine={"ranks_per_node": 4})
    if not refused:
        with_profile(cluster, one)
        return
    with pytest.raises(JobError) as caught:
        with_profile(cluster, one)
    assert caught.value.key == "machine.ranks_per_node"


@pytest.mark.parametrize(("per_node", "at_once", "counts"), [(1, 8, True), (2, 4, True), (1, 4, False), (2, 3, False)])
def test_links_that_not_all_ranks_used_do_not_count_beside_those_that_all_used(
    per_node: int, at_once: int, counts: bool
) -> None:
    cluster = Cluster.preset("h100")
    all_used = curve("all_gather", WHOLE, (1 << 28, 0.5))
    group = Group(ranks=2 * per_node, per_node=per_node, nodes=2, stride=8 // per_node, at_once=at_once)
    other = curve("all_gather", group, (1 << 28, 1e-4))
    base, both = (with_profile(cluster, profile(*curves)).efficiency.across.share.value
                  for curves in ((all_used,), (all_used, other)))  # fmt: skip
    assert (both != base) == counts
    alone = with_profile(cluster, profile(other)).efficiency.across.share
    assert alone != cluster.efficiency.across.share  # there are no others


def test_products_of_another_precision_say_nothing() -> None:
    cluster = Cluster.preset("v100")
    peak = {name: one for name, one in cluster.device.peak.items() if name != "fp32"}
    cluster = cluster.model_copy(update={"device": cluster.device.model_copy(update={"peak": peak})})
    found = with_profile(cluster, profile(products=(product(1.0, "fp32"),), passes=()))
    assert found.efficiency.matmul == cluster.efficiency.matmul


def beside(computation: float, communication: float, group: Group = NODE) -> Overlap:
    return Overlap(kind="all_reduce", group=group, bytes=8, m=8, k=8, n=8, precision="fp32", computation=computation,
                   communication=communication)  # fmt: skip


def test_the_error_of_a_slow_down_is_the_spread_of_what_was_measured() -> None:
    cluster = Cluster.preset("h100")
    found = with_profile(cluster, profile(overlaps=(beside(1.1, 1.5), beside(1.3, 0.9)))).efficiency
    assert found.slow_computation.value == pytest.approx(math.sqrt(1.1 * 1.3))
    assert found.slow_computation.error == pytest.approx(math.log(1.3 / 1.1) / 2)
    assert found.slow_communication.error == pytest.approx(math.log(1.5 / 0.9) / 2)
    across = with_profile(cluster, profile(overlaps=(beside(1.1, 1.5), beside(1.3, 1.4, WHOLE)))).efficiency
    assert (across.slow_computation.value, across.slow_computation.error) == (pytest.approx(1.3), 0.0)
    faster = with_profile(cluster, profile(overlaps=(beside(0.9, 1.1),))).efficiency
    assert faster.slow_computation.value == 1.0  # nothing speeds up
