"""Real processes carry out plans: every destination tile is its part of the tensor, however it got
there."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from plait.core.reshard.plan import WAYS
from tests.dist import resharding
from tests.support.ranks import Ranks

Pool = Callable[[int], Ranks]


def problems(results: list[list[str]]) -> list[str]:
    return [problem for result in results for problem in result]


@pytest.mark.parametrize("seed", range(2))
def test_random_layouts_types_and_ways(pool: Pool, seed: int) -> None:
    assert problems(pool(4).run(resharding.carry_out, seed, 40, 4, "plain")) == []


def test_random_delays_change_nothing(pool: Pool) -> None:
    assert problems(pool(4).run(resharding.carry_out, 100, 12, 4, "delayed")) == []
    assert problems(pool(4).run(resharding.both_ways, 5, 6)) == []


@pytest.mark.parametrize("way", WAYS)
def test_megabytes_while_computing(pool: Pool, way: str) -> None:
    assert problems(pool(4).run(resharding.large, way)) == []
