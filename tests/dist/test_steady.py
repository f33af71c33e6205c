"""A thousand steps in the memory of the fourth: nothing is allocated and kept, the peak is the same, the
process does not grow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from plait.core.model.spec import ModelSpec
from plait.core.parallel.sharding import Sharding
from plait.core.parallel.strategy import Strategy
from tests.dist import steady
from tests.dist.test_pipeline import GPT, LLAMA
from tests.support.ranks import Ranks

GROWTH = 8 << 20
"""Bytes: the interpreter's and the network's own, once."""


@pytest.mark.parametrize("steps", [40, pytest.param(1000, marks=pytest.mark.contract)])
@pytest.mark.parametrize(("spec", "strategy", "degrees", "sharding"), [
    (GPT, Strategy(p1=2, recompute="full"), [(2, 1)], Sharding(params=2, grads=2, optim=2)),
    (LLAMA, Strategy(), [(1, 1), (1, 1)], Sharding()),
], ids=["fsdp", "pipeline"])  # fmt: skip
def test_memory_is_constant(
    pool: Callable[[int], Ranks],
    spec: ModelSpec,
    strategy: Strategy,
    degrees: list[tuple[int, int]],
    sharding: Sharding,
    steps: int,
) -> None:
    spec = replace(spec, num_layers=2, dropout=0.0, attention_dropout=0.0)
    for found in pool(2).run(steady.many_steps, spec, strategy, degrees, sharding, steps, timeout=600.0):
        if len(degrees) == 1:  # what another stage sent is let go of in another thread, which the allocator's log omits
            assert found["left"] == [0, 0, 0]
            assert len(set(found["peak"])) == 1
        assert len(set(found["pool"])) == 1
        assert found["resident"][-1] - found["resident"][0] < GROWTH, "the process has grown"
