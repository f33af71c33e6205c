"""How long finding orders of segment ops takes, and what they are worth: seconds on this machine, and the
simulated time against the lower bound (all of the computation, or all of the communication).

    python benchmarks/orders.py [--json] [--rounds 3] [--case llama-126] [--whole] [--save FILE]

Nothing runs on ranks: costs come from shapes, with a link at which communication is 0.3 to 1.5 of the
computation. Seconds are the processor's for ``segment_lists``, that is from a model to lists: the fastest of
``--rounds``, the slowest of the ratios. ``--whole`` also searches every graph whole, as graphs of few ops
are (minutes), and compares simulated times: below 1 where the found order is better.
Times are sums over collectives as measured and a tenth late, as orders are judged.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, replace
from typing import Any

from keeping import finish, keep, make_parser
from rich.console import Console
from rich.table import Table

from plait.core.model.spec import Family, ModelSpec
from plait.core.parallel.strategy import Strategy
from plait.core.step.orders import overlap
from plait.core.step.orders.climb import OrderEvaluator
from plait.core.step.orders.overlap import JUDGED, Load, SegmentLists, segment_lists
from plait.core.step.orders.segment_costs import NumberedOps, SegmentCosts, segment_costs
from plait.core.step.segments import LAYERS, Phase, SegmentGraph, needs_table
from plait.core.step.stages import Stage

BATCH, SEQUENCE = 8, 2048
RATIOS = (0.3, 0.5, 0.8, 1.0, 1.2, 1.5)
"""Communication of the layers, of their computation."""
LATENCY = 1e-3
"""Of a collective, of a layer's computation."""
SLICES = ((1, 2), (2, 1), (2, 2), (4, 1), (4, 2), (8, 2))
CASES: dict[str, tuple[Family, int]] = {
    "gpt-12": ("gpt", 12), "llama-32": ("llama", 32), "gpt-96": ("gpt", 96), "llama-126": ("llama", 126),
}  # fmt: skip
PHASES: tuple[tuple[Phase, ...], ...] = (("step",), ("F", "B"), ("F", "I", "W"))


@dataclass(frozen=True)
class Case:
    """A model cut into slices, in one phase."""

    model: ModelSpec
    strategy: Strategy
    phases: tuple[Phase, ...]

    @property
    def stage(self) -> Stage:
        """All of it."""
        return Stage(0, 1, 0, self.model.num_layers)

    def costs(self, ratio: float) -> SegmentCosts:
        """From shapes, with a link that is so slow."""
        costs = segment_costs(self.model, self.strategy, batch=BATCH, sequence=SEQUENCE)
        one = SegmentGraph.of(replace(self.model, num_layers=1), self.strategy, Stage(0, 1, 0, 1))
        ops = {(op.site, op.kind): one.collective(op) for op in one.ops() if op.site in LAYERS}
        compute = sum(costs.compute[f"{site}.{kind}"] for site, kind in ops)
        wire = sum(costs.collective[f"{site}.{kind}"] for (site, kind), sent in ops.items() if sent)
        return replace(costs.late(ratio * compute / wire), latency=LATENCY * compute)

    def lists(self, costs: SegmentCosts) -> SegmentLists:
        """As a rank makes them at its start."""
        needs_table.cache_clear()
        return segment_lists(self.model, self.strategy, self.stage, Load(BATCH, SEQUENCE, costs), self.phases)


def simulated(lists: SegmentLists, costs: SegmentCosts) -> float:
    """Seconds of a micro-batch, phase after phase; sum over the judgements."""
    found = 0.0
    for phase, actions in lists.phases.items():
        judge = judged(lists, phase, costs)
        number = {op: i for i, op in enumerate(judge.numbered.ops)}
        found += judge.seconds([number[op] for verb, op in actions if verb == "run"])
    return found


def bound(lists: SegmentLists, costs: SegmentCosts) -> float:
    """No order takes less."""
    return sum(judged(lists, phase, costs).bound for phase in lists.phases)


def judged(lists: SegmentLists, phase: Phase, costs: SegmentCosts) -> OrderEvaluator:
    """What orders of a phase are worth; waits stand where results are read."""
    graph = replace(lists.graph, phase=phase)
    return OrderEvaluator(NumberedOps(graph), [costs.late(factor) for factor in JUDGED], BATCH, held_back=0)


def measure(case: Case, rounds: int, *, whole: bool) -> dict[str, Any]:
    """Seconds and simulated times of one case, by ratio."""
    seconds, of_bound, of_whole = list[float](), list[float](), list[float]()
    for ratio in RATIOS:
        costs, taken = case.costs(ratio), list[float]()
        for _ in range(rounds):
            begun = time.process_time()
            lists = case.lists(costs)
            taken.append(time.process_time() - begun)
        seconds.append(min(taken))
        found = simulated(lists, costs)
        of_bound.append(round(found / bound(lists, costs), 4))
        if whole:
            of_whole.append(round(found / simulated(searched_whole(case, costs), costs), 4))
    return {"seconds": round(max(seconds), 3), "of_bound": of_bound} | ({"of_whole": of_whole} if whole else {})


def searched_whole(case: Case, costs: SegmentCosts) -> SegmentLists:
    """The lists that a search of every op of every layer finds."""
    kept, overlap.SEARCHED = overlap.SEARCHED, 1 << 30
    try:
        return case.lists(costs)
    finally:
        overlap.SEARCHED = kept


def measure_all(options: argparse.Namespace) -> dict[str, Any]:
    """Every model, way of cutting and division into phases."""
    rows = list[dict[str, Any]]()
    for name in options.case or CASES:
        family, layers = CASES[name]
        model = ModelSpec(
            family=family,
            num_layers=layers,
            hidden=4096,
            num_heads=32,
            vocab=32000,
            ffn_hidden=11008,
            max_sequence=2048,
        )
        for p1, p2 in SLICES:
            for phases in PHASES:
                case = Case(model, Strategy(tp=4, p1=p1, p2=p2), phases)
                row = {"case": name, "p1": p1, "p2": p2, "phases": " ".join(phases)}
                rows.append(row | measure(case, options.rounds, whole=options.whole))
    return {"ratios": RATIOS, "latency": LATENCY, "rows": rows, "slowest": max(row["seconds"] for row in rows)}


def main() -> int:
    """Measure every case; print a table, and with --json one last line for programs."""
    parser = make_parser(__doc__, rounds=3, quick=1, cases=CASES)
    parser.add_argument("--whole", action="store_true", help="compare with a search of the whole graph (slow)")
    options = parser.parse_args()
    result = measure_all(options)
    table = Table("case", "p1 x p2", "phases", "seconds", f"of bound at {', '.join(map(str, RATIOS))}", "of whole")
    for row in result["rows"]:
        shown = [" ".join(f"{each:.3f}" for each in row.get(key, ())) for key in ("of_bound", "of_whole")]
        table.add_row(row["case"], f"{row['p1']} x {row['p2']}", row["phases"], f"{row['seconds']:.3f}", *shown)
    Console(width=160).print(table)
    keep(result, options)
    return 0


if __name__ == "__main__":
    finish(main)
