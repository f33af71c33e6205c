"""What sharded data parallelism sends: each collective of a unit, numbers of units, bytes of a step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from plait.core.model.spec import ModelSpec
from plait.core.parallel.sharding import Sharding, Unit
from plait.core.parallel.strategy import Strategy
from plait.core.step.stages import Stage
from plait.core.step.unit_traffic import Sent, UnitTraffic, step_bytes, unit_sizes, unit_traffic

MLP: Unit = ("mlp", 3)
VECTORS: Unit = ("vectors", 0)
CHAIN = Sharding(params=2, grads=4, optim=8)
"""Of 16 replicas."""


def unit(kind: Unit = MLP, sharding: Sharding = CHAIN, ranks: int = 16) -> UnitTraffic:
    return UnitTraffic(kind, 160, sharding, ranks, itemsize=2)


def gather(axis: str, numbers: int, ranks: int, stride: int) -> Sent:
    return Sent(axis, "all_gather", numbers * 2, ranks, stride)


def scatter(axis: str, numbers: int, ranks: int, stride: int) -> Sent:
    return Sent(axis, "reduce_scatter", numbers * 4, ranks, stride)


def test_a_unit_goes_down_the_chain_of_factors_and_back() -> None:
    one = unit()
    assert one.gather(forward=True) == one.gather(forward=False) == [gather("params", 160, 2, 1)]
    every = [scatter("params", 160, 2, 1), scatter("grads", 80, 2, 2)]
    assert one.reduce(last=False) == every
    assert one.reduce(last=True) == [
        *every, scatter("optim", 40, 2, 4), Sent("replicas", "all_reduce", 20 * 4, 2, 8),
    ]  # fmt: skip
    assert one.publish() == [gather("optim", 40, 2, 4), gather("grads", 80, 2, 2)]


def test_what_only_optimizers_share_out_is_reduced_once_and_published_whole() -> None:
    one = unit(VECTORS)
    assert (one.whole, one.params, one.grads) == (True, 1, 1)
    assert one.gather(forward=True) == one.gather(forward=False) == []
    assert one.reduce(last=True) == [
        scatter("params", 160, 2, 1), scatter("grads", 80, 2, 2), scatter("optim", 40, 2, 4),
        Sent("replicas", "all_reduce", 20 * 4, 2, 8),
    ]  # fmt: skip
    assert one.publish() == [gather("optim", 40, 2, 4), gather("grads", 80, 2, 2), gather("params", 160, 2, 1)]


@pytest.mark.parametrize(
    ("sharding", "every", "last", "back"),
    [
        (Sharding(), [], [Sent("replicas", "all_reduce", 640, 16, 1)], []),
        (Sharding(optim=16), [], [scatter("optim", 160, 16, 1)], [gather("optim", 160, 16, 1)]),
        (Sharding(grads=16, optim=16), [scatter("grads", 160, 16, 1)], [scatter("grads", 160, 16, 1)],
         [gather("grads", 160, 16, 1)]),
        (Sharding(params=16, grads=16, optim=16), [scatter("params", 160, 16, 1)], [scatter("params", 160, 16, 1)], []),
        (Sharding(params=4, grads=4, optim=4), [scatter("params", 160, 4, 1)],
         [scatter("params", 160, 4, 1), Sent("replicas", "all_reduce", 160, 4, 4)], []),
        (Sharding(optim=2), [], [scatter("optim", 160, 2, 1), Sent("replicas", "all_reduce", 320, 8, 2)],
         [gather("optim", 160, 2, 1)]),
    ],
)  # fmt: skip
def test_groups_of_one_rank_send_nothing(
    sharding: Sharding, every: list[Sent], last: list[Sent], back: list[Sent]
) -> None:
    one = unit(sharding=sharding)
    assert (one.reduce(last=False), one.reduce(last=True), one.publish()) == (every, last, back)
    assert one.publishes == (sharding.optim > sharding.params)
    assert bool(one.gather(forward=True)) == (sharding.params > 1)


def test_near_copies_are_gathered_backward_only() -> None:
    one = unit(sharding=Sharding(params=16, grads=16, optim=16, secondary=4))
    assert one.gather(forward=True) == [gather("params", 160, 16, 1)]
    assert one.gather(forward=False) == [gather("secondary", 160, 4, 1)]
    assert unit(sharding=Sharding(params=2, grads=2, optim=2, secondary=1)).gather(forward=False) == []


def test_a_ring_sends_a_part_of_the_whole_and_an_all_reduce_twice_that() -> None:
    assert gather("params", 160, 4, 1).bytes == scatter("params", 80, 4, 1).bytes == 320 * 3 // 4
    assert Sent("replicas", "all_reduce", 320, 4, 1).bytes == 2 * 320 * 3 // 4


def test_gradients_have_four_bytes_unless_said() -> None:
    (one,) = unit_traffic({MLP: 160}, CHAIN, 16, itemsize=2)
    assert one == unit()
    (wide,) = unit_traffic({MLP: 160}, CHAIN, 16, itemsize=2, gradient_itemsize=8)
    assert wide.reduce(last=False)[0].whole == 160 * 8
    assert wide.gather(forward=True)[0].whole == 160 * 2


@pytest.mark.parametrize(
    ("kind", "tied", "forward", "backward", "reduced"),
    [
        (MLP, False, 3, 3, 3),
        (("head", 0), False, 3, 3, 3),
        (("positions", 0), False, 3, 0, 3),
        (("positions", 0), True, 3, 0, 3),
        (("embedding", 0), False, 3, 0, 3),
        (("embedding", 0), True, 6, 3, 3),
        (MLP, True, 3, 3, 3),
        (VECTORS, False, 0, 0, 1),
    ],
)  # fmt: skip
def test_how_often_a_unit_is_gathered_and_reduced_in_a_step(
    kind: Unit, tied: bool, forward: int, backward: int, reduced: int
) -> None:
    """Of three micro-batches, over four replicas that share out everything."""
    sharding = Sharding(params=4, grads=4, optim=4, secondary=2)
    sent = step_bytes(unit_traffic({kind: 160}, sharding, 4, itemsize=2), micro_batches=3, tied=tied)
    publish = 240 if kind == VECTORS else 0
    assert sent == {
        "params": forward * 240 + reduced * 480 + publish, "secondary": backward * 160, "grads": 0, "optim": 0,
        "replicas": 0,
    }  # fmt: skip
    wide = step_bytes(
        unit_traffic({kind: 160}, sharding, 4, itemsize=2, gradient_itemsize=8), micro_batches=3, tied=tied
    )
    assert wide["params"] - sent["params"] == reduced * 480


def test_bytes_of_a_step_add_up_over_units_and_axes() -> None:
    sent = step_bytes(unit_traffic({MLP: 160, VECTORS: 16}, CHAIN, 16, itemsize=2), micro_batches=2)
    # Of 160 numbers: gathered 4 times (2 bytes), reduced twice (4 bytes), then the optimizer's, then back.
    assert sent == {
        "params": 4 * 160 + 2 * 320 + 32 + 16, "grads": 2 * 160 + 80 + 16 + 8, "optim": 80 + 40 + 8 + 4,
        "replicas": 80 + 8, "secondary": 0,
    }  # fmt: skip


GPT = ModelSpec(
    family="gpt", num_layers=4, hidden=8, num_heads=4, vocab=10, max_sequence=16, ffn_hidden=24, tied_embeddings=False
)
LLAMA = ModelSpec(
    family="llama", num_layers=4, hidden=8, num_heads=4, num_kv_heads=2, vocab=10, max_sequence=16, ffn_hidden=24
)


def sizes(model: ModelSpec, stage: Stage, *, tp: int = 1, **factors: int) -> dict[Unit, int]:
    return unit_sizes(model, Strategy(tp=tp), stage, Sharding(**factors))


@pytest.mark.parametrize(
    ("model", "stage", "tp", "told"),
    [
        # Queries, keys, values, output: 4 x 64. MLP: 2 x 8 x 24. A layer's norms: 2 x 16, biases: 24+24+8+8.
        (GPT, Stage(0, 1, 0, 1), 1, {("embedding", 0): 80, ("positions", 0): 128, ("attn", 0): 256, ("mlp", 0): 384,
                                    ("head", 0): 80, ("vectors", 0): 16 + 32 + 64}),
        (GPT, Stage(1, 3, 1, 2), 1, {("attn", 1): 256, ("mlp", 1): 384, ("attn", 2): 256, ("mlp", 2): 384,
                                    ("vectors", 1): 2 * (32 + 64)}),
        (GPT, Stage(2, 3, 3, 1), 2, {("attn", 3): 128, ("mlp", 3): 192, ("head", 0): 40,
                                    ("vectors", 2): 16 + 32 + 12 + 12 + 16}),
        # Keys and values of 2 heads; a gate; no biases, no positions.
        (LLAMA, Stage(0, 2, 0, 1), 1, {("embedding", 0): 80, ("attn", 0): 8 * (16 + 8), ("mlp", 0): 576,
                                      ("vectors", 0): 16}),
        (LLAMA, Stage(1, 2, 1, 1), 4, {("attn", 1): 8 * (4 + 4), ("mlp", 1): 144, ("head", 0): 3 * 8,
                                      ("vectors", 1): 8 + 16}),
        (replace(LLAMA, tied_embeddings=True), Stage(0, 1, 0, 0), 1, {("embedding", 0): 80, ("vectors", 0): 8}),
        (replace(LLAMA, tied_embeddings=True), Stage(1, 2, 0, 0), 1, {("head", 0): 80, ("vectors", 1): 8}),
    ],
)  # fmt: skip
def test_numbers_of_units(model: ModelSpec, stage: Stage, tp: int, told: dict[Unit, int]) -> None:
    assert sizes(model, stage, tp=tp) == told


def test_units_are_padded_to_what_their_shards_need_and_empty_ones_are_none() -> None:
    found: dict[Any, int] = sizes(LLAMA, Stage(1, 3, 1, 1), params=5, grads=5, optim=5)
    assert found == {("attn", 1): 195, ("mlp", 1): 580, ("vectors", 1): 20}
    assert sizes(LLAMA, Stage(1, 3, 1, 0)) == {}
