"""Bytes that last from step to step: of units, of buffers that they share, of rotary tables."""

from __future__ import annotations

from typing import Any

import pytest

from plait.core.model.spec import ModelSpec
from plait.core.parallel.sharding import Sharding
from plait.core.parallel.strategy import Strategy
from plait.core.step.memory.states import States, position_tables, reduction_buffers, states

UNITS: Any = {("attn", 0): 64, ("mlp", 0): 128, ("attn", 1): 64, ("attn", 2): 64, ("vectors", 0): 16}
"""Numbers: 320 in matrices."""


@pytest.mark.parametrize(
    ("sharding", "itemsize", "told"),
    [
        (Sharding(), 4, States(336 * 4, 336 * 4, 2 * 336 * 4, 0)),
        (Sharding(), 8, States(336 * 8, 336 * 8, 2 * 336 * 8, 0)),
        (Sharding(), 2, States(336 * 2, 336 * 4, 3 * 336 * 4, 0)),  # and masters
        (Sharding(optim=4), 2, States(336 * 2, 336 * 4, 3 * 84 * 4, 0)),
        # Two open gradients of each size, and vectors are whole.
        (Sharding(grads=4, optim=4), 2, States(336 * 2, (80 + 16) * 4, 3 * 84 * 4, (2 * 64 + 128) * 4)),
        (Sharding(params=2, grads=4, optim=8), 2,
         States((160 + 16) * 2, (80 + 16) * 4, 3 * 42 * 4, (2 * 64 + 128) * (2 + 4))),
        (Sharding(params=4, grads=4, optim=4, secondary=2), 4,
         States((80 + 160 + 16) * 4, (80 + 16) * 4, 2 * 84 * 4, (2 * 64 + 128) * 8)),
    ],
)  # fmt: skip
def test_states_of_a_rank(sharding: Sharding, itemsize: int, told: States) -> None:
    found = states(UNITS, sharding, itemsize=itemsize)
    assert found == told
    assert found.total == told.parameters + told.gradients + told.optimizer + told.buffers


@pytest.mark.parametrize(
    ("sharding", "numbers"),
    [
        (Sharding(), 0),
        (Sharding(optim=4), 64 + 128 + 16),
        (Sharding(grads=4, optim=4), 64 + 128 + 16),
        (Sharding(params=4, grads=4, optim=4), 64 + 128 + 16),
        (Sharding(params=2, grads=4, optim=4), (64 + 128 + 16) * 3 // 2),
        (Sharding(params=2, grads=4, optim=8), (64 + 128 + 16) * 7 // 4),
        (Sharding(params=2, grads=2, optim=8), (64 + 128 + 16) * 3 // 2),
    ],
)
def test_reductions_keep_a_buffer_for_every_size_of_every_level(sharding: Sharding, numbers: int) -> None:
    for size in (2, 4, 8):
        assert reduction_buffers(UNITS, sharding, itemsize=size) == numbers * size


def test_rotary_tables_are_of_a_sequence_or_of_every_position() -> None:
    llama = ModelSpec(family="llama", num_layers=1, hidden=8, num_heads=4, vocab=10, max_sequence=64, ffn_hidden=24)
    gpt = ModelSpec(family="gpt", num_layers=1, hidden=8, num_heads=4, vocab=10, max_sequence=64)
    assert position_tables(llama, Strategy(), sequence=16, itemsize=2) == 2 * 16 * 2 * 2
    assert position_tables(llama, Strategy(cp=2), sequence=16, itemsize=4) == 2 * 64 * 2 * 4
    assert position_tables(gpt, Strategy(), sequence=16, itemsize=2) == 0
