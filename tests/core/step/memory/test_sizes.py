"""Bytes of what ops make, by hand: streams, norms, products, attention and the MLP's core; and as
columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from plait.core.model.spec import ModelSpec
from plait.core.parallel.strategy import Strategy
from plait.core.step.memory.sizes import RankLoad, Sizes
from plait.core.step.tensors import TENSORS

GPT = ModelSpec(family="gpt", num_layers=2, hidden=32, num_heads=8, vocab=101, max_sequence=64, ffn_hidden=96)
LLAMA = ModelSpec(
    family="llama", num_layers=2, hidden=32, num_heads=8, num_kv_heads=4, vocab=101, max_sequence=64, ffn_hidden=96
)
DROPS = replace(GPT, dropout=0.1)
NORMED = replace(LLAMA, qk_norm=True)


NAMES = {
    name
    for row in TENSORS
    for name in (row.work, *(made.split("=")[-1].strip("!") for made in row.makes.split()))
    if row.branch != "experts"
}
"""Names of sizes, but experts', which are traced for one strategy at a time."""


@pytest.mark.parametrize("model", [GPT, DROPS, LLAMA, NORMED, replace(LLAMA, attention_dropout=0.1)])
@pytest.mark.parametrize(("cp", "ring"), [((1, 1), (1, 1)), ((2, 4), (1, 1)), ((4, 4), (2, 4))])
@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("mixed", [False, True])
def test_columns_are_the_numbers_of_every_row(
    model: ModelSpec, cp: tuple[int, int], ring: tuple[int, int], flat: bool, mixed: bool
) -> None:
    """mixed: what is the same in every row is a number beside the columns."""
    each = [
        Sizes(model, RankLoad.of(Strategy(tp=tp, cp=c, ring=r, p1=2, sequence_parallel=flat), batch=batch, sequence=32),
              2, gpu=False)
        for tp, c, r, batch in zip((2, 1), cp, ring, (3, 6), strict=True)
    ]  # fmt: skip
    ranks = [one.rank for one in each]

    def column(values: Sequence[Any]) -> Any:
        return values[0] if mixed and len(set(values)) == 1 else np.array(values)

    columns = RankLoad(
        **{name: column([getattr(rank, name) for rank in ranks]) for name in ("tp", "cp", "ring", "tokens", "sharded")},
        shares=tuple(column(shares) for shares in zip(*(rank.shares for rank in ranks), strict=True)),
    )
    both, seen = Sizes(model, columns, 2, gpu=False), set[str]()
    for branch, site in (("", "embed"), ("attn", "attn"), ("mlp", "block"), ("", "head"), ("", "leave")):
        made = both.of(branch, site, 0, 1)  # type: ignore[arg-type]
        for name in sorted(NAMES):
            if hasattr(made, name):
                seen.add(name)
                told = [getattr(one.of(branch, site, 0, 1), name) for one in each]  # type: ignore[arg-type]
                assert np.broadcast_to(getattr(made, name), 2).tolist() == told, name
    assert cp[0] == 1 or seen >= NAMES - {"", "saved"}
