"""Hash conflicts: the exact sum against chance itself, and where a transfer meets a hash at all."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.core.topology.switches import Hardware
from plait.place import ecmp
from plait.place.ecmp import RailFabric, conflict_factor, largest_load
from plait.place.topologies import MinipodSizes, generate


@pytest.mark.parametrize("flows, uplinks", [(1, 5), (3, 2), (4, 3), (5, 3), (6, 2), (4, 4)])
def test_small_cases_by_trying_all_hashes(flows: int, uplinks: int) -> None:
    loads = [max(Counter(hashes).values()) for hashes in itertools.product(range(uplinks), repeat=flows)]
    assert largest_load(flows, uplinks) == pytest.approx(sum(loads) / len(loads), abs=1e-9)


@settings(max_examples=20)
@given(st.integers(0, 60), st.integers(1, 12))
def test_bounds(flows: int, uplinks: int) -> None:
    load = largest_load(flows, uplinks)
    assert -(-flows // uplinks) <= load <= flows
    assert load <= largest_load(flows + 1, uplinks) + 1e-9
    assert largest_load(flows, uplinks + 1) <= load + 1e-9


def test_where_the_exact_sum_ends_nothing_jumps() -> None:
    for flows, uplinks in ((64, 32), (128, 16), (40, 51)):
        assert ecmp._exact(flows, uplinks) == pytest.approx(ecmp._large(flows, uplinks), abs=0.02)
    assert largest_load(10**6, 64) == pytest.approx(10**6 / 64 + math.sqrt(10**6 / 64) * 2.37, rel=0.002)
    assert largest_load(10**7, 1) == 10**7


@pytest.mark.parametrize("flows, uplinks", [(-1, 3), (3, 0)])
def test_what_is_no_case(flows: int, uplinks: int) -> None:
    with pytest.raises(ValueError, match="flows over"):
        largest_load(flows, uplinks)
    with pytest.raises(ValueError, match="at least 1"):
        RailFabric(uplinks=0)


def test_megascales_remedies_help() -> None:
    """Faster uplinks, more connections, fewer NICs that share them."""
    plain = RailFabric(uplinks=32, active=32)
    assert conflict_factor(plain) > 3
    assert conflict_factor(RailFabric(uplinks=32, active=32, speedup=2.0)) == pytest.approx(conflict_factor(plain) / 2)
    assert 1 < conflict_factor(plain, flows_per_nic=16) < conflict_factor(plain) / 1.5
    assert conflict_factor(RailFabric(uplinks=32, active=4)) < conflict_factor(plain)
    assert conflict_factor(RailFabric(uplinks=32, active=1)) == 1.0


@pytest.mark.parametrize(
    ("hardware", "rails", "active"),
    [
        (Hardware(gpus=8, nics=8, rails=8), 8, 4), (Hardware(gpus=8, nics=16, rails=8), 8, 8),
        (Hardware(gpus=8, nics=9, rails=8), 8, 8), (Hardware(gpus=8, nics=2), 1, 8), (Hardware(gpus=8), 1, 4),
        (Hardware(gpus=8, nics=2, rails=8), 8, 4),
    ],
)  # fmt: skip
def test_what_a_leaf_sends_upwards(hardware: Hardware, rails: int, active: int) -> None:
    """Four nodes; each has on a rail its NICs by the number of rails, and one where nothing is
    told."""
    tree = generate(MinipodSizes(minipods=2, nodes=16, leaf_nodes=4), hardware=hardware)
    assert RailFabric.of(tree, "n01") == RailFabric(uplinks=active, rails=rails, active=active)
    assert RailFabric.of(tree, "n01", speedup=2.0).uplinks == max(round(active / 2), 1)
    assert RailFabric.of(tree, "n01", speedup=100.0).uplinks == 1
    assert RailFabric.of(tree, "n01", active=3).active == 3
    told = generate(MinipodSizes(minipods=2, nodes=16, leaf_nodes=4), hardware=hardware, uplinks=5)
    assert RailFabric.of(told, "n01").uplinks == 5


@pytest.mark.parametrize(
    "wrong", [{"uplinks": 0}, {"rails": 0}, {"active": 0}, {"speedup": 0.0}, {"speedup": math.inf}]
)
def test_a_fabric_that_cannot_be(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="counts are at least 1, the speed-up is above 0"):
        RailFabric(**wrong)  # type: ignore[arg-type]
    assert RailFabric(uplinks=1, rails=1, active=1, speedup=1e-9)
