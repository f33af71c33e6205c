"""Who holds what of a unit, level by level."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.core.sharding import LEVELS, Sharding

factors = st.sampled_from([(1, 1, 1), (1, 1, 4), (1, 2, 4), (2, 2, 4), (2, 4, 8), (4, 4, 4), (1, 4, 4), (1, 1, 2)])


@given(factors, st.sampled_from([1, 2]))
def test_shards_of_a_level_make_the_whole_and_lie_within_those_before(sizes: tuple[int, int, int], times: int) -> None:
    params, grads, optim = sizes
    sharding, numel = Sharding(params=params, grads=grads, optim=optim), 16
    for rank in range(8 * times):
        low, high = 0, numel
        for level, factor in zip(LEVELS, sizes, strict=False):
            start, stop = sharding.shard(rank, level, numel)
            assert low <= start < stop <= high
            assert stop - start == numel // factor
            low, high = start, stop
    for level, factor in zip(LEVELS, sizes, strict=False):
        found = sorted({sharding.shard(rank, level, numel) for rank in range(8)})
        assert [start for start, _ in found] == [at * numel // factor for at in range(factor)]


@pytest.mark.parametrize(("level", "shard"), [("params", (40, 80)), ("grads", (40, 60)), ("optim", (50, 60))])
def test_a_rank_of_eight(level: str, shard: tuple[int, int]) -> None:
    assert Sharding(params=2, grads=4, optim=8).shard(5, level, 80) == shard  # type: ignore[arg-type]


@pytest.mark.parametrize(("secondary", "numel", "padded"), [(0, 8, 8), (0, 9, 12), (0, 1, 4), (2, 8, 8), (2, 9, 16)])
def test_a_unit_is_padded_so_that_every_factor_divides_it(secondary: int, numel: int, padded: int) -> None:
    assert Sharding(params=4, grads=4, optim=4, secondary=secondary).padded(numel) == padded


def test_neighbours_keep_the_other_parts_of_a_second_copy() -> None:
    assert Sharding(params=4, grads=4, optim=4, secondary=2).neighbours(5) == (4, 5)
    assert Sharding().neighbours(5) == (5,)
