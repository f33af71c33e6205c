"""What sharded data parallelism sends: each collective of a unit, numbers of units, bytes of a
step."""

from __future__ import annotations

from typing import Any

from plait.core.model.spec import ModelSpec
from plait.core.parallel.sharding import Sharding, Unit
from plait.core.parallel.strategy import Strategy
from plait.core.step.stages import Stage
from plait.core.step.traffic import Sent, UnitTraffic, step_bytes, unit_sizes, unit_traffic

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


def test_bytes_of_a_step_add_up_over_units_and_axes() -> None:
    sent = step_bytes(unit_traffic({MLP: 160, VECTORS: 16}, CHAIN, 16, itemsize=2), micro_batches=2)
    # Of 160 numbers: gathered 4 times (2 bytes), reduced twice (4 bytes), then the optimizer's, then back.
    assert sent == {
        "params": 4 * 160 + 2 * 320 + 32 + 16, "grads": 2 * 160 + 80 + 16 + 8, "optim": 80 + 40 + 8 + 4,
        "replicas": 80 + 8, "secondary": 0,
    }  # fmt: skip


LLAMA = ModelSpec(
    family="llama", num_layers=4, hidden=8, num_heads=4, num_kv_heads=2, vocab=10, max_sequence=16, ffn_hidden=24
)


def sizes(model: ModelSpec, stage: Stage, *, tp: int = 1, **factors: int) -> dict[Unit, int]:
    return unit_sizes(model, Strategy(tp=tp), stage, Sharding(**factors))


def test_units_are_padded_to_what_their_shards_need_and_empty_ones_are_none() -> None:
    found: dict[Any, int] = sizes(LLAMA, Stage(1, 3, 1, 1), params=5, grads=5, optim=5)
    assert found == {("attn", 1): 195, ("mlp", 1): 580, ("vectors", 1): 20}
    assert sizes(LLAMA, Stage(1, 3, 1, 0)) == {}
