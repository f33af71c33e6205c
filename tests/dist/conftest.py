"""Pools of gloo ranks, started once a session; a folder of checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.dist.checkpointing import One
from tests.ranks import Ranks


@pytest.fixture(scope="session")
def pool() -> Iterator[Callable[[int], Ranks]]:
    """``pool(n)`` is a world of n ranks."""
    pools: dict[int, Ranks] = {}

    def of(size: int) -> Ranks:
        if size in pools and pools[size].broken:  # what one rank did not do, the others still wait for
            pools.pop(size).kill()
        if size not in pools:
            pools[size] = Ranks(size)
        return pools[size]

    yield of
    for one in pools.values():
        one.close()


@pytest.fixture
def four(pool: Callable[[int], Ranks]) -> Ranks:
    return pool(4)


@pytest.fixture
def one(tmp_path: Path) -> One:
    return One(tmp_path / "checkpoints")
