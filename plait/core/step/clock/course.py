"""Places of a pipeline in a simulated step: what each does, and what that costs by axis."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from plait.core.step.clock.inside import Inside
from plait.core.step.clock.phase import Outcome, State
from plait.core.step.clock.pipeline_clock import RankClock
from plait.core.step.clock.places import PlaceLists
from plait.core.step.schedule import Op, Transfer
from plait.core.step.step import Place

AXES = ("compute", "tp", "cp", "dp", "pp", "optimizer", "idle", "beside")
"""Parts of a step's seconds. idle: waiting for computations of other places (the bubble) and for the slowest
node of the own place and of others. beside: what every step takes whatever it computes (data, logging)."""


class Turn(NamedTuple):
    """A computation of the schedule, when it ran, and what happened inside; longer than that by the factor
    ``scale``. op: None for what begins and completes a step."""

    op: Op | None
    start: float
    scale: float
    outcome: Outcome


class Moved(NamedTuple):
    """A transfer, on its sender; or how long its receiver stood still for it."""

    transfer: Transfer
    sends: bool
    start: float
    end: float


@dataclass(eq=False, kw_only=True)
class Course(RankClock):
    """A place's way through a step. ended: when collectives of its units were over: a moment, a scale, and
    seconds from that moment in units of that scale. leaves: until when its links carry what it sends,
    arrives: what it receives."""

    place: Place
    lists: PlaceLists
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
    def inside(self) -> Inside:
        """Its lists in virtual time."""
        return self.lists.inside

    def rest(self, moment: float, axis: str) -> None:
        """Stand still until ``moment``."""
        passed = moment - self.clock
        if passed <= 0:
            return
        if self.state.queue:
            self.state, ended = self.state.later(passed)
            self.ended.append((self.clock, 1.0, ended))
        self.spent[axis] += passed
        self.clock = moment

    def do(self, outcome: Outcome, op: Op | None = None, *, lost: float = 0.0) -> None:
        """Go through a list, or what begins or completes a step. lost: seconds by which transfers slow it
        down."""
        start, scale = self.clock, self.pace
        if lost:
            scale += lost / outcome.seconds
            self.spent["pp"] += lost
        self.turns.append(Turn(op, start, scale, outcome))
        if outcome.ended:
            self.ended.append((start, scale, outcome.ended))
        self.clock, self.state = start + outcome.seconds * scale, outcome.after

    def settle(self) -> None:
        """Add up what all its turns have spent."""
        outcomes = {id(turn.outcome): turn.outcome for turn in self.turns}
        for number, times in Counter(id(turn.outcome) for turn in self.turns).items():
            outcome = outcomes[number]
            for axis, seconds in zip(outcome.spent._fields, outcome.spent, strict=True):
                self.spent[axis] += times * seconds
            self.spent["idle"] += times * outcome.seconds * (self.pace - 1.0)
