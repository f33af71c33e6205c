"""Draws ``docs/overlap.svg``: forward and backward of a small GPT on a tensor-parallel rank, as ``simulate``
places them.

    python docs/picture.py
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from plait.api.pictures import draw_gantt
from plait.core.base.pictures import Bar
from plait.core.model.spec import ModelSpec
from plait.core.parallel.strategy import Strategy
from plait.core.step.orders.overlap import segment_order
from plait.core.step.seconds.segment_costs import TimedAction, makespan, segment_costs, simulate
from plait.core.step.segments import SegmentGraph
from plait.core.step.stages import Stage

MODEL = ModelSpec(family="gpt", num_layers=2, hidden=768, num_heads=12, vocab=257, max_sequence=256)
BATCH, SEQUENCE = 8, 256
FLOPS, BANDWIDTH = 5e10, 5e7  # so that plain tensor parallelism computes half of the time


def main() -> None:
    """Draw it beside this file."""
    plain, sliced = _step(Strategy(tp=2, overlap="sync")), _step(Strategy(tp=2, p1=2))
    bars = [bar for name, placed in (("plain", plain), ("two slices", sliced)) for bar in _rows(name, placed)]
    title = (
        f"One training step on one of two tensor-parallel ranks: {makespan(plain) / makespan(sliced):.2f} times as fast"
    )
    draw_gantt(bars, Path(__file__).with_name("overlap.svg"), title=title, unit="s")


def _step(strategy: Strategy) -> list[TimedAction]:
    costs = segment_costs(MODEL, strategy, batch=BATCH, sequence=SEQUENCE, flops=FLOPS, bandwidth=BANDWIDTH)
    graph = SegmentGraph.of(MODEL, strategy, Stage(0, 1, 0, MODEL.num_layers))
    return simulate(graph, segment_order(graph, strategy.overlap, costs, BATCH), costs, BATCH)


def _rows(name: str, placed: Sequence[TimedAction]) -> list[Bar]:
    """Computation and network; neighbours of one segment and slice are one bar."""
    sliced = any(p.action.op.slice for p in placed)
    found: list[Bar] = []
    for row, verbs in ((f"{name}: computation", ("run", "wait")), (f"{name}: network", ("start",))):
        own = [p for p in placed if p.action.verb in verbs and p.end > p.start]
        for (label, kind), several in groupby(own, lambda p: _look(p, sliced)):
            bars = list(several)
            found.append(Bar(row, bars[0].start, bars[-1].end, label, kind))
    return found


def _look(placed: TimedAction, sliced: bool) -> tuple[str, str]:
    """Label and kind."""
    verb, op = placed.action
    if verb == "wait":
        return "", "waiting for the network"
    return (
        f"{op.site}{op.layer if op.site in ('attn', 'mlp') else ''}",
        f"slice {op.slice + 1}" if sliced else "whole batch",
    )


if __name__ == "__main__":
    main()
