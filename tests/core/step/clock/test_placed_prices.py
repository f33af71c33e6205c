"""Prices of placed ranks: what crosses minipods, and how many flows share their links, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plait.core.cluster.hardware import Cluster
from plait.core.cluster.network import Network
from plait.core.job.plan import Plan
from plait.core.job.spec import Job
from plait.core.step.clock.prices import ClusterPrices, PlacedPrices
from plait.plan.make import make_plan
from plait.plan.search.simulate import PlacedOn, simulate_plan

PUBLISHED = Network(rate=1e9, collective_loss=0.17, p2p_loss=0.7)
CORE = replace(PUBLISHED, core=1e6)


def plan_of(*, dp: int, pp: int, tp: int = 1, shard: str = "ddp") -> Plan:
    return make_plan(Job.from_dict({
        "model": {"family": "gpt", "num_layers": 4, "hidden": 64, "num_heads": 4, "vocab": 256, "max_sequence": 32},
        "data": {"sequence_length": 32},
        "train": {"global_batch_size": 4 * dp, "micro_batch_size": 1},
        "strategy": {"dp": dp, "pp": pp, "tp": tp, "shard": shard, "schedule": "1f1b"},
    }), Cluster.preset("lab").hosts, vocab=256)  # fmt: skip


def hosts_of(each: int) -> Cluster:
    lab = Cluster.preset("lab")
    inner, outer = lab.tiers
    tiers = (inner.model_copy(update={"ranks": each}), outer.model_copy(update={"ranks": 0}))
    return lab.model_copy(update={"ranks_per_node": each, "tiers": tiers})


def prices(plan: Plan, pods: tuple[int, ...], network: Network = CORE, each: int = 1) -> PlacedPrices:
    return PlacedPrices(plan, hosts_of(each), pods=pods, network=network)


MANY = 3_000_000.0
"""Bytes that take seconds over a core of 1 MB/s, however fast what is inside."""


def test_what_does_not_cross_costs_what_it_does_in_one_minipod() -> None:
    plan = plan_of(dp=2, pp=2)
    plain, placed = ClusterPrices(plan, hosts_of(1)), prices(plan, (0, 0, 1, 1))
    assert placed.collective("all_reduce", MANY, 2, 1, 0) == plain.collective("all_reduce", MANY, 2, 1, 0)
    inside = prices(plan, (0, 0, 0, 0))
    assert inside.travel(0, 1) == plain.travel(0, 1)
    assert simulate_plan(plan, hosts_of(1)).seconds == simulate_plan(
        plan, hosts_of(1), placed=PlacedOn(pods=(0,) * 4, network=CORE)
    ).seconds  # fmt: skip


def test_flows_that_cross_at_once_share_a_minipods_link() -> None:
    """Pairs send their whole tensor each way; of two stages both, or one, cross."""
    plan = plan_of(dp=2, pp=2)
    both, one = prices(plan, (0, 1, 0, 1)), prices(plan, (0, 1, 1, 1))
    assert both.collective("all_reduce", MANY, 2, 1, 0) == pytest.approx(2 * MANY / 1e6)
    assert one.collective("all_reduce", MANY, 2, 1, 0) == pytest.approx(MANY / 1e6)
    assert one.collective("all_reduce", MANY, 2, 1, 1) < 1.0, "the other stage lies in one minipod"
    assert both.collective("all_gather", MANY, 2, 1, 0) == pytest.approx(2 * MANY / 2 / 1e6)


def test_a_ring_of_three_leaves_a_minipod_once() -> None:
    plan = plan_of(dp=3, pp=1)
    placed = prices(plan, (0, 0, 1))
    assert placed.collective("all_reduce", MANY, 3, 1, 0) == pytest.approx(2 * MANY * 2 / 3 / 1e6)


def test_a_ring_that_goes_to_and_fro_leaves_it_twice() -> None:
    plan = plan_of(dp=4, pp=1)
    assert prices(plan, (0, 1, 0, 1)).collective("all_reduce", MANY, 4, 1, 0) == pytest.approx(
        2 * prices(plan, (0, 0, 1, 1)).collective("all_reduce", MANY, 4, 1, 0)
    )


def test_groups_of_a_hosts_ranks_each_send_their_own() -> None:
    """tp = 2 inside hosts of two: two DP groups between the same hosts."""
    plan = plan_of(dp=2, pp=1, tp=2)
    placed = prices(plan, (0, 1), each=2)
    assert placed.collective("all_reduce", MANY, 2, 2, 0) == pytest.approx(2 * MANY / 1e6)


def test_what_stages_hand_on_crosses_for_all_replicas_at_once() -> None:
    plan = plan_of(dp=2, pp=2)
    tile = plan.crossing_bytes(0, (0, 1), plan.largest_share(0))
    slow = replace(CORE, core=1.0)
    assert prices(plan, (0, 0, 1, 1), slow).travel(0, 1) == pytest.approx(2 * tile)
    assert prices(plan, (0, 0, 0, 1), slow).travel(0, 1) == pytest.approx(tile)


def test_published_losses_where_no_core_was_measured() -> None:
    plan = plan_of(dp=2, pp=2)
    plain, placed = ClusterPrices(plan, hosts_of(1)), prices(plan, (0, 1, 1, 0), PUBLISHED)
    inside = plain.collective("all_reduce", MANY, 2, 1, 0)
    assert placed.collective("all_reduce", MANY, 2, 1, 0) == pytest.approx(inside / (1 - 0.17 / 2))
    assert placed.travel(0, 1) == pytest.approx(plain.travel(0, 1) / (1 - 0.7)), "two neighbours are one pair"
    assert placed.spreads() == (2, 2) and prices(plan, (0, 0, 1, 1)).spreads() == (1, 2)


def test_a_step_is_longer_the_more_it_crosses() -> None:
    plan = plan_of(dp=2, pp=2)
    slow = replace(CORE, core=2e4)

    def seconds(*pods: int) -> float:
        return simulate_plan(plan, hosts_of(1), placed=PlacedOn(pods=pods, network=slow)).seconds

    none, pipeline, one, all_of_them = (
        seconds(0, 0, 0, 0),
        seconds(0, 0, 1, 1),
        seconds(0, 1, 1, 1),
        seconds(0, 1, 0, 1),
    )
    assert none < pipeline and none < one < all_of_them
    assert seconds(1, 0, 1, 0) == pytest.approx(all_of_them), "names of minipods are names"


def test_places_of_a_kind_whose_groups_lie_alike_share_their_lists() -> None:
    plan = plan_of(dp=2, pp=2)
    assert prices(plan, (0, 1, 2, 3)).cost_class(0) == prices(plan, (0, 1, 2, 3)).cost_class(1)
    assert prices(plan, (0, 1, 1, 1)).cost_class(0) != prices(plan, (0, 1, 1, 1)).cost_class(1)


def test_inside_a_minipod_the_slowest_tier_counts_for_placed_ranks_too() -> None:
    """Hosts of two ranks; over both tiers and, where the group crosses, the core."""
    plan, lab = plan_of(dp=8, pp=1), hosts_of(2)
    reached = lab.efficiency.model_copy(update={"tiers": "slowest"})
    slowest = lab.model_copy(update={"efficiency": reached})
    seconds = {
        (name, pods): PlacedPrices(plan, one, pods=pods, network=replace(CORE, core=core)).collective(
            "all_reduce", MANY, 8, 1
        )
        for name, one in (("sum", lab), ("slowest", slowest))
        for pods, core in (((0,) * 4, 1e6), ((0, 0, 1, 1), 1e6), ((0, 1, 0, 1), 1e15))
    }
    assert seconds["slowest", (0,) * 4] == ClusterPrices(plan, slowest).collective("all_reduce", MANY, 8, 1)
    assert seconds["slowest", (0,) * 4] < seconds["sum", (0,) * 4]
    assert seconds["slowest", (0, 1, 0, 1)] == seconds["slowest", (0,) * 4]
    assert seconds["slowest", (0, 0, 1, 1)] == seconds["sum", (0, 0, 1, 1)] > seconds["sum", (0,) * 4]
