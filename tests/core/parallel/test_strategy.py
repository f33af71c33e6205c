from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.core.base.codec.data import decode
from plait.core.base.errors import JobError
from plait.core.model.spec import ModelSpec
from plait.core.parallel.strategy import Strategy, slice_sizes

GPT = ModelSpec(family="gpt", num_layers=2, hidden=24, num_heads=6, vocab=31, max_sequence=16)
LLAMA = ModelSpec(
    family="llama", num_layers=2, hidden=32, num_heads=8, num_kv_heads=2, ffn_hidden=48, vocab=32, max_sequence=16
)


@given(st.integers(0, 1000), st.integers(1, 50))
def test_slices_cover_the_whole_and_differ_by_at_most_one(total: int, parts: int) -> None:
    sizes = slice_sizes(total, parts)
    assert sum(sizes) == total
    assert len(sizes) == parts
    assert max(sizes) - min(sizes) <= 1
    assert sizes == tuple(sorted(sizes, reverse=True))


@pytest.mark.parametrize("values", [{"tp": 0}, {"p1": 0}, {"p2": -1}, {"cp": 0}, {"ring": 0}])
def test_impossible_values_are_refused_by_key(values: dict[str, Any]) -> None:
    with pytest.raises(JobError) as caught:
        Strategy(**values)
    assert caught.value.key == f"strategy.{next(iter(values))}"


def test_check_refuses_more_tokens_than_positions() -> None:
    with pytest.raises(JobError, match=r"data\.sequence_length: 32 exceeds the model's max_sequence = 16"):
        Strategy().check(GPT, batch=4, sequence=32)


def test_key_value_heads_are_copied_when_there_are_more_ranks_than_heads() -> None:
    assert [Strategy(tp=tp).kv_replicas(LLAMA) for tp in (1, 2, 4, 8)] == [1, 1, 2, 4]
    Strategy(tp=8).check(LLAMA, batch=1, sequence=16)


def test_the_vocabulary_is_padded_to_a_multiple_of_tp() -> None:
    assert [Strategy(tp=tp).padded_vocab(GPT) for tp in (1, 2, 3)] == [31, 32, 33]


def test_plain_values_round_trip_and_unknown_ones_are_refused() -> None:
    strategy = Strategy(tp=2, overlap="async", p1=2, p2=4, sequence_parallel=True)
    assert decode(Strategy, strategy.to_dict()) == strategy
    with pytest.raises(JobError, match=r"strategy\.overlp: unknown key \(did you mean 'overlap'\?\)"):
        decode(Strategy, {"overlp": "sync"}, "strategy")


def test_what_has_a_key_of_its_own_in_a_job_is_refused_by_that() -> None:
    assert Strategy(recompute="full", recompute_layers=0).recompute_layers == 0
    with pytest.raises(JobError) as caught:
        Strategy(recompute_layers=-1)
    assert caught.value.key == "strategy.recompute.layers"


@pytest.mark.parametrize(
    ("values", "model", "sequence", "key"),
    [
        ({"tp": 5}, {"num_heads": 5, "hidden": 20, "ffn_hidden": 24}, 16, "strategy.tp"),
        ({"tp": 6}, {"num_kv_heads": 2, "ffn_hidden": 24, "family": "llama"}, 16, None),
        ({"tp": 3}, {"num_kv_heads": 2, "ffn_hidden": 24, "family": "llama"}, 16, "strategy.tp"),
        ({"tp": 2, "sequence_parallel": True}, {}, 15, "strategy.sequence_parallel"),
        ({"tp": 2, "sequence_parallel": True, "cp": 3}, {}, 15, "strategy.sequence_parallel"),
        ({"tp": 2, "sequence_parallel": True, "cp": 3}, {}, 12, None),
        ({"cp": 4, "ring": 3}, {}, 16, "strategy.cp_comm_type"),
        ({"ring": 2}, {}, 16, "strategy.cp_comm_type"),
        ({"cp": 4}, {}, 16, "strategy.cp"),
        ({"cp": 4, "ring": 2}, {}, 16, None),
        ({"cp": 4, "ring": 4}, {}, 16, None),
        ({"cp": 4, "ring": 4}, {}, 12, "strategy.cp"),
        ({"cp": 4, "ring": 2}, {}, 12, None),
        ({"cp": 3}, {"attention_dropout": 0.1}, 12, None),
        ({"cp": 2, "ring": 2}, {"attention_dropout": 0.1}, 16, "model.attention_dropout"),
        ({"cp": 2}, {"num_kv_heads": 3, "ffn_hidden": 24, "family": "llama"}, 16, "strategy.cp"),
        ({"cp": 6}, {"num_kv_heads": 3, "ffn_hidden": 24, "family": "llama"}, 12, None),
        ({}, {"family": "utransformer", "levels": 1, "num_layers": 3}, 15, "data.sequence_length"),
        ({}, {"family": "utransformer", "levels": 2, "num_layers": 5}, 6, "data.sequence_length"),
        ({}, {"family": "utransformer", "levels": 2, "num_layers": 5}, 4, None),
        ({"cp": 2}, {"family": "utransformer", "levels": 1, "num_layers": 3}, 16, "strategy.cp"),
        ({"tp": 2, "sequence_parallel": True}, {"family": "utransformer", "levels": 1, "num_layers": 3}, 16,
         "strategy.sequence_parallel"),
        ({}, {}, 16, None),
        ({"p1": 4, "p2": 24}, {}, 16, None),
    ],
)  # fmt: skip
def test_what_fits_a_model_and_its_sequences(
    values: dict[str, Any], model: dict[str, Any], sequence: int, key: str | None
) -> None:
    shapes = {"family": "gpt", "num_layers": 2, "hidden": 24, "num_heads": 6, "vocab": 31, "max_sequence": 16}
    spec, strategy = ModelSpec(**(shapes | model)), Strategy(**values)
    if key is None:
        strategy.check(spec, batch=4, sequence=sequence)
        return
    with pytest.raises(JobError) as caught:
        strategy.check(spec, batch=4, sequence=sequence)
    assert caught.value.key == key


@pytest.mark.parametrize(
    ("heads", "kv", "tp", "cp", "ring", "allowed"),
    [
        (3, 1, 1, 2, 1, False), (4, 1, 1, 2, 1, True), (4, 4, 1, 4, 1, True), (8, 2, 1, 4, 1, True),
        (12, 3, 1, 2, 1, False), (12, 3, 1, 6, 1, True), (4, 4, 2, 4, 1, False), (4, 4, 2, 4, 2, True),
        (4, 2, 4, 2, 2, True), (4, 2, 4, 2, 1, False),
    ],
)  # fmt: skip
def test_heads_that_ranks_of_a_sequence_can_share_out(
    heads: int, kv: int, tp: int, cp: int, ring: int, allowed: bool
) -> None:
    model = ModelSpec(family="llama", num_layers=1, hidden=96, num_heads=heads, num_kv_heads=kv, head_size=4,
                      ffn_hidden=96, vocab=9, max_sequence=96)  # fmt: skip
    strategy = Strategy(tp=tp, cp=cp, ring=ring)
    if allowed:
        strategy.check(model, batch=1, sequence=48)
    else:
        with pytest.raises(JobError, match="ranks cannot share out"):
            strategy.check(model, batch=1, sequence=48)
