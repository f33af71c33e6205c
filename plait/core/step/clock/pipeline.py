"""Simulation of a step on a described cluster: the schedule and the instruction lists that ranks
run.

One simulation covers all pp ranks. The ranks of a pp rank are alike, so one stands for all of them.
The outer level simulates ops of the schedule, transfers that share the links of the pp ranks at
their ends, and the end of a step; the inside of each op is its list (``step.clock.inside``).
Results: a ``Timeline`` with the recorder's keys (``Simulated.timeline``), the seconds of a step,
and the seconds that each axis adds.

Approximations. A transfer on the same links as its sender's sharding traffic shares their bandwidth
with collectives in flight when it starts, not with later ones. A computation is slowed down by the
transfers in flight when it begins. All ops of a late node (jitter) are late by the same factor.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist

from plait.core.parallel.sharding import VECTORS, Unit
from plait.core.parallel.strategy import slice_sizes
from plait.core.record.timeline import OpSpan, Span, SpanKind, Timeline, spans_of
from plait.core.step.clock.phase import REDUCE_LAST, Label, Programme
from plait.core.step.clock.pipeline_clock import Entry, PipelineClock, TransferRoute, Transfers, script_of
from plait.core.step.clock.pipeline_ranks import AXES, Moved, PipelineRankLists, RankTimeline
from plait.core.step.clock.prices import Prices
from plait.core.step.schedule import Op, ends
from plait.core.step.step import PipelineRank, Step
from plait.core.step.traffic import UnitAction, UnitOp, UnitTraffic, UnitVerb


@dataclass(frozen=True)
class Simulated:
    """Seconds of a simulated step. pp_ranks: seconds of every pp rank by axis; each adds up to
    ``seconds``.

    compute: without slowdown by communication. tp, cp, dp, pp: exposed communication: not
    overlapped by computation, or slowing it down.
    """

    seconds: float
    pp_ranks: tuple[Mapping[str, float], ...]
    simulation: Simulation = field(repr=False, compare=False)

    @property
    def exposed(self) -> dict[str, float]:
        """Seconds by axis, averaged over ranks; they add up to ``seconds``."""
        counts = [len(mesh.ranks) for mesh in self.simulation.step.layout.meshes]
        return {
            axis: sum(seconds[axis] * count for seconds, count in zip(self.pp_ranks, counts, strict=True)) / sum(counts)
            for axis in AXES
        }

    def timeline(self, steps: Sequence[int] = (0,), ranks: Sequence[int] | None = None) -> Timeline:
        """Return the spans of ``ranks`` (None: all) in ``steps``. All steps are alike except a
        run's first: before step 0 no optimizer has updated parameters. Each step begins at second
        0."""

        return timeline(self.simulation, steps, ranks)


class StepClock(PipelineClock[RankTimeline]):
    """One simulated step of all pp ranks. steady: False for a run's first step."""

    def __init__(self, simulation: Simulation, *, steady: bool) -> None:
        self.simulation, self.prices, self.steady = simulation, simulation.prices, steady
        self.courses, self.seconds = simulation.courses(), 0.0
        transfers: Transfers = "buffered" if self.prices.buffered else "rendezvous"
        super().__init__(simulation.script, self.courses, transfers)
        for course in self.courses:
            if course.pipeline_rank.units:
                first = next(entry.key for entry in course.entries if entry.key)
                course.do(course.inside.begin((first.stage, first.phase), steady=steady))
        self.simulate()
        self._finish()
        for course in self.courses:
            course.settle()

    def wait(self, rank: RankTimeline, way: int) -> None:
        """Advance a pp rank's clock to the arrival of transfer ``way``: seconds until the transfer
        starts count as idle, seconds in transit as pp."""
        begin, (moves, there) = rank.clock, self.arrival(way)
        rank.rest(moves, "idle")
        rank.rest(there, "pp")
        rank.moved.append(Moved(self.ways[way].transfer, False, begin, rank.clock))

    def compute(self, rank: RankTimeline, entry: Entry) -> None:
        """Advance a pp rank by a stage's instruction list."""
        assert entry.key
        outcome, lost = rank.inside.phase(entry.key, rank.state), 0.0
        taken = max(rank.leaves, rank.arrives) - rank.clock
        if taken > 0:
            lost = min(outcome.seconds * rank.pace, taken) * (1 - 1 / self.prices.slow[0])
        rank.do(outcome, entry.op, lost=lost)

    def move(self, way: int, now: float) -> tuple[float, float]:
        """Return (begin, end) in seconds of a transfer over the links of the pp ranks at its ends,
        which carry one transfer at a time."""
        ends = self.ways[way]
        sender, receiver = self.courses[ends.sender], self.courses[ends.receiver]
        start = max(now, sender.leaves, receiver.arrives)
        seconds, tier = self.simulation.travel(ends)
        queue = sender.state.queue
        if queue and queue[0][1] == tier and sender.clock <= now:  # both at half the bandwidth until one is done
            shared = min(seconds, sum(left for left, other in queue if other == tier))
            sender.state, seconds = sender.state.behind(shared), seconds + shared
        end = start + seconds
        sender.leaves = sender.last_sent = receiver.arrives = end
        sender.moved.append(Moved(ends.transfer, True, start, end))
        return start, end

    def _finish(self) -> None:
        """Complete the step: sum gradients, compute their norm, run optimizers."""
        prices, step = self.prices, self.simulation.step
        for course in self.courses:
            course.rest(course.last_sent, "pp")
            if course.pipeline_rank.units:
                course.do(course.inside.complete(course.state))
            if course.pipeline_rank.replicated_gradient_bytes:
                where = course.pipeline_rank.index
                taken = prices.collective(
                    "all_reduce",
                    course.pipeline_rank.replicated_gradient_bytes,
                    course.pipeline_rank.strategy.tp,
                    1,
                    where,
                )
                course.rest(course.clock + taken, "tp")
        self._tie()
        world = step.layout.world_size
        _meet(self.courses)
        for course in self.courses:
            norm = prices.collective("all_reduce", 3 * 8, world, 1) if world > 1 else 0.0
            taken = prices.update(course.pipeline_rank.numbers) + prices.muon(course.pipeline_rank)
            course.rest(course.clock + norm + taken * course.pace, "optimizer")
        _meet(self.courses)
        self.seconds = self.courses[0].clock + prices.step_overhead
        for course in self.courses:
            course.rest(self.seconds, "beside")

    def _tie(self) -> None:
        """Sum the gradient of tied embeddings between the first and the last stage, if there are
        any."""
        step, rank_of = self.simulation.step, self.simulation.step.schedule.rank_of
        pp_ranks = sorted({rank_of[0], rank_of[len(step.stages) - 1]})
        tie = step.tie(step.layout.meshes[pp_ranks[0]].first)
        ranks = len(tie.ranks)
        if ranks == 1:
            return
        stride = max(1, step.layout.world_size // ranks)  # as in the closed form: one node's ends are inside
        size = tie.numbers * self.courses[0].pipeline_rank.step.workload.master
        courses = [self.courses[pp_rank] for pp_rank in pp_ranks]
        _meet(courses)
        for course in courses:
            course.rest(course.clock + self.prices.collective("all_reduce", size, ranks, stride), "pp")


def _meet(courses: Sequence[RankTimeline]) -> None:
    """Advance all timelines to the latest one's time, as a barrier does."""
    moment = max(course.clock for course in courses)
    for course in courses:
        course.rest(moment, "idle")


class Simulation:
    """A step's instruction lists, their simulated insides, and the speeds of nodes, which are the
    same in every step.

    key: returns the plan's key, with which timelines are stamped; called when a timeline is made.
    """

    def __init__(self, step: Step, prices: Prices, jitter_seed: int | None, key: Callable[[], str] = str) -> None:
        self.step, self.prices, self.key = step, prices, key
        self.pipeline_ranks = [PipelineRank(step, index) for index in range(len(step.layout.degrees))]
        kinds, known = dict[object, PipelineRankLists](), dict[object, Programme]()
        self.lists = [
            kinds.setdefault(
                (pipeline_rank.kind, prices.cost_class(pipeline_rank.index)),
                PipelineRankLists(pipeline_rank, prices, known),
            )
            for pipeline_rank in self.pipeline_ranks
        ]
        self.paces = self._paces(jitter_seed)
        self.script = script_of(step.schedule)
        self._travels: dict[tuple[int, int], tuple[float, int]] = {}

    def run(self, *, steady: bool = True) -> StepClock:
        """Return the clock of one simulated step, at its end. steady: False for a run's first
        step."""
        return StepClock(self, steady=steady)

    @property
    def simulated(self) -> Simulated:
        """Seconds of a step in the middle of a run. Not cached here: the result refers to this
        simulation, and a reference cycle would outlive its last reader."""
        run = self.run()
        return Simulated(run.seconds, tuple({axis: one.spent[axis] for axis in AXES} for one in run.courses), self)

    def courses(self) -> list[RankTimeline]:
        """Return the timelines of all pp ranks at a step's beginning."""
        parts = zip(self.script.entries, self.pipeline_ranks, self.lists, self.paces, strict=True)
        return [
            RankTimeline(entries, pipeline_rank=pipeline_rank, lists=lists, pace=pace)
            for entries, pipeline_rank, lists, pace in parts
        ]

    def travel(self, way: TransferRoute) -> tuple[float, int]:
        """Return (seconds of a transfer between two stages, number of the network tier that it
        uses)."""
        source, target = way.transfer[:2]
        edge = (source, target) if self.step.model.levels else (way.sender, way.receiver)  # equal layers, equal edges
        found = self._travels.get(edge)
        if found is None:
            found = self.prices.travel(source, target), self.prices.way(source, target)
            self._travels[edge] = found
        return found

    def _paces(self, seed: int | None) -> list[float]:
        """Return, by pp rank, the step time of its slowest node as a multiple of the mean node's.
        seed: of the random draw; None: the expected maximum."""
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
    """Return the expected excess of the slowest of ``nodes`` nodes over the mean, in standard
    deviations (Blom 1958)."""
    return NormalDist().inv_cdf((nodes - 0.375) / (nodes + 0.25)) if nodes > 1 else 0.0


# ---- spans ----


_VERBS: Mapping[str, UnitVerb] = {
    "need": "need", "gather": "gather", "publish": "publish", "reduce": "reduce", REDUCE_LAST: "reduce",
    "settle": "settle",
}  # fmt: skip
_KINDS: Mapping[str, SpanKind] = {"compute": "compute", "comm": "comm", "wait": "wait"}


def timeline(simulation: Simulation, steps: Sequence[int], ranks: Sequence[int] | None) -> Timeline:
    """Return the spans of ``ranks`` (None: all) in ``steps``. Bytes of embedding rows, which depend
    on the tokens, are upper bounds."""
    whole = simulation.step
    runs = {steady: simulation.run(steady=steady) for steady in {step > 0 for step in steps}}
    found: list[Span] = []
    for pp_rank, mesh in enumerate(whole.layout.meshes):
        shares = slice_sizes(whole.workload.micro_batch, mesh.dp)

        known: dict[tuple[bool, int], list[OpSpan]] = {}
        for step in steps:
            for rank in mesh.ranks if ranks is None else set(mesh.ranks).intersection(ranks):
                key = step > 0, shares[mesh.coordinates(rank)["dp"]]
                if key not in known:
                    known[key] = list(_RankSpans(simulation, runs[key[0]].courses[pp_rank], key[1]).all())
                found += spans_of(step, rank, known[key])
    return Timeline(tuple(found), simulation.key())


class _RankSpans:
    """Spans of one rank of a pp rank, which has ``share`` sequences of every micro-batch."""

    def __init__(self, simulation: Simulation, course: RankTimeline, share: int) -> None:
        self.step, self.course, self.pipeline_rank, self.share = simulation.step, course, course.pipeline_rank, share
        self.units = self.pipeline_rank.units

    def all(self) -> Iterator[OpSpan]:
        """Yield all spans of the rank, in no particular order."""
        yield from self._inside()
        yield from self._waits()
        yield from self._units()
        for transfer, sends, start, end in self.course.moved:
            send, receive = ends(transfer)
            if sends:
                yield OpSpan(send, "transfer", start, end, self._tile(send))
            else:
                yield OpSpan(receive, "idle", start, end)

    def _inside(self) -> Iterator[OpSpan]:
        """Yield spans of segment ops and their collectives."""
        for op, start, scale, outcome in self.course.turns:
            if op is None:
                continue
            at = self.pipeline_rank.stage_index[op.stage]
            actions = self.course.lists.of(self.pipeline_rank, at, op.work.phase)
            traffic = self.pipeline_rank.traffic(at, self.share)
            for position, kind, begin, end in outcome.done:
                action = actions[position]
                assert not isinstance(action, UnitAction)
                sent = traffic.sent(action.op) if kind == "comm" else 0
                yield OpSpan(action.op, _KINDS[kind], start + begin * scale, start + end * scale, sent)

    def _waits(self) -> Iterator[OpSpan]:
        """Yield spans of waits for units."""
        for _, moment, scale, outcome in self.course.turns:
            for label, start, end in outcome.waits:
                yield OpSpan(self._named(label), "wait", moment + start * scale, moment + end * scale)

    def _units(self) -> Iterator[OpSpan]:
        """Yield spans of units' collectives: one stream, one after the other."""
        sent = [
            (label, moment + at * scale)
            for _, moment, scale, outcome in self.course.turns
            for label, at in outcome.sent
        ]
        ended = [moment + at * scale for moment, scale, several in self.course.ended for at in several]
        before = 0.0
        for (label, started), end in zip(sent, ended, strict=True):
            yield OpSpan(self._named(label), "comm", max(started, before), end, self._sent(label))
            before = end

    def _named(self, label: Label) -> UnitOp:
        verb, number, forward = label
        unit: Unit = VECTORS if verb == "settle" else self.units[number].unit
        return UnitOp(_VERBS[verb], unit, forward)

    def _sent(self, label: Label) -> int:
        verb, number, forward = label
        unit: UnitTraffic = self.units[number]
        match verb:
            case "gather":
                found = unit.gather(forward=forward)
            case "publish":
                found = unit.publish()
            case _:
                found = unit.reduce(last=verb == REDUCE_LAST)
        return sum(one.bytes for one in found)

    def _tile(self, op: Op) -> int:
        return self.step.crossing_bytes(self.pipeline_rank.index, (op.stage, op.peer), self.share)
