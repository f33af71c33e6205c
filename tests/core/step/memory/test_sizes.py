"""Bytes of what ops make, by hand: streams, norms, products, attention and the MLP's core; and as columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from plait.core.model.dropout import Blocks
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
T = 3 * 16
"""Tokens of the first of two slices, of five sequences of 32 tokens on one of two ranks that share each."""


def sizes(model: ModelSpec = GPT, itemsize: int = 2, *, gpu: bool = False, **strategy: Any) -> Sizes:
    made = Strategy(**{"p1": 2, "cp": 2, **strategy})
    return Sizes(model, RankLoad.of(made, batch=5, sequence=32), itemsize, gpu=gpu)


def segment(site: str, *told: Any, at: int = 0, branch: Any = "", **asked: Any) -> Any:
    return sizes(*told, **asked).of(branch, site, 0, at)


def test_tensors_of_a_slice() -> None:
    assert [segment("attn", at=at).rows for at in (0, 1)] == [48, 32]
    one, flat = segment("mlp", tp=4), segment("mlp", tp=4, sequence_parallel=True)
    assert one.full == one.stream == one.came == T * 32 * 2
    assert flat.full == 4 * flat.stream == T * 32 * 2
    assert (segment("embed", tp=4).y_partial, one.y_partial) == (T * 8 * 2, T * 32 * 2)
    head = segment("head", tp=4)
    assert (head.logits, head.g_logits) == (T * 26 * 4, T * 26 * 2)  # of 104 words
    assert (head.narrowing, head.softmax) == (T * 26 * 2, T * 26 * 6)
    full = segment("head", GPT, 4, tp=4)
    assert (full.logits, full.narrowing, full.softmax) == (T * 26 * 4, 0, T * 26 * 4)
    assert head.loss == T * (8 + 2 + 12)
    assert segment("head", GPT, 8).loss == T * (10 + 24)
    assert one.widened == T * 32 * 4
    assert one.hashed == 0
    assert segment("mlp", DROPS, tp=4, sequence_parallel=True).hashed == T * 8 * 16


STREAM = T * 32 * 2


@pytest.mark.parametrize(
    ("model", "site", "joining", "placing", "dropping"),
    [
        (GPT, "attn", 2, 3, 3),
        (LLAMA, "attn", 1, 2, 3),
        (LLAMA, "leave", 2, 2, 3),  # what leaves is copied
        (DROPS, "attn", 1 + 8, 2 + 8, 1 + 8),  # a mask is drawn from 16 bytes of each number
        (DROPS, "up", (1 + 8) / 2, (2 + 8) / 2, (1 + 8) / 2),
    ],
)
def test_what_joins_the_stream_is_there_beside_it(
    model: ModelSpec, site: str, joining: float, placing: float, dropping: float
) -> None:
    one = segment(site, model)
    assert (one.joining, one.placing, one.dropping) == (STREAM * joining, STREAM * placing, STREAM * dropping)


def test_a_sequence_that_is_halved_and_doubled() -> None:
    made = sizes()
    assert made.of("", "down", 1, 0).stream == STREAM // 2
    assert made.of("", "up", 0, 0).came == STREAM // 2
    assert made.of("", "up", 0, 0).doubling == STREAM * 5 // 2


@pytest.mark.parametrize(
    ("model", "itemsize", "gpu", "sharded", "kept"),
    [
        (GPT, 2, False, 1, T * 2 * 4),  # mean and variance
        (GPT, 8, True, 1, T * 2 * 8),
        (GPT, 2, False, 4, T // 4 * 2 * 4),
        (LLAMA, 2, True, 1, T * 4),
        (LLAMA, 4, False, 1, T * 4 + T * 32 * 4),  # without a kernel, what is normalised ...
        (LLAMA, 2, False, 1, T * 4 + 2 * T * 32 * 4),  # ... and what it was converted to
        (LLAMA, 2, False, 4, T // 4 * 4 + 2 * T * 8 * 4),
    ],
)
def test_what_a_norm_keeps(model: ModelSpec, itemsize: int, gpu: bool, sharded: int, kept: int) -> None:
    one = segment("attn", model, itemsize, gpu=gpu, tp=sharded, sequence_parallel=sharded > 1)
    assert one.n_saved == kept
    own = model is LLAMA and not gpu
    assert one.norming == one.stream + kept + (one.widened if own and itemsize == 2 else 0)
    assert one.norm_back == (4 * one.widened if own else one.stream)


@pytest.mark.parametrize(("site", "times"), [("down", 3), ("up", 1), ("leave", 1)])
def test_what_gives_the_streams_gradient_without_a_norm(site: str, times: int) -> None:
    assert segment(site, LLAMA).norm_back == times * STREAM


@pytest.mark.parametrize(
    ("model", "branch", "first", "second"),
    [(GPT, "attn", 3 * 16, 16), (GPT, "mlp", 48, 48), (LLAMA, "attn", 16 + 2 * 8, 16), (LLAMA, "mlp", 2 * 48, 48)],
)
def test_a_weight_gradient_in_sixteen_bits_is_made_and_then_added(
    model: ModelSpec, branch: str, first: int, second: int
) -> None:
    """On a CPU in both precisions, on a GPU in fp32 alone; in fp32 it is added in one go."""
    for (itemsize, gpu), each in {(2, False): 6, (2, True): 4, (4, False): 0, (8, False): 0}.items():
        one = segment("block", model, itemsize, gpu=gpu, branch=branch, tp=2)
        assert (one.first_product, one.second_product) == (first * 32 * each, second * 32 * each)
        assert segment("head", model, itemsize, gpu=gpu, tp=2).product == 51 * 32 * each
        added = segment("embed", model, itemsize, gpu=gpu)
        assert added.scattering == T * 32 * (itemsize + (4 if itemsize == 2 else 0))


def test_more_ranks_than_key_heads_hold_one_head_each() -> None:
    assert segment("attn", LLAMA, branch="attn", tp=8, cp=1).first_product == (4 + 2 * 4) * 32 * 6


def core(model: ModelSpec, branch: str, itemsize: int = 2, *, gpu: bool = True) -> tuple[int, ...]:
    """z, o, saved; forward, backward."""
    one = segment(branch, model, itemsize, gpu=gpu, branch=branch, tp=2, cp=1)
    return one.z, one.o, one.saved, one.core, one.core_back


Q = 96 * 16 * 2
"""Bytes of a rank's half of the queries of three sequences of 32 tokens."""
LSE = 96 * 4 * 4


def test_an_mlp_keeps_what_its_activation_reads() -> None:
    inner = 96 * 48 * 2
    assert core(GPT, "mlp") == (inner, inner, 0, inner, 2 * inner)
    assert core(LLAMA, "mlp") == (2 * inner, inner, inner, 2 * inner, 4 * inner)


@pytest.mark.parametrize(
    ("model", "itemsize", "gpu", "told"),
    [
        # Forward: the output and the log-sum-exp. Backward: gradients of output, its copy, and of q, k and v.
        (GPT, 2, True, (3 * Q, Q, LSE, Q + LSE, max(5 * Q, 7 * Q - LSE))),
        (GPT, 4, False, (6 * Q, 2 * Q, LSE, 2 * Q + LSE, max(10 * Q, 14 * Q - LSE))),
        # Two query heads a key head: a GPU's kernels share keys in bf16 ...
        (LLAMA, 2, True, (2 * Q, Q, LSE + 3 * Q // 2, max(5 * Q // 2 + LSE, 3 * Q), max(4 * Q, 7 * Q // 2 - LSE))),
        # ... elsewhere they are copied for every query head.
        (LLAMA, 2, False, (2 * Q, Q, LSE + 3 * Q, Q + LSE + 3 * Q + Q // 2, max(5 * Q, 2 * Q - LSE))),
        (LLAMA, 4, True, (4 * Q, 2 * Q, LSE + 6 * Q, 2 * Q + LSE + 6 * Q + Q, max(10 * Q, 4 * Q - LSE))),
    ],
)  # fmt: skip
def test_attentions_core(model: ModelSpec, itemsize: int, gpu: bool, told: tuple[int, ...]) -> None:
    assert core(model, "attn", itemsize, gpu=gpu) == told


def test_norms_within_keep_their_statistics() -> None:
    """Of every head of queries and of keys; on a CPU also what was normalised, in fp32, and converted."""
    saved = core(LLAMA, "attn")[2]
    assert core(NORMED, "attn")[2] == saved + 96 * (4 + 2) * 4
    saved = core(LLAMA, "attn", gpu=False)[2]
    assert core(NORMED, "attn", gpu=False)[2] == saved + 96 * (4 + 2) * 4 + 2 * 96 * (16 + 8) * 4


def test_attention_with_dropout_is_computed_in_blocks_that_share_keys() -> None:
    blocks = Blocks(3 * 2, 2, 32, False)
    _, _, saved, forward, backward = core(replace(LLAMA, attention_dropout=0.1), "attn", gpu=False)
    assert saved == LSE + 3 * Q // 2
    assert forward == Q + saved + blocks.forward(4, 2)
    assert backward == 2 * Q + Q + blocks.backward(4, 2)


def shared(model: ModelSpec, itemsize: int = 2, *, gpu: bool = False, **strategy: Any) -> Any:
    return segment("attn", model, itemsize, gpu=gpu, branch="attn", **strategy)


def test_what_attention_shares_with_ranks_that_exchange_heads() -> None:
    """Of 4 key heads on each of two tensor-parallel ranks, 4 Ulysses ranks have one each, copied."""
    tokens = 3 * 8
    query, kv, tables = tokens * 16 * 2, tokens * 8 * 2, 2 * 8 * 4 * 2
    one = shared(LLAMA, tp=2, cp=4, ring=1)
    assert (one.z, one.query) == (query + 2 * kv, query)
    assert (one.there, one.block) == (query + 2 * tokens * 4 * 4 * 2, 2 * tokens * 4 * 4 * 2)
    assert one.lse == one.kernel == tokens * 4 * 4  # one head of queries a head of keys
    assert one.leaving == max(3 * query + tables, query + kv + 2 * one.there)
    assert one.leaving_back == 2 * query
    assert (one.core, one.core_back) == (0, 2 * one.there)
    assert one.turning_back == one.there + max(3 * query + tables, query + kv + one.z + tables)


def test_a_model_with_learned_positions_turns_nothing() -> None:
    one = shared(GPT, tp=2, cp=4, ring=4)
    assert one.z == 3 * one.query
    assert (one.leaving, one.turning_back) == (one.there, one.z)


@pytest.mark.parametrize(("itemsize", "gpu", "times"), [(2, True, 0), (2, False, 2), (4, True, 2)])
def test_blocks_of_a_ring_are_summed_up_in_fp32(itemsize: int, gpu: bool, times: int) -> None:
    """Keys go round as they are, and are copied where kernels want it. Of later blocks half of the queries
    or of the keys."""
    one = shared(LLAMA, itemsize, gpu=gpu, tp=2, cp=4, ring=4)
    query, lse, expanded = one.query, one.lse, times * one.query
    sums = query * 4 // itemsize
    assert (one.block, one.kernel) == (query, lse + expanded)
    assert (one.sums, one.found, one.sums_of_query, one.g_own) == (sums + lse, query + lse, sums, sums)
    assert one.first_block == query + lse + max(expanded, sums + lse)
    assert one.next_block == (query + lse) // 2 + max(expanded, sums // 2)
    keys = max(one.block, expanded) + expanded
    assert (one.own_back, one.block_back) == (keys + query + sums, keys + (query + sums) // 2)
    assert one.rounding == (3 * query if itemsize == 2 else 0)


def test_norms_within_are_computed_again_for_their_gradients() -> None:
    one, plain = (shared(model, gpu=True, cp=2, ring=2) for model in (NORMED, LLAMA))
    assert one.turning_back == max(plain.turning_back, one.turned + one.within_kept + 4 * one.query * 2)
    assert one.leaving == max(3 * one.query + 2 * 16 * 4 * 2 + T * (32 + 16) * 2, one.turned + one.there)


def test_blocks_of_attention_with_dropout_are_of_all_tokens_of_the_exchange() -> None:
    blocks = Blocks(3 * 1, 2, 16, False)  # of 4 query heads and 2 key heads, two ranks have 2 and 1
    one = shared(replace(LLAMA, attention_dropout=0.1), tp=2, cp=4, ring=2)
    assert one.core == blocks.forward(4, 2)
    assert one.core_back == max(2 * one.there, one.there + blocks.backward(4, 2))
    assert one.kernel == one.lse


NAMES = {
    name for row in TENSORS for name in (row.work, *(made.split("=")[-1].strip("!") for made in row.makes.split()))
}


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
