"""Several ranks compute what one would: every kind of group, sharding and message once, ranks as
threads.

What gloo's ranks do with many more shapes is in ``tests/dist``.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from plait.core.parallel.sharding import Sharding
from plait.core.parallel.strategy import Strategy
from tests.dist import pipelining
from tests.dist.equality import assert_equal
from tests.dist.pipelining import Pipeline
from tests.support.models import gpt, llama, utransformer
from tests.support.threads import threads

GPT = gpt(dropout=0.1, attention_dropout=0.2)
LLAMA = llama(dropout=0.1)
U = utransformer(dropout=0.1)
FULL, HALF = Sharding(params=2, grads=2, optim=2), Sharding(grads=2, optim=2)
P2, SHARDED = Strategy(p1=2), Strategy(sequence_parallel=True)

CASES = {
    "tp": Pipeline(GPT, [(1, 2)], strategy=P2),
    "sequence parallel": Pipeline(LLAMA, [(1, 2)], strategy=SHARDED),
    "full": Pipeline(GPT, [(1, 2)], strategy=Strategy(recompute="full", p2=2)),
    "dp": Pipeline(GPT, [(2, 1)]),
    "zero1": Pipeline(GPT, [(2, 1)], "gpipe", shardings=[Sharding(optim=2)]),
    "zero2": Pipeline(LLAMA, [(2, 1)], shardings=[HALF]),
    "zero3": Pipeline(replace(GPT, num_layers=4), [(2, 1)], shardings=[FULL]),
    "between": Pipeline(GPT, [(4, 1)], shardings=[Sharding(params=2, grads=4, optim=4)]),
    "replicas of shards": Pipeline(GPT, [(4, 1)], shardings=[FULL]),
    "secondary": Pipeline(GPT, [(4, 1)], shardings=[Sharding(params=4, grads=4, optim=4, secondary=2)]),
    "pipeline": Pipeline(GPT, [(1, 1), (1, 1)]),
    "zero bubble": Pipeline(LLAMA, [(1, 1), (1, 1)], "zb-h1"),
    "chunks": Pipeline(replace(GPT, num_layers=4), [(1, 1), (1, 1)], "zb-v", P2),
    "u": Pipeline(replace(U, num_layers=10), [(1, 1), (1, 1)]),
    "unequal": Pipeline(GPT, [(1, 2), (1, 1)]),
    "replicas to tensors": Pipeline(LLAMA, [(2, 1), (1, 2)], "gpipe"),
    "sharded stages": Pipeline(GPT, [(2, 1), (2, 1)], "1f1b", P2, [FULL, HALF]),
    "sharded, sequence parallel": Pipeline(LLAMA, [(2, 2)], "1f1b", SHARDED, [FULL]),
    "ulysses": Pipeline(GPT, strategy=Strategy(cp=2)),
    "ring": Pipeline(LLAMA, strategy=Strategy(cp=2, ring=2)),
}


@pytest.mark.parametrize("name", CASES)
def test_ranks_together_equal_the_reference(name: str) -> None:
    assert_equal(threads, CASES[name])


@pytest.mark.parametrize(("odd", "named"), [(0, 1), (1, 1)])
def test_a_rank_whose_order_differs_is_named_before_the_first_step(odd: int, named: int) -> None:
    """Rank 0 sets the norm for its pp rank, so where its own order differs its neighbour is named."""
    for said in threads(4).run(pipelining.other_order, replace(GPT, num_layers=6), odd, 12):
        assert f"rank {named} would run a different order of segment ops than the other ranks" in said


def test_ranks_with_different_plans_say_so() -> None:
    for said in threads(2).run(pipelining.disagreement, GPT):
        assert "rank 1 would run a different plan than the other ranks" in said
