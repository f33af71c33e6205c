"""Ranks that share processors are faster while others wait."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.core.cluster.hardware import Cluster
from plait.core.step.columns.points import SCHEDULES, StrategyTable
from plait.core.step.seconds.closed_form import step_seconds
from plait.plan.search.simulate import simulate_plan
from tests.plan.machines import SPEC, cluster, pipelined

ALONE: dict[str, float] = {
    "slow_computation": 1, "slow_communication": 1, "step": 0, "jitter": 0, "latency": 0, "optimizer_bytes": 0,
    "host_layer": 0, "host_collective": 0,
}  # fmt: skip
"""Nothing but the computation of micro-batches takes time, once links are fast."""


def crowded(crowd: float, **efficiency: float) -> Cluster:
    found = cluster("lab", rates=1e6, **{**ALONE, **efficiency})
    return found.model_copy(update={"crowd": crowd})


def seconds(name: str, pp: int, micro_batches: int, crowd: float, **more: Any) -> float:
    return simulate_plan(pipelined(name, pp, micro_batches, **more), crowded(crowd)).seconds


def test_pp_ranks_that_take_turns_have_all_processors_in_their_turn() -> None:
    """One micro-batch: forwards and backwards one after the other."""
    assert seconds("1f1b", 2, 1, 2.0) == pytest.approx(seconds("1f1b", 2, 1, 1.0) / 2, rel=0.03)
    assert seconds("1f1b", 4, 1, 2.0) == pytest.approx(seconds("1f1b", 4, 1, 1.0) / 2, rel=0.03), "no more than whole"
    assert seconds("1f1b", 4, 1, 4.0) == pytest.approx(seconds("1f1b", 4, 1, 1.0) / 4, rel=0.05)


@settings(max_examples=20)
@given(
    name=st.sampled_from(["1f1b", "gpipe", "zb-h1", "zb-v"]),
    pp=st.sampled_from([1, 2, 4]),
    micro_batches=st.integers(4, 9),
    crowd=st.floats(1.0, 4.0),
)
def test_no_processor_does_more_than_it_can(name: str, pp: int, micro_batches: int, crowd: float) -> None:
    plan, one = pipelined(name, pp, micro_batches), crowded(1.0)
    alone, shared = simulate_plan(plan, one), simulate_plan(plan, one.model_copy(update={"crowd": crowd}))
    assert shared.seconds <= alone.seconds * (1 + 1e-9)
    busy = sum(each["compute"] for each in alone.pp_ranks) / pp
    assert shared.seconds >= max(busy, alone.seconds / crowd) * (1 - 1e-6)


def test_the_closed_form_says_the_same_of_pipelines() -> None:
    """That a pp rank waits costs nothing as long as the processors are busy."""

    def closed(crowd: float, micro_batches: int) -> Any:
        point = {"pp": 4, "num_micro": micro_batches, "schedule": SCHEDULES.index("1f1b")}
        return step_seconds(SPEC, StrategyTable.of([point]), crowded(crowd), sequence=32, precision="fp32")

    few, many = closed(2.0, 1), closed(2.0, 64)
    assert few.total == pytest.approx(closed(1.0, 1).total / 2, rel=0.05)
    assert many.bubble[0] == 0 < closed(1.0, 64).bubble[0]
