"""Costs on a cluster: what is counted, and how it grows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from plait.core.model.spec import ModelSpec
from plait.core.parallel.strategy import Strategy
from plait.core.step.columns.points import Points
from plait.core.step.columns.shapes import Shapes, model_of
from plait.core.step.orders.overlap import Load
from plait.core.step.seconds import rates
from plait.core.step.seconds.costs import cluster_costs
from plait.core.step.seconds.layer_time import Layer
from plait.core.step.seconds.options import Options
from plait.core.step.seconds.segment_costs import SegmentCosts, segment_costs
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


def test_matrix_products_are_those_of_the_layer() -> None:
    """C has nothing but them: the input gradient of queries, keys and values, and of gate and up."""
    machine, tokens = cluster(**QUIET), 4 * 8192
    found = costs(machine=machine).compute
    first = 4096 + 2 * 1024
    assert found["attn.C"] == pytest.approx(float(rates.matmul(machine, "bf16-mixed", tokens, first, 4096)))
    assert found["mlp.C"] == pytest.approx(float(rates.matmul(machine, "bf16-mixed", tokens, 2 * 14336, 4096)))


@pytest.mark.parametrize(
    "strategy", [{}, {"tp": 8}, {"tp": 8, "sequence_parallel": True}, {"cp": 4}, {"tp": 2, "cp": 4, "ring": 4}]
)
def test_a_layer_takes_as_long_as_the_closed_form_says(strategy: dict[str, Any]) -> None:
    """Both levels of prediction rest on constants that were fitted with the closed form."""
    machine, made = cluster(host_layer=0.0, host_collective=0.0), Strategy(**strategy)
    found = costs(batch=1, machine=machine, **strategy).compute
    point = Points.of([{**strategy, "micro": 1, "num_micro": 1}])
    layer = Layer(Shapes.of(LLAMA), point, machine, LLAMA.max_sequence, "bf16-mixed", Options())
    for kinds, want in (("NFTKR", layer.forward), ("DSGHEZCWJ", layer.backward)):
        seconds = sum(v for key, v in found.items() if key.split(".")[0] in ("attn", "mlp") and key[-1] in kinds)
        several = made.ring > 1  # kernels, one for each block that comes round
        assert seconds == pytest.approx(float(want[0]), rel=0.1 if several else 1e-9)


def test_slices_cost_more_where_products_get_narrow() -> None:
    narrow = cluster(**{**QUIET, "matmul_depth": 500.0, "matmul_wave": 1e7})
    whole, cut = costs(machine=narrow), costs(machine=narrow, tp=8, p1=4, p2=2)
    alone = costs(machine=narrow, tp=8)
    assert cut.compute["mlp.F"] > alone.compute["mlp.F"] > whole.compute["mlp.F"] / 8


def test_sequence_parallelism_cuts_norms_and_keeps_bytes() -> None:
    plain, cut = costs(tp=8), costs(tp=8, sequence_parallel=True)
    assert cut.compute["attn.N"] == pytest.approx(plain.compute["attn.N"] / 8)
    forward = cut.collective["attn.N"] + cut.collective["attn.R"]
    assert forward == pytest.approx(plain.collective["attn.R"], rel=0.1)


def test_attention_with_dropout_is_no_fused_kernel() -> None:
    dropped = replace(LLAMA, attention_dropout=0.1)
    plain, unfused = costs().compute["attn.F"], costs(dropped).compute["attn.F"]
    assert unfused > plain
    layers = [layer_of(model) for model in (LLAMA, dropped)]
    attends = [float(each.sums.forward.attention[0]) for each in layers]
    assert attends[1] > attends[0]
    assert attends[1] - attends[0] == pytest.approx(unfused - plain)
    shapes = model_of(Shapes.of(dropped))
    assert shapes.attention_dropout == 0.1


def layer_of(model: ModelSpec) -> Layer:
    """Of the same micro-batch, in closed form."""
    points = Points.of([{"micro": 4, "num_micro": 1}])
    return Layer(Shapes.of(model), points, cluster(**QUIET), model.max_sequence, "bf16-mixed", Options())


def test_what_a_host_launches_is_no_cost_of_the_processor() -> None:
    """Nor of links: a host launches beside both."""
    slow = cluster(**{**QUIET, "host_layer": 10.0, "host_collective": 1.0})
    assert costs(machine=slow, tp=2, p1=2) == costs(machine=cluster(**QUIET), tp=2, p1=2)


def test_attention_that_is_shared_sends_what_it_exchanges() -> None:
    machine = cluster(**QUIET)
    heads, ring = (costs(machine=machine, batch=1, cp=8, ring=each) for each in (1, 8))
    sent = {key for key in heads.collective if heads.collective[key]}
    assert sent == {"attn.F", "attn.K", "attn.D", "attn.G"}
    assert {key for key in ring.collective if ring.collective[key]} == {"attn.T", "attn.S", "attn.H"}
    assert heads.collective["attn.F"] == heads.collective["attn.G"] > heads.collective["attn.K"]
    assert heads.collective["attn.K"] == heads.collective["attn.D"]
    assert ring.collective["attn.T"] == ring.collective["attn.H"]
    again = [costs(machine=machine, batch=1, cp=8, ring=each, recompute="full") for each in (1, 8)]
    assert again[0].compute["attn.X"] == again[0].compute["attn.K"]
    assert again[1].compute["attn.X"] == 0.0  # what came round is kept


def test_a_u_costs_its_mean_length() -> None:
    flat = replace(U, family="gpt", levels=0)
    assert costs(U).compute["mlp.R"] == pytest.approx(costs(flat).compute["mlp.R"] * (1 + 0.5 + 1) / 3)
    assert costs(U).compute["down.J"] > costs(U).compute["down.N"] > 0


# ---- each op by hand ----


MACHINE = cluster(host_layer=0.0, host_collective=0.0)
CUT: dict[str, Any] = {"tp": 4, "p1": 2, "p2": 2}
SHARES = (2, 1)
"""Sequences of two slices of three."""


def product(m: float, k: float, n: float) -> float:
    return float(rates.matmul(MACHINE, "bf16-mixed", m, k, n))


def numbers(count: float) -> float:
    """An elementwise pass over so many."""
    return float(rates.memory_bound(MACHINE, count * 2 * MACHINE.efficiency.elementwise.value))


def moved(nbytes: float) -> float:
    return float(rates.memory_bound(MACHINE, nbytes))


def attention(share: int, heads: float, block: float, *, backward: bool, causal: bool = True, size: int = 128) -> float:
    keys = block if causal else block / 2
    shape = rates.AttentionShape(batch=share, heads=heads, queries=block, keys=keys, head_size=size, causal=causal)
    return float(rates.attention(MACHINE, "bf16-mixed", shape, backward=backward))


def sent(kind: Any, nbytes: float, ranks: int, stride: int = 1) -> float:
    return float(rates.collective(MACHINE, kind, nbytes, ranks, stride))


def over_slices(seconds: Callable[[float, int], float], length: int = 8192) -> float:
    """seconds: of a slice's tokens and its sequences."""
    return sum(seconds(share * length, share) for share in SHARES)


HIDDEN, QUERY, KV, INNER = 4096, 4096 / 4, 1024 / 4, 14336 / 4
FIRST = QUERY + 2 * KV


def turned(tokens: float) -> float:
    return numbers(tokens * FIRST * 2)


@pytest.mark.parametrize(
    ("key", "seconds"),
    [
        ("attn.N", lambda t, _: numbers(t * HIDDEN * 5)),
        ("mlp.J", lambda t, _: numbers(t * HIDDEN * 10)),
        ("attn.F", lambda t, n: product(t, HIDDEN, FIRST) + turned(t) + attention(n, 8, 8192, backward=False)),
        ("mlp.F", lambda t, _: product(t, HIDDEN, 2 * INNER) + numbers(t * INNER * 3)),
        ("attn.R", lambda t, _: 2 * product(t, QUERY, HIDDEN / 2)),
        ("mlp.R", lambda t, _: 2 * product(t, INNER, HIDDEN / 2)),
        ("attn.D", lambda t, n: product(t, HIDDEN, QUERY) + 2 * turned(t) + attention(n, 8, 8192, backward=True)),
        ("mlp.D", lambda t, _: product(t, HIDDEN, INNER) + numbers(t * INNER * 6)),
        ("attn.C", lambda t, _: 2 * product(t / 2, FIRST, HIDDEN)),
        ("mlp.C", lambda t, _: 2 * product(t / 2, 2 * INNER, HIDDEN)),
        ("attn.W", lambda t, _: product(FIRST, t, HIDDEN) + product(HIDDEN, t, QUERY)),
        ("mlp.W", lambda t, _: product(2 * INNER, t, HIDDEN) + product(HIDDEN, t, INNER)),
        ("embed.R", lambda t, _: moved(t * HIDDEN * 4)),
        ("embed.W", lambda t, _: moved(t * HIDDEN * 8)),
        ("head.F", lambda t, _: product(t, HIDDEN, 128256 / 4)),
        ("head.L", lambda t, _: moved(t * 128256 / 4 * MACHINE.efficiency.logit_bytes.value)),
        ("head.C", lambda t, _: 2 * product(t / 2, 128256 / 4, HIDDEN)),
        ("head.W", lambda t, _: product(128256 / 4, t, HIDDEN)),
        ("head.N", lambda t, _: numbers(t * HIDDEN * 5)),
        ("leave.N", lambda t, _: numbers(t * HIDDEN * 5)),
    ],
)
def test_an_op_of_every_slice(key: str, seconds: Callable[[float, int], float]) -> None:
    found = costs(batch=3, machine=MACHINE, **CUT)
    assert found.compute[key] == pytest.approx(over_slices(seconds), rel=1e-12)


@pytest.mark.parametrize(
    ("recompute", "key", "seconds"),
    [
        ("full", "attn.M", lambda t, _: numbers(t * HIDDEN * 2)),
        ("full", "attn.A", lambda t, n: product(t, HIDDEN, FIRST) + turned(t) + attention(n, 8, 8192, backward=False)),
        ("full", "mlp.A", lambda t, _: product(t, HIDDEN, 2 * INNER) + numbers(t * INNER * 3)),
        ("selective", "mlp.A", lambda t, _: numbers(t * INNER * 3)),
        ("selective", "attn.M", lambda t, _: numbers(t * HIDDEN * 2)),
    ],
)
def test_what_is_computed_again(recompute: Any, key: str, seconds: Callable[[float, int], float]) -> None:
    """Of every layer, however many of a stage's do so."""
    for layers in (None, 1):
        found = costs(batch=3, machine=MACHINE, **CUT, recompute=recompute, recompute_layers=layers)
        assert found.compute[key] == pytest.approx(over_slices(seconds), rel=1e-12)
    assert "attn.A" not in costs(batch=3, machine=MACHINE, **CUT, recompute="selective").compute


@pytest.mark.parametrize(
    ("key", "nbytes", "kind", "flat"),
    [
        ("attn.R", lambda t: [t * HIDDEN * 2 / 2] * 2, "all_reduce", False),
        ("mlp.C", lambda t: [t * HIDDEN * 2 / 2] * 2, "all_reduce", False),
        ("head.C", lambda t: [t * HIDDEN * 2 / 2] * 2, "all_reduce", False),
        ("head.F", lambda t: [4 * 3 * t * 4], "all_gather", False),
        ("embed.R", lambda t: [t * HIDDEN * 2 * 4], "all_gather", False),
        ("attn.N", lambda t: [t * HIDDEN * 2], "all_gather", True),
        ("mlp.R", lambda t: [t * HIDDEN * 2 / 2] * 2, "reduce_scatter", True),
        ("mlp.C", lambda t: [t * HIDDEN * 2], "reduce_scatter", True),
        ("mlp.J", lambda t: [t * HIDDEN * 2], "all_gather", True),
        ("leave.J", lambda t: [t * HIDDEN * 2], "all_gather", True),
    ],
)
def test_a_collective_of_every_slice(key: str, nbytes: Callable[[float], list[float]], kind: Any, flat: bool) -> None:
    found = costs(batch=3, machine=MACHINE, **CUT, sequence_parallel=flat)
    told = over_slices(lambda tokens, _: sum(sent(kind, each, 4) for each in nbytes(tokens)))
    assert found.collective[key] == pytest.approx(told, rel=1e-12)
    assert not costs(batch=3, machine=MACHINE).collective


def test_norms_of_a_cut_sequence_are_a_part() -> None:
    found = costs(batch=3, machine=MACHINE, **CUT, sequence_parallel=True).compute["attn.N"]
    assert found == pytest.approx(over_slices(lambda tokens, _: numbers(tokens * HIDDEN * 5 / 4)))


def test_attention_of_a_ring_is_of_its_own_block_and_of_halves_of_others() -> None:
    """Rings of two, of ranks that exchange heads with two others: 8 of 32 heads, 4 of 8 keys' are there."""
    found = costs(batch=1, machine=MACHINE, tp=2, cp=4, ring=2, recompute="full")
    own, other = (attention(1, 8, 4096, backward=False, causal=causal) for causal in (True, False))
    assert found.compute["attn.K"] == pytest.approx(own + other)
    back = [attention(1, 8, 4096, backward=True, causal=causal) for causal in (True, False)]
    assert found.compute["attn.G"] == pytest.approx(sum(back))
    tokens, first = 2048, 2048 + 2 * 512
    rotated = numbers(tokens * first * 2)
    assert found.compute["attn.Z"] == pytest.approx(2 * rotated)
    assert found.compute["attn.F"] == pytest.approx(product(tokens, 4096, first) + rotated)
    assert found.compute["attn.A"] == pytest.approx(product(tokens, 4096, first) + rotated)
    assert found.compute["attn.D"] == pytest.approx(product(tokens, 4096, 2048))
    assert found.compute["attn.X"] == found.compute["attn.T"] == found.compute["attn.H"] == 0
    there, block = tokens * 2 * first, tokens * 2 * 1024
    assert found.collective["attn.F"] == pytest.approx(sent("all_to_all", there * 2, 2, 2))
    assert found.collective["attn.E"] == pytest.approx(sent("all_to_all", there * 2, 2, 2))
    assert found.collective["attn.T"] == pytest.approx(sent("send", block, 2, 4))
    assert found.collective["attn.D"] == pytest.approx(sent("all_to_all", tokens * 2 * 2048 * 2, 2, 2))
    heads = costs(batch=1, machine=MACHINE, tp=2, cp=4, recompute="full").compute
    assert heads["attn.X"] == heads["attn.K"] == pytest.approx(attention(1, 4, 8192, backward=False))


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
