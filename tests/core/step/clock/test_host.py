"""A host in a simulated step: what it launches of each list, and what a step takes where it is late."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from plait.core.job.plan import Plan
from plait.core.parallel.layout import Layout
from plait.core.step.clock.phase import Compute, Programme, Start
from plait.core.step.clock.pipeline import Simulation
from plait.core.step.clock.prices import ClusterPrices
from plait.core.step.schedules import whole_steps
from plait.core.step.seconds.costs import Launches
from plait.plan.simulate import PlanPrices, simulate_plan
from tests.plan.machines import SPEC, cluster, pipelined, plan_of

QUICK = {"slow_computation": 1.0, "slow_communication": 1.0, "step": 0.0, "jitter": 0.0}
HOST = cluster(host_layer=9 * 13.0, host_collective=1.0, **QUICK)
"""Nine rows forward take thirteen seconds each, thirteen backward nine."""
SMALL = replace(SPEC, num_layers=1)


def single(*, micro: int = 4, count: int = 1, **strategy: Any) -> Plan:
    layout = Layout.of(tp=strategy.get("tp", 1), cp=strategy.pop("cp", 1), dp=strategy.pop("dp", 1))
    return plan_of(whole_steps(count), layout, SMALL, micro=micro, precision="bf16-mixed", **strategy)


def programmes(plan: Plan) -> list[Programme]:
    """The lists of the first place."""
    return list(Simulation(plan, ClusterPrices(plan, HOST), None).lists[0].inside.programmes.values())


def launched(plan: Plan) -> tuple[float, float]:
    """Of ops, and of collectives."""
    steps = [step for programme in programmes(plan) for step in programme]
    ops = sum(step.launch for step in steps if isinstance(step, Compute))
    return ops, sum(step.launch for step in steps if isinstance(step, Start))


@pytest.mark.parametrize(
    ("strategy", "ops", "collectives"),
    [
        ({}, 234, 0),
        ({"p1": 2}, 468, 0),
        ({"p1": 4, "p2": 2}, 4 * (11 * 13 + 15 * 9), 0),
        ({"tp": 2}, 234, 4 + 3),  # of the ends: look-up, statistics, the gradient of the head's input
        ({"tp": 2, "p1": 2}, 468, 2 * 7),
        ({"cp": 2, "recompute": "full"}, 234 + 7 * 13, 4 + 2),
        ({"recompute": "full", "p1": 2}, 468 + 14 * 13, 0),
        ({"recompute": "full", "recompute_layers": 0}, 234, 0),
        ({"recompute": "selective"}, 234 + 3 * 13, 0),
    ],
    ids=str,
)  # fmt: skip
def test_lists_are_launched_slice_by_slice_and_what_runs_again_again(
    strategy: dict[str, Any], ops: float, collectives: float
) -> None:
    assert launched(single(**strategy)) == pytest.approx((ops, collectives))


@pytest.mark.parametrize(("strategy", "told"), [({}, 234), ({"p1": 2}, 468), ({"recompute": "full"}, 325)], ids=str)
def test_a_step_takes_what_a_late_host_takes(strategy: dict[str, Any], told: float) -> None:
    """Each micro-batch, from its beginning on: of the processor no more than the last op is left then."""
    found = simulate_plan(single(count=3, **strategy), HOST)
    assert found.exposed["compute"] == pytest.approx(3 * told, rel=1e-3)
    assert found.seconds >= 3 * told
    assert found.exposed["idle"] == 0.0


def test_captured_graphs_take_time_of_a_host_for_collectives_alone() -> None:
    ops, collectives = launched(single(tp=2, cuda_graphs=True))
    assert (ops, collectives) == (0.0, launched(single(tp=2))[1])
    for strategy in ({}, {"p1": 2}):
        captured = single(**strategy, cuda_graphs=True)
        assert launched(captured) == (0.0, 0.0)
        quick = simulate_plan(single(**strategy), cluster(host_layer=0.0, host_collective=0.0, **QUICK))
        assert simulate_plan(captured, HOST).seconds == pytest.approx(quick.seconds)


def test_exposed_collectives_are_time_for_a_host() -> None:
    """Of slow links: a step that waits for them is no longer for a host that is busy meanwhile."""
    slow = {"host_collective": 0.0, **QUICK, "rates": 1e-9}
    quick, half = (
        simulate_plan(single(tp=2, overlap="sync"), cluster(host_layer=each, **slow)) for each in (0.0, 0.01)
    )
    assert quick.exposed["tp"] > 1.0
    assert half.seconds == pytest.approx(quick.seconds, rel=0.01)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "interleaved", "zb-v"])
def test_a_later_host_never_makes_a_pipeline_faster(name: str) -> None:
    plan = pipelined(name, 4, 8)
    found = [
        simulate_plan(plan, cluster(host_layer=each, host_collective=each / 5, **QUICK)).seconds
        for each in (0.0, 1e-6, 1e-5, 1e-4, 1e-2)
    ]
    assert found == sorted(found)
    assert found[-1] > 8 * 2 * 1e-2  # each place launches eight forwards and eight backwards, at least


def test_proportions_of_a_plan_have_no_host() -> None:
    plan = single(tp=2)
    assert PlanPrices(plan).launches(0) == Launches()
    assert ClusterPrices(plan, HOST).launches(0).collective == 1.0
    assert ClusterPrices(plan, HOST, 2.0).launches(0) == ClusterPrices(plan, HOST).launches(0), "at its own pace"
