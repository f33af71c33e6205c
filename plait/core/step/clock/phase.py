"""A simulated phase as data: its priced list, what is under way before and after, seconds that were spent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from plait.core.step.segments import Phase

DIGITS = 11
"""Decimals of a second to which what is left of a collective is kept between phases, so that equal states are
equal numbers."""

LAST = "reduce last"
"""Verb of a label: the reduction that completes a step's gradient."""
Label = tuple[str, int, bool]
"""An event of a unit: verb, its number, whether in the forward."""
Size = tuple[int, int]
"""Numbers of a buffer, and bytes of each."""


class Compute(NamedTuple):
    """An op of a list. launch: seconds of the host."""

    seconds: float
    launch: float = 0.0


class Start(NamedTuple):
    """A collective of a list, and which it is. tier: the links of ranks that share sequences, if it is
    theirs. launch: seconds of the host."""

    slot: int
    seconds: float
    tier: int | None = None
    launch: float = 0.0


class Wait(NamedTuple):
    """For a collective of the list."""

    slot: int


class UnitStep(NamedTuple):
    """A ``UnitOp`` with the number of its unit."""

    verb: str
    unit: int
    forward: bool


Programme = Sequence[Compute | Start | Wait | UnitStep]


class Price(NamedTuple):
    """Seconds of a unit's collectives, and the links that they use."""

    seconds: float
    tier: int


@dataclass(frozen=True)
class UnitPrices:
    """Prices of one unit. None where there is nothing to do. gradient, parameters: the buffers that a whole
    gradient and gathered parameters take. whole: reduced at the step's end alone. kind: of the unit."""

    forward: Price | None
    backward: Price | None
    reduce: Price
    last: Price
    publish: Price | None
    gradient: Size | None
    parameters: Size | None
    whole: bool
    kind: str = ""


class State(NamedTuple):
    """Collectives and buffers between two phases. queue: seconds left and links of the collectives of units,
    in order. here, published: (unit, its place in the queue, -1 if over). reducing: likewise, with the buffer
    that is free afterwards. free: buffers, by size. unread: units whose first reader in this step is still to
    come."""

    queue: tuple[tuple[float, int], ...] = ()
    here: tuple[tuple[int, int], ...] = ()
    published: tuple[tuple[int, int], ...] = ()
    reducing: tuple[tuple[int, Size | None], ...] = ()
    free: tuple[tuple[Size, int], ...] = ()
    unread: frozenset[int] = frozenset()

    def later(self, seconds: float) -> tuple[State, list[float]]:
        """The state after so long in which nothing computes, and when collectives ended meanwhile."""
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
        """The state with so much of the first collective's time taken by others on the same links."""
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
    """The outcome of one phase. done: (position in the list, kind of span, start, end). waits: (what for,
    start, end). sent: what collectives of units were started, and when. ended: when such ended, those of
    earlier phases first. Times from the phase's start."""

    seconds: float
    spent: Spent
    after: State
    done: Sequence[tuple[int, str, float, float]] = ()
    waits: Sequence[tuple[Label, float, float]] = ()
    sent: Sequence[tuple[Label, float]] = ()
    ended: Sequence[float] = ()


class Key(NamedTuple):
    """A phase of one of the place's stages. last: whether it is the step's last of its stage. following: the
    computation after it."""

    stage: int
    phase: Phase
    last: bool = False
    following: tuple[int, Phase] | None = None


@dataclass(frozen=True)
class Rules:
    """Rules of a place. slow: as ``Rank`` has it. tp_tier: links of tensor parallelism. forward, backward:
    whether what sharding sends for them overlaps computation. sent: whether tensor parallelism sends at
    all."""

    slow: tuple[float, float]
    tp_tier: int
    forward: bool = True
    backward: bool = True
    sent: bool = True
