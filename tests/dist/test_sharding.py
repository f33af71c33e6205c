"""Sharded data parallelism, whatever the factors, is the unsharded computation."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plait.core.parallel.sharding import Sharding
from plait.core.parallel.strategy import Strategy
from tests.dist.equality import Pool, assert_equal
from tests.dist.pipelining import Pipeline
from tests.dist.test_pipeline import GPT, LLAMA, P2, U
from tests.support.cases import each_other

# Over four ranks: every named point, and what lies between.
POINTS = {
    "ddp": Sharding(),
    "zero1": Sharding(optim=4),
    "zero2": Sharding(grads=4, optim=4),
    "zero3": Sharding(params=4, grads=4, optim=4),
    "hsdp": Sharding(params=2, grads=2, optim=2),
    "hierarchical": Sharding(params=2, grads=2, optim=4),
    "hpz": Sharding(params=4, grads=4, optim=4, secondary=2),
    "1-2-4": Sharding(grads=2, optim=4),
    "1-1-2": Sharding(optim=2),
    "2-4-4": Sharding(params=2, grads=4, optim=4),
}
FULL, HALF = Sharding(params=2, grads=2, optim=2), Sharding(grads=2, optim=2)
SMALL = {"gpt": replace(GPT, num_layers=2), "llama": replace(LLAMA, num_layers=2)}
ONE_HEAD = replace(SMALL["llama"], num_kv_heads=1)
SHARDED = Strategy(sequence_parallel=True)


@pytest.mark.parametrize(("model", "point"), each_other(list(SMALL), list(POINTS)))
def test_every_point_equals_the_reference(pool: Pool, model: str, point: str) -> None:
    delay = 1 if point in ("2-4-4", "hpz") else None
    assert_equal(pool, Pipeline(SMALL[model], [(4, 1)], shardings=[POINTS[point]], delay=delay))


CASES = {
    "tp": Pipeline(GPT, [(2, 2)], "gpipe", P2, [FULL]),
    "tp, half": Pipeline(LLAMA, [(2, 2)], "1f1b", P2, [HALF]),
    "stages": Pipeline(GPT, [(2, 1), (2, 1)], "zb-h1", P2, [FULL, HALF]),
    "chunks": Pipeline(LLAMA, [(2, 1), (2, 1)], "zb-v", P2, [FULL, FULL]),
    "levels": Pipeline(U, [(2, 2)], "1f1b", P2, [FULL]),
    "unequal": Pipeline(GPT, [(2, 1), (1, 2)], "interleaved", P2, [FULL, Sharding()]),
    "chunks of one": Pipeline(GPT, [(4, 1)], "interleaved", Strategy(), [POINTS["2-4-4"]]),
    "late block": Pipeline(replace(GPT, parallel_block=True), [(2, 1), (2, 1)], "1f1b", P2, [FULL, HALF], delay=1),
    "sequence parallel": Pipeline(GPT, [(2, 2)], "1f1b", SHARDED, [FULL]),
    "replicated heads": Pipeline(ONE_HEAD, [(2, 2)], "1f1b", SHARDED, [Sharding(optim=2)]),
}
MORE = {
    f"{name}, unsliced": replace(CASES[name], strategy=Strategy())
    for name in CASES
    if CASES[name].strategy == P2
} | {
    "levels of stages": Pipeline(replace(U, num_layers=10), [(2, 1), (2, 1)], "eager-1f1b", P2, [FULL, FULL]),
    "sequence parallel, states": Pipeline(GPT, [(2, 2)], "1f1b", SHARDED, [Sharding(optim=2)]),
    "replicated heads, all": Pipeline(ONE_HEAD, [(2, 2)], "1f1b", SHARDED, [FULL]),
}  # fmt: skip


@pytest.mark.parametrize("name", [*CASES, *(pytest.param(name, marks=pytest.mark.contract) for name in MORE)])
def test_sharding_goes_with_everything_else(pool: Pool, name: str) -> None:
    assert_equal(pool, (CASES | MORE)[name])
