"""The band around a prediction: of one node, of several, of long pipelines."""

from __future__ import annotations

import numpy as np
import pytest
from planner_fit import spread_of

from plait.core.cluster.hardware import Cluster
from plait.core.step.columns.points import StrategyTable
from plait.plan.search.needs import P90, band, regimes

A100 = Cluster.preset("a100-80")


def test_regimes_are_of_nodes_and_of_pp_ranks() -> None:
    rows = [{"dp": 8}, {"pp": 8}, {"dp": 9}, {"pp": 3, "dp": 3}, {"pp": 4, "dp": 2}, {"pp": 4, "dp": 4}, {"pp": 16}]
    assert regimes(StrategyTable.of(rows), A100).tolist() == [0, 0, 1, 1, 0, 2, 2]


def test_nine_tenths_lie_on_either_side() -> None:
    spread = A100.efficiency.spread
    points = StrategyTable.of([{"dp": 8}, {"dp": 16}, {"pp": 16}])
    low, high = band(np.array([1.0, 2.0, 3.0]), points, A100)
    told = np.array([spread.node.value, spread.nodes.value, spread.pipeline.value])
    assert high == pytest.approx(np.array([1.0, 2.0, 3.0]) * np.exp(1.2815516 * told))
    assert low * high == pytest.approx([1.0, 4.0, 9.0])


@pytest.mark.parametrize(
    ("residuals", "weights", "told"),
    [
        ([0.1, -0.4, 0.2, -0.3, 0.5], [1, 1, 1, 1, 1], 0.4),  # four of five
        ([0.1, -0.4, 0.2, -0.3, 0.5], [1, 1, 1, 6, 1], 0.3),
        ([0.1, -0.4], [9, 1], 0.1),
        ([-0.7], [1], 0.7),
    ],
)
def test_the_spread_is_where_four_fifths_lie(residuals: list[float], weights: list[float], told: float) -> None:
    assert spread_of(np.array(residuals), np.array(weights, dtype=float)) == pytest.approx(told / P90)
