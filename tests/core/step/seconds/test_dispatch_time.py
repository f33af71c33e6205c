"""Seconds of sending tokens once to every node and rank that has an expert of theirs."""

from __future__ import annotations

import numpy as np
import pytest

from plait.core.cluster.hardware import Cluster
from plait.core.step.seconds.dispatch_time import ACROSS, INSIDE, dispatch
from plait.core.step.seconds.rates import latency

H100 = Cluster.preset("h100")
NODE, ROW = H100.tiers[0].ranks, 1e9


def seconds(ranks: int, stride: int, experts: int, per_token: int) -> float:
    return float(dispatch(H100, ROW, ranks, stride, experts=experts, per_token=per_token))


@pytest.mark.parametrize(
    ("ranks", "stride", "tier", "share"),
    [(NODE, 1, 0, INSIDE), (2, 1, 0, INSIDE), (4, NODE, 1, ACROSS), (32, NODE, 1, ACROSS)],
)
def test_whoever_goes_to_every_rank_of_a_tier_sends_a_row_to_each_other(
    ranks: int, stride: int, tier: int, share: float
) -> None:
    """Over that tier's links alone, at the share of their rate that was measured of them."""
    sent = (ranks - 1) * ROW / (H100.tiers[tier].rate.value * share)
    assert seconds(ranks, stride, ranks, ranks) == pytest.approx(sent + latency(H100, tier) * np.log2(ranks))


def test_the_slower_tier_decides_and_both_take_their_latency() -> None:
    nodes = 4
    inside = nodes * (NODE - 1) * ROW / (H100.tiers[0].rate.value * INSIDE)
    across = (nodes - 1) * ROW / (H100.tiers[1].rate.value * ACROSS)
    least = latency(H100, 0) * np.log2(NODE) + latency(H100, 1) * np.log2(nodes)
    experts = NODE * nodes
    assert seconds(experts, 1, experts, experts) == pytest.approx(max(inside, across) + least)


def test_one_rank_sends_nothing_and_fewer_experts_cost_less() -> None:
    assert seconds(1, 1, 8, 2) == 0.0
    taken = [seconds(NODE * 4, 1, 256, chosen) for chosen in (1, 2, 8, 64)]
    assert taken == sorted(taken) and len(set(taken)) == 4
