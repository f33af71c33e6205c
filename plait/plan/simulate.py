"""A step of a plan in virtual time: the schedule and the segment lists that ranks run, on a described
cluster.

One simulation for all places of the pipeline. The ranks of a place are alike, so one stands for all of them.
On the outside, ops of the schedule, transfers that share the links of the places between which they go, and
what ends a step; inside each op, its list (``plait.plan.inside``). What is found is a ``Timeline`` with the
recorder's keys (``Simulated.timeline``), the seconds of a step, and what each axis adds to them.

Approximations. A transfer that meets sharding's traffic of its sender on the same links shares their rate
with what is under way when it starts, not with what starts later; a computation is slowed down by the
transfers under way when it begins. Of a node that is late (jitter), all ops are late alike.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from heapq import heappop, heappush
from statistics import NormalDist
from typing import NamedTuple

from plait.core.cluster import Cluster
from plait.core.experts import refuse_experts
from plait.core.plan import Plan
from plait.core.schedule import Op, Transfer
from plait.core.segments import Phase
from plait.core.timeline import Timeline
from plait.plan.phase import Key, Outcome, State
from plait.plan.places import Place, PlaceLists, phase_of
from plait.plan.prices import ClusterPrices, PlanPrices, Prices

AXES = ("compute", "tp", "cp", "dp", "pp", "optimizer", "idle")
"""What a step's seconds consist of. idle: waiting for computations of other places (the bubble), for the
slowest node of the own place and of others, and for what is beside a step."""


@dataclass(frozen=True)
class Simulated:
    """A step of a plan. places: seconds of every place, by axis; each adds up to ``seconds``.

    compute: as if nothing ran beside it. tp, cp, dp, pp: exposed, so not hidden by computation, or slowing it
    down.
    """

    seconds: float
    places: tuple[Mapping[str, float], ...]
    simulation: Simulation = field(repr=False, compare=False)

    @property
    def exposed(self) -> dict[str, float]:
        """Seconds of the mean rank, by axis; they add up to ``seconds``."""
        counts = [len(mesh.ranks) for mesh in self.simulation.plan.layout.meshes]
        return {
            axis: sum(place[axis] * count for place, count in zip(self.places, counts, strict=True)) / sum(counts)
            for axis in AXES
        }

    def timeline(self, steps: Sequence[int] = (0,), ranks: Sequence[int] | None = None) -> Timeline:
        """The spans of ``ranks`` (None: of all) in ``steps``, which are all alike but for a run's first: no
        optimizer has changed anything before step 0. Each begins at second 0."""
        from plait.plan.spans import timeline  # makes keys and bytes, which ranking plans does not need

        return timeline(self.simulation, steps, ranks)


def simulate_plan(plan: Plan, cluster: Cluster | None = None, *, jitter_seed: int | None = None) -> Simulated:
    """A step of ``plan`` on ``cluster``, whose nodes its ranks fill in order.

    cluster: None for what the plan itself knows: its measured costs, or costs from shapes, whose proportions
    mean more than their seconds. jitter_seed: every node's step takes longer or shorter by a factor that is
    drawn with it, and a place waits for its slowest; None: all take as long as the slowest of the job's nodes
    does on average. Raises JobError where the cluster has no peak for
    the plan's precision.
    """
    refuse_experts(plan.model, "simulated")
    simulation = Simulation(plan, ClusterPrices(plan, cluster) if cluster else PlanPrices(plan), jitter_seed)
    return simulation.simulated


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


class Entry(NamedTuple):
    """One op of a place's list."""

    op: Op
    key: Key | None
    """None for a transfer."""
    arrivals: tuple[Transfer, ...]
    """What a computation needs from other places."""
    transfer: Transfer | None = None
    sends: bool = False


@dataclass(eq=False)
class Course:
    """What a place does in a step. ended: when collectives of its units were over: a moment, a scale, and
    seconds from that moment in units of that scale. leaves: until when its links carry what it sends,
    arrives: what it receives."""

    place: Place
    lists: PlaceLists
    pace: float
    entries: list[Entry]
    clock: float = 0.0
    at: int = 0
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
        start, scale = self.clock, self.pace + (lost / outcome.seconds if lost else 0.0)
        for axis, seconds in zip(outcome.spent._fields, outcome.spent, strict=True):
            self.spent[axis] += seconds
        self.spent["idle"] += outcome.seconds * (self.pace - 1.0)
        self.spent["pp"] += lost
        self.turns.append(Turn(op, start, scale, outcome))
        if outcome.ended:
            self.ended.append((start, scale, outcome.ended))
        self.clock, self.state = start + outcome.seconds * scale, outcome.after


class Run:
    """One step of all places. steady: not a run's first."""

    def __init__(self, simulation: Simulation, *, steady: bool) -> None:
        self.simulation, self.prices, self.steady = simulation, simulation.prices, steady
        self.courses = simulation.courses()
        self.seconds = 0.0
        self._arrived: dict[Transfer, tuple[float, float]] = {}
        """When each began to move, and when it was there."""
        self._blocked: dict[Transfer, int] = {}
        self._sent: set[Transfer] = set()
        self._posted: set[Transfer] = set()
        self._queue: list[tuple[float, int]] = []
        self._run()
        self._finish()

    def _run(self) -> None:
        """Until every place is through with its list; always the place whose clock is behind."""
        for number, course in enumerate(self.courses):
            if course.place.units:
                first = next(entry.key for entry in course.entries if entry.key)
                course.do(course.lists.inside.begin((first.stage, first.phase), steady=self.steady))
            heappush(self._queue, (course.clock, number))
        while self._queue:
            _, number = heappop(self._queue)
            self._advance(number, self.courses[number])
        assert not self._blocked, f"nobody sends {next(iter(self._blocked))}: such a schedule is refused"

    def _advance(self, number: int, course: Course) -> None:
        """Announce transfers until a computation comes, and run it."""
        while course.at < len(course.entries):
            op, key, arrivals, transfer, sends = course.entries[course.at]
            if key is None:
                assert transfer is not None
                self._announce(course, transfer, sends=sends)
                course.at += 1
                continue
            for transfer in arrivals:
                if transfer not in self._arrived:
                    self._blocked[transfer] = number
                    return
            for transfer in arrivals:
                self._stand(course, transfer)
            self._compute(course, op, key)
            course.at += 1
            heappush(self._queue, (course.clock, number))
            return

    def _stand(self, course: Course, transfer: Transfer) -> None:
        """Wait for a transfer: until it moves because others have not computed yet, then because of the
        network."""
        moves, there = self._arrived[transfer]
        begin = course.clock
        course.rest(moves, "idle")
        course.rest(there, "pp")
        course.moved.append(Moved(transfer, False, begin, course.clock))

    def _compute(self, course: Course, op: Op, key: Key) -> None:
        outcome = course.lists.inside.phase(key, course.state)
        beside = min(outcome.seconds * course.pace, max(course.leaves, course.arrives) - course.clock)
        course.do(outcome, op, lost=max(0.0, beside) * (1 - 1 / self.prices.slow[0]))

    def _announce(self, course: Course, transfer: Transfer, *, sends: bool) -> None:
        """One end of a transfer. It moves when it is sent and, unless the network takes in what nobody asked
        for yet, its receive is posted."""
        if sends:
            self._sent.add(transfer)
        else:
            self._posted.add(transfer)
        met = transfer in self._sent and (self.prices.buffered or transfer in self._posted)
        if met and transfer not in self._arrived:
            self._move(transfer, course.clock)

    def _move(self, transfer: Transfer, now: float) -> None:
        source, target, *_ = transfer
        rank_of = self.simulation.plan.schedule.rank_of
        sender, receiver = self.courses[rank_of[source]], self.courses[rank_of[target]]
        start = max(now, sender.leaves, receiver.arrives)
        seconds, way = self.simulation.travel(source, target)
        queue = sender.state.queue
        if queue and queue[0][1] == way and sender.clock <= now:  # both at half the rate until one is done
            shared = min(seconds, sum(left for left, tier in queue if tier == way))
            sender.state, seconds = sender.state.behind(shared), seconds + shared
        end = start + seconds
        sender.leaves = sender.last_sent = receiver.arrives = end
        sender.moved.append(Moved(transfer, True, start, end))
        self._arrived[transfer] = start, end
        waiting = self._blocked.pop(transfer, None)
        if waiting is not None:
            heappush(self._queue, (max(end, self.courses[waiting].clock), waiting))

    def _finish(self) -> None:
        """What completes a step: gradients summed, their norm, the optimizer."""
        prices, plan = self.prices, self.simulation.plan
        for course in self.courses:
            course.rest(course.last_sent, "pp")
            if course.place.units:
                course.do(course.lists.inside.complete(course.state))
            if course.place.copies:
                taken = prices.collective("all_reduce", course.place.copies, course.place.strategy.tp, 1)
                course.rest(course.clock + taken, "tp")
        if plan.tied:
            self._tie()
        world = plan.layout.world_size
        _meet(self.courses)
        for course in self.courses:
            norm = prices.collective("all_reduce", 3 * 8, world, 1) if world > 1 else 0.0
            course.rest(course.clock + norm + prices.update(course.place.numbers) * course.pace, "optimizer")
        self.seconds = max(course.clock for course in self.courses) + prices.beside
        for course in self.courses:
            course.rest(self.seconds, "idle")

    def _tie(self) -> None:
        """The first and the last stage sum the gradient of tied embeddings."""
        plan, rank_of = self.simulation.plan, self.simulation.plan.schedule.rank_of
        places = sorted({rank_of[0], rank_of[len(plan.stages) - 1]})
        meshes = [plan.layout.meshes[place] for place in places]
        ranks = sum(len(mesh.ranks) for mesh in meshes)
        if ranks == 1:
            return
        stride = max(1, (meshes[-1].ranks.stop - meshes[0].first) // ranks)
        size = plan.model.vocab * plan.model.hidden * self.courses[0].place.gradient
        courses = [self.courses[place] for place in places]
        _meet(courses)
        for course in courses:
            course.rest(course.clock + self.prices.collective("all_reduce", size, ranks, stride), "pp")


def _meet(courses: Sequence[Course]) -> None:
    """Wait for the last of them."""
    moment = max(course.clock for course in courses)
    for course in courses:
        course.rest(moment, "idle")


class Simulation:
    """What does not change from step to step: lists, what happens inside them, how fast nodes are."""

    def __init__(self, plan: Plan, prices: Prices, jitter_seed: int | None) -> None:
        self.plan, self.prices = plan, prices
        self.places = [Place(plan, index) for index in range(len(plan.layout.degrees))]
        kinds: dict[object, PlaceLists] = {}
        self.lists = [kinds.setdefault(place.kind, PlaceLists(place, prices)) for place in self.places]
        self.paces = self._paces(jitter_seed)
        self._entries = [self._listed(place) for place in self.places]
        self._travels: dict[tuple[int, int], tuple[float, int]] = {}

    def run(self, *, steady: bool = True) -> Run:
        """One step."""
        return Run(self, steady=steady)

    @cached_property
    def simulated(self) -> Simulated:
        """Of a step in the middle of a run."""
        run = self.run()
        return Simulated(run.seconds, tuple({axis: one.spent[axis] for axis in AXES} for one in run.courses), self)

    def courses(self) -> list[Course]:
        """Of all places, at a step's beginning."""
        parts = zip(self.places, self.lists, self.paces, self._entries, strict=True)
        return [Course(*part) for part in parts]

    def travel(self, source: int, target: int) -> tuple[float, int]:
        """Seconds of what one stage hands to another, and the links it uses."""
        found = self._travels.get((source, target))
        if found is None:
            found = self.prices.travel(source, target), self.prices.way(source, target)
            self._travels[source, target] = found
        return found

    def _listed(self, place: Place) -> list[Entry]:
        """A place's list."""
        schedule = self.plan.schedule
        ops = schedule.ranks[place.index]
        computing = [op for op in ops if op.computes]
        last = set({(op.stage, op.kind): op for op in computing}.values())
        phases: list[tuple[int, Phase]] = [(place.order[op.stage], phase_of(op)) for op in computing]
        following = iter([*phases[1:], None])
        entries: list[Entry] = []
        for op in ops:
            if op.computes:
                key = Key(place.order[op.stage], phase_of(op), op in last, next(following))
                entries.append(Entry(op, key, tuple(schedule.arrivals(op))))
            else:
                entries.append(Entry(op, None, (), op.transfer, op.sends))
        return entries

    def _paces(self, seed: int | None) -> list[float]:
        """By place: the time of its slowest node, as a multiple of the mean node's."""
        sigma, meshes = self.prices.jitter, self.plan.layout.meshes
        world = self.plan.layout.world_size
        each = self.prices.ranks_per_node or world
        count = -(-world // each)
        if seed is None:
            return [1.0 + slowest(count) * sigma] * len(meshes)
        chance = random.Random(seed)
        nodes = [chance.lognormvariate(-sigma * sigma / 2, sigma) for _ in range(count)]
        return [max(nodes[mesh.ranks[0] // each : mesh.ranks[-1] // each + 1]) for mesh in meshes]


def slowest(nodes: int) -> float:
    """By how many standard deviations the slowest of so many exceeds the mean, on average (Blom 1958)."""
    return NormalDist().inv_cdf((nodes - 0.375) / (nodes + 0.25)) if nodes > 1 else 0.0
