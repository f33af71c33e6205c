"""Pools of gloo ranks, started once a session."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

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
