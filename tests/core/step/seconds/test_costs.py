"""Costs on a cluster: what is counted, and how it grows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from plait.core.model.spec import ModelSpec
from plait.core.parallel.strategy import Strategy
from plait.core.step.columns.points import StrategyTable
from plait.core.step.columns.shapes import Options, Shapes
from plait.core.step.orders.overlap import Load
from plait.core.step.orders.segment_costs import SegmentCosts, segment_costs
from plait.core.step.seconds import rates
from plait.core.step.seconds.costs import cluster_costs
from plait.core.step.seconds.layer_time import Layer
from tests.plan.machines import cluster

LLAMA = ModelSpec(
    family="llama", num_layers=2, hidden=4096, num_heads=32, num_kv_heads=8, ffn_hidden=14336, vocab=128256,
    max_sequence=8192,
)  # fmt: skip
BLOCK = ModelSpec(
    family="gpt", num_layers=2, hidden=512, num_heads=8, vocab=1000, max_sequence=256, parallel_block=True
)
U = ModelSpec(family="utransformer", levels=1, num_layers=3, hidden=512, num_heads=8, vocab=1000, max_sequence=256)
QUIET = {"host_layer": 0.0, "host_collective": 0.0, "matmul_launch": 0.0, "matmul_wave": 0.0, "matmul_depth": 0.0}


def costs(model: ModelSpec = LLAMA, batch: int = 4, machine: Any = None, **strategy: Any) -> SegmentCosts:
    load = Load(batch, model.max_sequence)
    return cluster_costs(model, Strategy(**strategy), load, machine or cluster(**QUIET), precision="bf16-mixed")


@pytest.mark.parametrize("model", [LLAMA, BLOCK, U], ids=["llama", "block", "u"])
@pytest.mark.parametrize("strategy", [{}, {"tp": 4, "p1": 2, "p2": 2}, {"tp": 4, "recompute": "full"}])
def test_every_op_that_shapes_price_has_a_price(model: ModelSpec, strategy: dict[str, Any]) -> None:
    found = costs(model, **strategy)
    made = Strategy(**strategy)
    shapes = segment_costs(model, made, batch=4, sequence=model.max_sequence)
    sites = {"block"} if model.parallel_block else {"attn", "mlp"}
    known = {
        key
        for key in shapes.compute
        if key.split(".")[0] in sites | {"embed", "head"} and (key[-1] not in "MA" or made.recompute == "full")
    }
    assert known <= set(found.compute)
    assert min(found.compute[key] for key in known) > 0
    assert bool(found.collective) == (made.tp > 1)


@pytest.mark.parametrize(
    "strategy", [{}, {"tp": 8}, {"tp": 8, "sequence_parallel": True}, {"cp": 4}, {"tp": 2, "cp": 4, "ring": 4}]
)
def test_a_layer_takes_as_long_as_the_closed_form_says(strategy: dict[str, Any]) -> None:
    """Both levels of prediction rest on constants that were fitted with the closed form."""
    machine, made = cluster(host_layer=0.0, host_collective=0.0), Strategy(**strategy)
    found = costs(batch=1, machine=machine, **strategy).compute
    point = StrategyTable.of([{**strategy, "micro": 1, "num_micro": 1}])
    layer = Layer(Shapes.of(LLAMA), point, machine, LLAMA.max_sequence, "bf16-mixed", Options())
    for kinds, want in (("NFTKR", layer.forward), ("DSGHEZCWJ", layer.backward)):
        seconds = sum(v for key, v in found.items() if key.split(".")[0] in ("attn", "mlp") and key[-1] in kinds)
        several = made.ring > 1  # kernels, one for each block that comes round
        assert seconds == pytest.approx(float(want[0]), rel=0.1 if several else 1e-9)


def test_what_a_host_launches_is_no_cost_of_the_processor() -> None:
    """Nor of links: a host launches beside both."""
    slow = cluster(**{**QUIET, "host_layer": 10.0, "host_collective": 1.0})
    assert costs(machine=slow, tp=2, p1=2) == costs(machine=cluster(**QUIET), tp=2, p1=2)


# ---- each op by hand ----


MACHINE = cluster(host_layer=0.0, host_collective=0.0)


def product(m: float, k: float, n: float) -> float:
    return float(rates.matmul(MACHINE, "bf16-mixed", m, k, n))


def numbers(count: float) -> float:
    """An elementwise pass over so many."""
    return float(rates.memory_bound(MACHINE, count * 2 * MACHINE.efficiency.elementwise.value))


def attention(share: int, heads: float, block: float, *, backward: bool, causal: bool = True, size: int = 128) -> float:
    keys = block if causal else block / 2
    shape = rates.AttentionShape(batch=share, heads=heads, queries=block, keys=keys, head_size=size, causal=causal)
    return float(rates.attention(MACHINE, "bf16-mixed", shape, backward=backward))


def test_a_parallel_block_has_both_branches() -> None:
    machine, tokens = MACHINE, 4 * 256
    found = cluster_costs(BLOCK, Strategy(), Load(4, 256), machine, precision="bf16-mixed").compute
    core = numbers(tokens * 3 * 512 * 2) + attention(4, 8, 256, backward=False, size=64)
    assert found["block.F"] == pytest.approx(
        product(tokens, 512, 3 * 512) + core + product(tokens, 512, 2048) + numbers(tokens * 2048 * 2)
    )
    assert found["block.W"] == pytest.approx(
        product(512, tokens, 512) + product(1536, tokens, 512) + product(512, tokens, 2048) + product(2048, tokens, 512)
    )


def test_ways_down_and_up_at_their_mean_length() -> None:
    """Of two levels: sequences of 256 and 128 tokens become half as long, or twice."""
    two = replace(U, levels=2, num_layers=5)
    found = cluster_costs(two, Strategy(), Load(4, 256), MACHINE, precision="bf16-mixed").compute
    mean = 4 * (256 + 128) / 2
    down, up, passed = product(mean / 2, 1024, 512), product(mean / 2, 512, 512), numbers(mean * 512 * 2)
    assert [found[key] for key in ("down.N", "down.J", "up.N", "up.J")] == pytest.approx(
        [down + passed, 2 * down + passed, up + passed, 2 * up + passed]
    )
    assert "down.N" not in costs(machine=MACHINE).compute
    halved = cluster_costs(two, Strategy(cp=2), Load(4, 256), MACHINE, precision="bf16-mixed").compute
    assert halved["down.N"] == pytest.approx(product(mean / 4, 1024, 512) + passed / 2)
    assert found["mlp.R"] == pytest.approx(product(1024, 2048, 512) * (1 + 1 / 2 + 1 / 4 + 1 / 2 + 1) / 5)
    assert found["head.N"] == pytest.approx(numbers(1024 * 512 * 5))


def test_gradients_of_a_wide_model_are_wide() -> None:
    wide = replace(BLOCK, parallel_block=False)
    found = cluster_costs(wide, Strategy(tp=2), Load(4, 256), cluster("h100"), precision="fp64")
    told = rates.collective(cluster("h100"), "all_gather", 2 * 3 * 1024 * 8, 2, 1)
    assert found.collective["head.F"] == pytest.approx(float(told))
