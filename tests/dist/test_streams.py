"""On a GPU every strategy's work would be in order: the contract under virtual streams
(``tests.streams``).

The numbers are compared with the reference as ever; here it is also asked whether anything but
luck, and a CPU's patience, has made them right.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from plait.core.parallel.strategy import Recompute, Strategy
from tests.dist.equality import TOLERANCE, Case, Pool, TensorParallel, run
from tests.dist.pipelining import Pipeline
from tests.dist.test_equality import MODELS
from tests.dist.test_experts import mixture
from tests.dist.test_pipeline import GPT, LLAMA, P2, U
from tests.dist.test_sharding import FULL, HALF, POINTS
from tests.dist.test_sharding import SMALL as MODELS_OF_TWO
from tests.streams import running
from tests.streams.running import Found
from tests.support.streams.rules import broken

QUEUES = 32
"""Streams of a GPU that can be busy at once (``core.base.env``)."""
WAITS = ["Tensor.tolist", "anchor"]
"""What the host waits for in a step: loss and norm of the whole job, once."""
SMALL = MODELS_OF_TWO["gpt"]
FLAT = replace(MODELS_OF_TWO["llama"], attention_dropout=0.0)


def assert_right(found: Sequence[Found]) -> None:
    for one in found:
        error, what = one.result
        assert error < TOLERANCE, f"{what} is off by {error:.1e}"
        assert not one.problems, f"{len(one.problems)}: " + "\n".join(one.problems[:5])
        assert one.accesses > 500
        assert len(one.streams) < QUEUES


def in_order(pool: Pool, case: Case) -> list[Found]:
    """What was observed of a case, which must be right and in NCCL's order, and wait for nothing
    else."""
    found = run(pool, case, running.observed, "")
    assert_right(found)
    for one in found:
        assert all(waits == WAITS for waits in one.waits), one.waits
    assert not broken([one.calls for one in found])
    return found


def some(cases: Mapping[str, Case], *chosen: str) -> Any:
    """Cases by name, those chosen in the suite; the mark ``contract`` has the others."""
    marked = [pytest.param(name, marks=() if name in chosen else pytest.mark.contract) for name in cases]
    return pytest.mark.parametrize("name", marked)


NAMES = ["gpt", "few_kv", "llama_block"]
AGAIN: tuple[Recompute, ...] = ("none", "full")
CUTS: list[dict[str, Any]] = [{"cp": 2}, {"cp": 2, "ring": 2}, {"cp": 4, "ring": 2}]
SLICES = {
    "plain": Strategy(tp=2),
    "domino": Strategy(tp=2, p1=2, p2=2),
    "sharded": Strategy(tp=2, p1=3, sequence_parallel=True),
    "full": Strategy(tp=2, p1=2, p2=2, sequence_parallel=True, recompute="full"),
    "selective": Strategy(tp=2, p1=2, recompute="selective"),
}
POOLED = {
    "two": Strategy(tp=2, p1=2, streams=2),
    "full": Strategy(tp=2, p1=3, streams=2, p2=2, recompute="full"),
    "layer": Strategy(tp=2, p1=4, streams=3, recompute="layer", sequence_parallel=True),
    "selective": Strategy(tp=2, p1=2, streams=2, p2=2, recompute="selective"),
}
CASES: Mapping[str, Case] = {
    f"{name}, {kind}": TensorParallel(MODELS[name], strategy)
    for name, (kind, strategy) in product(NAMES, SLICES.items())
} | {f"sharding, {name}": Pipeline(SMALL, [(4, 1)], shardings=[point]) for name, point in POINTS.items()} | {
    "three places": Pipeline(replace(GPT, num_layers=3), [(1, 1)] * 3, "eager-1f1b"),
    "chunks": Pipeline(LLAMA, [(1, 1)] * 2, "zb-v", P2),
    "sharded sequences": Pipeline(SMALL, [(1, 2), (1, 2)], "1f1b", Strategy(p1=2, sequence_parallel=True)),
    "unequal": Pipeline(LLAMA, [(2, 1), (1, 2)], "interleaved"),
    "levels": Pipeline(replace(U, num_layers=10), [(1, 1)] * 2, "eager-1f1b"),
    "sharded stages": Pipeline(SMALL, [(2, 1), (2, 1)], "zb-h1", P2, [FULL, HALF]),
    "sharded chunks": Pipeline(LLAMA, [(2, 1), (2, 1)], "zb-v", Strategy(), [FULL, FULL]),
    "sharded tp": Pipeline(SMALL, [(2, 2)], "gpipe", Strategy(p1=2, sequence_parallel=True), [FULL]),
} | {
    f"sequences, {again}, {cut}": Pipeline(FLAT, strategy=Strategy(p1=2, recompute=again, **cut))
    for again, cut in product(AGAIN, CUTS)
}  # fmt: skip


@some(
    CASES, "gpt, domino", "few_kv, full", "sharding, hpz", "three places", "sharded sequences", "unequal",
    "sharded stages", "sequences, full, {'cp': 4, 'ring': 2}",
)  # fmt: skip
def test_work_is_in_order(pool: Pool, name: str) -> None:
    in_order(pool, CASES[name])


EXPERTS: Mapping[str, Case] = {
    "shared out": Pipeline(mixture(shared=1, balance_loss=0.1), [(2, 1)], strategy=Strategy(ep=2, p1=2)),
    "recomputed": Pipeline(mixture(capacity=1.0), [(2, 1)], strategy=Strategy(ep=2, p1=2, recompute="full")),
    "sharded": Pipeline(mixture(), [(4, 1)], strategy=Strategy(ep=2), shardings=[FULL]),
    "split sequences": Pipeline(
        mixture(balance_loss=0.1), [(1, 2)], "zb-h1",
        Strategy(ep=2, whole_experts=True, p1=2, sequence_parallel=True),
    ),
}  # fmt: skip


@some(EXPERTS, "shared out", "split sequences")
def test_work_of_experts_is_in_order(pool: Pool, name: str) -> None:
    """The host also waits for the counts of tokens that routers have chosen."""
    found = run(pool, EXPERTS[name], running.observed, "")
    assert_right(found)
    assert not broken([one.calls for one in found])


LANES: Mapping[str, Case] = {
    f"{name}, {kind}": TensorParallel(MODELS[name], strategy)
    for name, (kind, strategy) in product(NAMES, POOLED.items())
}


@some(LANES, "gpt, two", "few_kv, layer")
def test_slices_on_streams_of_their_own(pool: Pool, name: str) -> None:
    """Kernels of several slices may run at once: each waits for what it reads."""
    streams = {f"compute {one}" for one in range(POOLED[name.split(", ")[1]].streams)}
    assert all(streams <= set(each.streams) for each in in_order(pool, LANES[name]))


@some(CASES, "few_kv, domino", "unequal", "sharded stages", "sequences, none, {'cp': 4, 'ring': 2}")
def test_ranks_that_share_a_gpu(pool: Pool, name: str) -> None:
    """Through the host's memory, by ``run.device = "shared"``: as correct and as ordered as over
    NCCL."""
    found = run(pool, CASES[name], running.observed_sharing, "")
    assert_right(found)
    staged = {stream for one in found for stream in one.streams if stream.startswith("staged")}
    assert staged, "nothing went through the host's memory"


PIPELINE = Pipeline(SMALL, [(1, 1)] * 2)
ZERO3 = Pipeline(SMALL, [(2, 1)], shardings=[FULL])
UNORDERED = "neither waits for the other"
PLANTED: dict[str, tuple[Case, str]] = {
    "collective": (TensorParallel(MODELS["gpt"], Strategy(tp=2, p1=2)), UNORDERED),
    "forked": (ZERO3, UNORDERED),
    "gathered": (ZERO3, UNORDERED),
    "reduced": (ZERO3, UNORDERED),
    "delivered": (PIPELINE, UNORDERED),
    "message": (CASES["unequal"], UNORDERED),
    "strided": (
        Pipeline(replace(SMALL, dropout=0.0), [(1, 2), (1, 2)], "1f1b", Strategy(p1=2, sequence_parallel=True)),
        "contiguous tensors only",
    ),
    "freed": (PIPELINE, "is freed while that does not wait for it"),
    "pooled": (TensorParallel(MODELS["gpt"], POOLED["two"]), UNORDERED),
}


@pytest.mark.parametrize("fault", list(PLANTED))
def test_what_is_planted_is_found(pool: Pool, fault: str) -> None:
    case, said = PLANTED[fault]
    problems = [problem for one in run(pool, case, running.observed, fault) for problem in one.problems]
    assert any(said in problem for problem in problems), problems[:5]
