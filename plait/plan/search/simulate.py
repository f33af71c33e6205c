"""Simulation of a plan's step on a described cluster, or with costs that the plan itself contains;
and its pictures: timeline and memory of a rank of every pp rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from plait.core.base.pictures import Bar, PlotCurve
from plait.core.cluster.hardware import Cluster
from plait.core.cluster.network import Network
from plait.core.job.plan import Plan
from plait.core.model.experts import refuse_experts
from plait.core.record.records import sent_bytes
from plait.core.record.timeline import Span
from plait.core.step.clock.pipeline import Simulated, Simulation
from plait.core.step.clock.pipeline_ranks import shared_pace
from plait.core.step.clock.prices import ClusterPrices, PlacedPrices, muon_of
from plait.core.step.memory.estimate import PipelineRankMemory
from plait.core.step.memory.pipeline_memory import Peak
from plait.core.step.orders.segment_costs import BANDWIDTH, FLOPS, SegmentCosts
from plait.core.step.seconds.costs import Launches
from plait.core.step.seconds.sharding_costs import MuonPrices, Number
from plait.core.step.segments import Collective
from plait.core.step.step import PipelineRank, Step
from plait.plan.explain.memory_report import MemoryReport

OPTIMIZER_BYTES, FLOPS_A_BYTE = 40, 4
"""Optimizer cost without a described cluster. OPTIMIZER_BYTES: memory traffic of one parameter's
update; FLOPS_A_BYTE: FLOPs that one byte of it counts as."""


def simulate_plan(
    plan: Plan, cluster: Cluster | None = None, *, jitter_seed: int | None = None, placed: PlacedOn | None = None
) -> Simulated:
    """Simulate a step of ``plan`` on ``cluster``, whose nodes its ranks fill in order.

    cluster: None for the plan's own costs, measured or from shapes; proportions of the latter mean
    more than their seconds. placed: the minipods of these nodes; None: all in one. jitter_seed:
    seed of a random factor on each node's step time; a pp rank waits for its slowest node. None:
    every node takes as long as the job's slowest node does on average. Raises JobError if the
    cluster has no peak for the plan's precision.
    """
    refuse_experts(plan.model, "simulated")
    if cluster is None:
        return Simulation(plan, PlanPrices(plan), jitter_seed, lambda: plan.key).simulated
    prices = placed.prices(plan, cluster) if placed else ClusterPrices(plan, cluster)
    found = Simulation(plan, prices, jitter_seed, lambda: plan.key).simulated
    if cluster.crowd == 1.0:
        return found
    pace = shared_pace(found.simulation.run().courses, cluster.crowd)
    return Simulation(plan, replace(prices, pace=pace), jitter_seed, lambda: plan.key).simulated


@dataclass(frozen=True, kw_only=True)
class PlacedOn:
    """Placement in minipods. pods: the minipod of every host, by node rank. network: the costs of
    crossing minipods."""

    pods: tuple[int, ...]
    network: Network

    def prices(self, plan: Plan, cluster: Cluster) -> PlacedPrices:
        """Return the costs of a plan's step on a cluster."""
        return PlacedPrices(plan, cluster, pods=self.pods, network=self.network)


@dataclass(frozen=True)
class PlanPrices:
    """Costs of a plan's ops and transfers without a described cluster: measured, or derived from
    shapes."""

    plan: Plan
    slow: tuple[float, float] = (1.0, 1.0)
    buffered: bool = True
    jitter: float = 0.0
    ranks_per_node: int = 0
    step_overhead: float = 0.0

    def costs(self, pp_rank: int) -> SegmentCosts:
        """Return the seconds of a pp rank's segment ops, as the plan estimates them."""
        return self.plan.order_costs(pp_rank)

    def launches(self, pp_rank: int) -> Launches:
        """Return no launch seconds: the host's are unknown."""
        return Launches()

    def cost_class(self, pp_rank: int) -> object:
        """Return None: equal stages cost the same on all pp ranks."""
        return None

    def collective(self, kind: Collective, nbytes: float, ranks: int, stride: int, pp_rank: int | None = None) -> float:
        """Return the seconds of a collective over ``ranks`` ranks at one bandwidth."""
        return sent_bytes(kind, int(nbytes), ranks) / BANDWIDTH

    def tier(self, ranks: int, stride: int) -> int:
        """Return 0: there is one network tier."""
        return 0

    def update(self, numbers: int) -> float:
        """Return the seconds of an optimizer step over ``numbers`` parameters."""
        return numbers * OPTIMIZER_BYTES * FLOPS_A_BYTE / FLOPS

    def muon(self, pipeline_rank: PipelineRank) -> float:
        """Return the seconds to orthogonalise a pp rank's matrices, in addition to ``update``."""

        def product(m: Number, k: Number, n: Number) -> Number:
            return 2 * m * k * n / FLOPS

        def exchange(nbytes: Number, ranks: Number) -> Number:
            return sent_bytes("all_to_all", int(nbytes), int(ranks)) / BANDWIDTH

        work = self.plan.workload
        return muon_of(pipeline_rank, MuonPrices(work.matrix_steps, work.matrix_itemsize, product, exchange))

    def travel(self, source: int, target: int) -> float:
        """Return the seconds of sending all tensors one after the other, according to their reshard
        plans."""
        reshards = self.plan.reshards.get(self.plan.strategy.sequence_parallel, {})
        return sum(plan.predicted for plan in reshards.get((source, target), {}).values()) * 1e-9

    def way(self, source: int, target: int) -> int:
        """Return 1, the network tier of every transfer between stages."""
        return 1


CELLS = 1_000
"""Number of time cells in a picture; each shows the kind of op that takes most of it."""
MOST_PP_RANKS = 8
"""Largest number of pp ranks in a picture; of more, the first, the last and others at equal
distances are shown."""


def shown_pp_ranks(count: int) -> list[int]:
    """Return the pp ranks that a picture shows.

    >>> shown_pp_ranks(3), shown_pp_ranks(15)
    ([0, 1, 2], [0, 2, 4, 6, 8, 10, 12, 14])
    """
    if count <= MOST_PP_RANKS:
        return list(range(count))
    return sorted({round(at * (count - 1) / (MOST_PP_RANKS - 1)) for at in range(MOST_PP_RANKS)})


def step_bars(simulated: Simulated) -> list[Bar]:
    """Return the bars of computation and network, for the first rank of every shown pp rank, in a
    step in the middle of a run."""
    meshes = simulated.simulation.step.layout.meshes
    pp_rank_of = {meshes[pp_rank].first: pp_rank for pp_rank in shown_pp_ranks(len(meshes))}
    spans = defaultdict[tuple[int, str], list[Span]](list)
    for span in simulated.timeline((1,), tuple(pp_rank_of)).spans:
        spans[span.rank, span.lane].append(span)
    return [
        bar
        for rank, pp_rank in pp_rank_of.items()
        for lane, name in (("processor", f"pp rank {pp_rank}"), ("network", f"pp rank {pp_rank}, network"))
        for bar in _runs(spans[rank, lane], name, simulated.seconds)
    ]


def _runs(spans: Sequence[Span], row: str, seconds: float) -> Iterator[Bar]:
    """Yield bars: consecutive cells of one kind are joined."""
    each, busy = seconds / CELLS, [defaultdict[str, float](float) for _ in range(CELLS)]
    for span in spans:
        first, last = (min(CELLS - 1, int(at / each)) for at in (span.start, span.end))
        for cell in range(first, last + 1):
            shared = min(span.end, (cell + 1) * each) - max(span.start, cell * each)
            busy[cell][_kind(span)] += max(0.0, shared)
    sums = [sum(cell.values()) for cell in busy]
    least = min(each / 2, 0.99 * max(sums))  # a row of short spans keeps its longest
    told = [
        max(cell, key=lambda kind: cell[kind]) if some > least else "" for cell, some in zip(busy, sums, strict=True)
    ]
    at = 0
    for kind, cells in groupby(told):
        count = len(list(cells))
        if kind:
            yield Bar(row, at * each, (at + count) * each, "", kind)
        at += count


def _kind(span: Span) -> str:
    match span.kind:
        case "compute":
            return span.direction
        case "wait" | "idle":
            return "waiting"
        case "comm":
            return "collective"
        case _:
            return "transfer"


def memory_curves(simulated: Simulated, step: Step, report: MemoryReport, *, gpu: bool) -> list[PlotCurve]:
    """Return the memory in bytes of a rank of every shown pp rank over a step, including the
    device's overhead besides tensors. The curve has points before, at the peak of, and after every
    computation of the schedule."""
    run = simulated.simulation.run()
    found = list[PlotCurve]()
    for pp_rank in shown_pp_ranks(len(report.pp_ranks)):
        memory = report.pp_ranks[pp_rank].estimate.memory
        lasting = memory.total - memory.activations + report.pp_ranks[pp_rank].overhead
        walk, turns = PipelineRankMemory(step, pp_rank, gpu).walk(), iter(run.courses[pp_rank].turns)
        points = [(0.0, float(lasting))]
        for op in step.schedule_with_transfers.ranks[pp_rank]:
            before, walk.peak = walk.live, Peak(0, "", 0)
            walk.run([op])
            if op.computes:
                turn = next(turns)
                end = turn.start + turn.outcome.seconds * turn.scale
                points += [
                    (turn.start, float(lasting + before)),
                    ((turn.start + end) / 2, float(lasting + walk.peak.bytes)),
                    (end, float(lasting + walk.live)),
                ]
        points.append((simulated.seconds, float(lasting)))
        found.append(PlotCurve(f"pp rank {pp_rank}", points))
    return found
