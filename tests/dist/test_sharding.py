"""Sharded data parallelism, whatever the factors, is the unsharded computation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from plait.core.model.spec import ModelSpec
from plait.core.parallel.sharding import Sharding
from tests.dist import pipelining
from tests.dist.test_pipeline import GPT, LLAMA, TOLERANCE, U
from tests.support.cases import each_other
from tests.support.ranks import Ranks

Pool = Callable[[int], Ranks]

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


def assert_equal(
    pool: Pool,
    spec: ModelSpec,
    degrees: Sequence[tuple[int, int]],
    name: str,
    shardings: Sequence[Sharding],
    *,
    p1: int = 1,
    sequence_parallel: bool = False,
    delay: int | None = None,
) -> None:
    size = sum(dp * tp for dp, tp in degrees)
    for error, what in pool(size).run(
        pipelining.worst_error, spec, degrees, name, p1, sequence_parallel, delay, (), shardings
    ):
        assert error < TOLERANCE, f"{name} on {degrees} with {shardings}: {what} is off by {error:.1e}"


def family(value: object) -> str | None:
    """What a model is called in a test's name."""
    return value.family if isinstance(value, ModelSpec) else None


@pytest.mark.parametrize(("spec", "point"), list(each_other([GPT, LLAMA], list(POINTS))), ids=family)
def test_every_point_equals_the_reference(pool: Pool, spec: ModelSpec, point: str) -> None:
    assert_equal(pool, replace(spec, num_layers=2), [(4, 1)], "1f1b", [POINTS[point]])


FULL, HALF = Sharding(params=2, grads=2, optim=2), Sharding(grads=2, optim=2)


@pytest.mark.parametrize(("spec", "degrees", "name", "shardings"), [
    (GPT, [(2, 2)], "gpipe", [FULL]),
    (LLAMA, [(2, 2)], "1f1b", [HALF]),
    (GPT, [(2, 1), (2, 1)], "zb-h1", [FULL, HALF]),
    (LLAMA, [(2, 1), (2, 1)], "zb-v", [FULL, FULL]),
    pytest.param(replace(U, num_layers=10), [(2, 1), (2, 1)], "eager-1f1b", [FULL, FULL], marks=pytest.mark.contract),
    (U, [(2, 2)], "1f1b", [FULL]),
    (GPT, [(2, 1), (1, 2)], "interleaved", [FULL, Sharding()]),
    (GPT, [(4, 1)], "interleaved", [POINTS["2-4-4"]]),
    (replace(GPT, parallel_block=True), [(2, 1), (2, 1)], "1f1b", [FULL, HALF]),
], ids=family)  # fmt: skip
@pytest.mark.parametrize("p1", [pytest.param(1, marks=pytest.mark.contract), 2])
def test_sharding_goes_with_everything_else(
    pool: Pool, spec: ModelSpec, degrees: list[tuple[int, int]], name: str, shardings: list[Sharding], p1: int
) -> None:
    assert_equal(pool, spec, degrees, name, shardings, p1=p1 if degrees[0][0] < pipelining.MICRO else 1)


ONE_HEAD = replace(LLAMA, num_layers=2, num_kv_heads=1)


@pytest.mark.parametrize(("spec", "sharding"), [
    (GPT, FULL),
    (ONE_HEAD, Sharding(optim=2)),
    pytest.param(GPT, Sharding(optim=2), marks=pytest.mark.contract),
    pytest.param(ONE_HEAD, FULL, marks=pytest.mark.contract),
], ids=str)  # fmt: skip
def test_sharding_of_sequence_parallel_and_replicated_heads(pool: Pool, spec: ModelSpec, sharding: Sharding) -> None:
    assert_equal(pool, spec, [(2, 2)], "1f1b", [sharding], sequence_parallel=True)


def test_random_delays_in_collectives_change_nothing(pool: Pool) -> None:
    for delay, (degrees, shardings) in enumerate([([(4, 1)], [POINTS["2-4-4"]]), ([(2, 1), (2, 1)], [FULL, HALF])]):
        assert_equal(pool, GPT, degrees, "1f1b", shardings, delay=delay)
