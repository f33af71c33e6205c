"""Lists of segment actions: their text form, their legality, the plain orders, and orders in which
collectives overlap computation (Domino, arXiv 2409.15241).

>>> actions = sync_order(SegmentGraph(num_layers=1, p1=2))
>>> parse(" ".join(map(str, actions))) == actions
True

Orders are timed on one processor and one link (``orders.streams.ListClock``). ``domino_order`` is
list scheduling. Slices are independent chains: while one slice's collective is in flight, another
slice computes. Weight gradients, which no op of the chains needs, fill the gaps. Then single ops
are moved (``climb``), in many layers at once in large graphs (``improve_words``).

Beyond the paper's fixed interleaving: any number of slices; weight gradients are deferred to
moments when the processor would idle; slices may run ahead of each other, so that one slice's
compute-heavy backward overlaps another's communication-heavy forward.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby
from math import frexp, ldexp
from typing import cast

from plait.core.base.errors import ScheduleError
from plait.core.model.spec import ModelSpec
from plait.core.parallel.strategy import Overlap, Strategy, slice_sizes
from plait.core.step.attention_ops import OVERLAPS_OWN_BLOCK
from plait.core.step.orders.climb import OrderEvaluator, improve_words
from plait.core.step.orders.segment_costs import NumberedOps, SegmentCosts, segment_costs
from plait.core.step.orders.streams import POLICIES, ListClock, ListScheduler, Policy
from plait.core.step.schedule import PHASES
from plait.core.step.segments import (
    LAYERS,
    SIGNS,
    Action,
    Kind,
    Phase,
    SegmentGraph,
    SegmentOp,
    Site,
    Verb,
    needs_table,
)
from plait.core.step.stages import Stage

_VERBS = {sign: verb for verb, sign in SIGNS.items()}
_WORD = re.compile(
    rf"([<>]?)(?:(attn|mlp|block|down|up)(\d+)|(embed|enter|head|leave))\.({'|'.join(Kind)})(\d+)(?:\.(\d+))?"
)


def parse(text: str) -> list[Action]:
    """Return the actions of a text form. Raises ScheduleError naming a word that is not an
    action."""
    actions: list[Action] = []
    for word in text.split():
        match = _WORD.fullmatch(word)
        if not match:
            raise ScheduleError(f"'{word}' is not a segment action; examples are attn3.F0, >mlp0.R1.1 and <head.C0")
        sign, site, layer, end, kind, at, part = match.groups()
        op = SegmentOp(cast(Site, site or end), int(layer or 0), Kind(kind), int(at), int(part or 0))
        actions.append(Action(cast(Verb, _VERBS[sign]), op))
    return actions


def check(graph: SegmentGraph, actions: Sequence[Action]) -> None:
    """Raise ScheduleError, naming the op, unless ``actions`` runs the whole graph legally.

    Every op must run once, after its dependencies. Every collective must start after its op, be
    awaited once, and be awaited before any op reads its result.
    """
    needs = needs_table(graph)
    done: dict[Verb, set[SegmentOp]] = {"run": set(), "start": set(), "wait": set()}
    for verb, op in actions:
        if op not in needs:
            raise ScheduleError(
                f"{op} does not exist in phase {graph.phase} of {graph.num_layers} layers, "
                f"p1 = {graph.p1}, p2 = {graph.p2}"
            )
        if op in done[verb]:
            raise ScheduleError(f"{Action(verb, op)} occurs twice")
        if verb == "run":
            for need in needs[op]:
                if need.op not in done["run"]:
                    raise ScheduleError(f"{op} runs before {need.op}, which it needs")
                if need.collective and need.op not in done["wait"]:
                    raise ScheduleError(f"{op} reads the result of {need.op} before its collective is awaited")
        elif graph.collective(op) is None:
            raise ScheduleError(f"{Action(verb, op)}: {op} has no collective")
        elif op not in done["run" if verb == "start" else "start"]:
            raise ScheduleError(f"{Action(verb, op)} is listed before {'its op' if verb == 'start' else 'its start'}")
        done[verb].add(op)
    _check_complete(graph, done)


def _check_complete(graph: SegmentGraph, done: dict[Verb, set[SegmentOp]]) -> None:
    for op in graph.ops():
        if op not in done["run"]:
            raise ScheduleError(f"{op} never runs")
        if graph.collective(op) and op not in done["wait"]:
            raise ScheduleError(f"the collective of {op} is never {'awaited' if op in done['start'] else 'started'}")


def sync_order(graph: SegmentGraph) -> list[Action]:
    """Return the list of plain tensor parallelism: every collective is awaited where it starts."""
    actions: list[Action] = []
    for op in graph.ops():
        actions.append(Action("run", op))
        if graph.collective(op):
            actions += [Action("start", op), Action("wait", op)]
    return actions


def async_order(graph: SegmentGraph) -> list[Action]:
    """Return the list of Megatron-LM's overlap: a backward collective overlaps only its own
    sublayer's weight gradients. A ring's transfer of the next keys and values overlaps attention to
    the present block."""
    return insert_waits(
        graph, graph.ops(), late=lambda op: op.kind == Kind.COLUMN_DGRAD or op.kind in OVERLAPS_OWN_BLOCK
    )


def fixed_order(graph: SegmentGraph) -> list[Action]:
    """Return the list of Domino's own interleaving (arXiv 2409.15241, sections 4.1.1 and 4.1.2,
    figures 7 and 8).

    Slices take turns segment by segment, and a collective is awaited where its result is read. An
    input's gradient comes before the weight's. The backward of a segment's norm comes after all
    slices, so that a slice's reduction overlaps the computation of the others.
    """
    turns = groupby(graph.ops(), key=lambda op: (op.site, op.layer, op.forward))
    return insert_waits(graph, [op for _, each in turns for op in sorted(each, key=_joins)])


def _joins(op: SegmentOp) -> bool:
    return op.kind == Kind.NORM_BACKWARD


def insert_waits(
    graph: SegmentGraph, order: Iterable[SegmentOp], late: Callable[[SegmentOp], bool] = lambda _: True
) -> list[Action]:
    """Return the actions for an order of ops.

    A collective starts right after its op. It is awaited just before the first op that reads its
    result, so that it overlaps the computation in between. If ``late`` returns False for the op, it
    is awaited at once. A collective that no op of this phase reads is awaited at the end of the
    list.
    """
    numbered = NumberedOps(graph)
    number = {op: i for i, op in enumerate(numbered.ops)}
    return with_waits(numbered, [number[op] for op in order], late)


def with_waits(
    numbered: NumberedOps, order: Iterable[int], late: Callable[[SegmentOp], bool] = lambda _: True
) -> list[Action]:
    """Return the actions of ``insert_waits`` for op numbers."""
    ops, needs, travels = numbered.ops, numbered.needs, numbered.travels
    pending: dict[int, None] = {}  # started and not awaited, in the order in which they started
    actions: list[Action] = []
    for i in order:
        for source, collective in needs[i]:
            if collective and source in pending:
                del pending[source]
                actions.append(Action("wait", ops[source]))
        actions.append(Action("run", ops[i]))
        if travels[i]:
            actions.append(Action("start", ops[i]))
            if late(ops[i]):
                pending[i] = None
            else:
                actions.append(Action("wait", ops[i]))
    return actions + [Action("wait", ops[source]) for source in pending]


# Factors by which collectives are assumed slower than measured when orders are made ...
ASSUMED = (1.0, 1.4, 1.75)
# ... and when orders are compared: a late rank, or a communication thread that shares its core, slows
# collectives down, by a few percent if costs are medians of several steps.
JUDGED = (1.0, 1.1)
# Weight gradients that may be outstanding per slice before they take precedence: outstanding ones keep
# activations alive. Fewer with recomputation, since memory matters more then.
HELD_BACK, HELD_BACK_AGAIN = 8, 2
# How many of the best lists are improved.
IMPROVED = 4
# Graphs of at most SEARCHED ops, or of at most 2 * FEWEST layers, are searched whole. For larger graphs
# between LEAST and MADE lists are made, of about VISITED ops together.
SEARCHED, LEAST, MADE, VISITED = 640, 3, 8, 50_000
# Graphs of few layers select the tries: of about SAMPLED ops, within bounds, and of twice as many layers.
# More patience than PATIENT is rarely best for many layers; the two USUAL tries often are, with few
# outstanding weight gradients.
SAMPLED, FEWEST, MOST = 240, 3, 6
PATIENT = 0.3
USUAL = tuple((factor, Policy(ahead=True, fill=True, patience=0.0)) for factor in (1.75, 1.4))


def segment_order(graph: SegmentGraph, overlap: Overlap, costs: SegmentCosts, batch: int) -> list[Action]:
    """Return the action list of an overlap mode for micro-batches of ``batch`` sequences."""
    if not graph.sends:  # nothing to overlap: weight gradients run at once, which frees their operands
        return sync_order(graph)
    order = domino_order(graph, costs, batch) if overlap == "domino" else _PLAIN.get(overlap, sync_order)(graph)
    routed = graph.experts
    if routed is None or not routed.awaited:
        return order
    return awaited_at_once(order, lambda op: op.site == "moe" and routed.collective(op.kind) is not None)


def awaited_at_once(actions: Iterable[Action], which: Callable[[SegmentOp], bool]) -> list[Action]:
    """Return the actions with collectives of some ops awaited where they start."""
    found: list[Action] = []
    for action in actions:
        if not which(action.op) or action.verb == "run":
            found.append(action)
        elif action.verb == "start":
            found += [action, Action("wait", action.op)]
    return found


_PLAIN: Mapping[str, Callable[[SegmentGraph], list[Action]]] = {"async": async_order, "fixed": fixed_order}


@dataclass(frozen=True)
class SegmentLists:
    """A stage's graph, and the list of actions of each phase."""

    graph: SegmentGraph
    phases: Mapping[Phase, Sequence[Action]]


@dataclass(frozen=True)
class Load:
    """The load that lists are ordered for: micro-batches of ``batch`` sequences of ``sequence``
    tokens. costs: measured; None: estimated from shapes."""

    batch: int
    sequence: int
    costs: SegmentCosts | None = None


def segment_lists(
    model: ModelSpec, strategy: Strategy, stage: Stage, load: Load, phases: Iterable[Phase], *, backward: bool = True
) -> SegmentLists:
    """Return the lists of a stage's phases. They depend only on the arguments, so that every rank
    makes the same lists. backward: False for evaluation."""
    graph = SegmentGraph.of(model, strategy, stage, backward=backward)
    costs = load.costs or segment_costs(model, strategy, batch=load.batch, sequence=load.sequence)
    return SegmentLists(
        graph,
        {phase: segment_order(replace(graph, phase=phase), strategy.overlap, costs, load.batch) for phase in phases},
    )


def domino_order(graph: SegmentGraph, costs: SegmentCosts, batch: int) -> list[Action]:
    """Return the best of a few list-scheduling policies after improvement, by simulated time with
    measured and slowed collectives. Of equally fast lists the first wins.

    For graphs of many layers, graphs of few layers select the policies (``_few_tries``).
    """
    orders = _Orders(graph, costs, batch)
    if len(orders.numbered.ops) <= SEARCHED or graph.num_layers <= 2 * FEWEST:
        ranked = orders.ranked(orders.all_made(_tries(graph)))[:IMPROVED]
        best = orders.ranked(orders.improved(ranked))[0]
    else:
        best = improve_words(orders.judge, orders.fastest(_few_tries(orders)))
    return with_waits(orders.numbered, best)


_Try = tuple[float, Policy]  # assumed slowdown of collectives, and the list scheduler's policy
_TRIES: tuple[_Try, ...] = tuple((factor, policy) for factor in ASSUMED for policy in POLICIES)


def _tries(graph: SegmentGraph) -> list[_Try]:
    """Return the tries that can differ. A single slice needs no patience; a phase without weight
    gradients has nothing to fill gaps with; weight gradients alone leave no choice."""
    work = PHASES[graph.phase]
    if not (work.forward or work.input_gradient):
        return list(_TRIES[:1])
    fills = work.input_gradient and work.weight_gradient
    return [each for each in _TRIES if (graph.p1 > 1 or not each[1].patience) and (fills or each[1].fill)]


class _Orders:
    """The search for orders of a graph's ops."""

    def __init__(self, graph: SegmentGraph, costs: SegmentCosts, batch: int) -> None:
        self.numbered, self.costs, self.batch = NumberedOps(graph), costs, batch
        held_back = (HELD_BACK if graph.recompute == "none" else HELD_BACK_AGAIN) * graph.p1
        self.judge = OrderEvaluator(self.numbered, [costs.late(factor) for factor in JUDGED], batch, held_back)
        self.schedulers: dict[tuple[float, bool], ListScheduler] = {}

    def made(self, each: _Try, *, exact: bool = True) -> tuple[int, ...]:
        """Return the list scheduler's order of op numbers for one try (a policy with its costs).
        exact: False rounds seconds to a coarse grid, so that rounding errors make no layer's start
        differ from the others'."""
        key = each[0], exact
        if key not in self.schedulers:
            compute, wire = self.numbered.seconds(self.costs.late(each[0]), self.batch)
            if not exact:
                compute, wire = _rounded(compute, wire)
            clock = ListClock(self.numbered, compute, wire)
            self.schedulers[key] = ListScheduler(self.numbered, clock, self.judge.held_back)
        return tuple(self.schedulers[key].order(each[1]))

    def all_made(self, tries: Sequence[_Try]) -> Iterator[tuple[int, ...]]:
        """Yield the list scheduler's orders. If the first order is as short as possible, no other
        is made."""
        first = self.made(tries[0])
        yield first
        if not self.judge.as_good_as_any(first):
            yield from map(self.made, tries[1:])

    def improved(self, ranked: Sequence[Sequence[int]]) -> Iterator[Sequence[int]]:
        """Yield each order, then each after hill-climbing moves, up to one that is as short as
        possible."""
        yield from ranked
        for order in ranked:
            yield (better := self.judge.improve(order))
            if self.judge.as_good_as_any(better):
                return

    def fastest(self, tries: Iterable[_Try]) -> Sequence[int]:
        """Return the fastest order of ``tries``, or the first that is good enough. Of equally fast
        orders, the one with the fewest outstanding weight gradients wins."""
        found = list[tuple[float, int, Sequence[int]]]()
        for each in tries:
            order = self.made(each, exact=False)
            seconds, outstanding = self.judge.seconds(order), self.judge.most_outstanding(order)
            found.append((self.rounded(seconds), outstanding, order))
            if seconds <= self.judge.enough and outstanding <= self.judge.held_back:
                break
        return min(found)[2]

    def rounded(self, seconds: float) -> float:
        """Return an order's seconds relative to the lower bound, rounded to a thousandth."""
        return round(seconds / self.judge.bound, 3) if self.judge.bound else seconds

    def ranked(self, orders: Iterable[Sequence[int]]) -> list[Sequence[int]]:
        """Return each distinct order once, by seconds rounded to a thousandth of the longest; ties
        keep their order."""
        seconds = [(self.judge.seconds(order), order) for order in {tuple(order): None for order in orders}]
        longest = max(each for each, _ in seconds) or 1.0  # costs may all be zero
        return [order for _, order in sorted(seconds, key=lambda each: round(each[0] / longest, 3))]


def _few_tries(orders: _Orders) -> Iterator[_Try]:
    """Yield tries that are worth making for many layers. First come one or two that are often good
    enough. Then come those whose seconds for few layers, and for twice as many, extrapolate to the
    least for all layers."""
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
        if extrapolated < orders.judge.bound:  # below the bound: the extrapolation is wrong
            return more.rounded(seconds), outstanding
        return orders.rounded(extrapolated), outstanding

    different = {order: each for each, order in reversed(found.items())}.values()  # of equal orders the first
    promising = sorted(different, key=lambda each: (*expected(each), tries.index(each)))
    yield from [each for each in promising if each not in usual][: count - len(usual)]


def _fewer(graph: SegmentGraph, layers: int) -> SegmentGraph:
    """Return the graph with ``layers`` layers, some recomputed and some not if that holds for the
    whole graph."""
    again = graph.recomputed
    if again is not None and 0 < again < graph.num_layers:
        again = min(layers - 1, max(1, round(again * layers / graph.num_layers)))
    routed = graph.experts
    if routed:
        sampled = [graph.first_layer + at * graph.num_layers // layers for at in range(layers)]
        kept = tuple(graph.first_layer + at for at, layer in enumerate(sampled) if layer in routed.layers)
        routed = replace(routed, layers=kept)
    return replace(graph, num_layers=layers, recomputed=again, resampling=(), experts=routed)


def _rounded(compute: list[float], wire: list[float]) -> tuple[list[float], list[float]]:
    """Return (compute, wire) seconds rounded to multiples of a power of two, whose sums are
    exact."""
    last = frexp(sum(compute) + sum(wire))[1] - 48
    rounded = {each: ldexp(round(ldexp(each, -last)), last) for each in {*compute, *wire}}
    return [rounded[each] for each in compute], [rounded[each] for each in wire]


# ---- cached lists ----


ScaledCosts = tuple[tuple[str, float], ...]


def known_order(graph: SegmentGraph, overlap: Overlap, costs: SegmentCosts, batch: int) -> Sequence[Action]:
    """Return the list of ``segment_order``, cached. Stages of equal layers share one list, and so
    do costs that differ only by a power of two."""
    first = 0 if graph.resampling else graph.first_layer
    sizes = slice_sizes(batch, graph.p1)
    alike = graph.p1 if len(set(sizes)) == 1 else batch  # with equal slices the size does not matter
    ordered = _ordered(graph.moved(-first), overlap, *_scaled(costs), alike)
    return [later(one, first) for one in ordered] if first else ordered


@lru_cache(maxsize=256)
def _ordered(
    graph: SegmentGraph, overlap: Overlap, compute: ScaledCosts, collective: ScaledCosts, latency: float, batch: int
) -> Sequence[Action]:
    return segment_order(graph, overlap, SegmentCosts(dict(compute), dict(collective), latency), batch)


def later(action: Action, layers: int) -> Action:
    """Return the same action in layers whose numbers are higher by ``layers``."""
    verb, op = action
    return Action(verb, op._replace(layer=op.layer + layers)) if layers and op.site in LAYERS else action


def _scaled(costs: SegmentCosts) -> tuple[ScaledCosts, ScaledCosts, float]:
    """Return the costs in units of a power of two, by which division is exact."""
    largest = max([*costs.compute.values(), *costs.collective.values(), costs.latency], default=0.0)
    power = -frexp(largest)[1]

    def scale(seconds: dict[str, float]) -> ScaledCosts:
        return tuple((key, ldexp(value, power)) for key, value in seconds.items())

    return scale(costs.compute), scale(costs.collective), ldexp(costs.latency, power)
