"""Single operations: limits, proportions, and that more of anything is never slower."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.core.cluster import Cluster
from plait.core.errors import JobError
from plait.plan import rates

A100 = Cluster.preset("a100-80")
KINDS: tuple[rates.Kind, ...] = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send")
sizes = st.integers(1, 1 << 34)
powers = st.integers(0, 7).map(lambda n: 1 << n)


def faster(cluster: Cluster, tier: int, factor: float) -> Cluster:
    tiers = list(cluster.tiers)
    rate = tiers[tier].rate
    tiers[tier] = tiers[tier].model_copy(update={"rate": rate.model_copy(update={"value": rate.value * factor})})
    return cluster.model_copy(update={"tiers": tuple(tiers)})


@given(m=st.integers(1, 1 << 16), k=st.integers(1, 1 << 16), n=st.integers(1, 1 << 16))
def test_a_product_never_beats_the_peak_and_its_transpose_takes_as_long(m: int, k: int, n: int) -> None:
    seconds = rates.matmul(A100, "bf16-mixed", m, k, n)
    assert seconds > 2 * m * k * n / rates.peak(A100, "bf16-mixed")
    assert seconds == pytest.approx(rates.matmul(A100, "bf16-mixed", n, k, m))


def test_halves_of_a_product_take_longer_than_the_whole() -> None:
    whole = rates.matmul(A100, "bf16-mixed", 4096, 8192, 8192)
    assert 2 * rates.matmul(A100, "bf16-mixed", 4096, 8192, 4096) > whole


def test_a_precision_without_a_peak_is_named() -> None:
    with pytest.raises(JobError, match="no peak for fp8"):
        rates.matmul(A100, "fp8", 8, 8, 8)


@given(keys=st.integers(128, 1 << 18), fused=st.booleans())
def test_the_backward_of_attention_takes_longer(keys: int, fused: bool) -> None:
    def seconds(backward: bool) -> float:
        return float(
            rates.attention(
                A100,
                "bf16-mixed",
                batch=1,
                heads=8,
                queries=keys,
                keys=keys,
                head_size=128,
                backward=backward,
                fused=fused,
            )
        )

    assert seconds(True) > seconds(False) > 0


def test_fused_attention_skips_the_masked_half() -> None:
    shape = {"batch": 1, "heads": 32, "queries": 1 << 16, "keys": 1 << 16, "head_size": 128, "backward": False}
    whole = rates.attention(A100, "bf16-mixed", causal=False, **shape)
    assert rates.attention(A100, "bf16-mixed", causal=True, **shape) == pytest.approx(whole / 2, rel=0.01)


def test_attention_without_a_fused_kernel_is_slower_the_longer_the_more() -> None:
    def ratio(keys: int) -> float:
        several, one = (
            rates.attention(A100, "bf16-mixed", batch=4, heads=32, queries=keys, keys=keys, head_size=128,
                            backward=False, fused=fused) for fused in (False, True)
        )  # fmt: skip
        return float(several / one)

    assert 1 < ratio(1024) < ratio(4096)


@given(kind=st.sampled_from(KINDS), nbytes=sizes, ranks=powers, stride=powers)
def test_a_group_of_one_sends_nothing_and_a_larger_message_takes_longer(
    kind: rates.Kind, nbytes: int, ranks: int, stride: int
) -> None:
    seconds = rates.collective(A100, kind, nbytes, ranks, stride)
    if ranks == 1:
        assert seconds == 0
    else:
        assert 0 < seconds < rates.collective(A100, kind, 2 * nbytes, ranks, stride)


@given(kind=st.sampled_from(KINDS), nbytes=sizes, ranks=powers, stride=powers, tier=st.integers(0, 1),
       factor=st.floats(1, 100))  # fmt: skip
def test_faster_links_are_never_slower(
    kind: rates.Kind, nbytes: int, ranks: int, stride: int, tier: int, factor: float
) -> None:
    before = rates.collective(A100, kind, nbytes, ranks, stride)
    assert rates.collective(faster(A100, tier, factor), kind, nbytes, ranks, stride) <= before * (1 + 1e-12)


@given(kind=st.sampled_from(KINDS), ranks=st.sampled_from([2, 4, 8]))
def test_inside_a_node_the_network_does_not_matter(kind: rates.Kind, ranks: int) -> None:
    slow = faster(A100, 1, 0.01)
    assert rates.collective(slow, kind, 1 << 28, ranks, 1) == rates.collective(A100, kind, 1 << 28, ranks, 1)
    assert rates.collective(slow, kind, 1 << 28, 16, 1) > rates.collective(A100, kind, 1 << 28, 16, 1)


def test_ranks_of_a_group_on_one_node_pool_their_share_of_the_network() -> None:
    """16 ranks on two nodes send an eighth of what 2 ranks on two nodes do, of which a node has 8 pairs."""
    slow = faster(A100, 1, 1e-3)
    dense = rates.collective(slow, "all_gather", 1 << 36, 16, 1)
    apart = rates.collective(slow, "all_gather", 1 << 36, 2, 8)
    assert apart / dense == pytest.approx(8, rel=0.02)


def test_an_all_reduce_is_a_scatter_and_a_gather() -> None:
    halves = [rates.collective(A100, kind, 1 << 36, 64, 8) for kind in ("reduce_scatter", "all_gather")]
    assert rates.collective(A100, "all_reduce", 1 << 36, 64, 8) == pytest.approx(sum(halves), rel=0.01)


def test_a_chain_that_leaves_its_node_sends_over_the_network() -> None:
    inside = rates.collective(A100, "send", 1 << 30, 2, 4)
    assert rates.collective(A100, "send", 1 << 30, 2, 8) > 3 * inside


@given(busy=st.floats(0, 10), sent=st.floats(0, 10))
def test_side_by_side_is_between_the_longer_and_the_sum_of_both_slowed(busy: float, sent: float) -> None:
    both = rates.together(A100, busy, sent)
    slow = A100.efficiency.slow_communication.value
    assert max(busy, sent) - 1e-9 <= both <= busy + sent * slow + 1e-9


def test_columns_give_columns() -> None:
    seconds = rates.collective(A100, "all_gather", 1 << 30, np.array([1, 2, 8, 16]), np.array([1, 8, 1, 1]))
    assert seconds.shape == (4,)
    assert seconds[0] == 0 < seconds[2] < seconds[3] < seconds[1]
