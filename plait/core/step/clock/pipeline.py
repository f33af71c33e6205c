"""A step in virtual time: the schedule and the segment lists that ranks run, on a described
cluster.

One simulation for all places of the pipeline. The ranks of a place are alike, so one stands for all of them.
On the outside, ops of the schedule, transfers that share the links of the places between which they go, and
what ends a step; inside each op, its list (``step.clock.inside``). What is found is a ``Timeline`` with the
recorder's keys (``Simulated.timeline``), the seconds of a step, and what each axis adds to them.

Approximations. A transfer that meets sharding's traffic of its sender on the same links shares their rate
with what is under way when it starts, not with what starts later; a computation is slowed down by the
transfers under way when it begins. Of a node that is late (jitter), all ops are late alike.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist

from plait.core.record.timeline import Timeline
from plait.core.step.clock.course import AXES, Course, Moved
from plait.core.step.clock.phase import Programme
from plait.core.step.clock.pipeline_clock import Entry, PipelineClock, Transfers, Way, script_of
from plait.core.step.clock.places import PlaceLists
from plait.core.step.clock.prices import Prices
from plait.core.step.step import Place, Step


@dataclass(frozen=True)
class Simulated:
    """Seconds of a step. places: seconds of every place, by axis; each adds up to ``seconds``.

    compute: as if nothing ran beside it. tp, cp, dp, pp: exposed, so not hidden by computation, or slowing it
    down.
    """

    seconds: float
    places: tuple[Mapping[str, float], ...]
    simulation: Simulation = field(repr=False, compare=False)

    @property
    def exposed(self) -> dict[str, float]:
        """Seconds of the mean rank, by axis; they add up to ``seconds``."""
        counts = [len(mesh.ranks) for mesh in self.simulation.step.layout.meshes]
        return {
            axis: sum(place[axis] * count for place, count in zip(self.places, counts, strict=True)) / sum(counts)
            for axis in AXES
        }

    def timeline(self, steps: Sequence[int] = (0,), ranks: Sequence[int] | None = None) -> Timeline:
        """The spans of ``ranks`` (None: of all) in ``steps``, which are all alike but for a run's first: no
        optimizer has changed anything before step 0. Each begins at second 0."""
        from plait.core.step.clock.spans import timeline  # makes keys and bytes, which ranking plans does not need

        return timeline(self.simulation, steps, ranks)


class StepClock(PipelineClock[Course]):
    """One step of all places. steady: not a run's first."""

    def __init__(self, simulation: Simulation, *, steady: bool) -> None:
        self.simulation, self.prices, self.steady = simulation, simulation.prices, steady
        self.courses, self.seconds = simulation.courses(), 0.0
        transfers: Transfers = "buffered" if self.prices.buffered else "rendezvous"
        super().__init__(simulation.script, self.courses, transfers)
        for course in self.courses:
            if course.place.units:
                first = next(entry.key for entry in course.entries if entry.key)
                course.do(course.inside.begin((first.stage, first.phase), steady=steady))
        self.walk()
        self._finish()
        for course in self.courses:
            course.settle()

    def wait(self, rank: Course, way: int) -> None:
        """Stand still until a transfer moves because others have not computed yet, then because of the
        network."""
        begin, (moves, there) = rank.clock, self.there(way)
        rank.rest(moves, "idle")
        rank.rest(there, "pp")
        rank.moved.append(Moved(self.ways[way].transfer, False, begin, rank.clock))

    def compute(self, rank: Course, entry: Entry) -> None:
        """Go through a stage's list."""
        assert entry.key
        outcome, lost = rank.inside.phase(entry.key, rank.state), 0.0
        taken = max(rank.leaves, rank.arrives) - rank.clock
        if taken > 0:
            lost = min(outcome.seconds * rank.pace, taken) * (1 - 1 / self.prices.slow[0])
        rank.do(outcome, entry.op, lost=lost)

    def move(self, way: int, now: float) -> tuple[float, float]:
        """Send a tensor over the links of the places at its ends, which carry one at a time."""
        ends = self.ways[way]
        sender, receiver = self.courses[ends.sender], self.courses[ends.receiver]
        start = max(now, sender.leaves, receiver.arrives)
        seconds, tier = self.simulation.travel(ends)
        queue = sender.state.queue
        if queue and queue[0][1] == tier and sender.clock <= now:  # both at half the rate until one is done
            shared = min(seconds, sum(left for left, other in queue if other == tier))
            sender.state, seconds = sender.state.behind(shared), seconds + shared
        end = start + seconds
        sender.leaves = sender.last_sent = receiver.arrives = end
        sender.moved.append(Moved(ends.transfer, True, start, end))
        return start, end

    def _finish(self) -> None:
        """Complete the step: sum gradients, take their norm, let optimizers run."""
        prices, step = self.prices, self.simulation.step
        for course in self.courses:
            course.rest(course.last_sent, "pp")
            if course.place.units:
                course.do(course.inside.complete(course.state))
            if course.place.copies:
                where = course.place.index
                taken = prices.collective("all_reduce", course.place.copies, course.place.strategy.tp, 1, where)
                course.rest(course.clock + taken, "tp")
        self._tie()
        world = step.layout.world_size
        _meet(self.courses)
        for course in self.courses:
            norm = prices.collective("all_reduce", 3 * 8, world, 1) if world > 1 else 0.0
            taken = prices.update(course.place.numbers) + prices.muon(course.place)
            course.rest(course.clock + norm + taken * course.pace, "optimizer")
        _meet(self.courses)
        self.seconds = self.courses[0].clock + prices.beside
        for course in self.courses:
            course.rest(self.seconds, "beside")

    def _tie(self) -> None:
        """The first and the last stage sum the gradient of tied embeddings, if there are any."""
        step, rank_of = self.simulation.step, self.simulation.step.schedule.rank_of
        places = sorted({rank_of[0], rank_of[len(step.stages) - 1]})
        tie = step.tie(step.layout.meshes[places[0]].first)
        ranks = len(tie.ranks)
        if ranks == 1:
            return
        stride = max(1, step.layout.world_size // ranks)  # as the closed form has it: one node's ends are inside
        size = tie.numbers * self.courses[0].place.step.workload.master
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
    """A step's lists, what happens inside them, and how fast nodes are: the same in every step.

    key: gives the plan's, with which timelines are stamped; asked when one is made."""

    def __init__(self, step: Step, prices: Prices, jitter_seed: int | None, key: Callable[[], str] = str) -> None:
        self.step, self.prices, self.key = step, prices, key
        self.places = [Place(step, index) for index in range(len(step.layout.degrees))]
        kinds, known = dict[object, PlaceLists](), dict[object, Programme]()
        self.lists = [
            kinds.setdefault((place.kind, prices.alike(place.index)), PlaceLists(place, prices, known))
            for place in self.places
        ]
        self.paces = self._paces(jitter_seed)
        self.script = script_of(step.schedule)
        self._travels: dict[tuple[int, int], tuple[float, int]] = {}

    def run(self, *, steady: bool = True) -> StepClock:
        """Simulate one step."""
        return StepClock(self, steady=steady)

    @property
    def simulated(self) -> Simulated:
        """Seconds of a step in the middle of a run. Not kept here: it has the simulation, and a circle of
        both would outlive its last reader."""
        run = self.run()
        return Simulated(run.seconds, tuple({axis: one.spent[axis] for axis in AXES} for one in run.courses), self)

    def courses(self) -> list[Course]:
        """Courses of all places, at a step's beginning."""
        parts = zip(self.script.entries, self.places, self.lists, self.paces, strict=True)
        return [Course(entries, place=place, lists=lists, pace=pace) for entries, place, lists, pace in parts]

    def travel(self, way: Way) -> tuple[float, int]:
        """Seconds of what one stage hands to another, and the links it uses."""
        source, target = way.transfer[:2]
        edge = (source, target) if self.step.model.levels else (way.sender, way.receiver)  # equal layers, equal edges
        found = self._travels.get(edge)
        if found is None:
            found = self.prices.travel(source, target), self.prices.way(source, target)
            self._travels[edge] = found
        return found

    def _paces(self, seed: int | None) -> list[float]:
        """The time of each place's slowest node, as a multiple of the mean node's."""
        sigma, meshes = self.prices.jitter, self.step.layout.meshes
        world = self.step.layout.world_size
        each = self.prices.ranks_per_node or world
        count = -(-world // each)
        if seed is None:
            return [1.0 + slowest(count) * sigma] * len(meshes)
        chance = random.Random(seed)
        nodes = [chance.lognormvariate(-sigma * sigma / 2, sigma) for _ in range(count)]
        return [max(nodes[mesh.ranks[0] // each : mesh.ranks[-1] // each + 1]) for mesh in meshes]


def slowest(nodes: int) -> float:
    """Standard deviations by which the slowest of so many exceeds the mean, on average (Blom 1958)."""
    return NormalDist().inv_cdf((nodes - 0.375) / (nodes + 0.25)) if nodes > 1 else 0.0
