"""Experts shared out over ranks are the unsharded computation, however they are cut."""

from __future__ import annotations

import random
from typing import Any

import pytest

from plait.core.base.errors import PlaitError
from plait.core.model.experts import Experts
from plait.core.model.spec import ModelSpec
from plait.core.parallel.sharding import Sharding
from plait.core.parallel.strategy import Strategy
from tests.dist.equality import Pool, assert_equal
from tests.dist.pipelining import Pipeline
from tests.support.cases import first
from tests.support.models import llama

SEED = 20261130


def mixture(**changed: Any) -> ModelSpec:
    """Two layers of four experts, two of them a token's."""
    model = {name: changed.pop(name) for name in ("num_layers", "hidden", "dropout") if name in changed}
    return llama(experts=Experts(**{"count": 4, "per_token": 2, "ffn_hidden": 12, **changed}), **model)


@pytest.mark.parametrize(
    ("experts", "degrees", "strategy", "sharding"),
    [
        ({}, (2, 1), {"ep": 2, "p1": 2}, Sharding()),
        ({"shared": 1, "balance_loss": 0.1, "z_loss": 0.01}, (4, 1), {"ep": 2}, Sharding(params=4, grads=4, optim=4)),
        ({"capacity": 0.75, "balance_loss": 0.1}, (2, 1), {"ep": 4, "cp": 2, "p1": 2, "recompute": "full"}, Sharding()),
        ({"shared": 1, "shared_gate": True}, (2, 2), {"ep": 2, "p1": 2, "sequence_parallel": True}, Sharding(optim=2)),
        (
            {"shared": 1, "shared_gate": True, "balance_loss": 0.1, "capacity": 1.0},
            (2, 2),
            {"ep": 4, "whole_experts": True, "p1": 2, "p2": 2, "sequence_parallel": True, "recompute": "layer"},
            Sharding(),
        ),
        ({"balance_loss": 0.1}, (1, 2), {"ep": 1, "whole_experts": True, "p1": 2}, Sharding()),
        ({"count": 4, "per_token": 1, "balance": "dp", "balance_loss": 0.1}, (2, 1), {"ep": 2, "p1": 2}, Sharding()),
    ],
)
def test_experts_shared_out_equal_the_reference(
    pool: Pool, experts: dict[str, Any], degrees: tuple[int, int], strategy: dict[str, Any], sharding: Sharding
) -> None:
    case = Pipeline(mixture(**experts), (degrees,), strategy=Strategy(**strategy), shardings=(sharding,))
    assert_equal(pool, case)


def drawn(number: int) -> Pipeline:
    """A case of up to four ranks that the rules allow."""
    chance = random.Random(f"{SEED}/{number}")
    while True:
        pp = chance.choice((1, 1, 2))
        dp, tp, cp = chance.choice((1, 2, 4)), chance.choice((1, 1, 2)), chance.choice((1, 1, 2))
        whole = tp > 1 and chance.random() < 0.5
        among = dp * cp * (tp if whole else 1)
        ep = chance.choice([one for one in (1, 2, 4) if among % one == 0])
        if pp * dp * tp * cp > 4:
            continue
        experts = {
            "count": chance.choice((4, 8)), "per_token": chance.choice((1, 2, 3)), "shared": chance.choice((0, 1)),
            "capacity": chance.choice((0.0, 0.0, 0.6, 1.25)), "balance_loss": chance.choice((0.0, 0.1)),
            "score_function": chance.choice(("softmax", "sigmoid")), "norm_topk_prob": chance.random() < 0.7,
            "first_dense": chance.choice((0, 0, 1)),
        }  # fmt: skip
        strategy = {
            "ep": ep, "whole_experts": whole, "cp": cp, "ring": chance.choice((1, cp)),
            "p1": chance.choice((1, min(2, 4 // dp))),
            "p2": chance.choice((1, 2)), "sequence_parallel": tp > 1 and chance.random() < 0.5,
            "recompute": chance.choice(("none", "selective", "full", "layer")),
            "overlap": chance.choice(("domino", "async", "sync")),
        }  # fmt: skip
        factor = dp * cp
        shard = chance.choice((Sharding(), Sharding(optim=factor), Sharding(params=factor, grads=factor, optim=factor)))
        schedule = chance.choice(("1f1b", "eager-1f1b", "zb-h1")) if pp > 1 else "1f1b"
        try:
            case = Pipeline(
                mixture(num_layers=2 * pp, **experts), ((dp, tp),) * pp, schedule, Strategy(**strategy), (shard,) * pp,
                detailed=chance.random() < 0.3,
            )  # fmt: skip
            assert case.plan
        except PlaitError:
            continue
        return case


@pytest.mark.parametrize("number", first(6, of=100))
def test_drawn_ways_to_share_out_experts_equal_the_reference(pool: Pool, number: int) -> None:
    assert_equal(pool, drawn(number))
