"""States of a pp rank in columns: as counted unit by unit, and what other frameworks have
otherwise."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from plait.core.model.spec import ModelSpec
from plait.core.parallel.sharding import Sharding
from plait.core.parallel.strategy import Strategy
from plait.core.step.memory import states as states_module
from plait.core.step.memory.memory_options import PLAIT
from plait.core.step.memory.states import (
    Factors,
    HeldStates,
    StateTables,
    held_by,
    pp_rank_states,
)  # fmt: skip
from plait.core.step.stages import Stage

GPT = ModelSpec(family="gpt", num_layers=4, hidden=32, num_heads=8, vocab=48, max_sequence=64, ffn_hidden=96)
WHOLE, FIRST, INNER, LAST = Stage(0, 1, 0, 4), Stage(0, 3, 0, 1), Stage(1, 3, 1, 2), Stage(2, 3, 3, 1)
SHARDINGS = [
    Sharding(), Sharding(optim=4), Sharding(grads=4, optim=8), Sharding(params=2, grads=4, optim=8),
    Sharding(params=8, grads=8, optim=8, secondary=2), Sharding(params=2, grads=2, optim=2),
]  # fmt: skip


def factors(shardings: list[Sharding]) -> Factors:
    columns = ([getattr(one, name) for one in shardings] for name in ("params", "grads", "optim", "secondary"))
    return Factors(*(np.array(column) for column in columns))


# ---- experts ----


def test_tables_hold_what_pp_ranks_hold_in_whatever_order_it_is_asked() -> None:
    tables = StateTables(2, PLAIT)
    first, last = (held_by(GPT, Strategy(), (stage,), sequence=64, itemsize=2) for stage in (FIRST, LAST))
    for asked in ([2, 0], [5], [1, 1, 4], [0, 1, 2, 3, 4, 5]):
        some = factors([SHARDINGS[at] for at in asked])
        which = tables.numbered(some)
        for held in (first, last, replace(first)):  # equal pp ranks have one table
            assert np.array_equal(tables.states(held, which), pp_rank_states(held, some, itemsize=2, options=PLAIT))


def test_a_table_grows_only_by_what_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    counted, own = list[int](), states_module.pp_rank_states

    def told(held: HeldStates, some: Factors, **how: Any) -> np.ndarray:
        counted.append(len(some.params))
        return own(held, some, **how)

    monkeypatch.setattr(states_module, "pp_rank_states", told)
    tables, held = StateTables(2, PLAIT), held_by(GPT, Strategy(), (INNER,), sequence=64, itemsize=2)
    for asked in ([0, 1], [1], [0, 2, 3], [3]):
        tables.states(held, tables.numbered(factors([SHARDINGS[at] for at in asked])))
    assert counted == [2, 2]
