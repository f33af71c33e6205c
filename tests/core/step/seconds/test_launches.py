"""Seconds in which a host launches ops: of every slice, part and repeated forward, as in the closed
form."""

from __future__ import annotations

from typing import Any

import pytest

from plait.core.model.spec import ModelSpec
from plait.core.parallel.strategy import Strategy
from plait.core.step.columns.points import OVERLAPS, RECOMPUTES, StrategyTable
from plait.core.step.columns.shapes import Options, Shapes
from plait.core.step.ops import AGAIN_KINDS as AGAIN
from plait.core.step.ops import FORWARD_KINDS, LAYERS
from plait.core.step.orders.overlap import Load
from plait.core.step.seconds.costs import Launches, cluster_launches
from plait.core.step.seconds.layer_time import Layer
from plait.core.step.segments import SegmentGraph
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
    one = Layer(Shapes.of(model), StrategyTable.of([row]), HOST, 64, "bf16-mixed", Options())
    runs = [
        one.forward + one.tp_forward + one.cp_forward, one.backward + one.tp_backward + one.cp_backward,
        one.again + one.tp_again + one.cp_again,
    ]  # fmt: skip
    late = (one.late_forward, one.late_backward, one.late_again)
    told = [float((lag + run)[0]) for lag, run in zip(late, runs, strict=True)]
    assert passes(model, made, launches(model, **strategy)) == pytest.approx(told)


def test_captured_graphs_launch_nothing_but_collectives() -> None:
    """What is captured lies between two collectives, which the host starts (docs/adr/0038)."""
    rows: list[dict[str, Any]] = [{}, {"tp": 2, "p1": 2}, {"cp": 2, "recompute": "full"}]
    for strategy in rows:
        made = Strategy(**strategy, cuda_graphs=True)
        assert not any(launches(**strategy, cuda_graphs=True).ops.values())
        sent = passes(LLAMA, made, Launches(collective=1.0))
        assert passes(LLAMA, made, launches(**strategy, cuda_graphs=True)) == sent
