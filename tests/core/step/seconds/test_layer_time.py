"""One layer of one micro-batch, part by part: products, passes over memory, what runs again, and its host."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from plait.core.model.spec import ModelSpec, keys_seen
from plait.core.step.columns.points import RECOMPUTES
from plait.core.step.columns.shapes import Shapes
from plait.core.step.seconds import rates
from plait.core.step.seconds.options import Options
from tests.plan.layers import A100, BF16, FLAT, GPT, LLAMA, MIXTRAL, SEQUENCE, SYNC, layer, pass_over, product, same

HIDDEN, INNER, KV = 4096, 14336, 1024
SELECTIVE, FULL = ({"recompute": RECOMPUTES.index(name)} for name in ("selective", "full"))
BLOCK = replace(Shapes.of(GPT), parallel_block=1)


def test_tokens_of_a_rank_are_those_of_its_part_of_the_sequence() -> None:
    same(layer(micro=3, cp=4, tp=2).tokens, 3 * SEQUENCE / 4)


@pytest.mark.parametrize("flat", [False, True])
def test_products_of_slices_are_several_smaller_ones(flat: bool) -> None:
    """Two slices of the batch, four of the columns of what is summed and of the rows of its gradient, which a
    sequence that is cut leaves whole; a gate doubles the MLP's first."""
    rows, first, second = 2 * SEQUENCE / 2, (HIDDEN + 2 * KV) / 4, HIDDEN / 4
    one = layer(tp=4, micro=2, p1=2, p2=4, **(FLAT if flat else {}))
    outer = 4 * product(rows, second, HIDDEN / 4) + 4 * product(rows, INNER / 4, HIDDEN / 4)
    told = product(rows, HIDDEN, first) + product(rows, HIDDEN, 2 * INNER / 4) + outer
    same(one.linear, 2 * told)
    same(one.sums.forward.second, 2 * outer)
    parts = 1 if flat else 4
    inputs = parts * (product(rows / parts, first, HIDDEN) + product(rows / parts, 2 * INNER / 4, HIDDEN))
    inputs = inputs + product(rows, HIDDEN, second) + product(rows, HIDDEN, INNER / 4)
    weights = product(first, rows, HIDDEN) + product(2 * INNER / 4, rows, HIDDEN)
    weights = weights + product(HIDDEN, rows, second) + product(HIDDEN, rows, INNER / 4)
    same(one.three, 2 * (told + inputs + weights))
    same(one.sums.backward.weights, 2 * weights)


def test_more_ranks_than_key_heads_hold_one_each() -> None:
    head = 128
    told = (
        product(SEQUENCE, HIDDEN, HIDDEN / 16 + 2 * head) + product(SEQUENCE, HIDDEN, 2 * INNER / 16)
        + product(SEQUENCE, HIDDEN / 16, HIDDEN) + product(SEQUENCE, INNER / 16, HIDDEN)
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
    same(one.sums.forward.second, product(SEQUENCE, hidden, hidden))
    three = rates.three_products(A100, BF16, SEQUENCE, hidden, hidden + 2 * kv)
    three = three + rates.three_products(A100, BF16, SEQUENCE, hidden, hidden)
    same(one.three, three + one.routed.products(backward=True))


@pytest.mark.parametrize("slices", [1, 5])
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(("dropout", "fused"), [(0.0, True), (0.0, False), (0.1, True)])
def test_attention_is_of_a_ranks_heads_block_by_block(backward: bool, dropout: float, fused: bool, slices: int) -> None:
    """Of its own block, and of half of the one that comes round the ring. No fused kernel has dropout."""
    model = replace(Shapes.of(LLAMA), attention_dropout=dropout)
    one = layer(model, Options(fused_attention=fused, attention_work=3.0), tp=2, cp=8, ring=2, micro=5, p1=slices)
    own = rates.AttentionShape(
        batch=5 / slices, heads=32 / 2 / 4, queries=SEQUENCE / 2, keys=SEQUENCE / 2, head_size=128
    )
    told = sum(
        rates.attention(A100, BF16, shape, backward=backward, fused=fused and not dropout)
        for shape in (own, replace(own, keys=SEQUENCE / 4, causal=False))
    )
    found = one.sums.backward if backward else one.sums.forward
    same(found.attention, 3 * slices * told)


def test_attention_of_a_window_sees_its_keys() -> None:
    """Of half of the layers."""
    windowed = layer(replace(Shapes.of(LLAMA), window=512, windowed=0.5))
    seen = keys_seen(SEQUENCE, 512, 0.5)
    assert 512 < seen < SEQUENCE
    shape = rates.AttentionShape(batch=1, heads=32, queries=SEQUENCE, keys=seen, head_size=128)
    same(windowed.sums.forward.attention, rates.attention(A100, BF16, shape, backward=False))


@pytest.mark.parametrize(("model", "first", "last"), [(LLAMA, 2 * INNER, INNER), (GPT, GPT.ffn_hidden, GPT.ffn_hidden)])
def test_passes_over_memory(model: ModelSpec, first: int, last: int) -> None:
    """Numbers of 2 bytes: of a norm five, two of which others may read more often; of its gradient ten."""
    tokens, kv = 2 * SEQUENCE / 2, model.num_kv_heads * model.head_size
    for flat in (False, True):
        one = layer(model, Options(norm_work=1.5), tp=4, micro=2, cp=2, **(FLAT if flat else {}))
        residual, heads = tokens * model.hidden / (4 if flat else 1), tokens * (model.hidden + 2 * kv) / 4
        inner = tokens * (first + last) / 4
        norms = 2 * (3 + 2 * 1.5) * residual
        same(one.sums.forward.elementwise, pass_over(2 * (norms + 2 * heads + inner)))
        same(one.sums.backward.elementwise, pass_over(2 * (2 * norms + 4 * heads + 2 * inner)))


def test_numbers_are_as_long_as_the_model_computes() -> None:
    """Passes in 32 bits take twice as long; attention's exchanges and reductions have twice the bytes."""
    on = A100
    short, long = (layer(LLAMA, None, precision, on, tp=2, cp=2, **SYNC) for precision in (BF16, "fp32"))
    same(long.sums.forward.elementwise, 2 * short.sums.forward.elementwise)
    axes: list[tuple[str, Any, int]] = [("tp", "all_reduce", 1), ("heads", "all_to_all", 2)]
    for name, kind, stride in axes:
        delay = 2 * rates.collective(on, kind, 0.0, 2, stride)  # of two collectives, whatever their bytes
        one, two = (getattr(each.sums.forward, name) - delay for each in (short, long))
        same(two, 2 * one)


def test_routed_rows_are_passed_over_too() -> None:
    """Each token's two experts; they are sorted, too, and back."""
    one = layer(MIXTRAL, tp=2)
    inner, heads, residual = SEQUENCE * 3 * 2 * INNER / 2, SEQUENCE * 2 * (HIDDEN + 2 * KV) / 2, SEQUENCE * HIDDEN
    same(one.sums.forward.elementwise, pass_over(2 * (inner + heads + 10 * residual)))
    sorting = one.routed.moves(np.array([SEQUENCE * 4096.0]))
    assert sorting[0] > 0
    same(one.forward, one.linear + one.sums.forward.attention + one.sums.forward.elementwise + sorting)
    own = one.sums.backward
    same(one.backward, one.three - one.linear + own.attention + own.elementwise + 2 * sorting)


def test_a_forward_and_a_backward_are_the_sum_of_their_parts() -> None:
    one = layer(tp=2, micro=2)
    same(one.forward, one.linear + one.sums.forward.attention + one.sums.forward.elementwise)
    own = one.sums.backward
    same(one.backward, one.three - one.linear + own.attention + own.elementwise)
    same(one.three - one.linear, own.products)


def test_a_parallel_block_has_half_the_norms_and_half_the_reductions() -> None:
    for flat in ({}, FLAT):
        one, two = (layer(model, tp=2, micro=2, **SYNC, **flat) for model in (BLOCK, GPT))
        residual = 2 * SEQUENCE * GPT.hidden / (2 if flat else 1)
        same(one.linear, two.linear)
        same(one.three, two.three)
        same(one.sums.forward.attention, two.sums.forward.attention)
        same(one.forward, two.forward - pass_over(2 * 5 * residual))
        same(one.backward, two.backward - pass_over(2 * 10 * residual))
        same(one.tp_forward, two.tp_forward / 2)
        same(one.tp_backward, two.tp_backward / 2)
        same(one.sums.forward.calls, two.sums.forward.calls / 2)
        assert one.sums.forward.rows[0] == two.sums.forward.rows[0] - 1


# ---- what runs again ----


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("core", [False, True])
def test_what_is_computed_again(whole: bool, core: bool) -> None:
    """whole: layers, reductions included; core: selective recomputation of attention's."""
    told = Options(recompute_collectives=whole, recompute_attention=core)
    none, selective, full = (layer(LLAMA, told, tp=2, **row, **FLAT) for row in ({}, SELECTIVE, FULL))
    kept = full.sums.forward.second + pass_over(12 * SEQUENCE * 4096 / 2)
    activation = pass_over(2 * SEQUENCE * 3 * INNER / 2)
    same(none.again + none.linear_again + none.attention_again + none.tp_again, 0.0)
    same(selective.again, selective.sums.forward.attention if core else activation)
    same(full.again, full.forward - (0 if whole else kept))
    same(selective.linear_again + selective.tp_again, 0.0)
    same(full.linear_again, full.linear - (0 if whole else full.sums.forward.second))
    same(selective.attention_again, selective.sums.forward.attention if core else 0.0)
    same(full.attention_again, full.sums.forward.attention)
    same(full.tp_again, full.tp_forward if whole else full.tp_forward / 2)  # of Plait's, the gathers
    apart = layer(LLAMA, told, tp=2, **FULL)
    same(apart.tp_again, apart.tp_forward if whole else 0.0)


def test_selective_recomputation_repeats_norms_where_each_rank_has_the_whole_sequence() -> None:
    """Where it is cut they are gathered, and a collective is not repeated."""
    activation, norms = pass_over(2 * SEQUENCE * 3 * INNER / 2), pass_over(2 * 2 * 2 * SEQUENCE * HIDDEN)
    same(layer(tp=2, **SELECTIVE).again, activation + norms)
    same(layer(LLAMA, Options(norm_work=3.0), tp=2, **SELECTIVE).again, activation + 3 * norms)
    same(layer(tp=2, **SELECTIVE, **FLAT).again, activation)


def test_ring_attention_is_not_repeated_and_heads_are_exchanged_again() -> None:
    """What came round a ring is kept. full: products, passes and norms all the same."""
    ring, heads = layer(tp=2, cp=4, ring=4, **FULL, **SYNC), layer(tp=2, cp=4, **FULL, **SYNC)
    same(ring.attention_again, 0.0)
    same(ring.cp_again, 0.0)
    same(heads.attention_again, heads.sums.forward.attention)
    same(heads.cp_again, heads.cp_forward)
    same(ring.linear_again, heads.linear_again)
    same(ring.again, heads.again - heads.attention_again)
    mixed = layer(tp=2, cp=4, ring=2, **FULL, **SYNC)
    same(mixed.attention_again, 0.0)
    same(mixed.cp_again, mixed.sums.forward.heads)
    same(layer(tp=2, cp=4, **SELECTIVE, **SYNC).cp_again, 0.0)


def test_tokens_travel_to_experts_again_where_whole_layers_are_repeated() -> None:
    row = {"dp": 8, "ep": 8, **FULL}
    same(layer(MIXTRAL, **row).ep_again, 0.0)
    one = layer(MIXTRAL, Options(recompute_collectives=True), **row)
    same(one.ep_again, one.ep_forward)
    assert one.ep_forward[0] > 0
    same(layer(MIXTRAL, Options(recompute_collectives=True), dp=8, ep=8).ep_again, 0.0)


# ---- the host ----


HOST, CALL = 1e-4, 3e-5
"""Of an unsliced pass of a layer, and of a collective: constants of the cluster."""


@pytest.mark.parametrize(
    ("row", "forward", "backward", "calls"),
    [
        ({}, 1, 1, (0, 0)),
        ({"p1": 4, "micro": 4}, 4, 4, (0, 0)),
        ({"p2": 4}, 15 / 9, 19 / 13, (0, 0)),  # two products in four parts, forward and backward
        ({"p1": 2, "p2": 4, "micro": 2}, 30 / 9, 38 / 13, (0, 0)),
        ({"tp": 2}, 1, 1, (2, 2)),
        ({"tp": 2, "p1": 2, "p2": 2, "micro": 2}, 22 / 9, 30 / 13, (8, 8)),
        ({"tp": 2, **FLAT}, 1, 1, (4, 4)),
        ({"tp": 2, "p2": 2, **FLAT}, 11 / 9, 1, (6, 4)),  # a reduce-scatter of the gradient is not cut
        ({"cp": 2}, 1, 1, (2, 2)),
        ({"cp": 4, "ring": 4}, 12 / 9, 16 / 13, (3, 6)),  # a kernel a block; S and H go round
        ({"cp": 4, "ring": 2}, 10 / 9, 14 / 13, (3, 4)),
    ],
    ids=str,
)
def test_a_host_launches_every_row_of_every_slice_and_part(
    row: dict[str, int], forward: float, backward: float, calls: tuple[int, int]
) -> None:
    """Nine rows forward, thirteen backward: no more than its constant for an unsliced pass."""
    one = layer(**row, **SYNC)
    same(one.late_forward, HOST * forward + CALL * calls[0] - one.forward - one.tp_forward - one.cp_forward)
    same(one.late_backward, HOST * backward + CALL * calls[1] - one.backward - one.tp_backward - one.cp_backward)
    same(one.late_again, 0.0)


@pytest.mark.parametrize(
    ("row", "options", "rows", "calls"),
    [
        (FULL, {}, 7, 0),  # both norms, attention's product, pass and core, the MLP's product and activation
        ({**FULL, "p1": 2, "micro": 2}, {}, 14, 0),
        ({**FULL, "tp": 2}, {}, 7, 0),
        ({**FULL, "tp": 2, **FLAT}, {}, 7, 2),
        ({**FULL, "cp": 2}, {}, 7, 2),
        ({**FULL, "cp": 2, "ring": 2}, {}, 6, 0),
        (SELECTIVE, {}, 3, 0),
        ({**SELECTIVE, "tp": 2, **FLAT}, {}, 1, 0),
        ({**FULL, "tp": 2}, {"recompute_collectives": True}, 9, 2),
        ({**SELECTIVE, "p1": 2, "micro": 2, "cp": 2, "ring": 2}, {"recompute_attention": True}, 4, 0),
    ],
    ids=str,
)
def test_a_host_launches_again_what_runs_again(
    row: dict[str, int], options: dict[str, Any], rows: int, calls: int
) -> None:
    one = layer(LLAMA, Options(**options), **row, **SYNC)
    same(one.late_again, HOST * rows / 9 + CALL * calls - one.again - one.tp_again - one.cp_again - one.ep_again)
    plain = layer(LLAMA, Options(**options), **(row | {"recompute": 0}), **SYNC)
    same(one.late_forward, plain.late_forward)
    same(one.late_backward, plain.late_backward)


def test_what_is_gathered_and_reduced_is_time_for_the_host() -> None:
    one = layer(dp=8, params=8, grads=8, optim=8)
    assert one.shard_forward[0] > 0 and one.shard_backward[0] > 0
    same(one.late_forward, HOST - one.forward - one.shard_forward)
    same(one.late_backward, HOST - one.backward - one.shard_backward)


def test_of_captured_graphs_the_host_starts_collectives_alone() -> None:
    for row in ({}, {"tp": 2}, {"cp": 2, **FULL}):
        one = layer(graphs=1, **row, **SYNC)
        each = A100.efficiency.host_collective.value
        same(one.late_forward, each * one.sums.forward.calls - one.forward - one.tp_forward - one.cp_forward)
        same(one.late_backward, each * one.sums.backward.calls - one.backward - one.tp_backward - one.cp_backward)
        same(one.late_again, each * one.sums.again.calls - one.again - one.tp_again - one.cp_again)
        same(one.forward, layer(**row, **SYNC).forward)
