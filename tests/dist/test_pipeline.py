"""A pipeline, whatever its schedule, meshes, slices or delays, is the unsharded computation; its
memory is what the schedule predicts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from plait.core.job.plan import Choices
from plait.core.parallel.strategy import Strategy
from plait.core.step.schedules import GENERATORS, planned_shape
from tests.dist import pipelining
from tests.dist.equality import Pool, assert_equal
from tests.dist.pipelining import Pipeline
from tests.support.cases import pairwise
from tests.support.models import gpt, llama, mistral, qwen3, utransformer

GPT = gpt(num_layers=4, dropout=0.1, attention_dropout=0.2)
LLAMA = llama(num_layers=4, dropout=0.1)
U = utransformer(dropout=0.1)
MODELS = {"gpt": GPT, "llama": LLAMA, "utransformer": U}
PEERS = {"qwen3": qwen3(num_layers=4, window=3, full_every=2), "mistral": mistral(num_layers=4)}
P2 = Strategy(p1=2)


@pytest.mark.parametrize(
    ("name", "model", "shape", "p1", "again", "delay"),
    pairwise(
        list(GENERATORS), list(MODELS), [(2, 1), (3, 1), (2, 2), (4, 1)], (1, 2),
        ("none", "full", "selective", "layer"), (None, 0),
    ),
)  # fmt: skip
def test_every_schedule_equals_the_reference(
    pool: Pool, name: str, model: str, shape: tuple[int, int], p1: int, again: Any, delay: int | None
) -> None:
    (pp, tp), parts = shape, 2 * MODELS[model].levels + 1
    spec = replace(MODELS[model], num_layers=-(-planned_shape(name, pp, 1, 2).num_stages // parts) * parts)
    assert_equal(pool, Pipeline(spec, [(1, tp)] * pp, name, Strategy(p1=p1, recompute=again), delay=delay))


SCHEDULED = {"gpt": "interleaved", "llama": "zb-h1", "utransformer": "eager-1f1b"}
UNEQUAL = [[(1, 2), (1, 1)], [(1, 1), (1, 2)], [(2, 1), (1, 2)], [(1, 2), (2, 1)], [(2, 1), (2, 1)]]
CHOSEN = list(zip(UNEQUAL, ["gpt", "utransformer", "gpt", "llama", "utransformer"], strict=True))
CHOSEN += [([(2, 1), (1, 2)], "utransformer")]
OTHERS = [(one, model) for one in [*UNEQUAL, [(1, 1), (2, 2), (1, 1)]] for model in MODELS]


@pytest.mark.parametrize(
    ("degrees", "model"),
    [*CHOSEN, *(pytest.param(*one, marks=pytest.mark.contract) for one in OTHERS if one not in CHOSEN)],
    ids=str,
)
def test_unequal_meshes_equal_the_reference(pool: Pool, degrees: list[tuple[int, int]], model: str) -> None:
    delay = 1 if degrees[0][0] > 1 else None
    assert_equal(pool, Pipeline(MODELS[model], degrees, SCHEDULED[model], delay=delay))


SHARDED = Strategy(sequence_parallel=True)
TIED = llama(num_layers=4, head_size=6, vocab=33, tied_embeddings=True, dropout=0.1)
CASES = {
    "shards": Pipeline(GPT, [(1, 2), (1, 2)], "1f1b", SHARDED),
    "shards and replicas": Pipeline(LLAMA, [(2, 1), (1, 2)], "zb-v", SHARDED),
    "unequal layers": Pipeline(
        gpt(num_layers=5, vocab=40, tied_embeddings=False), [(1, 1)] * 3, "1f1b", P2, layers=(1, 3, 1)
    ),
    "tied": Pipeline(TIED, [(1, 1), (1, 1)], "zb-v"),
    "tied, tp to one": Pipeline(TIED, [(1, 2), (1, 1)], "zb-v"),
    "tied, one to dp": Pipeline(TIED, [(1, 1), (2, 1)], "zb-v"),
    "qwen3": Pipeline(PEERS["qwen3"], [(1, 1), (1, 1)], "zb-v", P2),
    "mistral, shards": Pipeline(PEERS["mistral"], [(1, 2), (1, 2)], "1f1b", SHARDED),
}


@pytest.mark.parametrize("name", CASES)
def test_a_pipeline_equals_the_reference(pool: Pool, name: str) -> None:
    assert_equal(pool, CASES[name])


@pytest.mark.parametrize(("slow", "alive"), [(0, [4, 2, 1]), (1, [4, 3, 1])])
def test_slack_is_measured_where_it_is_needed(pool: Pool, slow: int, alive: list[int]) -> None:
    for found in pool(3).run(pipelining.measured_slack, replace(GPT, num_layers=3), 3, slow):
        assert found == alive


SLICES = Choices(strategies=tuple(Strategy(tp=2, p1=p1, p2=p2) for p1 in (1, 2, 4) for p2 in (1, 2)))


@pytest.mark.parametrize(
    ("what", "degrees", "choices", "of"),
    [("slices", (1, 2), SLICES, 6), ("sharding", (2, 1), Choices(shard_overlap=True), 4)],
)
def test_candidates_are_timed_where_that_can_pay_by_all_ranks_or_none(
    pool: Pool, what: str, degrees: tuple[int, int], choices: Choices, of: int
) -> None:
    """Ranks measure different times and decide the same."""
    spec = replace(GPT, num_layers=2)
    long, short = (pool(2).run(pipelining.timed, spec, degrees, choices, steps) for steps in (10**7, 3))
    for counted, chosen, notes, zero in (*long, *short):
        assert zero
        assert chosen == (long if counted else short)[0][1]
        says = f"fastest of {of} timed candidates" if counted else "nothing is timed before training"
        assert says in notes[what]
    assert [one[0] for one in long] == [of, of]
    assert [one[:2] for one in short] == [(0, Strategy(tp=degrees[1]))] * 2


def test_ranks_with_different_plans_say_so_before_the_first_step(pool: Pool) -> None:
    for said in pool(2).run(pipelining.disagreement, GPT):
        assert "rank 1 would run a different plan than the other ranks" in said


def test_a_rank_whose_order_differs_is_named_before_the_first_step(pool: Pool) -> None:
    for said in pool(4).run(pipelining.other_order, replace(GPT, num_layers=6), 3, 0):
        assert "rank 3 would run a different order of segment ops than the other ranks" in said
