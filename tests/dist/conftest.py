"""Pools of gloo ranks, started once a session; a folder of checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.dist.checkpointing import One
from tests.support.ranks import Ranks, worlds


@pytest.fixture(scope="session")
def pool() -> Iterator[Callable[[int], Ranks]]:
    """``pool(n)`` is a world of n ranks."""
    with worlds() as of:
        yield of


@pytest.fixture
def four(pool: Callable[[int], Ranks]) -> Ranks:
    return pool(4)


@pytest.fixture
def one(tmp_path: Path) -> One:
    return One(tmp_path / "checkpoints")
