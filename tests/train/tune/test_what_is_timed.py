"""Which candidates are timed, and what is told of them: by a clock and steps that are set. On real
ones: ``test_measure``."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch

from plait.core.job.plan import Choices
from plait.core.job.refine import Measurements, Times, Timing
from plait.core.parallel.strategy import Strategy
from plait.core.record.timeline import OpSpan
from plait.core.step.schedule import Transfer
from plait.core.step.segments import Kind, SegmentOp
from plait.core.step.traffic import UnitOp
from plait.train.engine.agreement import Compilation
from plait.train.engine.pipeline import PipelineExecutor
from plait.train.engine.shards import Shards
from plait.train.machine.device import RankDevice
from plait.train.record.recorder import Recorder
from plait.train.tune import measure
from plait.train.tune.measure import REPEATS, travel_times
from tests.dist.equality import DEVICE
from tests.support.models import gpt
from tests.support.threads import threads
from tests.train.tune.test_measure import measured

GPT = gpt()
OP, UNIT = SegmentOp("mlp", 0, Kind.COLUMN_FORWARD, 0), UnitOp("gather", ("mlp", 0), True)
SPANS = [
    OpSpan(OP, "compute", 100.0, 103.0), OpSpan(OP, "comm", 103.0, 107.0), OpSpan(OP, "wait", 104.0, 107.0),
    OpSpan(UNIT, "comm", 100.0, 120.0), OpSpan(UNIT, "wait", 107.0, 127.0),
]  # fmt: skip
"""A step's: three seconds of computing, three of waiting, four of a collective, twenty of a
unit's."""


def rank() -> int:
    return threading.current_thread().rank  # type: ignore[attr-defined]


@dataclass
class Told:
    """What others were told, in order, and what they answer. seconds: of each candidate timed.
    ticks: of every rank, what its clock moves between two looks at it. runs: the first of what is
    timed. slower: by what a rank computes longer than the one before."""

    timing: Timing | None = None
    seconds: Sequence[float] = (3.0, 1.0, 2.0, 4.0)
    spans: Sequence[OpSpan] = field(default_factory=lambda: SPANS)
    ticks: Sequence[Sequence[float]] = ((1.0,), (1.0,), (1.0,))
    recorded: list[int] = field(default_factory=list)
    affordable: list[tuple[float, ...]] = field(default_factory=list)
    timed: list[tuple[int, int]] = field(default_factory=list)
    worth: list[tuple[float, int]] = field(default_factory=list)
    looks: dict[int, tuple[int, float]] = field(default_factory=dict)
    recorders: dict[int, Recorder] = field(default_factory=dict)
    runs: bool = False
    slower: float = 1.0

    def perf_counter(self) -> float:
        look, now = self.looks.get(rank(), (0, 0.0))
        now += self.ticks[rank()][look % len(self.ticks[rank()])]
        self.looks[rank()] = look + 1, now
        return now

    def record(self, run: Any, recorder: Any, times: int) -> list[list[OpSpan]]:
        self.recorders[rank()] = recorder
        if rank() == 0:
            self.recorded.append(times)
        later = [
            span._replace(end=span.end + self.slower * rank()) if span.kind == "compute" else span
            for span in self.spans
        ]
        return [later] * times

    def afford(self, *asked: float, overhead: float) -> Timing:
        if rank() == 0:
            self.affordable.append((*asked, overhead))
        return self.timing or Timing(0, 0, int(asked[-1]), 0.0, 0.0)

    def interleave(self, runs: Sequence[Any], device: Any, *, rounds: int) -> list[float]:
        if rank() == 0:
            self.timed.append((len(runs), rounds))
        if self.runs:
            self.recorders[rank()].take()
            runs[0]()
            spans = self.recorders[rank()].take()
            assert not any(isinstance(span.op, SegmentOp) for span in spans), "recording takes time"
        return list(self.seconds[: len(runs)])

    def pays(self, seconds: float, steps: int) -> str:
        if rank() == 0:
            self.worth.append((seconds, steps))
        return ""


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    one = Told()
    monkeypatch.setattr(measure, "time", one)
    monkeypatch.setattr(measure, "recorded", one.record)
    monkeypatch.setattr(measure, "timing_budget", one.afford)
    monkeypatch.setattr(measure, "time_interleaved", one.interleave)
    monkeypatch.setattr(measure, "worth_compiling", one.pays)
    return one


def strategies(found: Measurements) -> list[Strategy]:
    return [timed.strategy for timed in found.strategies]


CANDIDATES = tuple(
    Strategy(tp=2, p1=p1, p2=p2, sequence_parallel=cut) for cut in (True, False) for p2 in (2, 1) for p1 in (4, 1)
)


STEADY = (1.0, 2.0, 5.0, 3.0)
"""Two seconds pass in a plain step, three while an order is found."""


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(
    ("other", "seconds"), [(STEADY, 2.0), ((0.0, 6.0, 0.0, 2.0), 6.0), ((0.0, 1.0, 0.0, 1.0), 2.0)]
)
def test_what_timing_can_save_and_costs_is_that_of_the_slowest_rank(
    told: Told, other: tuple[float, ...], seconds: float, whole: bool
) -> None:
    """Of micro-batches that follow one another one is timed, and stands for the four of a step."""
    told.ticks, order = (STEADY, other), 3.0
    (found, _), _ = measured(GPT, [(1, 2)], Choices(strategies=CANDIDATES), 50, whole=whole)
    sliced = (4 + 1) * (2 + 1) / 4
    beside = order * sliced + measure.RECORDED * seconds / len(CANDIDATES)
    assert told.affordable == [pytest.approx((seconds, 4.0, 50 * (4 if whole else 1), len(CANDIDATES), beside))]
    assert (told.recorded, told.timed, found.strategies) == ([1], [], ())
    assert list(found.costs) == [False] and found.costs[False].compute["mlp.F"] == 3.5 / (1 if whole else 4)
    assert "nothing is timed before training" in found.notes["slices"]


@pytest.mark.parametrize(
    ("candidates", "rounds", "recorded", "kinds", "note"),
    [
        (8, 3, [1, 4, 1, 4], [False, True], "fastest of 8 timed candidates"),
        (8, 1, [1, 0, 1, 0], [False, True], "timing 8 of 8 candidates, rounds: 1"),
        (8, 2, [1, 1, 1, 1], [False, True], "timing 8 of 8 candidates, rounds: 2"),
        (4, 3, [1, 4], [False], "timing 4 of 8 candidates, rounds: 3"),
        (5, 1, [1, 0, 1, 0], [False, True], "timing 5 of 8 candidates, rounds: 1"),
    ],
)
def test_what_is_likely_to_be_fast_is_timed_first(
    told: Told, candidates: int, rounds: int, recorded: list[int], kinds: list[bool], note: str
) -> None:
    told.timing, told.seconds = Timing(candidates, rounds, 8, 7.0, 9.0), range(9, 0, -1)
    (found, chosen), (other, _) = measured(GPT, [(1, 2)], Choices(strategies=CANDIDATES), 50)
    likely = [
        Strategy(tp=2, p1=p1, p2=p2, sequence_parallel=cut) for cut in (False, True) for p2 in (1, 2) for p1 in (1, 4)
    ]
    assert strategies(found) == likely[:candidates] and chosen == likely[candidates - 1]
    assert [timed.seconds for timed in found.strategies] == list(told.seconds[:candidates])
    assert (told.timed, told.recorded, sorted(found.costs)) == ([(candidates, rounds)], recorded, kinds)
    assert found.notes["slices"].startswith(note)
    assert (found.strategies, found.costs) == (other.strategies, other.costs)


@pytest.mark.parametrize(("count", "note"), [(0, "nothing is timed"), (2, "timing 2 of 4"), (4, "fastest of 4")])
def test_what_sharding_leaves_under_way_is_timed_least_of_it_last(told: Told, count: int, note: str) -> None:
    told.timing = Timing(count, 3 if count else 0, 4, 7.0, 9.0)
    told.ticks = (STEADY,) * 2
    (found, chosen), _ = measured(GPT, [(2, 1)], Choices(shard_overlap=True), 50, "zero3")
    names = ["both", "backward", "forward", "none"]
    assert [timed.strategy.shard_overlap for timed in found.overlaps] == names[:count]
    assert chosen.shard_overlap == ("backward" if count else Strategy().shard_overlap)
    assert found.notes["sharding"].startswith(note)
    assert told.timed == ([(count, 3)] if count else [])
    beside = 3.0 * 1.0 + measure.RECORDED * 2.0 / 4
    assert told.affordable == [pytest.approx((2.0, 20.0, 50, 4, beside))], "what the units communicate can be hidden"


def test_a_step_is_timed_with_all_that_sharding_does_in_it(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    called = list[str]()

    def note(kind: type, name: str) -> None:
        real = getattr(kind, name)

        def noted(*args: Any, **named: Any) -> Any:
            if rank() == 0:
                called.append(name)
            return real(*args, **named)

        monkeypatch.setattr(kind, name, noted)

    for kind, names in ((PipelineExecutor, ("prefetch", "run")), (Shards, ("complete", "publish", "settle"))):
        for name in names:
            note(kind, name)
    told.timing, told.runs = Timing(2, 3, 4, 7.0, 9.0), True
    measured(GPT, [(2, 1)], Choices(shard_overlap=True), 50, "zero3")
    step = ["prefetch", "run", "complete", "publish"]
    assert [name for name in called if name != "settle"] == [*step, *step, "complete"], "a plain one to warm up"
    assert called[-2:] == ["settle", "settle"], "what is still being reduced is none of the next step's"


def test_an_order_of_few_slices_is_found_sooner_than_those_of_more(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    told.ticks = (STEADY,) * 2
    measured(GPT, [(1, 2)], Choices(strategies=CANDIDATES), 50, strategy=Strategy(tp=2, p1=2, p2=2))
    beside = 3.0 * (4 + 1) * (2 + 1) / 4 / 4 + measure.RECORDED * 2.0 / len(CANDIDATES)
    assert told.affordable[0][-1] == pytest.approx(beside)


def test_compiling_is_tried_where_it_can_pay_and_is_possible(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    def found(problem: str = "") -> tuple[Measurements, Strategy]:
        monkeypatch.setattr(measure, "compile_ahead", lambda part: Compilation(5, 2.0, problem))
        return measured(GPT, [(1, 1)], Choices(compile=True), 50)[0]

    told.seconds = (0.4, 0.15)
    one, chosen = found()
    assert (told.timed, told.worth) == ([(1, 1), (2, 3)], [(0.4, 50)])
    assert [(timed.strategy.compile, timed.seconds) for timed in one.compiled] == [(False, 0.4), (True, 0.15)]
    assert chosen.compile
    assert one.notes["compile"] == ("compiled 5 functions in 2.0 s; a step takes 150.0 ms, 400.0 ms if not compiled")
    told.seconds = (0.1, 0.15)
    assert not found()[1].compile
    one, chosen = found("rank 0: no compiler")
    assert (one.compiled, chosen.compile) == ((), False)
    assert one.notes["compile"] == "not possible (rank 0: no compiler)"
    monkeypatch.setattr(measure, "worth_compiling", lambda *_: "not tried: too short")
    told.timed.clear()
    one, chosen = found()
    assert (one.compiled, one.notes["compile"], told.timed) == ((), "not tried: too short", [(1, 1)])


def test_graphs_are_timed_with_and_without(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(DEVICE), "captures", True)
    told.seconds = (0.25, 0.125)
    ((found, chosen),) = measured(GPT, [(1, 1)], Choices(cuda_graphs=True), 50)
    assert [(timed.strategy.cuda_graphs, timed.seconds) for timed in found.graphed] == [(False, 0.25), (True, 0.125)]
    assert chosen.cuda_graphs and told.timed == [(2, 3)]
    assert found.notes["cuda_graphs"] == "a step takes 125.0 ms with CUDA graphs, 250.0 ms without"


def test_what_was_found_before_is_kept_and_followed(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "compile_ahead", lambda part: Compilation(5, 2.0, ""))
    monkeypatch.setattr(type(DEVICE), "captures", True)
    told.timing = Timing(4, 3, 4, 7.0, 9.0)
    choices = Choices(shard_overlap=True, compile=True, cuda_graphs=True)
    (found, chosen), _ = measured(GPT, [(2, 1)], choices, 50, "ddp")
    assert list(found.notes) == ["sharding", "compile", "cuda_graphs"]
    assert {timed.strategy.shard_overlap for timed in (*found.compiled, *found.graphed)} == {"backward"}
    assert {timed.strategy.compile for timed in found.graphed} == {True}
    assert (chosen.shard_overlap, chosen.compile, chosen.cuda_graphs) == ("backward", True, True)


def test_a_pp_rank_is_as_busy_as_its_busiest_rank_but_for_what_travels(
    told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of its four micro-batches takes a quarter of the step that comes after the one to warm
    up."""
    monkeypatch.setattr(measure, "travel_times", lambda courier, pp_rank, device: [0.5])
    found = [one.times for one, _ in measured(GPT, [(2, 1), (1, 1)], Choices(slack=True), 50)]
    assert found == [Times(((4 + 3) / 4, (5 + 3) / 4), (0.5,))] * 3
    told.slower = -1  # now those of lower numbers take longer
    found = [one.times for one, _ in measured(GPT, [(2, 1), (1, 1)], Choices(slack=True), 50)]
    assert found == [Times(((3 + 3) / 4, (1 + 3) / 4), (0.5,))] * 3
    assert told.recorded == [2, 2]


# ---- boundaries ----


class Stages(NamedTuple):
    rank_of: tuple[int, ...]

    @property
    def num_stages(self) -> int:
        return len(self.rank_of)


class Post:
    """A courier that notes what has been waited for."""

    def __init__(self, rank_of: tuple[int, ...]) -> None:
        self.schedule, self.log = Stages(rank_of), list[str]()

    def tiles(self, transfer: Transfer, *, receiving: bool) -> str:
        return f"{'received' if receiving else 'sent'} from {transfer.source} to {transfer.target}"

    def send(self, transfer: Transfer, tiles: str) -> Letter:
        assert tiles == self.tiles(transfer, receiving=False)
        return Letter(self, f"send {transfer.direction} {transfer.source}-{transfer.target}")

    def receive(self, transfer: Transfer) -> tuple[None, Letter]:
        return None, Letter(self, f"receive {transfer.direction} {transfer.source}-{transfer.target}")


@dataclass
class Letter:
    post: Post
    text: str

    def wait(self) -> None:
        self.post.log.append(self.text)


@pytest.mark.parametrize(
    ("rank_of", "seconds", "crossed"),
    [
        ((0, 1), [1.0], [0]),
        ((0, 0, 1, 1), [0.0, 1.0, 0.0], [1]),
        ((0, 1, 0), [1.0, 0.125], [0]),
        ((0,), [], []),
        ((0, 0), [0.0], []),
    ],
)
def test_a_boundary_takes_half_of_the_shortest_round_trip_by_the_clock_of_who_begins(
    rank_of: tuple[int, ...], seconds: list[float], crossed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where both stages lie on one pp rank nothing travels."""
    trips = (0.0, 7.0, 0.0, 2.0, 0.0, 3.0, 0.0, 8.0, 0.0, 4.0)
    monkeypatch.setattr(measure, "time", Told(ticks=(trips, (0.25,))))

    def work(pp_rank: int) -> tuple[list[float], list[str]]:
        post = Post(rank_of)
        return travel_times(post, pp_rank, device), post.log  # type: ignore[arg-type]

    ready, device = list[int](), RankDevice(torch.device("cpu"))
    monkeypatch.setattr(device, "synchronize", lambda: ready.append(rank()))
    (first, begins), (other, answers) = threads(2).run(work)
    assert first == other == seconds
    assert ready.count(0) == REPEATS * len(crossed), "what has come is waited for"
    there = [(f"F {at}-{at + 1}", f"B {at + 1}-{at}") for at in crossed for _ in range(REPEATS)]
    back = [("F 1-2", "B 2-1")] * REPEATS if rank_of == (0, 1, 0) else []
    assert begins == [
        f"{does} {way}" for trip in there for does, way in zip(("send", "receive"), trip, strict=True)
    ] + [f"{does} {way}" for trip in back for does, way in zip(("receive", "send"), trip, strict=True)]
    assert answers == [
        f"{does} {way}" for trip in there for does, way in zip(("receive", "send"), trip, strict=True)
    ] + [f"{does} {way}" for trip in back for does, way in zip(("send", "receive"), trip, strict=True)]
