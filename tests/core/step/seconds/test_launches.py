"""Seconds in which a host launches ops: of every slice, part and repeated forward, as in the closed form."""

from __future__ import annotations

from typing import Any

import pytest

from plait.core.model.spec import ModelSpec
from plait.core.parallel.strategy import Strategy
from plait.core.step.columns.points import OVERLAPS, RECOMPUTES, Points
from plait.core.step.columns.shapes import Shapes
from plait.core.step.ops import AGAIN_KINDS as AGAIN
from plait.core.step.ops import FORWARD_KINDS, LAYERS, Kind
from plait.core.step.orders.overlap import Load
from plait.core.step.seconds.costs import Launches, cluster_launches
from plait.core.step.seconds.layer_time import Layer
from plait.core.step.seconds.options import Options
from plait.core.step.segments import SegmentGraph, SegmentOp
from plait.core.step.stages import Stage
from tests.plan.machines import cluster

LLAMA = ModelSpec(
    family="llama", num_layers=1, hidden=64, num_heads=8, num_kv_heads=8, ffn_hidden=128, vocab=96, max_sequence=64
)
BLOCK = ModelSpec(family="gpt", num_layers=1, hidden=64, num_heads=8, vocab=96, max_sequence=64, parallel_block=True)
HOST = cluster(host_layer=9 * 13.0, host_collective=1.0)
"""Nine rows forward take thirteen seconds each, thirteen backward nine."""


def launches(model: ModelSpec = LLAMA, **strategy: Any) -> Launches:
    return cluster_launches(model, Strategy(**strategy), Load(4, 64), HOST, precision="bf16-mixed")


def passes(model: ModelSpec, strategy: Strategy, found: Launches) -> tuple[float, float, float]:
    """Of all ops of the layer: forward, backward, again; collectives included."""
    graph = SegmentGraph.of(model, strategy, Stage(0, 1, 0, 1))
    total = [0.0, 0.0, 0.0]
    for op in graph.ops():
        at = 0 if op.kind in FORWARD_KINDS else 2 if op.kind in AGAIN else 1
        if op.site in LAYERS:
            total[at] += found.of(op) + (found.collective if graph.collective(op) else 0.0)
        else:
            assert found.of(op) == 0.0, "only layers are counted, as in the closed form"
    return total[0], total[1], total[2]


@pytest.mark.parametrize(
    ("strategy", "told"),
    [
        ({}, (117, 117, 0)),
        ({"p1": 2}, (234, 234, 0)),
        ({"p2": 4}, (15 * 13, 19 * 9, 0)),
        ({"tp": 2}, (119, 119, 0)),
        ({"tp": 2, "p1": 4, "p2": 2}, (4 * (11 * 13 + 4), 4 * (15 * 9 + 4), 0)),
        ({"tp": 2, "p2": 2, "sequence_parallel": True}, (11 * 13 + 6, 117 + 4, 0)),
        ({"cp": 2}, (119, 119, 0)),
        ({"cp": 4, "ring": 4}, (12 * 13 + 3, 16 * 9 + 6, 0)),
        ({"recompute": "full"}, (117, 117, 7 * 13)),
        ({"recompute": "full", "p1": 2}, (234, 234, 14 * 13)),
        ({"recompute": "full", "cp": 2}, (119, 119, 7 * 13 + 2)),
        ({"recompute": "full", "cp": 2, "ring": 2}, (10 * 13 + 1, 14 * 9 + 2, 6 * 13)),
        ({"recompute": "selective"}, (117, 117, 3 * 13)),
        ({"recompute": "selective", "tp": 2, "sequence_parallel": True}, (121, 121, 13)),
    ],
    ids=str,
)
def test_every_slice_part_and_repeated_forward_is_launched(
    strategy: dict[str, Any], told: tuple[float, float, float]
) -> None:
    made = Strategy(**strategy)
    assert passes(LLAMA, made, launches(**strategy)) == pytest.approx(told)


@pytest.mark.parametrize("model", [LLAMA, BLOCK], ids=["apart", "block"])
@pytest.mark.parametrize(
    "strategy",
    [{"p1": 2, "p2": 2, "tp": 4}, {"tp": 2, "cp": 4, "ring": 2, "p1": 2}, {"cp": 4, "recompute": "full", "p1": 4}],
    ids=str,
)
def test_a_list_is_launched_as_long_as_the_closed_form_says(model: ModelSpec, strategy: dict[str, Any]) -> None:
    made = Strategy(**strategy)
    row = {
        "tp": made.tp, "cp": made.cp, "ring": made.ring, "p1": made.p1, "p2": made.p2, "micro": 4,
        "recompute": RECOMPUTES.index(made.recompute), "overlap": OVERLAPS.index("sync"),
    }  # fmt: skip
    one = Layer(Shapes.of(model), Points.of([row]), HOST, 64, "bf16-mixed", Options())
    runs = [
        one.forward + one.tp_forward + one.cp_forward, one.backward + one.tp_backward + one.cp_backward,
        one.again + one.tp_again + one.cp_again,
    ]  # fmt: skip
    late = (one.late_forward, one.late_backward, one.late_again)
    told = [float((lag + run)[0]) for lag, run in zip(late, runs, strict=True)]
    assert passes(model, made, launches(model, **strategy)) == pytest.approx(told)


def test_parts_of_an_op_are_launched_alike() -> None:
    found = launches(tp=2, p1=2, p2=4, cp=2, ring=2)
    assert found.of(SegmentOp("attn", 3, Kind.SECOND, 1, 3)) == 13.0  # one product
    assert found.of(SegmentOp("attn", 0, Kind.CORE, 0, 1)) == 13.0  # one kernel a block
    assert found.of(SegmentOp("attn", 0, Kind.FIRST_GRAD, 0)) == 9.0
    assert found.of(SegmentOp("attn", 0, Kind.WEIGHT_GRAD, 0, 1)) == 9.0
    assert found.of(SegmentOp("attn", 0, Kind.ROTATE, 0)) == 0.0  # nothing but its collective
    assert found.collective == 1.0
    assert (Launches().of(SegmentOp("mlp", 0, Kind.FIRST, 0)), Launches().collective) == (0.0, 0.0)


def test_captured_graphs_launch_nothing_but_collectives() -> None:
    """What is captured lies between two collectives, which the host starts (docs/adr/0038)."""
    rows: list[dict[str, Any]] = [{}, {"tp": 2, "p1": 2}, {"cp": 2, "recompute": "full"}]
    for strategy in rows:
        made = Strategy(**strategy, cuda_graphs=True)
        assert not any(launches(**strategy, cuda_graphs=True).ops.values())
        sent = passes(LLAMA, made, Launches(collective=1.0))
        assert passes(LLAMA, made, launches(**strategy, cuda_graphs=True)) == sent
