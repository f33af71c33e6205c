"""The inside of a place of the pipeline in virtual time: the segment lists of its stages with the gathers and
reductions of its units, as ``plait.train.engine`` runs them.

What one phase of a micro-batch does depends on the list and on what is under way when it begins: units
gathered ahead, reductions not yet over. Both repeat, from micro-batch to micro-batch and from place to place,
so every phase is run once for each state that it meets (``Inside.phase``).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from plait.core.segments import Phase
from plait.plan.streams import DP, TP, Flight, Rank

DIGITS = 11
"""Decimals of a second to which what is left of a collective is kept between phases, so that equal states are
equal numbers."""

LAST = "reduce last"
"""Verb of a label: the reduction that completes a step's gradient."""
Label = tuple[str, int, bool]
"""What happens to a unit: verb, its number, whether in the forward."""
Size = tuple[int, int]
"""Numbers of a buffer, and bytes of each."""


class Run(NamedTuple):
    """An op of a list. waits: what of its seconds attention waits for other ranks."""

    seconds: float
    waits: float = 0.0


class Start(NamedTuple):
    """A collective of a list, and which it is."""

    slot: int
    seconds: float


class Wait(NamedTuple):
    """For a collective of the list."""

    slot: int


class UnitStep(NamedTuple):
    """As ``UnitOp``, with the number of the unit."""

    verb: str
    unit: int
    forward: bool


Programme = Sequence[Run | Start | Wait | UnitStep]


class Price(NamedTuple):
    """Seconds of a unit's collectives, and the links that they use."""

    seconds: float
    tier: int


@dataclass(frozen=True)
class UnitPrices:
    """Of one unit. None where there is nothing to do. gradient, parameters: the buffers that a whole gradient
    and gathered parameters take. whole: reduced at the step's end alone."""

    forward: Price | None
    backward: Price | None
    reduce: Price
    last: Price
    publish: Price | None
    gradient: Size | None
    parameters: Size | None
    whole: bool


class State(NamedTuple):
    """What is under way between phases. queue: seconds left and links of the collectives of units, in order.
    here, published: (unit, its place in the queue, -1 if over). reducing: likewise, with the buffer that is
    free afterwards. free: buffers, by size. unread: units whose first reader in this step is still to
    come."""

    queue: tuple[tuple[float, int], ...] = ()
    here: tuple[tuple[int, int], ...] = ()
    published: tuple[tuple[int, int], ...] = ()
    reducing: tuple[tuple[int, Size | None], ...] = ()
    free: tuple[tuple[Size, int], ...] = ()
    unread: frozenset[int] = frozenset()

    def later(self, seconds: float) -> tuple[State, list[float]]:
        """After so long in which nothing computes, and when the collectives that ended in it did."""
        ended, passed, queue = list[float](), 0.0, list(self.queue)
        while queue and queue[0][0] <= seconds - passed:
            passed += queue.pop(0)[0]
            ended.append(passed)
        if queue:
            queue[0] = (round(queue[0][0] - (seconds - passed), DIGITS), queue[0][1])
        gone = len(ended)

        def at(number: int) -> int:
            return max(-1, number - gone)

        moved = self._replace(
            queue=tuple(queue),
            here=tuple((unit, at(number)) for unit, number in self.here),
            published=tuple((unit, at(number)) for unit, number in self.published),
            reducing=tuple((at(number), size) for number, size in self.reducing),
        )
        return moved, ended

    def behind(self, seconds: float) -> State:
        """With so much of the first collective's time taken by others on the same links."""
        (left, tier), *rest = self.queue
        return self._replace(queue=((round(left + seconds, DIGITS), tier), *rest))


class Spent(NamedTuple):
    """Seconds of a phase."""

    compute: float = 0.0
    tp: float = 0.0
    cp: float = 0.0
    dp: float = 0.0


@dataclass(frozen=True)
class Outcome:
    """Of one phase. done: (position in the list, kind of span, start, end). waits: (what for, start, end).
    sent: what collectives of units were started, and when. ended: when such ended, those of earlier phases
    first. Times from the phase's start."""

    seconds: float
    spent: Spent
    after: State
    done: Sequence[tuple[int, str, float, float]] = ()
    waits: Sequence[tuple[Label, float, float]] = ()
    sent: Sequence[tuple[Label, float]] = ()
    ended: Sequence[float] = ()


class Key(NamedTuple):
    """Which phase: of which of the place's stages, whether it is the step's last of its stage, and which
    computation follows."""

    stage: int
    phase: Phase
    last: bool = False
    following: tuple[int, Phase] | None = None


@dataclass(frozen=True)
class Rules:
    """What holds at a place. slow: as ``Rank`` has it. tp_tier: links of tensor parallelism. forward: whether
    what sharding sends for forwards overlaps computation; recorded: whether tensor parallelism's collectives
    are."""

    slow: tuple[float, float]
    tp_tier: int
    forward: bool = True
    backward: bool = True
    sent: bool = True


class Inside:
    """programmes: of every stage and phase, by (number of the stage at its place, phase). units: of the
    place, in order."""

    def __init__(
        self, programmes: dict[tuple[int, Phase], Programme], units: Sequence[UnitPrices], rules: Rules
    ) -> None:
        self.programmes, self.units, self.rules = programmes, units, rules
        self._known: dict[tuple[Key, State], Outcome] = {}
        self.leads = {at: self._lead(at[1], programme) for at, programme in programmes.items()}

    def _lead(self, phase: Phase, programme: Programme) -> tuple[tuple[int, bool], ...]:
        """What is gathered ahead of a phase."""
        found: list[tuple[int, bool]] = []
        if self.rules.forward if phase in ("F", "step") else self.rules.backward:
            for step in programme:
                if not isinstance(step, UnitStep) or step.verb != "gather":
                    break
                found.append((step.unit, step.forward))
        return tuple(found)

    def phase(self, key: Key, state: State) -> Outcome:
        """One phase of a micro-batch, begun in ``state``."""
        if not self.units:
            key = Key(key.stage, key.phase)
        known = self._known.get((key, state))
        if known is None:
            walk = _Walk(self, state)
            walk.run(self.programmes[key.stage, key.phase], key)
            known = self._known[key, state] = walk.outcome()
        return known

    def begin(self, first: tuple[int, Phase], *, steady: bool) -> Outcome:
        """Before a step's first list. steady: the step before has changed parameters, which are on their
        way."""
        walk = _Walk(self, State(free=self._buffers()))
        walk.begin(self.leads[first], steady=steady)
        return walk.outcome()

    def complete(self, state: State) -> Outcome:
        """After a step's last list: the gradients that are left are reduced."""
        walk = _Walk(self, state)
        walk.complete()
        return walk.outcome()

    def _buffers(self) -> tuple[tuple[Size, int], ...]:
        """Two of every size, one where there is one such unit only."""
        parameters, gradients = (
            Counter(size for size in sizes if size)
            for sizes in ([one.parameters for one in self.units], [one.gradient for one in self.units])
        )
        free = Counter[Size]()
        for found in (parameters, gradients):
            free.update({size: min(2, count) for size, count in found.items()})
        return tuple(sorted(free.items()))


class _Walk:
    """One phase. What happens to units is what ``plait.train.engine.shards`` does."""

    def __init__(self, inside: Inside, state: State) -> None:
        self.units, self.rules, self.leads = inside.units, inside.rules, inside.leads
        flights = [Flight(left, tier) for left, tier in state.queue]
        if flights:
            flights[0].began = 0.0
        self.rank = Rank(inside.rules.slow, flights)
        self.flights = list(flights)

        def at(number: int) -> Flight | None:
            return None if number < 0 else flights[number]

        self.here = {unit: at(number) for unit, number in state.here}
        self.published = {unit: at(number) for unit, number in state.published}
        self.reducing = deque((at(number), size) for number, size in state.reducing)
        self.free = Counter(dict(state.free))
        self.unread = set(state.unread)
        self.open_units = set[int]()
        self.attention = 0.0
        self.done: list[tuple[int, str, float, float]] = []
        self.waits: list[tuple[Label, float, float]] = []
        self.sent: list[tuple[Label, float]] = []

    def run(self, programme: Programme, key: Key) -> None:
        rank, slots = self.rank, dict[int, tuple[int, Flight]]()
        for position, step in enumerate(programme):
            start = rank.now
            if isinstance(step, Run):
                rank.compute(step.seconds)
                self.attention += step.waits
                self.done.append((position, "compute", start, rank.now))
            elif isinstance(step, Start):
                if self.rules.sent:
                    slots[step.slot] = position, rank.start(TP, step.seconds, self.rules.tp_tier)
            elif isinstance(step, Wait):
                if step.slot in slots:
                    at, flight = slots.pop(step.slot)
                    rank.wait(flight, TP)
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
        while self.reducing:
            self._retire()

    def begin(self, lead: Sequence[tuple[int, bool]], *, steady: bool) -> None:
        publishing = [unit for unit, prices in enumerate(self.units) if prices.publish]
        for unit in publishing if steady else ():
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
        self.settle()

    def _reduce(self, unit: int, size: Size | None, *, last: bool) -> None:
        price = self.units[unit].last if last else self.units[unit].reduce
        self.reducing.append((self._start((LAST if last else "reduce", unit, False), price), size))

    def _retire(self) -> None:
        flight, size = self.reducing.popleft()
        self._wait(flight)
        self._give(size)

    def _take(self, size: Size) -> None:
        """A free buffer; if there is none, the oldest reduction's, or a new one."""
        while not self.free[size] and any(held == size for _, held in self.reducing):
            self._retire()
        self.free[size] -= self.free[size] > 0

    def _give(self, size: Size | None) -> None:
        if size is not None:
            self.free[size] += 1

    def _start(self, label: Label, price: Price) -> Flight:
        self.sent.append((label, self.rank.now))
        flight = self.rank.start(DP, *price)
        self.flights.append(flight)
        return flight

    def _wait(self, flight: Flight | None) -> None:
        if flight is not None:
            self.rank.wait(flight, DP)

    # ---- afterwards ----

    def outcome(self) -> Outcome:
        """Of what has been done."""
        rank = self.rank
        assert not self.open_units, "a gradient was opened and never closed"
        number = {id(flight): at for at, flight in enumerate(rank.queues[DP])}

        def at(flight: Flight | None) -> int:
            return -1 if flight is None else number.get(id(flight), -1)

        after = State(
            queue=tuple((round(flight.left, DIGITS), flight.tier) for flight in rank.queues[DP]),
            here=tuple(sorted((unit, at(flight)) for unit, flight in self.here.items())),
            published=tuple(sorted((unit, at(flight)) for unit, flight in self.published.items())),
            reducing=tuple((at(flight), size) for flight, size in self.reducing),
            free=tuple(sorted((size, count) for size, count in self.free.items() if count)),
            unread=frozenset(self.unread),
        )
        spent = Spent(rank.compute_seconds - self.attention, rank.exposed[TP], self.attention, rank.exposed[DP])
        ended = [flight.ended for flight in self.flights if flight.ended is not None]
        return Outcome(rank.now, spent, after, self.done, self.waits, self.sent, ended)
