"""A micro-batch of one layer: the sum of its directions, and the ends of a model."""

from __future__ import annotations

from typing import Any

import pytest

from plait.core.model.precision import ITEMSIZE
from plait.core.step.columns.points import RECOMPUTES
from plait.core.step.columns.shapes import Shapes
from plait.core.step.seconds import rates
from plait.core.step.seconds.experts_time import LAUNCHES
from plait.core.step.seconds.micro_batch import MicroBatchSeconds
from plait.core.step.seconds.options import Options
from tests.plan.layers import BF16, FLAT, LLAMA, MIXTRAL, SEQUENCE, SYNC, layer, same
from tests.plan.machines import cluster

FULL = {"tp": 2, "dp": 8, "cp": 2, "ring": 2, "ep": 4, "micro": 2, "params": 4, "grads": 8, "optim": 16,
        "recompute": RECOMPUTES.index("full")}  # fmt: skip


@pytest.mark.parametrize("ring", [1, 2])
def test_a_micro_batch_is_the_sum_of_a_layers_directions(ring: int) -> None:
    told = Options(recompute_collectives=True)
    one = layer(MIXTRAL, told, **FULL | {"ring": ring}, **FLAT)
    found = MicroBatchSeconds.of(one)
    ahead = one.tp_forward + one.cp_forward + one.shard_forward + one.ep_forward
    back = one.tp_backward + one.cp_backward + one.shard_backward + one.ep_forward
    assert min(float(each[0]) for each in (one.tp_forward, one.cp_forward, one.shard_forward, one.ep_forward)) > 0
    same(found.sent, ahead + back)
    same(found.sent_again, one.tp_again + one.cp_again + one.ep_again)
    same(found.tp, one.tp_forward + one.tp_backward)
    same(found.cp, one.cp_forward + one.cp_backward)
    same(found.sharding, one.shard_forward + one.shard_backward)
    assert (found.gathered, found.reduced) == (one.shard_forward_sent, one.shard_backward_sent)
    same(found.attention_forward, one.sums.forward.attention)
    same(found.attention_backward, one.sums.backward.attention)
    for name in ("linear", "three", "forward", "backward", "again", "linear_again", "attention_again",
                 "weight_gradients", "tp_again", "cp_again", "ep_again", "late_forward", "late_backward",
                 "late_again"):  # fmt: skip
        same(getattr(found, name), getattr(one, name))
    same(found.ep, one.ep_forward)


def test_a_slow_host_is_late_in_each_direction() -> None:
    """Ten seconds a pass and one a collective, less all that runs; experts are launched with the rest."""
    late = cluster(host_layer=10.0, host_collective=1.0)
    one = layer(LLAMA, None, BF16, late, tp=2, dp=2, params=2, grads=2, optim=2)
    found = MicroBatchSeconds.of(one)
    same(found.late_forward, 12 - one.forward - one.tp_forward - one.shard_forward)
    same(found.late_backward, 12 - one.backward - one.tp_backward - one.shard_backward)
    routed = layer(MIXTRAL, None, BF16, late, dp=8, ep=8)
    waits = LAUNCHES + 10 - routed.ep_forward
    same(MicroBatchSeconds.of(routed).late_forward, waits - routed.forward)
    same(MicroBatchSeconds.of(routed).late_backward, waits - routed.backward - routed.shard_backward)


@pytest.mark.parametrize(("precision", "named"), [("bf16-mixed", BF16), ("fp8", BF16), ("fp32", "fp32")])
@pytest.mark.parametrize("flat", [False, True])
def test_the_head_is_never_quantised_and_the_ends_have_norms_and_collectives(
    precision: Any, named: Any, flat: bool
) -> None:
    """Embedding, head and what each of them alone has on a rank: parameters sharded, gathered and reduced."""
    on = cluster("h100")
    model, words, size = Shapes.of(LLAMA), LLAMA.vocab / 4, ITEMSIZE[precision]
    told = Options(gradient_bytes=3.0, weight_bytes=1.5)
    row = {"tp": 4, "dp": 8, "params": 8, "grads": 8, "optim": 8, "micro": 2, **SYNC, **(FLAT if flat else {})}
    one = layer(model, told, precision, on, **row)
    tokens = 2 * SEQUENCE
    edge = rates.collective(on, "all_gather", words * 4096 * 1.5, 8, 4)
    edge = edge + rates.collective(on, "reduce_scatter", words * 4096 * 3.0, 8, 4)
    products = rates.three_products(on, named, tokens, 4096, words)
    logits = rates.memory_bound(on, tokens * words * on.efficiency.logit_bytes.value)
    numbers = tokens * 4096 / (4 if flat else 1)
    norms = rates.memory_bound(on, 15 * numbers * size * on.efficiency.elementwise.value)
    statistics = rates.collective(on, "all_gather", 4 * 3 * tokens * max(4, size), 4, 1)
    gathered, scattered, summed = (
        rates.collective(on, kind, tokens * 4096 * size, 4, 1)
        for kind in ("all_gather", "reduce_scatter", "all_reduce")
    )
    looked_up = rates.collective(on, "all_gather", tokens * 4096 * size * 4, 4, 1)
    found = MicroBatchSeconds.of(one)
    same(found.head, products + logits + norms + edge + statistics + (gathered + scattered if flat else summed))
    same(found.embedding, rates.memory_bound(on, tokens * 4096 * 12) + edge + looked_up + (gathered if flat else 0))
    same(found.leave, norms)


def test_no_more_rows_of_an_embedding_are_looked_up_than_there_are() -> None:
    """Sixteen words on each of four ranks, of thousands of tokens."""
    on = cluster("h100")
    model = Shapes.of(LLAMA)
    few = layer(type(model)(**{**model.__dict__, "vocab": 64}), None, BF16, on, tp=4, **SYNC)
    passed = rates.memory_bound(on, SEQUENCE * 4096 * 12)
    same(few.sums.embed.tp, rates.collective(on, "all_gather", 16 * 4096 * 2 * 4, 4, 1))
    same(MicroBatchSeconds.of(few).embedding, passed + few.sums.embed.tp)


def test_words_that_do_not_divide_are_padded() -> None:
    """Each of four ranks has as many rows as the one that has most."""
    model = Shapes.of(LLAMA)
    odd, even = (
        layer(type(model)(**{**model.__dict__, "vocab": vocab}), tp=4, **SYNC).sums.head for vocab in (50_001, 50_004)
    )
    same(odd.products, even.products)
    same(odd.elementwise, even.elementwise)
