"""A pipeline, whatever its schedule, meshes, slices or delays, is the unsharded computation; its memory is
what the schedule predicts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from plait.core.job.plan import Choices
from plait.core.model.spec import ModelSpec
from plait.core.parallel.strategy import Strategy
from plait.core.step.schedules import GENERATORS
from tests.dist import pipelining
from tests.support.cases import each_other
from tests.support.models import gpt, llama, mistral, qwen3, utransformer
from tests.support.ranks import Ranks

Pool = Callable[[int], Ranks]

GPT = gpt(num_layers=6, dropout=0.1, attention_dropout=0.2)
LLAMA = llama(num_layers=6, dropout=0.1)
U = utransformer(dropout=0.1)
MODELS = {"gpt": GPT, "llama": LLAMA, "utransformer": U}
PEERS = {"qwen3": qwen3(num_layers=4, window=3, full_every=2), "mistral": mistral(num_layers=4)}
TOLERANCE = 1e-10


def assert_equal(pool: Pool, spec: ModelSpec, degrees: Sequence[tuple[int, int]], name: str, *args: object) -> None:
    size = sum(dp * tp for dp, tp in degrees)
    for error, what in pool(size).run(pipelining.worst_error, spec, degrees, name, *args):
        assert error < TOLERANCE, f"{name} on {degrees}: {what} is off by {error:.1e}"


def contract() -> Iterator[Any]:
    """Every schedule, pp, tp, p1 and model; the suite has each schedule with each model on two places and a
    few shapes of three and four ranks, the mark ``contract`` the others."""
    shapes = [(2, 1), (2, 2), (3, 1), (4, 1), (3, 2), (4, 2)]
    for turn, ((pp, tp), name) in enumerate(product(shapes, GENERATORS)):
        for number, (model, p1) in enumerate(product(MODELS, (1, 2))):
            chosen = (
                p1 == 1 + turn % 2
                if (pp, tp) == (2, 1)
                else pp * tp <= 4 and number == turn % (2 * len(MODELS)) and turn % 2 == 0
            )
            marks = () if chosen else pytest.mark.contract
            yield pytest.param(model, name, pp, tp, p1, id=f"{model}-{name}-pp{pp}-tp{tp}-p{p1}", marks=marks)


@pytest.mark.parametrize(("model", "name", "pp", "tp", "p1"), list(contract()))
def test_every_schedule_equals_the_reference(pool: Pool, model: str, name: str, pp: int, tp: int, p1: int) -> None:
    parts, stages = 2 * MODELS[model].levels + 1, pp * pipelining.CHUNKS.get(name, 1)
    spec = replace(MODELS[model], num_layers=-(-stages // parts) * parts)
    assert_equal(pool, spec, [(1, tp)] * pp, name, p1)


UNEQUAL = [[(1, 2), (1, 1)], [(1, 1), (1, 2)], [(2, 1), (1, 2)], [(1, 2), (2, 1)], [(2, 1), (2, 1)]]


@pytest.mark.parametrize(("degrees", "model"), [
    *each_other(UNEQUAL, list(MODELS)),
    *(pytest.param([(1, 1), (2, 2), (1, 1)], model, marks=pytest.mark.contract) for model in MODELS),
], ids=str)  # fmt: skip
def test_unequal_meshes_equal_the_reference(pool: Pool, degrees: list[tuple[int, int]], model: str) -> None:
    name = {"gpt": "interleaved", "llama": "zb-h1", "utransformer": "eager-1f1b"}[model]
    assert_equal(pool, MODELS[model], degrees, name)


@pytest.mark.parametrize("degrees", [[(1, 2), (1, 2)], [(2, 1), (1, 2)]], ids=str)
def test_sequence_parallel_stages_pass_on_shards(pool: Pool, degrees: list[tuple[int, int]]) -> None:
    for model, name in (("gpt", "1f1b"), ("llama", "zb-v")):
        assert_equal(pool, MODELS[model], degrees, name, 1, True)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.contract)])
def test_random_delays_in_transfers_change_nothing(pool: Pool, seed: int) -> None:
    for degrees, name in (([(1, 1)] * 3, "eager-1f1b"), ([(1, 1)] * 2, "zb-v"), ([(2, 1), (1, 2)], "interleaved")):
        for spec in (GPT, replace(U, num_layers=10)):
            assert_equal(pool, spec, degrees, name, 1, False, seed)


def test_unequal_layers_and_untied_embeddings(pool: Pool) -> None:
    untied = gpt(num_layers=5, vocab=40, tied_embeddings=False)
    assert_equal(pool, untied, [(1, 1)] * 3, "1f1b", 2, False, None, (1, 3, 1))


@pytest.mark.parametrize("name", PEERS)
def test_pipelines_equal_models_of_transformers(pool: Pool, name: str) -> None:
    assert_equal(pool, PEERS[name], [(1, 1), (1, 1)], "zb-v", 2)
    assert_equal(pool, PEERS[name], [(1, 2), (1, 2)], "1f1b", 1, True)


def test_tied_llama(pool: Pool) -> None:
    tied = llama(num_layers=4, head_size=6, vocab=33, tied_embeddings=True, dropout=0.1)
    for degrees in ([(1, 1), (1, 1)], [(1, 2), (1, 1)], [(1, 1), (2, 1)]):
        assert_equal(pool, tied, degrees, "zb-v")


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
        assert "rank 1 would run another plan than the others" in said


@pytest.mark.parametrize(("odd", "seed"), [(0, 12), (1, 12), (3, 0)])
def test_a_rank_whose_order_differs_is_named_before_the_first_step(pool: Pool, odd: int, seed: int) -> None:
    """Rank 0 sets the norm for its place, so where its own order differs its neighbour is named."""
    named = {0: 1}.get(odd, odd)
    for said in pool(4).run(pipelining.other_order, GPT, odd, seed):
        assert f"rank {named} would run another order of segment ops than the others" in said
