"""A simulated phase as data: its instruction list with costs, the collectives in flight before and
after it, and its seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from plait.core.step.segments import Phase

SECONDS_DIGITS = 11
"""Decimals of a second to which the remaining time of a collective is kept between phases, so that
equal states are equal numbers."""

REDUCE_LAST = "reduce last"
"""Label of the reduction that completes a step's gradient."""
Label = tuple[str, int, bool]
"""Label of an event of a sharded unit (the parameters that are gathered together): (verb, number of
the unit, True in the forward)."""
Size = tuple[int, int]
"""Size of a buffer: (numbers in it, bytes of each number)."""


class Compute(NamedTuple):
    """An op of an instruction list. seconds: on the processor. launch: seconds of the host."""

    seconds: float
    launch: float = 0.0


class Start(NamedTuple):
    """The start of a collective of an instruction list. slot: its number. tier: the links of
    context parallelism; None: of tensor parallelism. launch: seconds of the host."""

    slot: int
    seconds: float
    tier: int | None = None
    launch: float = 0.0


class Wait(NamedTuple):
    """A wait for a collective that the instruction list has started. slot: number of the collective
    in the list."""

    slot: int


class UnitStep(NamedTuple):
    """An action on a sharded unit (``UnitOp``), with the unit replaced by its number."""

    verb: str
    unit: int
    forward: bool


Programme = Sequence[Compute | Start | Wait | UnitStep]


class Price(NamedTuple):
    """Seconds of a unit's collectives, and the links (tier) that they use."""

    seconds: float
    tier: int


@dataclass(frozen=True)
class UnitPrices:
    """Costs of the collectives of one sharded unit (parameters gathered together). A field is None
    if that collective does not exist. gradient, parameters: buffers of a whole gradient and of
    gathered parameters. whole: True if gradients are reduced only at the step's end. kind: the
    unit's kind."""

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
    """Collectives and buffers between two phases. queue: (seconds left, links) of the unit
    collectives in flight, in order. here: gathered units; published: units whose updated parameters
    are gathered; both as (unit, position in the queue, -1 if that collective has ended). reducing:
    reductions as (position in the queue, buffer that becomes free afterwards). free: free buffers,
    by size. unread: units whose first reader in this step has not run yet."""

    queue: tuple[tuple[float, int], ...] = ()
    here: tuple[tuple[int, int], ...] = ()
    published: tuple[tuple[int, int], ...] = ()
    reducing: tuple[tuple[int, Size | None], ...] = ()
    free: tuple[tuple[Size, int], ...] = ()
    unread: frozenset[int] = frozenset()

    def later(self, seconds: float) -> tuple[State, list[float]]:
        """Return the state after ``seconds`` without computation, and the moments at which
        collectives ended meanwhile."""
        ended, passed, queue = list[float](), 0.0, list(self.queue)
        while queue and queue[0][0] <= seconds - passed:
            passed += queue.pop(0)[0]
            ended.append(passed)
        if queue:
            queue[0] = (round(queue[0][0] - (seconds - passed), SECONDS_DIGITS), queue[0][1])
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
        """Return the state with the first collective delayed by ``seconds`` of other traffic on the
        same links."""
        (left, tier), *rest = self.queue
        return self._replace(queue=((round(left + seconds, SECONDS_DIGITS), tier), *rest))


class Spent(NamedTuple):
    """Seconds of a phase by axis: computation, and exposed communication of tp, cp and dp."""

    compute: float = 0.0
    tp: float = 0.0
    cp: float = 0.0
    dp: float = 0.0


@dataclass(frozen=True)
class Outcome:
    """The result of one phase. done: (position in the list, kind of span, start, end). waits:
    (event waited for, start, end). sent: unit collectives started, with their moments. ended: end
    moments of unit collectives, those of earlier phases first. Times in seconds from the phase's
    start."""

    seconds: float
    spent: Spent
    after: State
    done: Sequence[tuple[int, str, float, float]] = ()
    waits: Sequence[tuple[Label, float, float]] = ()
    sent: Sequence[tuple[Label, float]] = ()
    ended: Sequence[float] = ()


class Key(NamedTuple):
    """Key of a simulated phase (forward or backward of a micro-batch) of one of a pp rank's stages.
    last: True for the stage's last such phase in the step. following: the (stage, phase) computed
    next; None at the end."""

    stage: int
    phase: Phase
    last: bool = False
    following: tuple[int, Phase] | None = None


@dataclass(frozen=True)
class Rules:
    """Simulation rules of a pp rank. slow: slowdown factors of (computation, communication) while
    both run. tp_tier: links of tensor parallelism. forward, backward: True if sharding's
    communication for that pass overlaps computation. sent: False if tensor parallelism does not
    communicate."""

    slow: tuple[float, float]
    tp_tier: int
    forward: bool = True
    backward: bool = True
    sent: bool = True
