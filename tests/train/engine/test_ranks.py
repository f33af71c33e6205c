"""Several ranks compute what one would: every kind of group, sharding and message once, ranks as threads.

What gloo's ranks do with many more shapes is in ``tests/dist``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from plait.core.model.spec import ModelSpec
from plait.core.parallel.layout import SequenceCut
from plait.core.parallel.sharding import Sharding
from tests.dist import pipelining
from tests.support.models import gpt, llama, utransformer
from tests.support.threads import threads

GPT = gpt(dropout=0.1, attention_dropout=0.2)
LLAMA = llama(dropout=0.1)
U = utransformer(dropout=0.1)
FULL, HALF = Sharding(params=2, grads=2, optim=2), Sharding(grads=2, optim=2)
HPZ = Sharding(params=4, grads=4, optim=4, secondary=2)
TOLERANCE = 1e-10

CASES: dict[str, tuple[ModelSpec, list[tuple[int, int]], str, dict[str, Any]]] = {
    "tp": (GPT, [(1, 2)], "1f1b", {"p1": 2}),
    "sequence parallel": (LLAMA, [(1, 2)], "1f1b", {"sequence_parallel": True}),
    "full": (GPT, [(1, 2)], "1f1b", {"more": {"recompute": "full", "p2": 2}}),
    "dp": (GPT, [(2, 1)], "1f1b", {}),
    "zero1": (GPT, [(2, 1)], "gpipe", {"shardings": [Sharding(optim=2)]}),
    "zero2": (LLAMA, [(2, 1)], "1f1b", {"shardings": [HALF]}),
    "zero3": (replace(GPT, num_layers=4), [(2, 1)], "1f1b", {"shardings": [FULL]}),
    "between": (GPT, [(4, 1)], "1f1b", {"shardings": [Sharding(params=2, grads=4, optim=4)]}),
    "replicas of shards": (GPT, [(4, 1)], "1f1b", {"shardings": [FULL]}),
    "secondary": (GPT, [(4, 1)], "1f1b", {"shardings": [HPZ]}),
    "pipeline": (GPT, [(1, 1), (1, 1)], "1f1b", {}),
    "zero bubble": (LLAMA, [(1, 1), (1, 1)], "zb-h1", {}),
    "chunks": (replace(GPT, num_layers=4), [(1, 1), (1, 1)], "zb-v", {"p1": 2}),
    "u": (replace(U, num_layers=10), [(1, 1), (1, 1)], "1f1b", {}),
    "unequal": (GPT, [(1, 2), (1, 1)], "1f1b", {}),
    "replicas to tensors": (LLAMA, [(2, 1), (1, 2)], "gpipe", {}),
    "sharded stages": (GPT, [(2, 1), (2, 1)], "1f1b", {"shardings": [FULL, HALF], "p1": 2}),
    "sharded, sequence parallel": (LLAMA, [(2, 2)], "1f1b", {"shardings": [FULL], "sequence_parallel": True}),
    "ulysses": (GPT, [(1, 1)], "1f1b", {"cut": SequenceCut(cp=2)}),
    "ring": (LLAMA, [(1, 1)], "1f1b", {"cut": SequenceCut(cp=2, ring=2)}),
}


@pytest.mark.parametrize("name", CASES)
def test_ranks_together_equal_the_reference(name: str) -> None:
    spec, degrees, schedule, more = CASES[name]
    size = sum(dp * tp for dp, tp in degrees) * more.get("cut", SequenceCut()).cp
    for error, what in threads(size).run(lambda rank: pipelining.worst_error(rank, spec, degrees, schedule, **more)):
        assert error < TOLERANCE, f"{what} is off by {error:.1e}"


@pytest.mark.parametrize(("odd", "named"), [(0, 1), (1, 1)])
def test_a_rank_whose_order_differs_is_named_before_the_first_step(odd: int, named: int) -> None:
    """Rank 0 sets the norm for its place, so where its own order differs its neighbour is named."""
    for said in threads(4).run(pipelining.other_order, replace(GPT, num_layers=6), odd, 12):
        assert f"rank {named} would run another order of segment ops than the others" in said


def test_ranks_with_different_plans_say_so() -> None:
    for said in threads(2).run(pipelining.disagreement, GPT):
        assert "rank 1 would run another plan than the others" in said
