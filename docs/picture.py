"""Draws ``docs/overlap.svg``: forward and backward of a small GPT on a tensor-parallel rank, simulated.

python docs/picture.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path

from plait.api.pictures import draw_gantt
from plait.core.base.pictures import Bar
from plait.core.cluster.hardware import Cluster
from plait.core.model.spec import ModelSpec
from plait.core.parallel.layout import Layout
from plait.core.parallel.strategy import Strategy
from plait.core.record.timeline import Span
from plait.core.step.orders.segment_costs import segment_costs
from plait.core.step.schedules import whole_steps
from plait.core.step.step import Step, Workload
from plait.plan.make import assemble_plan
from plait.plan.search.simulate import simulate_plan

MODEL = ModelSpec(family="gpt", num_layers=2, hidden=768, num_heads=12, vocab=257, max_sequence=256)
BATCH, SEQUENCE = 8, 256
SLOWER = 2.5
"""Links are so much slower than costs from shapes assume: plain tensor parallelism computes half of the
time."""


def main() -> None:
    """Draw it beside this file."""
    plain, sliced = _step(Strategy(tp=2, overlap="sync")), _step(Strategy(tp=2, p1=2))
    bars = [bar for name, spans in (("plain", plain), ("two slices", sliced)) for bar in _rows(name, spans)]
    gain = max(one.end for one in plain) / max(one.end for one in sliced)
    title = f"One training step on one of two tensor-parallel ranks: {gain:.2f} times as fast"
    draw_gantt(bars, Path(__file__).with_name("overlap.svg"), title=title, unit="s")


def _step(strategy: Strategy) -> Sequence[Span]:
    work = Workload(micro_batch=BATCH, num_micro_batches=1, sequence=SEQUENCE)
    step = Step.of(MODEL, work, strategy, Layout.of(tp=2), whole_steps(1))
    costs = segment_costs(MODEL, strategy, batch=BATCH, sequence=SEQUENCE).late(SLOWER)
    plan = assemble_plan(replace(step, costs=costs), Cluster.preset("a100-80").hosts)
    return simulate_plan(plan).timeline(ranks=(0,)).spans


def _rows(name: str, spans: Sequence[Span]) -> list[Bar]:
    """Computation and network; neighbours of one segment and slice are one bar."""
    sliced = any(span.slice for span in spans)
    found: list[Bar] = []
    for row, lane in ((f"{name}: computation", "processor"), (f"{name}: network", "network")):
        own = [span for span in spans if span.lane == lane and span.seconds]
        for (label, kind), several in groupby(own, lambda span: _look(span, sliced)):
            bars = list(several)
            found.append(Bar(row, bars[0].start, bars[-1].end, label, kind))
    return found


def _look(span: Span, sliced: bool) -> tuple[str, str]:
    """Label and kind."""
    if span.kind == "wait":
        return "", "waiting for the network"
    number = span.layer if span.site in ("attn", "mlp") else ""
    return f"{span.site}{number}", f"slice {span.slice + 1}" if sliced else "whole batch"


if __name__ == "__main__":
    main()
