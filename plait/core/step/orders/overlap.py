"""Choosing an order of segment ops in which collectives overlap computation (Domino, arXiv 2409.15241).

Orders are timed on one processor and one link (``clock.streams.ListClock``). ``domino_order`` is list
scheduling. Slices are independent chains: while one slice's collective travels, another slice computes.
Weight gradients, which nobody waits for, fill what is left. Then single ops are moved (``climb``), in many
layers at once where there are many (``repeats``).

Beyond the paper's fixed interleaving: any number of slices; weight gradients are deferred to where the
processor would idle; slices may run ahead of each other, so that one slice's compute-heavy backward overlaps
another's communication-heavy forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import frexp, ldexp

from plait.core.model.spec import ModelSpec
from plait.core.parallel.strategy import Overlap, Strategy
from plait.core.step.clock.streams import ListClock
from plait.core.step.orders.climb import Judge
from plait.core.step.orders.list_scheduling import POLICIES, ListScheduler, Policy
from plait.core.step.orders.repeats import improve_words
from plait.core.step.orders.segment_lists import async_order, fixed_order, sync_order, with_waits
from plait.core.step.schedule import PHASES
from plait.core.step.seconds.segment_costs import NumberedOps, SegmentCosts, segment_costs
from plait.core.step.segments import Action, Phase, SegmentGraph
from plait.core.step.stages import Stage

# Orders are made for collectives that are so many times slower than measured ...
ASSUMED = (1.0, 1.4, 1.75)
# ... and judged by these: a rank that is late, or a communication thread that shares its core, slows
# collectives down, by a few percent where costs are medians of several steps.
JUDGED = (1.0, 1.1)
# Weight gradients that may be outstanding per slice before they take precedence: what is outstanding keeps
# activations alive. Fewer where these are computed again, since then memory is what matters.
HELD_BACK, HELD_BACK_AGAIN = 8, 2
# Of the lists made, so many of the best are improved.
IMPROVED = 4
# Graphs of so many ops are searched whole, and those of no more layers than models of few layers may have. Of
# larger ones only so many lists are made, of about so many ops together.
SEARCHED, LEAST, MADE, VISITED = 640, 3, 8, 50_000
# Models of few layers say which: of as many as have so many ops, within bounds, and of twice as many. More
# patience than so is hardly ever the best of many layers; two tries often are, without holding back much.
SAMPLED, FEWEST, MOST = 240, 3, 6
PATIENT = 0.3
USUAL = tuple((factor, Policy(ahead=True, fill=True, patience=0.0)) for factor in (1.75, 1.4))


def segment_order(graph: SegmentGraph, overlap: Overlap, costs: SegmentCosts, batch: int) -> list[Action]:
    """The action list of an overlap mode for micro-batches of ``batch`` sequences."""
    if not graph.sends:  # nothing to hide: weight gradients at once, so that what they read can go
        return sync_order(graph)
    if overlap == "domino":
        return domino_order(graph, costs, batch)
    return _PLAIN.get(overlap, sync_order)(graph)


_PLAIN: Mapping[str, Callable[[SegmentGraph], list[Action]]] = {"async": async_order, "fixed": fixed_order}


@dataclass(frozen=True)
class SegmentLists:
    """A stage's graph, and by phase the list of its actions."""

    graph: SegmentGraph
    phases: Mapping[Phase, Sequence[Action]]


@dataclass(frozen=True)
class Load:
    """The load that lists are made for: micro-batches of ``batch`` sequences of so many tokens. costs:
    measured; None: from shapes."""

    batch: int
    sequence: int
    costs: SegmentCosts | None = None


def segment_lists(
    model: ModelSpec, strategy: Strategy, stage: Stage, load: Load, phases: Iterable[Phase], *, backward: bool = True
) -> SegmentLists:
    """The lists of a stage's phases: a function of its arguments, so that every rank makes the same.
    backward: False to evaluate."""
    graph = SegmentGraph.of(model, strategy, stage, backward=backward)
    costs = load.costs or segment_costs(model, strategy, batch=load.batch, sequence=load.sequence)
    return SegmentLists(
        graph,
        {phase: segment_order(replace(graph, phase=phase), strategy.overlap, costs, load.batch) for phase in phases},
    )


def domino_order(graph: SegmentGraph, costs: SegmentCosts, batch: int) -> list[Action]:
    """The best of a few list-scheduling policies, improved, by simulated time with collectives as measured
    and late; the first if equal.

    Where there are many layers, models of few choose the policies (``_few_tries``).
    """
    orders = _Orders(graph, costs, batch)
    if len(orders.numbered.ops) <= SEARCHED or graph.num_layers <= 2 * FEWEST:
        ranked = orders.ranked(orders.all_made(_tries(graph)))[:IMPROVED]
        best = orders.ranked(orders.improved(ranked))[0]
    else:
        best = improve_words(orders.judge, orders.fastest(_few_tries(orders)))
    return with_waits(orders.numbered, best)


_Try = tuple[float, Policy]  # how much slower collectives are assumed to be, and how the list scheduler chooses
_TRIES: tuple[_Try, ...] = tuple((factor, policy) for factor in ASSUMED for policy in POLICIES)


def _tries(graph: SegmentGraph) -> list[_Try]:
    """Tries that may differ: a slice that is alone has no other to be patient with, weight gradients fill
    nothing in a phase that has none, and alone they leave nothing to choose."""
    work = PHASES[graph.phase]
    if not (work.forward or work.input_gradient):
        return list(_TRIES[:1])
    fills = work.input_gradient and work.weight_gradient
    return [each for each in _TRIES if (graph.p1 > 1 or not each[1].patience) and (fills or each[1].fill)]


class _Orders:
    """Makes and ranks orders of a graph's ops."""

    def __init__(self, graph: SegmentGraph, costs: SegmentCosts, batch: int) -> None:
        self.numbered, self.costs, self.batch = NumberedOps(graph), costs, batch
        held_back = (HELD_BACK if graph.recompute == "none" else HELD_BACK_AGAIN) * graph.p1
        self.judge = Judge(self.numbered, [costs.late(factor) for factor in JUDGED], batch, held_back)
        self.schedulers: dict[tuple[float, bool], ListScheduler] = {}

    def made(self, each: _Try, *, exact: bool = True) -> tuple[int, ...]:
        """The order that the list scheduler makes. exact: False rounds seconds a little, so that no layer
        differs from the others in the last digit of when it begins."""
        key = each[0], exact
        if key not in self.schedulers:
            compute, wire = self.numbered.seconds(self.costs.late(each[0]), self.batch)
            if not exact:
                compute, wire = _rounded(compute, wire)
            clock = ListClock(self.numbered, compute, wire)
            self.schedulers[key] = ListScheduler(self.numbered, clock, self.judge.held_back)
        return tuple(self.schedulers[key].order(each[1]))

    def all_made(self, tries: Sequence[_Try]) -> Iterator[tuple[int, ...]]:
        """The orders that the list scheduler makes. Where the first is as short as any can be, it is the
        first of the best, too."""
        first = self.made(tries[0])
        yield first
        if not self.judge.as_good_as_any(first):
            yield from map(self.made, tries[1:])

    def improved(self, ranked: Sequence[Sequence[int]]) -> Iterator[Sequence[int]]:
        """The orders, and each after moves, up to one that is as short as any can be."""
        yield from ranked
        for order in ranked:
            yield (better := self.judge.improve(order))
            if self.judge.as_good_as_any(better):
                return

    def fastest(self, tries: Iterable[_Try]) -> Sequence[int]:
        """The best of these, or the first that is good enough; of those equally fast the one with the fewest
        weight gradients outstanding."""
        found = list[tuple[float, int, Sequence[int]]]()
        for each in tries:
            order = self.made(each, exact=False)
            seconds, outstanding = self.judge.seconds(order), self.judge.most_outstanding(order)
            found.append((self.rounded(seconds), outstanding, order))
            if seconds <= self.judge.enough and outstanding <= self.judge.held_back:
                break
        return min(found)[2]

    def rounded(self, seconds: float) -> float:
        """Seconds to a thousandth of what no order is shorter than."""
        return round(seconds / self.judge.bound, 3) if self.judge.bound else seconds

    def ranked(self, orders: Iterable[Sequence[int]]) -> list[Sequence[int]]:
        """Each once, by seconds, to a thousandth of the longest; equals as they come."""
        seconds = [(self.judge.seconds(order), order) for order in {tuple(order): None for order in orders}]
        longest = max(each for each, _ in seconds) or 1.0  # costs may all be zero
        return [order for _, order in sorted(seconds, key=lambda each: round(each[0] / longest, 3))]


def _few_tries(orders: _Orders) -> Iterator[_Try]:
    """Tries that are worth making of many layers: two that often are good enough, then those whose
    seconds for few layers, and for twice as many, extrapolate to the least for all of them."""
    graph, num_ops = orders.numbered.graph, len(orders.numbered.ops)
    count = max(LEAST, min(MADE, VISITED // num_ops))
    usual = USUAL[: 1 + (count > LEAST)]
    yield from usual
    layers = max(FEWEST, min(MOST, graph.num_layers // 2, SAMPLED * graph.num_layers // num_ops))
    tries = [each for each in _tries(graph) if each[1].patience <= PATIENT]
    less, more = (_Orders(_fewer(graph, count), orders.costs, orders.batch) for count in (layers, 2 * layers))
    found = {each: more.made(each) for each in tries}

    def expected(each: _Try) -> tuple[float, int]:
        seconds, outstanding = more.judge.seconds(found[each]), more.judge.most_outstanding(found[each])
        further = seconds - less.judge.seconds(less.made(each))
        extrapolated = seconds + further * (graph.num_layers / layers - 2)
        if extrapolated < orders.judge.bound:  # no order is so short: this is not what layers add
            return more.rounded(seconds), outstanding
        return orders.rounded(extrapolated), outstanding

    different = {order: each for each, order in reversed(found.items())}.values()  # of equals the first
    promising = sorted(different, key=lambda each: (*expected(each), tries.index(each)))
    yield from [each for each in promising if each not in usual][: count - len(usual)]


def _fewer(graph: SegmentGraph, layers: int) -> SegmentGraph:
    """The same with so many layers, of which some are recomputed and some not if it is so in the whole."""
    again = graph.recomputed
    if again is not None and 0 < again < graph.num_layers:
        again = min(layers - 1, max(1, round(again * layers / graph.num_layers)))
    return replace(graph, num_layers=layers, recomputed=again, resampling=())


def _rounded(compute: list[float], wire: list[float]) -> tuple[list[float], list[float]]:
    """Seconds as multiples of a power of two, which are added without error."""
    last = frexp(sum(compute) + sum(wire))[1] - 48
    rounded = {each: ldexp(round(ldexp(each, -last)), last) for each in {*compute, *wire}}
    return [rounded[each] for each in compute], [rounded[each] for each in wire]
