"""A host in a simulated step: what it launches of each list, and what a step takes where it is
late."""

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
from plait.plan.search.simulate import simulate_plan
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


def test_captured_graphs_take_time_of_a_host_for_collectives_alone() -> None:
    ops, collectives = launched(single(tp=2, cuda_graphs=True))
    assert (ops, collectives) == (0.0, launched(single(tp=2))[1])
    for strategy in ({}, {"p1": 2}):
        captured = single(**strategy, cuda_graphs=True)
        assert launched(captured) == (0.0, 0.0)
        quick = simulate_plan(single(**strategy), cluster(host_layer=0.0, host_collective=0.0, **QUICK))
        assert simulate_plan(captured, HOST).seconds == pytest.approx(quick.seconds)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "interleaved", "zb-v"])
def test_a_later_host_never_makes_a_pipeline_faster(name: str) -> None:
    plan = pipelined(name, 4, 8)
    found = [
        simulate_plan(plan, cluster(host_layer=each, host_collective=each / 5, **QUICK)).seconds
        for each in (0.0, 1e-6, 1e-5, 1e-4, 1e-2)
    ]
    assert found == sorted(found)
    assert found[-1] > 8 * 2 * 1e-2  # each pp rank launches eight forwards and eight backwards, at least
