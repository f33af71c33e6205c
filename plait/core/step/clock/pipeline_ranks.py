"""The pp ranks of a step as the simulation models them: the instruction lists of their stages with
costs, and their timelines through a step, with seconds by axis.

Pp ranks that differ only in their layers do the same work, so they share lists and everything
computed from them. Stages of one pp rank or of several share too: each kind of stage is listed and
costed once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from plait.core.parallel.sharding import Unit
from plait.core.step.clock.inside import PhaseSimulator
from plait.core.step.clock.phase import (
    Compute,
    Outcome,
    Price,
    Programme,
    Rules,
    Start,
    State,
    UnitPrices,
    UnitStep,
    Wait,
)
from plait.core.step.clock.pipeline_clock import RankClock
from plait.core.step.clock.prices import Prices
from plait.core.step.orders.overlap import known_order, later
from plait.core.step.orders.segment_costs import Durations, SegmentCosts
from plait.core.step.schedule import Op, Transfer
from plait.core.step.seconds.costs import Launches
from plait.core.step.segments import LAYERS, Action, Collective, Phase, SegmentGraph, SegmentOp
from plait.core.step.step import PipelineRank
from plait.core.step.traffic import Sent, UnitAction, UnitTraffic, with_units

Listed = Sequence[Action | UnitAction]


@dataclass(frozen=True)
class PipelineRankLists:
    """Instruction lists of pp ranks of one kind. pipeline_rank: the first of the kind. known: cache
    of costed lists of the step's stages, at any pp rank, by kind of stage; units are numbered
    within the stage."""

    pipeline_rank: PipelineRank
    prices: Prices
    known: dict[object, Programme] = field(default_factory=dict[object, Programme], repr=False, compare=False)
    _listed: dict[tuple[int, Phase], Listed] = field(
        default_factory=dict[tuple[int, Phase], Listed], init=False, repr=False, compare=False
    )

    def listed(self, at: int, phase: Phase) -> Listed:
        """Return the instruction list of a stage and phase, with the gathers and reductions of its
        sharded units. at: index of the stage on its pp rank."""
        if (at, phase) not in self._listed:
            pipeline_rank, graph = self.pipeline_rank, replace(self.pipeline_rank.graph(at), phase=phase)
            found = known_order(graph, pipeline_rank.strategy.overlap, self._order_costs, pipeline_rank.share)
            found = (
                with_units(graph, found, pipeline_rank.held[at], pipeline_rank.strategy)
                if pipeline_rank.units
                else found
            )
            self._listed[at, phase] = found
        return self._listed[at, phase]

    def of(self, other: PipelineRank, at: int, phase: Phase) -> Listed:
        """Return the list of another pp rank of the same kind: the same actions for that rank's
        layers. at: index of the stage there."""
        here, there = self.pipeline_rank.stages[at].first_layer, other.stages[at].first_layer
        actions = self.listed(at, phase)
        return [one if isinstance(one, UnitAction) else later(one, there - here) for one in actions]

    @cached_property
    def _order_costs(self) -> SegmentCosts:
        """Seconds of segment ops by which list scheduling orders the lists."""
        return self.pipeline_rank.step.order_costs(self.pipeline_rank.index)

    @cached_property
    def inside(self) -> PhaseSimulator:
        """The simulator of these instruction lists, with costs; cached."""
        pipeline_rank, prices, strategy = self.pipeline_rank, self.prices, self.pipeline_rank.strategy
        rules = Rules(
            prices.slow,
            prices.tier(strategy.tp, 1),
            forward=strategy.hides_shards(forward=True),
            backward=strategy.hides_shards(forward=False),
            sent=strategy.overlap != "no-communication",
        )
        programmes = {key: self._programme(*key) for key in pipeline_rank.phases}
        prices = {(one.unit[0], one.numel): one for one in pipeline_rank.units}  # units equal in this key cost the same
        found = {kind: self._unit_prices(one) for kind, one in prices.items()}
        return PhaseSimulator(programmes, [found[one.unit[0], one.numel] for one in pipeline_rank.units], rules)

    @cached_property
    def _costs(self) -> SegmentCosts:
        """Seconds of segment ops by which the simulation prices the lists."""
        return self.prices.costs(self.pipeline_rank.index)

    @cached_property
    def _launches(self) -> Launches:
        """Launch seconds of the host."""
        return self.prices.launches(self.pipeline_rank.index)

    def _tier(self, kind: Collective | None) -> int | None:
        """Return the number of the network tier that attention's context-parallel collectives use;
        None for other collectives."""
        strategy = self.pipeline_rank.strategy
        ulysses = strategy.cp // strategy.ring
        ways = {"all_to_all": (ulysses, strategy.tp), "rotate": (strategy.ring, strategy.tp * ulysses)}
        return self.prices.tier(*ways[kind]) if kind in ways else None

    def _programme(self, at: int, phase: Phase) -> Programme:
        """Return the list of a stage with costs, and with the pp rank's numbers of its units."""
        key = self._kind(at, phase)
        if key not in self.known:
            self.known[key] = self._priced(at, self.listed(at, phase))
        own = [self._numbers.get(unit, -1) for unit in self.pipeline_rank.held[at]]
        return [
            step._replace(unit=own[step.unit]) if isinstance(step, UnitStep) and step.unit >= 0 else step
            for step in self.known[key]
        ]

    def _kind(self, at: int, phase: Phase) -> object:
        """Return a key that is equal for stages that do the same work, whichever layers they
        hold."""
        pipeline_rank, mesh, graph = self.pipeline_rank, self.pipeline_rank.mesh, self.pipeline_rank.graph(at)
        first = 0 if graph.resampling else graph.first_layer  # else layers differ
        held = [
            (unit[0], unit[1] - first if unit[0] in LAYERS else 0, size)
            for unit, size in pipeline_rank.held[at].items()
        ]
        alike = self.prices.cost_class(pipeline_rank.index)
        graph = replace(graph, phase=phase, first_layer=graph.first_layer - first)
        return graph, tuple(held), mesh.dp, mesh.tp, mesh.cp, pipeline_rank.sharding, alike

    @cached_property
    def _numbers(self) -> dict[Unit, int]:
        """Number of each sharded unit, by unit, counted over the whole pp rank."""
        return {one.unit: number for number, one in enumerate(self.pipeline_rank.units)}

    def _priced(self, at: int, listed: Listed) -> Programme:
        """Return one list with its costs; units are numbered within the stage. Ops that differ only
        in the layer cost the same."""
        graph = self.pipeline_rank.graph(at)
        again = graph.num_layers if graph.recomputed is None else graph.recomputed
        recomputed = graph.first_layer + again  # later layers are not recomputed
        numbers = {unit: number for number, unit in enumerate(self.pipeline_rank.held[at])}
        computed, sent = dict[object, Compute](), dict[object, tuple[float, int | None, float]]()
        slots: dict[object, int] = {}
        programme: list[Compute | Start | Wait | UnitStep] = []
        for action in listed:
            if isinstance(action, UnitAction):
                verb, unit, forward = action.op
                programme.append(UnitStep(verb, numbers.get(unit, -1), forward))
                continue
            verb, op = action
            if verb == "wait":
                programme.append(Wait(slots[op]))
                continue
            site, layer, kind, of_slice, part = op
            sort = site, kind, of_slice, part, layer < recomputed
            if verb == "run":
                known = computed.get(sort)
                if known is None:
                    known = computed[sort] = self._compute(graph, op)
                programme.append(known)
            else:
                slots[op] = slot = len(slots)
                start = sent.get(sort)
                if start is None:
                    start = sent[sort] = self._start(graph, op)
                programme.append(Start(slot, *start))
        return programme

    def _compute(self, graph: SegmentGraph, op: SegmentOp) -> Compute:
        return Compute(Durations(graph, self._costs, self.pipeline_rank.share).compute(op), self._launches.of(op))

    def _start(self, graph: SegmentGraph, op: SegmentOp) -> tuple[float, int | None, float]:
        """Return (seconds, tier, launch) of an op's collective, the fields of ``Start`` after its
        slot."""
        seconds = Durations(graph, self._costs, self.pipeline_rank.share).collective(op)
        return seconds, self._tier(graph.collective(op)), self._launches.collective

    def _unit_prices(self, unit: UnitTraffic) -> UnitPrices:
        gathered = unit.params > 1
        forward, backward = (unit.gather(forward=way) for way in (True, False))
        return UnitPrices(
            forward=self._price(forward) if gathered else None,
            backward=self._price(backward) if gathered else None,
            reduce=self._price(unit.reduce(last=False)),
            last=self._price(unit.reduce(last=True)),
            publish=self._price(unit.publish()) if unit.publishes else None,
            gradient=(unit.numel, unit.gradient) if unit.grads > 1 else None,
            parameters=(unit.numel, unit.itemsize) if gathered else None,
            whole=unit.whole,
            kind=unit.unit[0],
        )

    def _price(self, collectives: Sequence[Sent]) -> Price:
        """Return the cost of collectives that run one after the other: their total seconds, and the
        network tier of the slowest one."""
        tp = self.pipeline_rank.strategy.tp
        where = self.pipeline_rank.index
        each = [self.prices.collective(one.kind, one.whole, one.ranks, one.stride * tp, where) for one in collectives]
        if not each:
            return Price(0.0, -1)
        slowest = collectives[each.index(max(each))]
        return Price(sum(each), self.prices.tier(slowest.ranks, slowest.stride * tp))


# ---- timelines through a step ----


AXES = ("compute", "tp", "cp", "dp", "pp", "optimizer", "idle", "beside")
"""Parts of a step's seconds. idle: waiting for computations of other pp ranks (the bubble) and for
the slowest node of any pp rank. beside: overhead of every step, independent of computation (data,
logging)."""


class Turn(NamedTuple):
    """A computation of the schedule: its start, its simulated inside, and the factor ``scale`` by
    which it took longer. op: None for the beginning and the completion of a step."""

    op: Op | None
    start: float
    scale: float
    outcome: Outcome


class Moved(NamedTuple):
    """A transfer, recorded on its sender; or on its receiver the interval in which it waited."""

    transfer: Transfer
    sends: bool
    start: float
    end: float


@dataclass(eq=False, kw_only=True)
class RankTimeline(RankClock):
    """A pp rank's timeline through a step. pace: slowdown factor of its computation. ended: ends of
    unit collectives, as (moment, scale, seconds from that moment in units of scale). leaves,
    arrives: moments until which its links carry outgoing and incoming transfers."""

    pipeline_rank: PipelineRank
    lists: PipelineRankLists
    pace: float
    state: State = field(default_factory=State)
    spent: dict[str, float] = field(default_factory=lambda: dict.fromkeys(AXES, 0.0))
    turns: list[Turn] = field(default_factory=list[Turn])
    moved: list[Moved] = field(default_factory=list[Moved])
    ended: list[tuple[float, float, Sequence[float]]] = field(
        default_factory=list[tuple[float, float, Sequence[float]]]
    )
    leaves: float = 0.0
    arrives: float = 0.0
    last_sent: float = 0.0

    @cached_property
    def inside(self) -> PhaseSimulator:
        """The simulator of the pp rank's instruction lists."""
        return self.lists.inside

    def rest(self, moment: float, axis: str) -> None:
        """Advance the timeline to second ``moment`` without work, and count the time for
        ``axis``."""
        passed = moment - self.clock
        if passed <= 0:
            return
        if self.state.queue:
            self.state, ended = self.state.later(passed)
            self.ended.append((self.clock, 1.0, ended))
        self.spent[axis] += passed
        self.clock = moment

    def do(self, outcome: Outcome, op: Op | None = None, *, lost: float = 0.0) -> None:
        """Append a computation, or the beginning or completion of a step. lost: seconds by which
        transfers slow it down."""
        start, scale = self.clock, self.pace
        if lost:
            scale += lost / outcome.seconds
            self.spent["pp"] += lost
        self.turns.append(Turn(op, start, scale, outcome))
        if outcome.ended:
            self.ended.append((start, scale, outcome.ended))
        self.clock, self.state = start + outcome.seconds * scale, outcome.after

    def settle(self) -> None:
        """Add the seconds of all turns (simulated computations) to ``spent``, by axis."""
        outcomes = {id(turn.outcome): turn.outcome for turn in self.turns}
        for number, times in Counter(id(turn.outcome) for turn in self.turns).items():
            outcome = outcomes[number]
            for axis, seconds in zip(outcome.spent._fields, outcome.spent, strict=True):
                self.spent[axis] += times * seconds
            self.spent["idle"] += times * outcome.seconds * (self.pace - 1.0)


# ---- ranks that share processors ----


def shared_pace(courses: Sequence[RankTimeline], crowd: float) -> float:
    """Return the factor on computation if ranks share processors, for a step that was simulated as
    if all ranks computed all the time. The factor is at least 1 / crowd."""
    changes = sorted(change for course in courses for change in _changes(course))
    ranks = sum(len(course.pipeline_rank.step.layout.meshes[course.pipeline_rank.index].ranks) for course in courses)
    computing, before, whole, taken = 0, 0.0, 0.0, 0.0
    for moment, change in changes:
        if computing:
            whole += moment - before
            taken += (moment - before) * max(computing / ranks, 1 / crowd)
        computing, before = computing + change, moment
    return taken / whole if whole else 1.0


def _changes(course: RankTimeline) -> Iterator[tuple[float, int]]:
    """Yield the moments at which the ranks of a pp rank begin (positive count) or end (negative
    count) to compute."""
    count = len(course.pipeline_rank.step.layout.meshes[course.pipeline_rank.index].ranks)
    for turn in course.turns:
        for _, kind, start, end in turn.outcome.done:
            if kind == "compute" and end > start:
                yield turn.start + start * turn.scale, count
                yield turn.start + end * turn.scale, -count
