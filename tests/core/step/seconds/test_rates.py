"""Single operations: limits, proportions, and that more of anything is never slower."""

from __future__ import annotations

from typing import Any

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


def test_a_precision_without_a_peak_is_named() -> None:
    with pytest.raises(JobError, match="no peak for fp8"):
        rates.matmul(A100, "fp8", 8, 8, 8)


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


# ---- by hand ----


E = A100.efficiency


SIZE = 3e8


def rate(tier: int) -> float:
    one = E.across if tier else E.inside
    return one.share.value * A100.tiers[tier].rate.value


def test_no_ranks_send_nothing_beside_others_that_do() -> None:
    found = rates.collective(A100, "all_gather", [SIZE, SIZE, SIZE], [0, 1, 4], [1, 0, 0])
    assert found.tolist() == [0.0, 0.0, float(rates.collective(A100, "all_gather", SIZE, 4, 1))]
    assert rates.collective(A100, "all_reduce", [SIZE, 1.0], [1, 1], 1).tolist() == [0.0, 0.0]


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


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "all_to_all", "broadcast"])
def test_only_the_slowest_tier_counts_but_of_an_all_to_all(kind: rates.Kind) -> None:
    """``Efficiency.tiers``: what an all-to-all sends over several tiers adds up in any case."""
    slowest = A100.model_copy(update={"efficiency": A100.efficiency.model_copy(update={"tiers": "slowest"})})
    together, apart = (rates.collective(one, kind, 1 << 30, 32, 1) for one in (slowest, A100))
    assert together == apart if kind == "all_to_all" else 0 < together < 0.9 * apart
