"""Costs on a cluster: what is counted, and how it grows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from plait.core.model import ModelSpec
from plait.core.overlap import Load
from plait.core.segment_costs import SegmentCosts, segment_costs
from plait.core.strategy import Strategy
from plait.plan import rates
from plait.plan.costs import cluster_costs
from plait.plan.layer_time import Layer, Options
from plait.plan.loose_model import model_of
from plait.plan.points import Points
from plait.plan.shapes import Shapes
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


def test_a_device_is_never_faster_than_its_host() -> None:
    found = costs(machine=cluster(**{**QUIET, "host_layer": 10.0}), p1=2).compute
    layer = sum(value for key, value in found.items() if key.split(".")[0] in ("attn", "mlp") and key[-1] in "NFR")
    assert layer == pytest.approx(20.0)


def test_attention_with_dropout_is_no_fused_kernel() -> None:
    dropped = replace(LLAMA, attention_dropout=0.1)
    plain, unfused = costs().compute["attn.F"], costs(dropped).compute["attn.F"]
    assert unfused > plain
    layers = [layer_of(model) for model in (LLAMA, dropped)]
    assert layers[1].attention_forward.item() > layers[0].attention_forward.item()
    assert (layers[1].attention_forward - layers[0].attention_forward).item() == pytest.approx(unfused - plain)
    shapes = model_of(Shapes.of(dropped))
    assert shapes.attention_dropout == 0.1


def layer_of(model: ModelSpec) -> Layer:
    """Of the same micro-batch, in closed form."""
    points = Points.of([{"micro": 4, "num_micro": 1}])
    return Layer(Shapes.of(model), points, cluster(**QUIET), model.max_sequence, "bf16-mixed", Options())


@pytest.mark.parametrize(
    ("strategy", "launched", "exposed"),
    [
        ({}, 10.0, (0.0, 0.0)),
        ({"p1": 2}, 20.0, (0.0, 0.0)),
        ({"tp": 2, "overlap": "sync"}, 12.0, (1.0, 1.0)),
        ({"tp": 2, "overlap": "none"}, 12.0, (0.0, 0.0)),
        ({"tp": 2, "overlap": "async"}, 12.0, (1.0, 0.0)),
        ({"tp": 2, "p1": 2, "p2": 2}, 24.0, (0.25, 0.25)),
        ({"cp": 2}, 10.0, (1.0, 1.0)),
    ],
)
def test_collectives_take_the_host_time_and_give_it_some(
    strategy: dict[str, Any], launched: float, exposed: tuple[float, float]
) -> None:
    """Launches of two collectives a layer and direction where tensors are split; what of a collective nothing
    hides is time in which the host gets ahead."""
    slow = cluster(**{**QUIET, "host_layer": 10.0, "host_collective": 1.0}, rates=0.01)
    made = {"overlap": "sync", **strategy} if "cp" in strategy else strategy
    found = costs(machine=slow, **made)
    for kinds, share in zip(("NFTKR", "DSGHEZCWJ"), exposed, strict=True):
        device, sent = (
            sum(each for key, each in table.items() if key.split(".")[0] in ("attn", "mlp") and key[-1] in kinds)
            for table in (found.compute, found.collective)
        )
        assert (sent > 0.01) == bool({"tp", "cp"} & set(strategy))
        assert device == pytest.approx(launched - share * sent, rel=1e-9)


def test_a_host_that_keeps_up_costs_nothing() -> None:
    quick = cluster(**{**QUIET, "host_layer": 1e-6, "host_collective": 1e-6})
    assert costs(machine=quick, tp=2).compute == costs(machine=cluster(**QUIET), tp=2).compute


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
