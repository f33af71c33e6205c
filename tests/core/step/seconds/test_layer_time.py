"""One layer of one micro-batch, part by part: products, passes over memory, and collectives beside them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from plait.core.model.spec import ModelSpec
from plait.core.step.columns.points import RECOMPUTES, SCHEDULES, SHARD_OVERLAPS
from plait.core.step.columns.shapes import Shapes
from plait.core.step.seconds import rates
from plait.core.step.seconds.layer_time import Options
from tests.plan.layers import (
    A100,
    ASYNC,
    BF16,
    DOMINO,
    FLAT,
    GPT,
    LLAMA,
    MIXTRAL,
    NONE,
    SEQUENCE,
    SYNC,
    layer,
    pass_over,
    product,
    same,
    sent,
)  # fmt: skip


def test_tokens_of_a_rank_are_those_of_its_part_of_the_sequence() -> None:
    same(layer(micro=3, cp=4, tp=2).tokens, 3 * SEQUENCE / 4)


@pytest.mark.parametrize("each", [rates.matmul, rates.three_products])
def test_products_of_slices_are_several_smaller_ones(each: Any) -> None:
    """Two slices of the batch, three of the columns of what is summed; a gate doubles the MLP's first."""
    rows, hidden, ffn, kv = 2 * SEQUENCE / 2, 4096, 14336, 1024
    one = layer(tp=4, micro=2, p1=2, p2=4)
    shapes = ((1, hidden, hidden / 4 + 2 * kv / 4), (1, hidden, 2 * ffn / 4), (4, hidden / 4, hidden / 4),
              (4, ffn / 4, hidden / 4))  # fmt: skip
    told = sum(2 * times * each(A100, BF16, rows, k, n) for times, k, n in shapes)
    same(one.three if each is rates.three_products else one.linear, told)
    same(one.second_products, 2 * sum(4 * product(rows, k, n) for _, k, n in shapes[2:]))


def test_more_ranks_than_key_heads_hold_one_each() -> None:
    rows, hidden, ffn, head = SEQUENCE, 4096, 14336, 128
    told = (
        product(rows, hidden, hidden / 16 + 2 * head) + product(rows, hidden, 2 * ffn / 16)
        + product(rows, hidden / 16, hidden) + product(rows, ffn / 16, hidden)
    )  # fmt: skip
    same(layer(tp=16).linear, told)


def test_a_model_without_a_gate_has_one_first_product_in_its_mlp() -> None:
    hidden, ffn = GPT.hidden, GPT.ffn_hidden
    shapes = ((hidden, 3 * hidden), (hidden, hidden), (hidden, ffn), (ffn, hidden))
    same(layer(GPT).linear, sum(product(SEQUENCE, k, n) for k, n in shapes))


def test_where_all_of_the_mlp_is_experts_only_their_products_are_made() -> None:
    one = layer(MIXTRAL, ep=8, dp=8)
    hidden, kv = MIXTRAL.hidden, MIXTRAL.num_kv_heads * MIXTRAL.head_size
    attention = product(SEQUENCE, hidden, hidden + 2 * kv) + product(SEQUENCE, hidden, hidden)
    same(one.linear, attention + one.routed.products(backward=False))
    same(one.second_products, product(SEQUENCE, hidden, hidden))
    three = rates.three_products(A100, BF16, SEQUENCE, hidden, hidden + 2 * kv)
    three = three + rates.three_products(A100, BF16, SEQUENCE, hidden, hidden)
    same(one.three, three + one.routed.products(backward=True))


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(("dropout", "fused"), [(0.0, True), (0.0, False), (0.1, True)])
def test_attention_is_of_a_ranks_heads_and_its_rings_queries(backward: bool, dropout: float, fused: bool) -> None:
    """No fused kernel has dropout."""
    model = replace(Shapes.of(LLAMA), attention_dropout=dropout)
    one = layer(model, Options(fused_attention=fused, attention_work=3.0), tp=2, cp=8, ring=2, micro=5)
    shape = rates.AttentionShape(batch=5, heads=32 / 2 / 4, queries=SEQUENCE / 2, keys=SEQUENCE, head_size=128)
    told = 3 * rates.attention(A100, BF16, shape, backward=backward, fused=fused and not dropout)
    same(one.attention_backward if backward else one.attention_forward, told)


@pytest.mark.parametrize(("model", "width"), [(LLAMA, 6 * 14336), (GPT, 4 * GPT.ffn_hidden)])
def test_passes_over_memory(model: ModelSpec, width: int) -> None:
    tokens, kv = 2 * SEQUENCE / 2, model.num_kv_heads * model.head_size
    for flat in (False, True):
        one = layer(model, Options(norm_work=1.5), tp=4, micro=2, cp=2, **(FLAT if flat else {}))
        residual = tokens * model.hidden / (4 if flat else 1)
        same(one.norms, pass_over(8 * 1.5 * residual))
        same(one.activation, pass_over(tokens * width / 4))
        heads = tokens * 4 * (model.hidden + 2 * kv) / 4
        same(one.elementwise, one.norms + one.activation + pass_over(12 * residual + heads))


def test_routed_rows_are_passed_over_too() -> None:
    one = layer(MIXTRAL, tp=2)
    same(one.activation, pass_over(SEQUENCE * 6 * 2 * 14336 / 2))  # each token's two experts
    heads = SEQUENCE * 4 * (4096 + 2 * 1024) / 2
    same(one.elementwise, one.norms + one.activation + pass_over(12 * SEQUENCE * 4096 + heads)
         + one.routed.moves(np.array([SEQUENCE * 4096.0])))  # fmt: skip


def test_a_forward_and_a_backward_are_the_sum_of_their_parts() -> None:
    one = layer(tp=2, micro=2)
    same(one.forward, one.linear + one.attention_forward + one.elementwise)
    same(one.backward, one.three - one.linear + one.attention_backward + 2 * one.elementwise)


@pytest.mark.parametrize(("tp", "launched"), [(1, 1e-4), (2, 1.6e-4)])
def test_a_device_waits_for_what_its_host_has_not_launched(tp: int, launched: float) -> None:
    one = layer(tp=tp)
    same(one.waits_for_host(np.array([0.4e-4])), launched - 0.4e-4)
    same(one.waits_for_host(np.array([2e-4])), 0.0)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("core", [False, True])
def test_what_is_computed_again(whole: bool, core: bool) -> None:
    """whole: layers, reductions included; core: selective recomputation of attention's."""
    told = Options(recompute_collectives=whole, recompute_attention=core)
    none, selective, full = (
        layer(LLAMA, told, tp=2, recompute=RECOMPUTES.index(name), **FLAT) for name in ("none", "selective", "full")
    )
    kept = full.second_products + pass_over(12 * SEQUENCE * 4096 / 2)
    same(none.again + none.linear_again + none.attention_again + none.tp_again, 0.0)
    same(selective.again, selective.attention_forward if core else selective.norms + selective.activation)
    same(full.again, full.forward - (0 if whole else kept))
    same(selective.linear_again + selective.tp_again, 0.0)
    same(full.linear_again, full.linear - (0 if whole else full.second_products))
    same(selective.attention_again, selective.attention_forward if core else 0.0)
    same(full.attention_again, full.attention_forward)
    same(full.tp_again, full.tp_forward if whole else full.tp_forward / 2)  # of Plait's, the gathers
    same(layer(LLAMA, told, tp=2, recompute=RECOMPUTES.index("full")).tp_again, full_again(whole))


def full_again(whole: bool) -> Any:
    """What is sent again where every rank has the whole sequence."""
    return layer(tp=2).tp_forward if whole else 0.0


def test_tokens_travel_to_experts_again_where_whole_layers_are_repeated() -> None:
    row = {"dp": 8, "ep": 8, "recompute": RECOMPUTES.index("full")}
    same(layer(MIXTRAL, **row).ep_again, 0.0)
    one = layer(MIXTRAL, Options(recompute_collectives=True), **row)
    same(one.ep_again, one.ep_forward)
    assert one.ep_forward[0] > 0
    same(layer(MIXTRAL, Options(recompute_collectives=True), dp=8, ep=8).ep_again, 0.0)


# ---- collectives ----


def beside(busy: Any, communicated: Any) -> Any:
    """What communication adds to computation."""
    return rates.together(A100, busy, communicated) - busy


def exposed(communicated: Any, busy: Any, slices: int) -> Any:
    """Of slices, the last one's, and what does not fit beside the others' computation."""
    rest = 1 - 1 / slices
    return communicated / slices + beside(busy * rest, communicated * rest)


WHOLE = 2 * SEQUENCE * 4096 * 2
REDUCED = sent("all_reduce", WHOLE, 4, 1)
CUT = sent("all_gather", WHOLE, 4, 1) + sent("reduce_scatter", WHOLE, 4, 1)
SLICED = {**DOMINO, "tp": 4, "micro": 2}


def test_both_sublayers_reduce_and_nothing_hides_it_where_collectives_are_synchronous() -> None:
    for flat, told in (({}, REDUCED), (FLAT, CUT)):
        one = layer(tp=4, micro=2, **SYNC, **flat)
        same(one.tp_forward, 2 * told)
        same(one.tp_backward, 2 * told)
    same(layer(tp=4, micro=2, **NONE).tp_forward, 0.0)
    same(layer(tp=4, micro=2, **NONE).tp_backward, 0.0)


def test_asynchronous_ones_run_beside_weight_gradients() -> None:
    one = layer(tp=4, micro=2, p1=2, p2=2, **ASYNC)
    same(one.tp_forward, exposed(2 * REDUCED, one.forward, 1))
    same(one.tp_backward, beside(one.linear, 2 * REDUCED))


@pytest.mark.parametrize(("p1", "p2"), [(2, 1), (4, 1), (2, 2), (1, 2), (1, 4), (1, 1)])
def test_slices_hide_all_but_the_last_ones(p1: int, p2: int) -> None:
    """Columns alone hide behind each other's products."""
    one = layer(p1=p1, p2=p2, **SLICED)
    told = exposed(2 * REDUCED, one.forward, p1 * p2) if p1 > 1 else exposed(2 * REDUCED, one.second_products, p2)
    same(one.tp_forward, told)
    back = exposed(2 * REDUCED, one.backward, p1 * p2)
    same(one.tp_backward, min(float(back[0]), float(beside(one.linear, 2 * REDUCED)[0])))


@pytest.mark.parametrize("flat", [{}, FLAT])
@pytest.mark.parametrize(("p1", "p2"), [(2, 1), (2, 2), (1, 2), (1, 1)])
def test_a_split_backward_leaves_other_slices_or_rows_to_hide_behind(flat: dict[str, int], p1: int, p2: int) -> None:
    one = layer(p1=p1, p2=p2, schedule=SCHEDULES.index("zb-h1"), pp=2, **SLICED, **flat)
    communicated = 2 * (CUT if flat else REDUCED)
    inputs, rows = one.backward - (one.three - one.linear) / 2, one.linear - one.second_products
    if p1 > 1:
        told = exposed(communicated, inputs, p1 * p2)
    else:
        told = communicated if flat else exposed(communicated, rows, p2)
    same(one.tp_backward, told)
    same(layer(tp=4, micro=2, schedule=SCHEDULES.index("zb-h1"), pp=2, **ASYNC).tp_backward, 2 * REDUCED)


def test_routed_rows_are_reduced_as_often_as_tokens_are_routed() -> None:
    one = layer(MIXTRAL, tp=4, micro=2, **SYNC, **FLAT)
    same(one.routed.more_reductions, 1.0)
    same(one.tp_forward, 3 * CUT)
    same(one.tp_backward, 3 * CUT)


def test_heads_are_exchanged_and_blocks_go_round() -> None:
    """Of 8 ranks that share sequences, rings of 2 whose neighbours are 4 x tp apart."""
    one = layer(tp=2, cp=8, ring=2, micro=2, **SYNC)
    tokens = 2 * SEQUENCE / 8
    exchanged = 2 * sent("all_to_all", tokens * 4096 / 2 * 2 * 4, 4, 2) + 2 * sent(
        "all_to_all", tokens * 4 * 128 * 2 * 4, 4, 2
    )
    for tensors, attention, told in ((1, one.attention_forward, one.cp_forward),
                                     (2, one.attention_backward, one.cp_backward)):  # fmt: skip
        block = sent("send", tensors * 2 * tokens * 1024 / 2 * 2, 2, 8)
        same(told, exchanged + beside(attention / 2, block))


def test_a_longer_ring_has_as_many_more_turns() -> None:
    one = layer(tp=2, cp=8, ring=8, **SYNC)
    block = sent("send", 2 * SEQUENCE / 8 * 1024 / 2 * 2, 8, 2)
    same(one.cp_forward, 7 * beside(one.attention_forward / 8, block))
    same(layer(tp=2, **SYNC).cp_forward, 0.0)


def test_fewer_heads_than_ranks_are_copied_to_be_exchanged() -> None:
    one = layer(tp=8, cp=4, **SYNC)
    tokens = SEQUENCE / 4
    told = sent("all_to_all", tokens * 4096 / 8 * 2 * 4, 4, 8) + sent("all_to_all", tokens * 4 * 128 * 2 * 4, 4, 8)
    same(one.cp_forward, 2 * told)


def test_slices_hide_exchanges_and_reductions_behind_the_same_computation() -> None:
    one = layer(cp=8, ring=2, p1=4, **SLICED)
    tokens = 2 * SEQUENCE / 8
    reduced = 2 * sent("all_reduce", tokens * 4096 * 2, 4, 1)
    exchanged = 2 * sent("all_to_all", tokens * 4096 / 4 * 2 * 4, 4, 4) + 2 * sent(
        "all_to_all", tokens * 4 * 128 * 2 * 4, 4, 4
    )
    for tensors, busy, tp, cp in ((1, one.forward, one.tp_forward, one.cp_forward),
                                  (2, one.backward, one.tp_backward, one.cp_backward)):  # fmt: skip
        block = sent("send", tensors * 2 * tokens * 1024 / 4 * 2, 2, 16)
        rest = max(0.0, float((exposed(exchanged + block + reduced, busy, 4) - tp)[0]))
        plain = layer(tp=4, cp=8, ring=2, micro=2, **SYNC)
        same(cp, min(rest, float((plain.cp_forward if tensors == 1 else plain.cp_backward)[0])))
    assert one.cp_forward[0] < layer(tp=4, cp=8, ring=2, micro=2, **SYNC).cp_forward[0]
    same(layer(cp=8, ring=2, p1=1, p2=4, **SLICED).cp_forward, layer(cp=8, ring=2, p1=1, **SLICED).cp_forward)
    same(layer(tp=4, micro=2, cp=8, ring=2, p1=4, **ASYNC).cp_forward, plain.cp_forward)


WEIGHTS = 4096 * (2 * 4096 + 2 * 1024 + 3 * 14336) / 2
"""Of a layer, on one of two tensor-parallel ranks."""


def gathered(ranks: int) -> Any:
    """Attention and MLP, each half of a layer's weights."""
    return 2 * sent("all_gather", WEIGHTS * 2 / 2, ranks, 2)


@pytest.mark.parametrize("hides", SHARD_OVERLAPS)
@pytest.mark.parametrize(("params", "grads", "secondary"), [(1, 1, 0), (4, 8, 0), (1, 8, 0), (8, 8, 2)])
def test_sharded_weights_are_gathered_twice_and_gradients_reduced_once(
    hides: str, params: int, grads: int, secondary: int
) -> None:
    one = layer(
        tp=2, dp=8, params=params, grads=grads, optim=8, secondary=secondary,
        shard_overlap=SHARD_OVERLAPS.index(hides),
    )  # fmt: skip
    whole = WEIGHTS * 4 / 2
    reduced = sent("reduce_scatter", whole, params, 2) + sent(
        "reduce_scatter", whole / params, grads // params, 2 * params
    )
    ahead, back = gathered(params), gathered(secondary or params) + 2 * reduced
    same(one.shard_forward_sent, ahead)
    same(one.shard_backward_sent, back)
    same(one.shard_forward, beside(one.forward, ahead) if hides in ("forward", "both") else ahead)
    same(one.shard_backward, beside(one.backward, back) if hides in ("backward", "both") else back)


def test_bytes_of_gradients_and_weights_on_their_way_may_differ() -> None:
    row = {"tp": 2, "dp": 8, "params": 8, "grads": 8, "optim": 8}
    one = layer(LLAMA, Options(gradient_bytes=2.0, weight_bytes=1.0), **row)
    same(one.shard_forward_sent, 2 * sent("all_gather", WEIGHTS / 2, 8, 2))
    same(one.shard_backward_sent, one.shard_forward_sent + 2 * sent("reduce_scatter", WEIGHTS, 8, 2))


def test_experts_are_gathered_and_reduced_besides() -> None:
    row = {"tp": 2, "dp": 16, "ep": 2, "params": 8, "grads": 16, "optim": 16}
    one = layer(MIXTRAL, **row)
    dense = MIXTRAL.hidden * (2 * 4096 + 2 * 1024 + 8) / 2
    own = 2 * sent("all_gather", dense, 8, 2)
    same(one.shard_forward_sent, own + one.routed.gathered(np.array([8]), 2.0))
    reduced = sent("reduce_scatter", dense * 2, 8, 2) + sent("reduce_scatter", dense * 2 / 8, 2, 16)
    told = own + one.routed.gathered(np.array([8]), 2.0) + 2 * reduced + one.routed.reduced(4.0)
    same(one.shard_backward_sent, told)
