"""Single operations: limits, proportions, and that more of anything is never slower."""

from __future__ import annotations

from dataclasses import replace
from operator import add
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.core.base.errors import JobError
from plait.core.cluster.hardware import Cluster
from plait.core.step.seconds import rates

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
        shape = rates.AttentionShape(batch=1, heads=8, queries=keys, keys=keys, head_size=128)
        return float(rates.attention(A100, "bf16-mixed", shape, backward=backward, fused=fused))

    assert seconds(True) > seconds(False) > 0


def test_fused_attention_skips_the_masked_half() -> None:
    whole = rates.AttentionShape(batch=1, heads=32, queries=1 << 16, keys=1 << 16, head_size=128, causal=False)
    every, half = (
        rates.attention(A100, "bf16-mixed", replace(whole, causal=causal), backward=False) for causal in (False, True)
    )
    assert half == pytest.approx(every / 2, rel=0.01)


def test_attention_without_a_fused_kernel_is_slower_the_longer_the_more() -> None:
    def ratio(keys: int) -> float:
        shape = rates.AttentionShape(batch=4, heads=32, queries=keys, keys=keys, head_size=128)
        several, one = (
            rates.attention(A100, "bf16-mixed", shape, backward=False, fused=fused) for fused in (False, True)
        )
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


# ---- by hand ----


TOP = 312e12
"""FLOP/s of an A100 in bf16."""
E = A100.efficiency


def test_a_product_by_hand() -> None:
    told = 2 * 100 * 200 * 300 / (TOP * E.matmul.value) * (1 + E.matmul_wave.value / (100 * 300))
    told = told * (1 + E.matmul_depth.value / 200) + E.matmul_launch.value
    assert rates.matmul(A100, "bf16-mixed", 100, 200, 300) == pytest.approx(told)
    three = [rates.matmul(A100, "bf16-mixed", *shape) for shape in ((100, 200, 300), (100, 300, 200), (200, 100, 300))]
    assert rates.three_products(A100, "bf16-mixed", 100, 200, 300) == pytest.approx(sum(map(float, three)))


def test_fp8_has_a_share_and_attention_of_its_own() -> None:
    h100 = Cluster.preset("h100")
    eight, sixteen = (rates.peak(h100, name) for name in ("fp8", "bf16-mixed"))
    one = h100.efficiency
    told = 2 * 4096**3 / (eight * one.matmul_fp8.value) * (1 + one.matmul_wave.value / 4096**2)
    told = told * (1 + one.matmul_depth.value / 4096) + one.matmul_launch.value
    assert rates.matmul(h100, "fp8", 4096, 4096, 4096) == pytest.approx(told)
    assert eight > sixteen
    shape = rates.AttentionShape(batch=1, heads=8, queries=512, keys=512, head_size=128)
    fp8, bf16 = (rates.attention(h100, precision, shape, backward=False) for precision in ("fp8", "bf16-mixed"))
    assert fp8 == bf16


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("backward", "times", "share"), [
    (False, 1.0, E.attention_forward.value), (True, 2.5, E.attention_backward.value),
])  # fmt: skip
def test_fused_attention_by_hand(backward: bool, times: float, share: float, causal: bool) -> None:
    shape = rates.AttentionShape(batch=3, heads=5, queries=700, keys=900, head_size=64, causal=causal)
    found = rates.attention(A100, "bf16-mixed", shape, backward=backward)
    flops = 4 * 3 * 5 * 700 * 900 * 64 * times * (0.5 if causal else 1)
    told = flops / (TOP * share) * (1 + E.attention_short.value / 900) + E.attention_launch.value
    assert found == pytest.approx(told)


@pytest.mark.parametrize(("size", "odd"), [(64, 1.0), (80, 1.0), (72, 1.0), (36, E.matmul_odd.value)])
@pytest.mark.parametrize("backward", [False, True])
def test_attention_of_several_kernels_by_hand(size: int, odd: float, backward: bool) -> None:
    """Two products of all scores and the passes over these; twice as much backward."""
    shape = rates.AttentionShape(batch=3, heads=5, queries=700, keys=900, head_size=size)
    found = rates.attention(A100, "bf16-mixed", shape, backward=backward, fused=False)
    scores = 3 * 5 * 700 * 900
    products = 4 * scores * size / (TOP * E.matmul.value) * (1 + E.matmul_depth.value / size) * odd
    passes = scores * E.attention_score_bytes.value / (A100.device.memory_rate.value * E.memory.value)
    assert found == pytest.approx((products + passes) * (2 if backward else 1) + E.attention_launch.value)
    assert E.matmul_odd.value > 1


SIZE = 3e8
INSIDE, ACROSS = A100.tiers[0], A100.tiers[-1]


def rate(tier: int) -> float:
    one = E.across if tier else E.inside
    return one.share.value * A100.tiers[tier].rate.value


def half(tier: int) -> float:
    return (E.across if tier else E.inside).half.value


def hop(tier: int) -> float:
    """Seconds of a ring's hop, latency alone."""
    return (E.across if tier else E.inside).hop.value * A100.tiers[tier].latency.value


def log(tier: int, ranks: float) -> float:
    return (E.across if tier else E.inside).latency.value * A100.tiers[tier].latency.value * float(np.log2(ranks))


@pytest.mark.parametrize(
    ("kind", "moved", "pieces", "ring"),
    [
        ("all_gather", SIZE * 3 / 4, 3, True),
        ("reduce_scatter", SIZE * 3 / 4, 3, True),
        ("broadcast", SIZE, 3, True),
        ("all_reduce", 2 * SIZE * 3 / 4, 2, False),
        ("all_to_all", SIZE / 4 * 3 / 4, 2, False),
    ],
)
@pytest.mark.parametrize(("stride", "tier"), [(1, 0), (2, 0), (8, 1), (16, 1)])
def test_a_collective_over_links_of_one_kind(
    kind: rates.Kind, moved: float, pieces: float, ring: bool, stride: int, tier: int
) -> None:
    """Of four ranks: each sends its part, delayed by a piece for every hop of a ring or level of a tree."""
    told = moved / rate(tier) + half(tier) * pieces / rate(tier) + log(tier, 4) + (3 * hop(tier) if ring else 0)
    assert rates.collective(A100, kind, SIZE, 4, stride) == pytest.approx(told)


@pytest.mark.parametrize("kind", ["all_gather", "all_reduce", "all_to_all", "broadcast"])
@pytest.mark.parametrize(("ranks", "stride", "here"), [(16, 1, 8), (8, 2, 4), (32, 4, 2)])
@pytest.mark.parametrize("tiers", ["sum", "slowest"])
def test_ranks_on_a_node_pool_their_links_to_others(
    kind: rates.Kind, ranks: int, stride: int, here: int, tiers: str
) -> None:
    """What is sent inside and across adds up, or the slower decides but for all-to-alls; both delay it."""
    ring, nodes = kind in ("all_gather", "broadcast"), ranks // here
    inside = {
        "all_gather": SIZE * (ranks - 1) / ranks, "all_reduce": 2 * SIZE * (ranks - 1) / ranks,
        "all_to_all": SIZE / ranks * (ranks - 1) / ranks, "broadcast": SIZE,
    }[kind]  # fmt: skip
    across = {
        "all_gather": SIZE * (ranks - here) / ranks / here, "all_reduce": 2 * SIZE * (ranks - here) / ranks / here,
        "all_to_all": SIZE / ranks * (ranks - here) / ranks, "broadcast": SIZE / here,
    }[kind]  # fmt: skip
    pieces = (ranks - 1, ranks - here) if ring else (np.log2(ranks), np.log2(nodes))
    taken = (max if tiers == "slowest" and kind != "all_to_all" else add)(inside / rate(0), across / rate(1))
    delay = half(0) * pieces[0] / rate(0) + half(1) * pieces[1] / (here * rate(1)) + log(0, here) + log(1, nodes)
    if ring:
        delay += hop(0) * (here - 1) * nodes + hop(1) * (nodes - 1)
    one = A100.model_copy(update={"efficiency": E.model_copy(update={"tiers": tiers})})
    assert rates.collective(one, kind, SIZE, ranks, stride) == pytest.approx(taken + delay)
    columns = rates.collective(one, kind, SIZE, np.array([1, ranks]), stride)
    assert columns.tolist() == [0, rates.collective(one, kind, SIZE, ranks, stride)]


@pytest.mark.parametrize(
    ("ranks", "stride", "tier"), [(2, 1, 0), (8, 1, 0), (2, 7, 0), (9, 1, 1), (2, 8, 1), (2, 99, 1)]
)
def test_a_send_goes_over_the_outermost_links_of_its_chain(ranks: int, stride: int, tier: int) -> None:
    one = E.across if tier else E.inside
    told = (SIZE + half(tier)) / rate(tier) + A100.tiers[tier].latency.value * one.latency.value
    assert rates.collective(A100, "send", SIZE, ranks, stride) == pytest.approx(told)
    assert rates.collective(A100, "send", SIZE, 1, stride) == 0


def test_no_ranks_send_nothing_beside_others_that_do() -> None:
    found = rates.collective(A100, "all_gather", [SIZE, SIZE, SIZE], [0, 1, 4], [1, 0, 0])
    assert found.tolist() == [0.0, 0.0, float(rates.collective(A100, "all_gather", SIZE, 4, 1))]
    assert rates.collective(A100, "all_reduce", [SIZE, 1.0], [1, 1], 1).tolist() == [0.0, 0.0]


@pytest.mark.parametrize(("busy", "sent", "told"), [
    (10.0, 2.0, 10 + 2 * 1.2 * (1 - 1 / 1.3)), (2.0, 10.0, 10 + 2 * 1.3 * (1 - 1 / 1.2)), (0.0, 3.0, 3.0),
    (3.0, 0.0, 3.0),
])  # fmt: skip
def test_both_slow_each_other_down_as_long_as_both_run(busy: float, sent: float, told: float) -> None:
    changed = {"slow_computation": 1.3, "slow_communication": 1.2}
    reached = E.model_copy(
        update={name: getattr(E, name).model_copy(update={"value": value}) for name, value in changed.items()}
    )
    assert rates.together(A100.model_copy(update={"efficiency": reached}), busy, sent) == pytest.approx(told)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stride", [1, 4, 16])
def test_the_last_tier_connects_all_whatever_it_says(kind: rates.Kind, stride: int) -> None:
    told = A100.model_copy(update={"tiers": (A100.tiers[0], A100.tiers[-1].model_copy(update={"ranks": 16}))})
    assert rates.collective(told, kind, SIZE, 64, stride) == rates.collective(A100, kind, SIZE, 64, stride)


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "all_to_all", "broadcast"])
def test_a_tier_that_connects_all_leaves_nothing_to_those_beyond(kind: rates.Kind) -> None:
    inside = A100.tiers[0].model_copy(update={"ranks": 0})
    told = A100.model_copy(update={"tiers": (inside, A100.tiers[-1])})
    whole = A100.model_copy(update={"tiers": (inside.model_copy(update={"ranks": 1024}), A100.tiers[-1])})
    assert rates.collective(told, kind, SIZE, 64, 1) == rates.collective(whole, kind, SIZE, 64, 1)


@pytest.mark.parametrize("precision", ["mxfp8", "nvfp4"])
def test_block_formats_have_a_share_and_a_peak_of_their_own(precision: Any) -> None:
    gb200 = Cluster.preset("gb200")
    share = getattr(gb200.efficiency, f"matmul_{precision}").value
    wave, depth = gb200.efficiency.matmul_wave.value, gb200.efficiency.matmul_depth.value
    told = 2 * 8192**3 / (rates.peak(gb200, precision) * share) * (1 + wave / 8192**2) * (1 + depth / 8192)
    assert rates.matmul(gb200, precision, 8192, 8192, 8192) == pytest.approx(
        told + gb200.efficiency.matmul_launch.value
    )
    shape = rates.AttentionShape(batch=1, heads=8, queries=4096, keys=4096, head_size=128)
    quantised, bf16 = (rates.attention(gb200, name, shape, backward=True) for name in (precision, "bf16-mixed"))
    assert quantised == bf16


def test_a_group_on_a_mesh_has_the_links_among_its_ranks() -> None:
    """Of eight that have a link to each of the seven others."""
    mesh = Cluster.preset("mi300x")
    tiers = (mesh.tiers[0].model_copy(update={"mesh": False}), *mesh.tiers[1:])
    switched, size = mesh.model_copy(update={"tiers": tiers}), 1e12
    for kind in ("all_reduce", "all_gather", "all_to_all", "send"):
        found = [float(rates.collective(one, kind, size, ranks, 1)) for ranks in (2, 4, 8) for one in (mesh, switched)]
        slower = [found[at] / found[at + 1] for at in (0, 2, 4)]
        assert slower == pytest.approx([7, 7, 7] if kind == "send" else [7, 7 / 3, 1], rel=1e-3)
    across = [float(rates.collective(one, "all_gather", size, 16, 8)) for one in (mesh, switched)]
    assert across[0] == across[1]
