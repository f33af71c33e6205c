"""On a GPU every strategy's work would be in order: the contract under virtual streams (``tests.streams``).

The numbers are compared with the reference as ever; here it is also asked whether anything but luck, and a
CPU's patience, has made them right.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from plait.core.parallel.layout import SequenceCut
from plait.core.parallel.sharding import Sharding
from plait.core.parallel.strategy import Strategy
from tests.dist import equality, pipelining
from tests.dist.test_equality import MODELS as ALL
from tests.dist.test_pipeline import GPT, LLAMA, TOLERANCE, U
from tests.dist.test_sharding import FULL, HALF, POINTS
from tests.streams import running
from tests.streams.running import Found
from tests.support.ranks import Ranks
from tests.support.streams.rules import broken

Pool = Callable[[int], Ranks]
PATIENCE = 300.0  # seconds, on busy cores
QUEUES = 32
"""Streams of a GPU that can be busy at once (``core.base.env``)."""
WAITS = ["Tensor.tolist", "anchor"]
"""What the host waits for in a step: loss and norm of the whole job, once."""


def observed(pool: Pool, size: int, function: Callable[..., Any], *args: Any, plant: str = "") -> list[Found]:
    if size == 1:
        return [running.observed(0, plant, function, *args)]
    return pool(size).run(running.observed, plant, function, *args, timeout=PATIENCE)


def assert_right(found: Sequence[Found]) -> None:
    for one in found:
        error, what = one.result
        assert error < TOLERANCE, f"{what} is off by {error:.1e}"
        assert not one.problems, f"{len(one.problems)}: " + "\n".join(one.problems[:5])
        assert one.accesses > 500
        assert len(one.streams) < QUEUES


def assert_in_order(pool: Pool, size: int, function: Callable[..., Any], *args: Any) -> None:
    found = observed(pool, size, function, *args)
    assert_right(found)
    for one in found:
        assert all(waits == WAITS for waits in one.waits), one.waits
    assert not broken([one.calls for one in found])


def some(cases: Sequence[Any], *chosen: int) -> list[Any]:
    """Those of these numbers in the suite; the mark ``contract`` has the others."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else [case]), marks=() if at in chosen else pytest.mark.contract)
        for at, case in enumerate(cases)
    ]


SLICES = [
    (1, 1, False, "none"), (2, 2, False, "none"), (3, 1, True, "none"), (2, 2, True, "full"), (2, 1, False, "selective")
]  # fmt: skip
NAMES = ["gpt", "few_kv", "llama_block"]


@pytest.mark.parametrize(("name", "slices"), some(list(product(NAMES, SLICES)), 1, 8))
def test_slices(pool: Pool, name: str, slices: tuple[int, int, bool, Any]) -> None:
    p1, p2, parallel, again = slices
    strategy = Strategy(tp=2, p1=p1, p2=p2, sequence_parallel=parallel, recompute=again)
    assert_in_order(pool, 2, equality.worst_error, ALL[name], strategy)


POOLED = [
    (2, 2, 1, "none", False), (3, 2, 2, "full", False), (4, 3, 1, "layer", True), (2, 2, 2, "selective", False)
]  # fmt: skip


@pytest.mark.parametrize(("name", "pooled"), some(list(product(NAMES, POOLED)), 0, 6))
def test_slices_on_streams_of_their_own(pool: Pool, name: str, pooled: tuple[int, int, int, Any, bool]) -> None:
    """Kernels of several slices may run at once: each waits for what it reads."""
    p1, streams, p2, again, parallel = pooled
    strategy = Strategy(tp=2, p1=p1, p2=p2, recompute=again, sequence_parallel=parallel, streams=streams)
    assert_in_order(pool, 2, equality.worst_error, ALL[name], strategy)
    found = observed(pool, 2, equality.worst_error, ALL[name], strategy)
    assert all({f"compute {one}" for one in range(streams)} <= set(each.streams) for each in found)


@pytest.mark.parametrize("point", some(list(POINTS), 6))
def test_sharding(pool: Pool, point: str) -> None:
    args = (replace(GPT, num_layers=2), [(4, 1)], "1f1b", 1, False, None, (), [POINTS[point]])
    assert_in_order(pool, 4, pipelining.worst_error, *args)


@pytest.mark.parametrize(("spec", "degrees", "name", "p1", "parallel", "shardings"), some([
    (replace(GPT, num_layers=3), [(1, 1)] * 3, "eager-1f1b", 1, False, ()),
    (LLAMA, [(1, 1)] * 2, "zb-v", 2, False, ()),
    (replace(GPT, num_layers=2), [(1, 2), (1, 2)], "1f1b", 2, True, ()),
    (LLAMA, [(2, 1), (1, 2)], "interleaved", 1, False, ()),
    (replace(U, num_layers=10), [(1, 1)] * 2, "eager-1f1b", 1, False, ()),
    (replace(GPT, num_layers=2), [(2, 1), (2, 1)], "zb-h1", 2, False, [FULL, HALF]),
    (LLAMA, [(2, 1), (2, 1)], "zb-v", 1, False, [FULL, FULL]),
    (replace(GPT, num_layers=2), [(2, 2)], "gpipe", 2, True, [FULL]),
], 0, 2, 3, 5), ids=str)  # fmt: skip
def test_pipelines(
    pool: Pool, spec: Any, degrees: Any, name: str, p1: int, parallel: bool, shardings: list[Sharding]
) -> None:
    size = sum(dp * tp for dp, tp in degrees)
    assert_in_order(pool, size, pipelining.worst_error, spec, degrees, name, p1, parallel, None, (), shardings)


CUTS = [SequenceCut(cp=2), SequenceCut(cp=2, ring=2), SequenceCut(cp=4, ring=2)]


@pytest.mark.parametrize(("cut", "again"), some(list(product(CUTS, ["none", "full"])), 5), ids=str)
def test_shared_sequences(pool: Pool, cut: SequenceCut, again: str) -> None:
    spec = replace(LLAMA, num_layers=2, attention_dropout=0.0)
    args = (spec, [(1, 1)], "1f1b", 2, False, None, (), (), cut, {"recompute": again})
    assert_in_order(pool, cut.cp, pipelining.worst_error, *args)


@pytest.mark.parametrize(("size", "function", "args"), some([
    (2, equality.worst_error, (ALL["llama_block"], Strategy(tp=2, p1=2, p2=2, sequence_parallel=True))),
    (2, equality.worst_error, (GPT, Strategy(tp=2, p1=2, recompute="full"))),
    (4, pipelining.worst_error, (LLAMA, [(2, 1), (1, 2)], "interleaved")),
    (4, pipelining.worst_error,
     (replace(GPT, num_layers=2), [(2, 1), (2, 1)], "zb-h1", 2, False, None, (), [FULL, HALF])),
    (4, pipelining.worst_error, (replace(LLAMA, num_layers=2, attention_dropout=0.0), [(1, 1)], "1f1b", 2, False,
                                 None, (), (), SequenceCut(cp=4, ring=2))),
], 0, 2, 3, 4), ids=["slices", "again", "unequal", "sharded", "sequences"])  # fmt: skip
def test_ranks_that_share_a_gpu(pool: Pool, size: int, function: Callable[..., Any], args: Any) -> None:
    """Through the host's memory, by ``run.device = "shared"``: as correct and as ordered as over NCCL."""
    found = pool(size).run(running.observed_sharing, "", function, *args, timeout=PATIENCE)
    assert_right(found)
    staged = {stream for one in found for stream in one.streams if stream.startswith("staged")}
    assert staged, "nothing went through the host's memory"


PIPELINE = (replace(GPT, num_layers=2), [(1, 1)] * 2, "1f1b")
SHARDED = (replace(GPT, num_layers=2), [(2, 1)], "1f1b", 1, False, None, (), [FULL])
PLANTED = {
    "collective": (2, equality.worst_error, (GPT, Strategy(tp=2, p1=2)), "neither waits for the other"),
    "forked": (2, pipelining.worst_error, SHARDED, "neither waits for the other"),
    "gathered": (2, pipelining.worst_error, SHARDED, "neither waits for the other"),
    "reduced": (2, pipelining.worst_error, SHARDED, "neither waits for the other"),
    "delivered": (2, pipelining.worst_error, PIPELINE, "neither waits for the other"),
    "message": (
        4,
        pipelining.worst_error,
        (replace(LLAMA, num_layers=4), [(2, 1), (1, 2)], "interleaved"),
        "neither waits for the other",
    ),
    "strided": (
        4,
        pipelining.worst_error,
        (replace(GPT, num_layers=2, dropout=0.0), [(1, 2), (1, 2)], "1f1b", 2, True),
        "contiguous tensors only",
    ),
    "freed": (2, pipelining.worst_error, PIPELINE, "is freed while that does not wait for it"),
    "pooled": (2, equality.worst_error, (GPT, Strategy(tp=2, p1=2, streams=2)), "neither waits for the other"),
}


@pytest.mark.parametrize("fault", list(PLANTED))
def test_what_is_planted_is_found(pool: Pool, fault: str) -> None:
    size, function, args, said = PLANTED[fault]
    problems = [problem for one in observed(pool, size, function, *args, plant=fault) for problem in one.problems]
    assert any(said in problem for problem in problems), problems[:5]
