"""A micro-batch of one layer: the sum of its directions, and the ends of a model."""

from __future__ import annotations

from typing import Any

import pytest

from plait.core.step.columns.points import RECOMPUTES
from plait.core.step.columns.shapes import Shapes
from plait.core.step.seconds import rates
from plait.core.step.seconds.experts_time import LAUNCHES
from plait.core.step.seconds.layer_time import Options
from plait.core.step.seconds.micro_batch import MicroBatchSeconds
from tests.plan.layers import BF16, FLAT, LLAMA, MIXTRAL, SEQUENCE, layer, same
from tests.plan.machines import cluster

FULL = {"tp": 2, "dp": 8, "cp": 2, "ring": 2, "ep": 4, "micro": 2, "params": 4, "grads": 8, "optim": 16,
        "recompute": RECOMPUTES.index("full")}  # fmt: skip


def test_a_micro_batch_is_the_sum_of_a_layers_directions() -> None:
    told = Options(recompute_collectives=True)
    one = layer(MIXTRAL, told, **FULL, **FLAT)
    found = MicroBatchSeconds.of(one)
    ahead = one.tp_forward + one.cp_forward + one.shard_forward + one.ep_forward
    back = one.tp_backward + one.cp_backward + one.shard_backward + one.ep_forward
    assert min(float(each[0]) for each in (one.tp_forward, one.cp_forward, one.shard_forward, one.ep_forward)) > 0
    same(found.sent, ahead + back)
    same(found.sent_again, one.tp_again + one.ep_again)
    same(found.tp, one.tp_forward + one.tp_backward)
    same(found.cp, one.cp_forward + one.cp_backward)
    same(found.sharding, one.shard_forward + one.shard_backward)
    assert (found.gathered, found.reduced) == (one.shard_forward_sent, one.shard_backward_sent)
    for name in ("linear", "three", "attention_forward", "attention_backward", "forward", "backward", "again",
                 "linear_again", "attention_again", "tp_again", "ep_again"):  # fmt: skip
        same(getattr(found, name), getattr(one, name))
    same(found.ep, one.ep_forward)
    same(found.host, 0.0)


def test_a_slow_host_is_late_in_each_direction() -> None:
    late = cluster(host_layer=10.0, host_collective=1.0)
    one = layer(LLAMA, None, BF16, late, tp=2, dp=2, params=2, grads=2, optim=2)
    ahead = one.tp_forward + one.cp_forward + one.shard_forward
    back = one.tp_backward + one.cp_backward + one.shard_backward
    same(MicroBatchSeconds.of(one).host, 24 - one.forward - ahead - one.backward - back)
    routed = layer(MIXTRAL, None, BF16, late, dp=8, ep=8)
    told = 20 + 2 * LAUNCHES - routed.forward - routed.backward - 2 * routed.ep_forward
    same(MicroBatchSeconds.of(routed).host, told - routed.shard_forward - routed.shard_backward)


@pytest.mark.parametrize(("precision", "named"), [("bf16-mixed", BF16), ("fp8", BF16), ("fp32", "fp32")])
def test_the_head_is_never_quantised_and_passes_over_its_logits(precision: Any, named: Any) -> None:
    on = cluster("h100")
    model, words = Shapes.of(LLAMA), LLAMA.vocab / 4
    one = layer(model, Options(gradient_bytes=3.0, weight_bytes=1.5), precision, on, tp=4, dp=8, params=8, micro=2)
    tokens = 2 * SEQUENCE
    edge = rates.collective(on, "all_gather", words * 4096 * 1.5, 8, 4)
    edge = edge + rates.collective(on, "reduce_scatter", words * 4096 * 3.0, 8, 4)
    products = rates.three_products(on, named, tokens, 4096, words)
    logits = rates.memory_bound(on, tokens * words * on.efficiency.logit_bytes.value)
    found = MicroBatchSeconds.of(one)
    same(found.head, products + logits + edge)
    same(found.embedding, rates.memory_bound(on, tokens * 4096 * 12) + edge)
