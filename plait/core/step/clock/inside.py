"""Simulation inside a pp rank: the instruction lists of its stages with the gathers and reductions
of its sharded units, as ``plait.train.engine`` runs them.

The result of a phase of a micro-batch depends on its list and on the collectives in flight when it
begins: units gathered ahead, reductions not yet finished. Both repeat from micro-batch to
micro-batch and across pp ranks. So every phase is simulated once for each initial state
(``PhaseSimulator.phase``).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

from plait.core.parallel.sharding import buffer_counts
from plait.core.step.clock.phase import (
    REDUCE_LAST,
    SECONDS_DIGITS,
    Compute,
    Key,
    Label,
    Outcome,
    Price,
    Programme,
    Rules,
    Size,
    Spent,
    Start,
    State,
    UnitPrices,
    UnitStep,
    Wait,
)  # fmt: skip
from plait.core.step.orders.streams import CP_ACCOUNT, DP, TP, CollectiveFlight, Rank
from plait.core.step.schedule import PHASES, Phase


class PhaseSimulator:
    """Simulator of a pp rank's instruction lists. programmes: lists by (index of the stage at its
    pp rank, phase). units: the pp rank's sharded units, in order."""

    def __init__(
        self, programmes: dict[tuple[int, Phase], Programme], units: Sequence[UnitPrices], rules: Rules
    ) -> None:
        self.programmes, self.units, self.rules = programmes, units, rules
        self._known: dict[tuple[Key, State], Outcome] = {}
        self._gathers = any(one.parameters for one in units)
        self.leads = {at: self._lead(at[1], programme) for at, programme in programmes.items()}

    def _lead(self, phase: Phase, programme: Programme) -> tuple[tuple[int, bool], ...]:
        """Return the sharded units whose parameters are gathered before the phase's list begins:
        (number of the unit, True for the forward) each."""
        found: list[tuple[int, bool]] = []
        if self.rules.forward if PHASES[phase].forward else self.rules.backward:
            for step in programme:
                if not isinstance(step, UnitStep) or step.verb != "gather":
                    break
                found.append((step.unit, step.forward))
        return tuple(found)

    def phase(self, key: Key, state: State) -> Outcome:
        """Simulate one phase of a micro-batch from ``state``; its host begins with it."""
        known = self._known.get((key, state))
        if known is None:
            bare = self._bare(key)
            known = self._known.get((bare, state))
            if known is None:
                walk = _PhaseRun(self, state)
                walk.run(self.programmes[key.stage, key.phase], bare)
                known = self._known[bare, state] = walk.outcome()
            self._known[key, state] = known
        return known

    def _bare(self, key: Key) -> Key:
        """Return the key without fields that do not affect the simulated result."""
        if not self.units:
            return Key(key.stage, key.phase)
        return key if self._gathers else key._replace(following=None)

    def begin(self, first: tuple[int, Phase], *, steady: bool) -> Outcome:
        """Simulate the beginning of a step. steady: True if the previous step has updated
        parameters, which are still being gathered."""
        walk = _PhaseRun(self, State(free=self._buffers()))
        walk.begin(self.leads[first], steady=steady)
        return walk.outcome()

    def complete(self, state: State) -> Outcome:
        """Simulate the end of a step after its last list: reduce the remaining gradients."""
        walk = _PhaseRun(self, state)
        walk.complete()
        return walk.outcome()

    def _buffers(self) -> tuple[tuple[Size, int], ...]:
        """Return (size, number of buffers) for gathered parameters and for gradients, as the
        runtime allocates them. A size is (numbers in a buffer, bytes of each)."""
        gathered = buffer_counts((one.kind, one.parameters) for one in self.units if one.parameters)
        opened = buffer_counts((one.kind, one.gradient) for one in self.units if one.gradient)
        return tuple(sorted((gathered + opened).items()))


class _PhaseRun:
    """The simulation of one phase. Units are handled as in ``plait.train.engine.shards``."""

    def __init__(self, inside: PhaseSimulator, state: State) -> None:
        self.units, self.rules, self.leads = inside.units, inside.rules, inside.leads
        flights = [CollectiveFlight(left, tier) for left, tier in state.queue]
        if flights:
            flights[0].began = 0.0
        self.rank = Rank(inside.rules.slow, flights)
        self.flights = list(flights)

        def at(number: int) -> CollectiveFlight | None:
            return None if number < 0 else flights[number]

        self.here = {unit: at(number) for unit, number in state.here}
        self.published = {unit: at(number) for unit, number in state.published}
        self.reducing = deque((at(number), size) for number, size in state.reducing)
        self.free = Counter(dict(state.free))
        self.unread = set(state.unread)
        self.open_units = set[int]()
        self.done: list[tuple[int, str, float, float]] = []
        self.waits: list[tuple[Label, float, float]] = []
        self.sent: list[tuple[Label, float]] = []

    def run(self, programme: Programme, key: Key) -> None:
        rank, slots = self.rank, dict[int, tuple[int, CollectiveFlight]]()
        for position, step in enumerate(programme):
            start = rank.now
            if isinstance(step, Compute):
                start = rank.work(step.launch, step.seconds)
                self.done.append((position, "compute", start, rank.now))
            elif isinstance(step, Start):
                if self.rules.sent:
                    rank.launch(step.launch)
                    way = (self.rules.tp_tier, TP) if step.tier is None else (step.tier, CP_ACCOUNT)
                    slots[step.slot] = position, rank.start(TP, step.seconds, *way)
            elif isinstance(step, Wait):
                if step.slot in slots:
                    at, flight = slots.pop(step.slot)
                    rank.wait(flight)
                    assert flight.began is not None and flight.ended is not None
                    self.done.append((at, "comm", flight.began, flight.ended))
                self.done.append((position, "wait", start, rank.now))
            else:
                self._unit(step, key)

    def _unit(self, step: UnitStep, key: Key) -> None:
        match step.verb:
            case "gather":
                self.gather(step.unit, forward=step.forward)
            case "need":
                self.need(step.unit, forward=step.forward)
            case "drop":
                self.drop(step.unit)
            case "next":
                for unit, forward in self.leads[key.following] if key.following else ():
                    self.gather(unit, forward=forward)
            case "open":
                self.open(step.unit)
            case "close":
                self.close(step.unit, last=key.last)
            case _:
                self.settle()

    # ---- units ----

    def gather(self, unit: int, *, forward: bool) -> None:
        prices = self.units[unit]
        price = prices.forward if forward else prices.backward
        if prices.parameters is None or unit in self.here:
            return
        assert price is not None
        self._take(prices.parameters)
        self.here[unit] = self._start(("gather", unit, forward), price)

    def need(self, unit: int, *, forward: bool) -> None:
        prices, first = self.units[unit], unit in self.unread
        self.unread.discard(unit)
        if not first and prices.parameters is None:
            return
        start = self.rank.now
        self._wait(self.published.pop(unit, None))
        if prices.parameters is not None:
            self.gather(unit, forward=forward)
            self._wait(self.here[unit])
        self.waits.append((("need", unit, forward), start, self.rank.now))

    def drop(self, unit: int) -> None:
        if unit in self.here:
            del self.here[unit]
            self._give(self.units[unit].parameters)

    def open(self, unit: int) -> None:
        size = self.units[unit].gradient
        if size is not None and unit not in self.open_units:
            self._take(size)
            self.open_units.add(unit)

    def close(self, unit: int, *, last: bool) -> None:
        whole = unit in self.open_units
        self.open_units.discard(unit)
        if whole or last:
            self._reduce(unit, self.units[unit].gradient if whole else None, last=last)

    def settle(self) -> None:
        start = self.rank.now
        while self.reducing:
            self._retire()
        self.waits.append((("settle", 0, False), start, self.rank.now))

    def begin(self, lead: Sequence[tuple[int, bool]], *, steady: bool) -> None:
        publishing = [unit for unit, prices in enumerate(self.units) if prices.publish]
        for unit in sorted(publishing, key=lambda unit: not self.units[unit].whole) if steady else ():
            price = self.units[unit].publish
            assert price is not None
            self.published[unit] = self._start(("publish", unit, True), price)
        for unit, forward in lead:
            self.gather(unit, forward=forward)
        self.unread = {unit for unit in publishing if not self.units[unit].whole}
        for unit in publishing:
            if self.units[unit].whole:
                start = self.rank.now
                self._wait(self.published.pop(unit, None))
                self.waits.append((("need", unit, True), start, self.rank.now))
        if not self.rules.forward:
            while self.published:
                self._wait(self.published.pop(next(iter(self.published))))

    def complete(self) -> None:
        for unit, prices in enumerate(self.units):
            if prices.whole:
                self._reduce(unit, None, last=True)
        if self.units:
            self.settle()

    def _reduce(self, unit: int, size: Size | None, *, last: bool) -> None:
        price = self.units[unit].last if last else self.units[unit].reduce
        self.reducing.append((self._start((REDUCE_LAST if last else "reduce", unit, False), price), size))

    def _retire(self) -> None:
        flight, size = self.reducing.popleft()
        self._wait(flight)
        self._give(size)

    def _take(self, size: Size) -> None:
        """Take a free gradient or parameter buffer of this size; if there is none, wait for the
        oldest reduction's buffer, or allocate a new one."""
        while not self.free[size] and any(held == size for _, held in self.reducing):
            self._retire()
        self.free[size] -= self.free[size] > 0

    def _give(self, size: Size | None) -> None:
        if size is not None:
            self.free[size] += 1

    def _start(self, label: Label, price: Price) -> CollectiveFlight:
        self.sent.append((label, self.rank.now))
        flight = self.rank.start(DP, *price)
        self.flights.append(flight)
        return flight

    def _wait(self, flight: CollectiveFlight | None) -> None:
        if flight is not None:
            self.rank.wait(flight)

    # ---- afterwards ----

    def outcome(self) -> Outcome:
        """Return the outcome of the simulated actions."""
        rank = self.rank
        assert not self.open_units, "a gradient was opened and never closed"
        number = {id(flight): at for at, flight in enumerate(rank.queues[DP])}

        def at(flight: CollectiveFlight | None) -> int:
            return -1 if flight is None else number.get(id(flight), -1)

        after = State(
            queue=tuple((round(flight.left, SECONDS_DIGITS), flight.tier) for flight in rank.queues[DP]),
            here=tuple(sorted((unit, at(flight)) for unit, flight in self.here.items())),
            published=tuple(sorted((unit, at(flight)) for unit, flight in self.published.items())),
            reducing=tuple((at(flight), size) for flight, size in self.reducing),
            free=tuple(sorted((size, count) for size, count in self.free.items() if count)),
            unread=frozenset(self.unread),
        )
        spent = Spent(rank.compute_seconds, rank.exposed[TP], rank.exposed[CP_ACCOUNT], rank.exposed[DP])
        ended = [flight.ended for flight in self.flights if flight.ended is not None]
        return Outcome(rank.now, spent, after, self.done, self.waits, self.sent, ended)
