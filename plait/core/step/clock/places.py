"""The places of a step's pipeline as the simulation sees them: the lists of their stages, priced.

Places that differ only in which layers they hold do the same, so they share lists and all that is found out
about them. So do stages, at one place or at several: each kind of stage is listed and priced once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from plait.core.parallel.sharding import Unit
from plait.core.step.clock.inside import Inside
from plait.core.step.clock.phase import Compute, Price, Programme, Rules, Start, UnitPrices, UnitStep, Wait
from plait.core.step.clock.prices import Prices
from plait.core.step.orders.known import known_order, later
from plait.core.step.seconds.costs import Launches
from plait.core.step.seconds.segment_costs import Durations, SegmentCosts
from plait.core.step.segments import LAYERS, Action, Collective, Phase, SegmentGraph, SegmentOp
from plait.core.step.step import Place
from plait.core.step.unit_traffic import Sent, UnitTraffic
from plait.core.step.units import UnitAction, with_units

Listed = Sequence[Action | UnitAction]


@dataclass(frozen=True)
class PlaceLists:
    """Lists of places of one kind. place: the first of the kind. known: priced lists of the step's stages, at
    this place and at others, by kind of stage; units have their numbers in the stage."""

    place: Place
    prices: Prices
    known: dict[object, Programme] = field(default_factory=dict[object, Programme], repr=False, compare=False)
    _listed: dict[tuple[int, Phase], Listed] = field(
        default_factory=dict[tuple[int, Phase], Listed], init=False, repr=False, compare=False
    )

    def listed(self, at: int, phase: Phase) -> Listed:
        """The list of a stage, with what happens to units."""
        if (at, phase) not in self._listed:
            place, graph = self.place, replace(self.place.graph(at), phase=phase)
            found = known_order(graph, place.strategy.overlap, self._order_costs, place.share)
            found = with_units(graph, found, place.held[at], place.strategy) if place.units else found
            self._listed[at, phase] = found
        return self._listed[at, phase]

    def of(self, other: Place, at: int, phase: Phase) -> Listed:
        """The list of another place of the kind: the same for its layers."""
        here, there = self.place.stages[at].first_layer, other.stages[at].first_layer
        actions = self.listed(at, phase)
        return [one if isinstance(one, UnitAction) else later(one, there - here) for one in actions]

    @cached_property
    def _order_costs(self) -> SegmentCosts:
        """Seconds from which lists are made."""
        return self.place.step.order_costs(self.place.index)

    @cached_property
    def inside(self) -> Inside:
        """The lists, priced."""
        place, prices, strategy = self.place, self.prices, self.place.strategy
        rules = Rules(
            prices.slow,
            prices.tier(strategy.tp, 1),
            forward=strategy.hides_shards(forward=True),
            backward=strategy.hides_shards(forward=False),
            sent=strategy.overlap != "no-communication",
        )
        programmes = {key: self._programme(*key) for key in place.phases}
        prices = {(one.unit[0], one.numel): one for one in place.units}  # such units cost as much
        found = {kind: self._unit_prices(one) for kind, one in prices.items()}
        return Inside(programmes, [found[one.unit[0], one.numel] for one in place.units], rules)

    @cached_property
    def _costs(self) -> SegmentCosts:
        """Seconds of segment ops."""
        return self.prices.costs(self.place.index)

    @cached_property
    def _launches(self) -> Launches:
        """Seconds of the host."""
        return self.prices.launches(self.place.index)

    def _tier(self, kind: Collective | None) -> int | None:
        """The links of attention's collectives."""
        strategy = self.place.strategy
        ulysses = strategy.cp // strategy.ring
        ways = {"all_to_all": (ulysses, strategy.tp), "rotate": (strategy.ring, strategy.tp * ulysses)}
        return self.prices.tier(*ways[kind]) if kind in ways else None

    def _programme(self, at: int, phase: Phase) -> Programme:
        """The list of a stage, priced, with the numbers that its units have at the place."""
        key = self._kind(at, phase)
        if key not in self.known:
            self.known[key] = self._priced(at, self.listed(at, phase))
        own = [self._numbers.get(unit, -1) for unit in self.place.held[at]]
        return [
            step._replace(unit=own[step.unit]) if isinstance(step, UnitStep) and step.unit >= 0 else step
            for step in self.known[key]
        ]

    def _kind(self, at: int, phase: Phase) -> object:
        """Equal for stages that do the same, whichever layers they hold."""
        place, mesh, graph = self.place, self.place.mesh, self.place.graph(at)
        first = 0 if graph.resampling else graph.first_layer  # else layers differ
        held = [(unit[0], unit[1] - first if unit[0] in LAYERS else 0, size) for unit, size in place.held[at].items()]
        alike = self.prices.alike(place.index)
        graph = replace(graph, phase=phase, first_layer=graph.first_layer - first)
        return graph, tuple(held), mesh.dp, mesh.tp, mesh.cp, place.sharding, alike

    @cached_property
    def _numbers(self) -> dict[Unit, int]:
        """Of units, among the place's."""
        return {one.unit: number for number, one in enumerate(self.place.units)}

    def _priced(self, at: int, listed: Listed) -> Programme:
        """One list with its prices; units by their numbers in the stage. Ops that differ in nothing but the
        layer cost the same."""
        graph = self.place.graph(at)
        again = graph.num_layers if graph.recomputed is None else graph.recomputed
        recomputed = graph.first_layer + again  # from there on layers are not
        numbers = {unit: number for number, unit in enumerate(self.place.held[at])}
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
        return Compute(Durations(graph, self._costs, self.place.share).compute(op), self._launches.of(op))

    def _start(self, graph: SegmentGraph, op: SegmentOp) -> tuple[float, int | None, float]:
        """What a ``Start`` says beside its slot."""
        seconds = Durations(graph, self._costs, self.place.share).collective(op)
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

    def _price(self, found: Sequence[Sent]) -> Price:
        """Price of collectives one after the other; they use the links of the one that takes longest."""
        tp = self.place.strategy.tp
        where = self.place.index
        each = [self.prices.collective(one.kind, one.whole, one.ranks, one.stride * tp, where) for one in found]
        if not each:
            return Price(0.0, -1)
        slowest = found[each.index(max(each))]
        return Price(sum(each), self.prices.tier(slowest.ranks, slowest.stride * tp))
