"""What segment ops and their collectives cost, and how long a list of them takes.

Two resources work side by side: the processor runs one op at a time, the link carries one collective at a
time in the order in which they start. Costs come from shapes (``segment_costs``) or from measured steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from plait.core.model.spec import ModelSpec
from plait.core.model.weights import Site
from plait.core.parallel.strategy import Strategy, slice_sizes
from plait.core.record.records import EXCHANGED
from plait.core.step.segments import LAYERS, Action, SegmentGraph, SegmentOp, numbered_needs
from plait.core.step.sends import SENDS, exchanged

# FLOP/s of a rank and bytes/s of its link before anything is measured: a 2020s CPU core and 1 Gbit/s. Only
# their ratio matters, and only to the order of ops.
FLOPS, BANDWIDTH = 5e10, 1.25e8
SITES: tuple[Site, ...] = ("attn", "mlp")


@dataclass(frozen=True)
class SegmentCosts:
    """Seconds of every op and collective of one micro-batch, by ``site.kind`` for the whole batch (all
    slices, all parts).

    compute: e.g. ``{"attn.F": 0.02}``; what is missing costs nothing. collective: likewise, busy time of the
    link. latency: seconds that every collective costs beyond its share of the bytes.
    """

    compute: dict[str, float]
    collective: dict[str, float]
    latency: float = 0.0

    def late(self, factor: float) -> SegmentCosts:
        """With collectives that take so many times longer."""
        return replace(self, collective={key: seconds * factor for key, seconds in self.collective.items()})


class TimedAction(NamedTuple):
    """When the simulator puts an action: seconds from the start of the micro-batch. A wait's span is the
    exposed time."""

    action: Action
    start: float
    end: float


def segment_costs(
    model: ModelSpec,
    strategy: Strategy,
    *,
    batch: int,
    sequence: int,
    flops: float = FLOPS,
    bandwidth: float = BANDWIDTH,
    latency: float = 0.0,
    bytes_per_number: int = 4,
) -> SegmentCosts:
    """Costs from shapes: ``flops`` per second of one rank, ``bandwidth`` of its link in bytes per second and
    direction.

    Norms and joins count as memory traffic at an assumed 4 FLOPs a byte; a ring all-reduce sends 2 (tp-1)/tp
    of its bytes.
    """
    tp, tokens = strategy.tp, batch * sequence // strategy.cp
    numbers = tokens * model.hidden
    widths = {site: strategy.widths(model, site) for site in SITES}
    first, second = ({site: 2 * tokens * model.hidden * pair[at] for site, pair in widths.items()} for at in (0, 1))
    core = {"attn": 4 * tokens * sequence * widths["attn"][1] / 2, "mlp": 0.0}  # causal: half the square
    for each in (first, second, core):
        each["block"] = each["attn"] + each["mlp"]
    norm = 4.0 * bytes_per_number * 4 * numbers / (tp if strategy.sequence_parallel else 1)
    work: dict[str, float] = {"embed.R": norm / 4, "embed.W": norm / 4}
    head = 2 * tokens * model.hidden * strategy.padded_vocab(model) / tp
    work |= {"head.N": norm, "head.F": head, "head.C": head, "head.W": head, "head.J": norm}
    for site in LAYERS:
        work |= {
            f"{site}.N": norm,
            f"{site}.F": first[site] + core[site],
            f"{site}.R": second[site],
            f"{site}.J": 2 * norm,
        }
        work |= {
            f"{site}.M": norm / 2,
            f"{site}.A": core[site] + (first[site] if strategy.recompute == "full" else norm),
        }
        work |= {
            f"{site}.D": second[site] + 2.5 * core[site],
            f"{site}.C": first[site],
            f"{site}.W": first[site] + second[site],
        }
    if strategy.cp > 1:
        _share_attention(work, core["attn"], tokens * widths["attn"][0], strategy)
    share = (tp - 1) / tp * bytes_per_number / bandwidth
    whole = numbers * share * (1 if strategy.sequence_parallel else 2)
    wire = {f"{site}.{kind}": whole for site in ("embed", *LAYERS, "head") for kind in "RCNMJ"}
    wire["embed.R"] = numbers * share  # at most: as if no token occurred twice
    wire["head.F"] = 3 * 4 * tokens * (tp - 1) / bandwidth
    if strategy.cp > 1:
        held: dict[str, int] = dict(
            zip(("there", "back", "block"), exchanged(model, strategy, tokens * bytes_per_number), strict=True)
        )
        ulysses, ring = strategy.cp // strategy.ring, strategy.ring
        for send in SENDS:
            if send.axis in ("ulysses", "ring"):
                nbytes = held[send.whole]
                nbytes = nbytes * (ring - 1) if send.axis == "ring" else nbytes * (ulysses - 1) / ulysses
                wire |= {f"{site}.{kind}": nbytes / bandwidth for site in send.sites for kind in send.kinds}
    return SegmentCosts({op: value / flops for op, value in work.items()}, wire, latency)


def _share_attention(work: dict[str, float], core: float, numbers: float, strategy: Strategy) -> None:
    """Cut attention's work into the ops that it has where ranks share a sequence. numbers: queries, keys and
    values."""
    moved = 4.0 * 4 * numbers
    for site in ("attn", "block"):
        for kind, times in (("F", 1.0), ("A", 1.0), ("D", 2.5)):
            work[f"{site}.{kind}"] -= times * core
        work |= {f"{site}.K": core, f"{site}.X": core if strategy.ring == 1 else moved, f"{site}.G": 2.5 * core}
        work |= {f"{site}.{kind}": moved for kind in "HEZ"}


class Durations:
    """Seconds of single ops: costs spread over slices and parts."""

    def __init__(self, graph: SegmentGraph, costs: SegmentCosts, batch: int) -> None:
        self.graph, self.costs = graph, costs
        self.shares = [size / batch for size in slice_sizes(batch, graph.p1)]

    def compute(self, op: SegmentOp) -> float:
        """Of the processor."""
        whole = self.costs.compute.get(f"{op.site}.{op.kind}", 0.0)
        return whole * self.shares[op.slice] / self.graph.parts(op.site, op.kind)

    def collective(self, op: SegmentOp) -> float:
        """Of the link; 0 where nothing is sent."""
        if self.graph.collective(op) is None:
            return 0.0
        whole = self.costs.collective.get(f"{op.site}.{op.kind}", 0.0)
        shared = self.graph.shared(op.site)
        parts = shared.sends(op.kind) if shared and op.kind in EXCHANGED else self.graph.parts(op.site, op.kind)
        return self.costs.latency + whole * self.shares[op.slice] / parts


class NumberedOps:
    """The ops of a graph as numbers, for algorithms that look at each many times. Lists are indexed by these
    numbers.

    needs: (number, whether its collective must have ended) of all that an op needs. travels: whether a
    collective follows the op. sorts: ops that differ in nothing but the layer have the same number here.
    slices: of which slice. weight: whether it is a weight gradient.
    """

    def __init__(self, graph: SegmentGraph) -> None:
        self.graph, self.ops = graph, graph.ops()
        self.needs = numbered_needs(graph, self.ops)
        self.travels = [graph.collective(op) is not None for op in self.ops]
        self.slices, self.weight = [op.slice for op in self.ops], [op.kind == "W" for op in self.ops]
        firsts: dict[tuple[str, str, int, int, bool], int] = {}
        self.sorts = [
            firsts.setdefault((site, kind, at, part, travels), len(firsts))
            for (site, _, kind, at, part), travels in zip(self.ops, self.travels, strict=True)
        ]

    @cached_property
    def feeds(self) -> list[list[tuple[int, bool]]]:
        """Who needs an op, and whether its collective must have ended."""
        feeds: list[list[tuple[int, bool]]] = [[] for _ in self.ops]
        for i, sources in enumerate(self.needs):
            for source, collective in sources:
                feeds[source].append((i, collective))
        return feeds

    @cached_property
    def following(self) -> list[list[int]]:
        """Of those who need an op: the ones of its own slice that are no weight gradients."""
        slices, weight = self.slices, self.weight
        return [[j for j, _ in fed if not weight[j] and slices[j] == slices[i]] for i, fed in enumerate(self.feeds)]

    @cached_property
    def ranks(self) -> tuple[list[int], list[int]]:
        """Numbers in whose order the slice that is behind goes first; and the one that is further along."""
        place: dict[tuple[str, int, str, int], int] = {}
        along = [
            place.setdefault((site, layer, kind, part), len(place)) * self.graph.p1
            for site, layer, kind, _, part in self.ops
        ]
        return [a + s for a, s in zip(along, self.slices, strict=True)], [
            s - a for a, s in zip(along, self.slices, strict=True)
        ]

    def seconds(self, costs: SegmentCosts, batch: int) -> tuple[list[float], list[float]]:
        """What every op takes of the processor, and its collective of the link."""
        durations, sample = Durations(self.graph, costs, batch), dict(zip(self.sorts, self.ops, strict=True))
        compute = {sort: durations.compute(op) for sort, op in sample.items()}
        wire = {sort: durations.collective(op) for sort, op in sample.items()}
        return [compute[sort] for sort in self.sorts], [wire[sort] for sort in self.sorts]


def simulate(graph: SegmentGraph, actions: Sequence[Action], costs: SegmentCosts, batch: int) -> list[TimedAction]:
    """Run ``actions`` on the two-resource model; one TimedAction per action, the collective's own time under
    its start."""
    durations, now, link = Durations(graph, costs, batch), 0.0, 0.0
    arrival: dict[SegmentOp, float] = {}
    placed: list[TimedAction] = []
    for action in actions:
        verb, op = action
        if verb == "run":
            placed.append(TimedAction(action, now, now + durations.compute(op)))
            now = placed[-1].end
        elif verb == "start":
            begin = max(now, link)
            link = arrival[op] = begin + durations.collective(op)
            placed.append(TimedAction(action, begin, link))
        else:
            placed.append(TimedAction(action, now, max(now, arrival[op])))
            now = placed[-1].end
    return placed


def makespan(placed: Sequence[TimedAction]) -> float:
    """Seconds until the last op or collective ends."""
    return max((p.end for p in placed), default=0.0)
