"""Collectives of one layer, and what they add beside its computation: reductions, exchanges of attention, and
what sharding gathers and reduces."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from plait.core.step.columns.points import RECOMPUTES, SCHEDULES, SHARD_OVERLAPS
from plait.core.step.seconds import rates
from plait.core.step.seconds.options import Options
from tests.plan.layers import A100, ASYNC, DOMINO, FIXED, FLAT, LLAMA, MIXTRAL, NONE, SEQUENCE, SYNC, layer, same, sent


def beside(busy: Any, communicated: Any) -> Any:
    """What communication adds to computation."""
    return rates.together(A100, busy, communicated) - busy


def exposed(communicated: Any, busy: Any, slices: int) -> Any:
    """Of slices, the last one's, and what does not fit beside the others' computation."""
    rest = 1 - 1 / slices
    return communicated / slices + beside(busy * rest, communicated * rest)


WHOLE = 2 * SEQUENCE * 4096 * 2
"""Bytes of the residual stream of two sequences."""
SLICED = {**DOMINO, "tp": 4, "micro": 2}


def reduced(count: int) -> Any:
    """Both sublayers', each in so many parts, one after the other."""
    return 2 * count * sent("all_reduce", WHOLE / count, 4, 1)


def cut(scattered: int, gathered: int) -> Any:
    """The same where every rank has a part of the sequence."""
    scatter = scattered * sent("reduce_scatter", WHOLE / scattered, 4, 1)
    return 2 * (scatter + gathered * sent("all_gather", WHOLE / gathered, 4, 1))


def test_both_sublayers_reduce_and_nothing_hides_it_where_collectives_are_synchronous() -> None:
    for flat, told in (({}, reduced(1)), (FLAT, cut(1, 1))):
        one = layer(tp=4, micro=2, **SYNC, **flat)
        same(one.tp_forward, told)
        same(one.tp_backward, told)
    same(layer(tp=4, micro=2, **NONE).tp_forward, 0.0)
    same(layer(tp=4, micro=2, **NONE).tp_backward, 0.0)
    silent = layer(tp=2, cp=4, ring=2, micro=2, **NONE)
    same(silent.cp_forward + silent.cp_backward, 0.0)


@pytest.mark.parametrize(("p1", "p2"), [(1, 2), (2, 1), (2, 4)])
def test_every_slice_and_part_has_collectives_of_its_own(p1: int, p2: int) -> None:
    """Rows of a gradient whose sequence is cut are not parts."""
    one, other = (layer(tp=4, micro=2, p1=p1, p2=p2, **SYNC, **flat) for flat in ({}, FLAT))
    same(one.tp_forward, reduced(p1 * p2))
    same(one.tp_backward, reduced(p1 * p2))
    same(other.tp_forward, cut(p1 * p2, p1))
    same(other.tp_backward, cut(p1, p1))
    assert one.tp_forward[0] > reduced(1) and other.tp_forward[0] > cut(1, 1)


def test_asynchronous_ones_run_beside_weight_gradients() -> None:
    one = layer(tp=4, micro=2, p1=2, p2=2, **ASYNC)
    same(one.tp_forward, reduced(4))
    same(one.tp_backward, beside(one.sums.backward.weights, reduced(4)))


def among(p1: int, sent: Any, *busy: Any) -> Any:
    """Of slices that are computed while others send, an equal part beside each; a slice alone takes its part
    of both."""
    beside_all = sum(rates.together(A100, one, sent / len(busy)) for one in busy)
    return np.maximum(beside_all, (sum(busy) + sent) / p1) - sum(busy)


def of_attention(one: Any) -> Any:
    """Of a forward: all that is not the MLP's products, or half of what passes over memory."""
    part = float(one.model.mlp_weights / one.model.layer_weights)
    return one.forward - part * one.sums.forward.products - one.sums.forward.elementwise / 2


@pytest.mark.parametrize(("p1", "p2"), [(2, 1), (2, 2), (1, 2), (1, 4), (1, 1)])
def test_slices_of_the_batch_hide_behind_each_other_and_columns_behind_products(p1: int, p2: int) -> None:
    """Backward, what slices of the batch do not hide is beside weight gradients."""
    one, told = layer(p1=p1, p2=p2, **SLICED), reduced(p1 * p2)
    attention = of_attention(one)
    sliced = among(p1, told, attention, one.forward - attention)
    same(one.tp_forward, sliced if p1 > 1 else exposed(told, one.sums.forward.second, p2))
    same(one.tp_backward, among(p1, told, one.backward) if p1 > 1 else beside(one.sums.backward.weights, told))


@pytest.mark.parametrize("again", [{}, {"recompute": RECOMPUTES.index("full")}], ids=["kept", "repeated"])
@pytest.mark.parametrize("p1", [1, 2])
def test_slices_that_are_gathered_hide_behind_weight_gradients_and_what_is_repeated(
    p1: int, again: dict[str, int]
) -> None:
    """Of a sequence that is cut; what is repeated hides them where the batch has no slices."""
    one = layer(p1=p1, **SLICED, **FLAT, **again)
    busy = one.sums.backward.weights + (one.again if again and p1 == 1 else 0)
    same(one.tp_backward, beside(busy, cut(p1, p1)))


def test_gradients_of_a_cut_sequence_are_gathered_before_anything_hides_them() -> None:
    """But for experts, whose two numbers were fitted without."""
    one = layer(tp=4, micro=2, **ASYNC, **FLAT)
    half = cut(1, 1) / 2
    same(one.tp_backward, half + beside(one.sums.backward.weights, half))
    routed = layer(MIXTRAL, tp=4, micro=2, **ASYNC, **FLAT)
    same(routed.tp_backward, beside(routed.weight_gradients, 1.5 * cut(1, 1)))


@pytest.mark.parametrize("flat", [{}, FLAT])
@pytest.mark.parametrize(("p1", "p2"), [(2, 1), (2, 2), (1, 2), (1, 1)])
def test_a_split_backward_leaves_other_slices_or_rows_to_hide_behind(flat: dict[str, int], p1: int, p2: int) -> None:
    one = layer(p1=p1, p2=p2, schedule=SCHEDULES.index("zb-h1"), pp=2, **SLICED, **flat)
    communicated = cut(p1, p1) if flat else reduced(p1 * p2)
    inputs, rows = one.backward - one.sums.backward.weights, one.linear - one.sums.forward.second
    if p1 > 1:
        told = exposed(communicated, inputs, p1 * p2) if flat or p2 > 1 else among(p1, communicated, inputs)
    else:
        told = communicated if flat else exposed(communicated, rows, p2)
    whole = rates.together(A100, np.zeros(1), communicated)
    same(one.tp_backward, told if p1 > 1 else np.minimum(told, whole))
    same(layer(tp=4, micro=2, schedule=SCHEDULES.index("zb-h1"), pp=2, **ASYNC).tp_backward, reduced(1))


def test_routed_rows_are_reduced_as_often_as_tokens_are_routed() -> None:
    one = layer(MIXTRAL, tp=4, micro=2, **SYNC, **FLAT)
    same(one.routed.more_reductions, 1.0)
    same(one.tp_forward, 1.5 * cut(1, 1))
    same(one.tp_backward, 1.5 * cut(1, 1))


# ---- attention that ranks share ----


TOKENS = 2 * SEQUENCE / 8
RING = {"tp": 2, "cp": 8, "ring": 2, "micro": 2}
"""Of 8 ranks that share sequences, rings of 2 whose neighbours are 4 x tp apart."""


def exchanged(slices: int = 1, *, heads: int = 16, kv: int = 4, ranks: int = 4, stride: int = 2) -> Any:
    """Queries with keys and values there, what attention gives back, as bytes over all ranks; once."""
    size = TOKENS / slices * 128 * 2 * ranks
    there, back = (sent("all_to_all", size * each, ranks, stride) for each in (heads + 2 * kv, heads))
    return slices * (there + back)


def block(slices: int = 1, *, kv: int = 4, ranks: int = 2, stride: int = 8) -> Any:
    """Keys and values of a block to the next rank of the ring."""
    return slices * sent("send", 2 * TOKENS / slices * 128 * kv * 2, ranks, stride)


@pytest.mark.parametrize("mode", ["sync", "async", "domino"])
def test_heads_are_exchanged_and_blocks_go_round(mode: str) -> None:
    """Backward, keys and values go round again and their gradients home. Blocks travel behind attention to
    those before, unless ``sync``; gradients with ``domino`` alone."""
    one = layer(**RING, **{"sync": SYNC, "async": ASYNC, "domino": DOMINO}[mode])
    ahead, back = (each.attention / 2 for each in (one.sums.forward, one.sums.backward))
    told = {
        "sync": (block(), 2 * block()),
        "async": (beside(ahead, block()), beside(back, block()) + block()),
        "domino": (beside(ahead, block()), beside(back, 2 * block())),
    }[mode]
    same(one.cp_forward, exchanged() + told[0])
    same(one.cp_backward, exchanged() + told[1])
    same(one.sums.forward.home, 0.0)
    same(one.sums.backward.home, block())


def test_a_longer_ring_has_as_many_more_turns() -> None:
    one, other = (layer(tp=2, cp=8, ring=8, micro=2, **mode) for mode in (SYNC, ASYNC))
    each = block(kv=4, ranks=8, stride=2)
    same(one.cp_forward, 7 * each)
    same(one.cp_backward, 14 * each)
    turns = other.sums.forward.attention * 7 / 8
    same(other.cp_forward, beside(turns, 7 * each))
    same(layer(tp=2, **SYNC).cp_forward, 0.0)


def test_fewer_heads_than_ranks_are_copied_to_be_exchanged() -> None:
    one = layer(tp=8, cp=4, micro=1, **SYNC)  # as many tokens as above
    same(one.cp_forward, exchanged(heads=4, kv=4, ranks=4, stride=8))
    same(one.cp_backward, one.cp_forward)


def test_slices_of_exchanges_are_several_smaller_ones() -> None:
    one = layer(**RING, p1=2, p2=4, **SYNC)
    same(one.cp_forward, exchanged(2) + block(2))
    same(one.cp_backward, exchanged(2) + 2 * block(2))
    assert one.cp_forward[0] > layer(**RING, **SYNC).cp_forward[0]


def test_slices_hide_exchanges_and_reductions_behind_the_same_computation() -> None:
    row = RING | {"tp": 4, "micro": 2}
    one, plain = layer(p1=2, **row, **DOMINO), layer(p1=2, **row, **SYNC)
    sums = 4 * sent("all_reduce", TOKENS / 2 * 4096 * 2, 4, 1)
    heads, turn = exchanged(2, heads=8, kv=4, ranks=4, stride=4), block(2, stride=16)
    half = {"forward": one.sums.forward.attention / 2, "backward": one.sums.backward.attention / 2}
    for name, turns, busy in (("forward", 1, one.forward), ("backward", 2, one.backward)):
        tp, cp = (getattr(one, f"{axis}_{name}") for axis in ("tp", "cp"))
        together = exposed(heads + turns * turn + sums, busy, 2) - tp
        alone = heads + beside(half[name], turns * turn)
        same(cp, min(max(0.0, float(together[0])), float(alone[0])))
        assert cp[0] < getattr(plain, f"cp_{name}")[0]
    same(layer(p1=1, p2=4, **row, **DOMINO).cp_forward, layer(p1=1, **row, **DOMINO).cp_forward)
    beside_own = layer(p1=2, **row, **ASYNC)
    same(beside_own.cp_forward, heads + beside(half["forward"], turn))


# ---- sharding ----


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
    part = float(one.model.mlp_weights / one.model.layer_weights)
    attention = one.ahead - part * one.sums.forward.products - (one.sums.forward.elementwise + one.tp_forward) / 2
    waited = (1 - part) * ahead + beside(attention, part * ahead)  # the MLP's gather starts with attention's
    same(one.shard_forward, beside(one.forward, ahead) if hides in ("forward", "both") else waited)
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


@pytest.mark.parametrize("row", [{"tp": 4}, {"tp": 4, "p2": 2, **FLAT}, {"tp": 2, "cp": 4, "ring": 2}])
def test_the_fixed_order_is_priced_as_the_searched_one(row: dict[str, Any]) -> None:
    fixed, searched, sync = (layer(micro=2, p1=2, **row, **mode) for mode in (FIXED, DOMINO, SYNC))
    for name in ("tp_forward", "tp_backward", "cp_forward", "cp_backward"):
        same(getattr(fixed, name), getattr(searched, name))
    assert fixed.tp_backward < sync.tp_backward
