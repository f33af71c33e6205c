"""How a model is shared out over places and replicas, and what that costs at a step's end."""

from __future__ import annotations

from dataclasses import replace
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest

from plait.core.step.columns.points import SCHEDULES, Points
from plait.core.step.columns.shapes import Shapes
from plait.core.step.seconds import rates
from plait.core.step.seconds.experts_time import of_experts
from plait.core.step.seconds.options import Options
from plait.core.step.seconds.owners import Owners
from tests.plan.layers import A100, LLAMA, MIXTRAL, same, sent

SHAPES = Shapes.of(LLAMA)
LAYER = 4096 * (2 * 4096 + 2 * 1024 + 3 * 14336)
WORDS = LLAMA.vocab * 4096


def owners(model: Shapes = SHAPES, options: Options | None = None, /, **row: int) -> Owners:
    return Owners.of(model, Points.of([row]), A100, options or Options())


@pytest.mark.parametrize(
    ("total", "pp", "virtual", "told"),
    [
        (32, 1, 1, (32, 32, 32)),
        (32, 4, 1, (8, 8, 8)),
        (32, 4, 2, (8, 8, 8)),
        (30, 4, 1, (7, 8, 7)),  # embedding and head count as a layer each
        (30, 4, 2, (7, 8, 7)),
        (30, 1, 1, (30, 30, 30)),
        (30, 1, 4, (30, 30, 30)),
        (31, 4, 1, (7.75, 8, 7.75)),
        (30, 8, 1, (3, 4, 3)),
        (29, 2, 1, (14.5, 15, 14.5)),
        (33, 4, 0, (8.25, 9, 8.25)),
    ],
)
def test_layers_of_the_first_an_inner_and_the_last_place(
    total: int, pp: int, virtual: int, told: tuple[float, ...]
) -> None:
    found = owners(replace(SHAPES, num_layers=total), pp=pp, virtual=virtual)
    assert tuple(float(each[0]) for each in (found.first, found.inner, found.last)) == told


SHARED = {"tp": 2, "dp": 8, "cp": 2, "params": 2, "grads": 4, "optim": 8}


def moved(weights: float, units: float, gradient: float = 4, weight: float = 2) -> tuple[Any, Any]:
    """Down and up the chain of factors, unit by unit, over 16 replicas that lie two ranks apart."""
    part = weights / units
    down = sent("reduce_scatter", part * gradient / 4, 2, 8) + sent("all_reduce", part * gradient / 8, 2, 16)
    up = sent("all_gather", part * weight / 4, 2, 8) + sent("all_gather", part * weight / 2, 2, 4)
    return units * down, units * up


def updated(numbers: float, ranks: int) -> Any:
    """Seconds of an optimizer, with the norm of all gradients, three numbers of eight bytes."""
    return rates.memory_bound(A100, numbers * A100.efficiency.optimizer_bytes.value) + sent("all_reduce", 24, ranks, 1)


@pytest.mark.parametrize(
    ("pp", "tied", "weights", "layers"),
    [
        (1, 0, 32 * LAYER + 2 * WORDS, 32),
        (1, 1, 32 * LAYER + WORDS, 32),
        (2, 0, 16 * LAYER + WORDS, 16),
        (2, 1, 16 * LAYER + WORDS, 16),
        (4, 0, 8 * LAYER + WORDS, 8),
    ],
)
def test_gradients_go_to_their_owners_and_parameters_come_back(pp: int, tied: int, weights: float, layers: int) -> None:
    model = replace(SHAPES, tied_embeddings=tied)
    found = owners(model, pp=pp, **SHARED)
    down, up = moved(weights / 2, 2 * layers + 2)
    same(found.down, down)
    same(found.up, up)
    same(found.optimizer, updated(weights / 2 / 8, 32 * pp))
    others = owners(model, Options(in_lists=False), pp=pp, **SHARED)
    same(found.optimizer - others.optimizer, sent("all_reduce", 24, 32 * pp, 1))
    few = owners(model, Options(gradient_bytes=1.0, weight_bytes=3.0), pp=pp, **SHARED)
    down, up = moved(weights / 2, 2 * layers + 2, 1, 3)
    same(few.down, down)
    same(few.up, up)


def test_a_first_place_of_zb_v_has_both_ends_and_positions_are_whole_on_every_rank() -> None:
    """Embedding and head are two units there, tied or not: the place has a copy of each."""
    model = replace(SHAPES, tied_embeddings=1)
    both = owners(model, pp=4, virtual=2, schedule=SCHEDULES.index("zb-v"), **SHARED)
    same(both.down, moved((8 * LAYER + 2 * WORDS) / 2, 18)[0])
    learned = owners(replace(model, learned_positions=1, max_sequence=1000), pp=4, **SHARED)
    same(learned.down, moved((8 * LAYER + WORDS) / 2 + 1000 * 4096, 19)[0])


def test_an_inner_place_owns_most_where_it_has_more_layers() -> None:
    small = replace(SHAPES, num_layers=30, vocab=8)  # 7, 8 and 7 layers, and hardly an embedding
    same(owners(small, pp=4, **SHARED).down, moved(8 * LAYER / 2, 18)[0])
    two = replace(SHAPES, num_layers=31, vocab=8)  # no place but the ends
    same(owners(two, pp=2, **SHARED).down, moved((15.5 * LAYER + 8 * 4096) / 2, 34)[0])


def test_experts_are_reduced_over_those_that_have_the_same() -> None:
    shapes, points = Shapes.of(MIXTRAL), Points.of([{**SHARED, "ep": 2}])
    found = Owners.of(shapes, points, A100, Options())
    weights = 32 * 4096 * (2 * 4096 + 2 * 1024 + 8) + 2 * MIXTRAL.vocab * 4096
    down, up = moved(weights / 2, 66)
    own, part = of_experts(points), 8 * 4096 * 3 * 14336 / 4  # of a layer, on a rank
    assert (int(own.params[0]), int(own.grads[0]), int(own.optim[0]), int(own.replicas[0])) == (1, 2, 4, 8)
    down = down + 32 * (sent("reduce_scatter", part * 4 / 2, 2, 8) + sent("all_reduce", part * 4 / 4, 2, 16))
    up = up + 32 * (sent("all_gather", part * 2 / 2, 2, 8) + sent("all_gather", part * 2, 2, 4))
    same(found.down, down)
    same(found.up, up)
    owned = weights / 2 / 8 + 32 * part / 4
    same(found.optimizer, updated(owned, 32))


@pytest.mark.parametrize(("pp", "most"), [(1, 30), (2, 15), (4, 8), (8, 4)])
def test_the_place_with_most_experts_owns_most(pp: int, most: float) -> None:
    """Of 30 layers: 7, 8, 8 and 7, or 3 and 4."""
    row = {"pp": pp, "dp": 8, "ep": 8, "optim": 8}
    shapes = replace(Shapes.of(MIXTRAL), num_layers=30)
    dense = replace(shapes, experts=0, routed=0, expert_ffn=0, shared_ffn=0, expert_share=0, ffn_hidden=0)
    found = owners(shapes, **row).optimizer - owners(dense, **row).optimizer
    layers = {1: 30, 2: 15, 4: 7, 8: 3}[pp]
    router = layers * 4096 * 8 / 8  # which every rank has; of the place that has most else
    told = most * 3 * 4096 * 14336 + router
    same(found, rates.memory_bound(A100, told * A100.efficiency.optimizer_bytes.value))


def test_columns_of_dense_models_have_no_experts_to_reduce() -> None:
    dense = Shapes.of(LLAMA)
    both = Shapes.stack([dense, Shapes.of(MIXTRAL)])
    found = Owners.of(both, Points.of([SHARED, SHARED]), A100, Options())
    same(found.down, owners(dense, **SHARED).down)
    same(found.up, owners(dense, **SHARED).up)


def test_both_copies_of_tied_weights_are_summed() -> None:
    tied = replace(SHAPES, tied_embeddings=1)
    same(owners(tied, pp=1, tp=2, dp=8).ends, 0.0)
    same(owners(tied, pp=4, tp=2, dp=8).ends, sent("all_reduce", WORDS / 2 * 4, 2, 32))
    same(owners(tied, Options(gradient_bytes=2.0), pp=2, dp=8).ends, sent("all_reduce", WORDS * 2, 2, 8))


@pytest.mark.parametrize(("ranks", "nodes"), [(1, 1), (8, 1), (9, 2), (16, 2), (24, 3), (80, 10)])
def test_the_slowest_of_more_nodes_is_later(ranks: int, nodes: int) -> None:
    told = NormalDist().inv_cdf((nodes - 0.375) / (nodes + 0.25)) if nodes > 1 else 0.0
    same(owners(dp=ranks).late, told)
    both = Owners.of(SHAPES, Points.of([{"dp": 80}, {"dp": ranks}]), A100, Options()).late
    assert both[1] == pytest.approx(told)


def test_owners_depend_on_no_schedule() -> None:
    one, other = owners(pp=4, **SHARED), owners(pp=4, schedule=SCHEDULES.index("zb-h1"), **SHARED)
    assert np.array_equal(one.down, other.down)
