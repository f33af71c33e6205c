"""A place's course through a step: what it spends, what ends while it rests; and transfers between places."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from statistics import NormalDist
from typing import Any

import pytest

from plait.core.parallel.layout import Layout
from plait.core.parallel.sharding import Sharding
from plait.core.step.clock.course import AXES, Course, Turn
from plait.core.step.clock.phase import Key, Outcome, Spent, State
from plait.core.step.clock.pipeline import Simulated, Simulation, StepClock, slowest
from plait.core.step.clock.pipeline_clock import Entry, script_of
from plait.core.step.schedule import Op
from plait.core.step.schedules import Shape, find_schedule, whole_steps
from plait.core.step.segments import Collective
from plait.plan.simulate import PlanPrices
from tests.plan.machines import SPEC, Given, pipelined, plan_of


def course(pace: float = 1.0, state: State | None = None) -> Course:
    nothing: Any = None
    return Course((), 5.0, place=nothing, lists=nothing, pace=pace, state=state or State())


def test_who_rests_until_now_or_earlier_spends_nothing() -> None:
    one = course(state=State(queue=((1.0, 0),)))
    one.rest(5.0, "pp")
    one.rest(4.0, "idle")
    assert (one.clock, one.ended, one.state.queue) == (5.0, [], ((1.0, 0),))
    assert one.spent == dict.fromkeys(AXES, 0.0)


def test_collectives_end_while_a_place_rests() -> None:
    one = course(pace=2.0, state=State(queue=((1.0, 0), (3.0, 0))))
    one.rest(7.0, "pp")
    assert (one.clock, one.spent["pp"]) == (7.0, 2.0)
    assert one.ended == [(5.0, 1.0, [1.0])]
    assert one.state.queue == ((2.0, 0),)
    idle = course()
    idle.rest(6.0, "idle")
    assert (idle.ended, idle.spent["idle"]) == ([], 1.0)


def test_a_computation_takes_its_pace_and_what_transfers_slow_it_down() -> None:
    after = State(queue=((1.0, 0),))
    outcome = Outcome(4.0, Spent(3.0, 0.5, 0.25, 0.25), after, ended=(0.5, 2.0))
    one, op = course(pace=1.5), Op(0, "F", 0)
    one.do(outcome, op, lost=2.0)
    assert one.turns == [Turn(op, 5.0, 2.0, outcome)]
    assert (one.clock, one.state) == (13.0, after)
    assert one.ended == [(5.0, 2.0, (0.5, 2.0))]
    one.do(replace(outcome, ended=()))
    assert (one.clock, len(one.ended), one.turns[1]) == (19.0, 1, Turn(None, 13.0, 1.5, replace(outcome, ended=())))
    one.settle()
    told = {
        "compute": 6.0,
        "tp": 1.0,
        "cp": 0.5,
        "dp": 0.5,
        "pp": 2.0,
        "optimizer": 0.0,
        "idle": 2 * 4 * 0.5,
        "beside": 0.0,
    }
    assert one.spent == told
    assert sum(one.spent.values()) == one.clock - 5.0


def test_a_script_says_what_each_op_needs_and_what_follows() -> None:
    schedule = pipelined("1f1b", 2, 2).schedule
    script = script_of(schedule)
    assert {(way.sender, way.receiver) for way in script.ways} == {(0, 1), (1, 0)}
    assert len(script.ways) == 4
    first, second = script.entries
    assert [str(entry.op) for entry in first] == [str(op) for op in schedule.ranks[0]]
    computing: list[Entry] = [entry for entry in first if entry.key]
    assert [entry.key for entry in computing] == [
        Key(0, "F", False, (0, "F")), Key(0, "F", True, (0, "B")), Key(0, "B", False, (0, "B")),
        Key(0, "B", True, None),
    ]  # fmt: skip
    assert [len(entry.arrivals) for entry in computing] == [0, 0, 1, 1]
    assert [entry.key and entry.key[:2] for entry in second if entry.key] == [(0, "F"), (0, "B")] * 2
    assert {(entry.way, entry.sends) for entry in computing} == {(-1, False)}, "of computations there is no transfer"
    moves = [(entry.way, entry.sends) for entry in (*first, *second) if not entry.key]
    assert sorted(moves) == [(way, sends) for way in range(4) for sends in (False, True)]


# ---- between places ----


@dataclass(frozen=True)
class Told(Given):
    """With factors of disturbance, and the links that transfers use; writes down what is asked of links."""

    slow: tuple[float, float] = (1.0, 1.0)
    buffered: bool = True
    links: int = 1
    beside: float = 0.0
    asked: list[tuple[str, float, int, int]] = field(default_factory=list[tuple[str, float, int, int]])

    def way(self, source: int, target: int) -> int:
        return self.links

    def collective(self, kind: Collective, nbytes: float, ranks: int, stride: int, place: int | None = None) -> float:
        self.asked.append((kind, nbytes, ranks, stride))
        return self.unit

    def update(self, numbers: int) -> float:
        return numbers * 1e-6


def run(plan: Any, *, steady: bool = False, seconds: float = 1.0, **given: Any) -> StepClock:
    each = (seconds,) * len(plan.layout.degrees)
    prices = Told(plan, forward=each, input_gradient=each, weight_gradient=each, **given)
    return Simulation(plan, prices, None).run(steady=steady)


def moved(one: StepClock, place: int, *, sends: bool) -> list[tuple[float, float]]:
    return [(each.start, each.end) for each in one.courses[place].moved if each.sends == sends]


def ended(one: StepClock) -> float:
    """When the last collective of place 1's units was over."""
    moment, scale, several = one.courses[1].ended[-1]
    return moment + scale * several[-1]


SHARED = Sharding(grads=2, optim=2)


@pytest.mark.parametrize(("links", "end"), [(1, 12.0), (0, 16.0)])
def test_a_transfer_shares_its_rate_with_what_sharding_sends_on_the_same_links(links: int, end: float) -> None:
    """Place 1 begins at 5, when what place 0 computed until 1 has come; from 7 on it sends a gradient, and
    still reduces."""
    plan = pipelined("1f1b", 2, 1, dp=2, shardings=(SHARED, SHARED))
    one = run(plan, hop=4.0, unit=10.0, links=links)
    assert moved(one, 0, sends=True) == [(1.0, 5.0)]
    assert moved(one, 1, sends=True) == [(8.0, end)]
    other = run(plan, hop=4.0, unit=10.0, links=1 - links)
    last = [ended(each) for each in (one, other)]
    assert last[0] - last[1] == pytest.approx(4.0 if links == 0 else -4.0)


def test_a_long_transfer_shares_no_more_than_there_is() -> None:
    """Reductions are begun one after the other: all that is left of them on these links."""
    plan = pipelined("1f1b", 2, 1, dp=2, shardings=(SHARED, SHARED))
    shared = run(plan, hop=1000.0, unit=10.0, links=0)
    start, end = moved(shared, 1, sends=True)[0]
    left = sum(seconds for seconds, _ in shared.courses[1].turns[2].outcome.after.queue)
    assert left > 10.0
    assert end - start == pytest.approx(1000.0 + left)


def test_transfers_slow_computation_down_as_long_as_they_last() -> None:
    one = run(pipelined("1f1b", 2, 2), hop=0.5, slow=(2.0, 1.0))
    turns = [(turn.start, turn.scale) for turn in one.courses[0].turns]
    assert turns[:2] == [(0.0, 1.0), (1.0, 1.25)]  # for half a second at half the rate
    long = run(pipelined("1f1b", 2, 2), hop=50.0, slow=(2.0, 1.0))
    assert long.courses[0].turns[1].scale == 1.5  # no longer than it takes
    assert long.courses[0].spent["pp"] >= 0.5
    assert run(pipelined("1f1b", 2, 2), hop=0.0, slow=(2.0, 1.0)).courses[0].turns[1].scale == 1.0


def test_a_transfer_moves_when_it_is_sent_or_when_its_receive_is_posted() -> None:
    """A schedule in which stage 1 asks for its second micro-batch only when it is done with the first."""
    schedule = find_schedule("1f1b", Shape(ranks=2, micro_batches=2))[0]
    plan = plan_of(schedule, Layout.of(pp=2), replace(SPEC, num_layers=2))
    early, late = run(plan, hop=0.25), run(plan, hop=0.25, buffered=False)
    assert moved(early, 0, sends=True)[0] == (1.0, 1.25)
    assert moved(early, 0, sends=True)[1][0] == 2.0
    assert moved(late, 0, sends=True)[1][0] >= moved(early, 0, sends=True)[1][0]
    assert early.seconds <= late.seconds


def test_standing_still_is_idleness_until_a_transfer_moves_then_the_networks_fault() -> None:
    one = run(pipelined("1f1b", 2, 1), hop=4.0)
    assert one.courses[1].spent["idle"] == pytest.approx(1.0 + 2.0, abs=0.01)  # until place 0 has computed
    assert one.courses[1].spent["pp"] == pytest.approx(4.0 + 4.0)  # until what it sends itself is there
    assert moved(one, 1, sends=False) == [(0.0, 5.0)]


def test_a_step_ends_with_sums_a_norm_and_an_update() -> None:
    tied = replace(SPEC, num_layers=2, tied_embeddings=True)
    plan = pipelined("1f1b", 2, 1, tied, tp=2, sequence_parallel=True, dp=2)
    prices = Told(plan, forward=(1.0, 1.0), input_gradient=(1.0, 1.0), weight_gradient=(1.0, 1.0), unit=0.5, beside=7.0)
    found = Simulation(plan, prices, None).run()
    asked = prices.asked
    assert asked.count(("all_reduce", 24, 8, 1)) == 2  # three doubles of every rank
    copies = [found.courses[place].place.copies for place in (0, 1)]
    assert all(("all_reduce", size, 2, 1) in asked for size in copies)
    tie = plan.tie(0)
    assert asked.count(("all_reduce", tie.numbers * 4, 2, 4)) == 2
    assert found.seconds == max(one.clock for one in found.courses)
    assert all(one.clock == found.seconds for one in found.courses)
    # Six seconds of computation, copies, tied weights, the norm, the update, and what is beside.
    updates = max(one.place.numbers for one in found.courses) * 1e-6
    assert found.seconds == pytest.approx(6 + 3 * 0.5 + updates + 7.0 + reduced(found))


def reduced(found: StepClock) -> float:
    """Seconds of replicas' sums at the end of a step."""
    return max(one.spent["dp"] for one in found.courses)


def test_one_rank_sums_nothing() -> None:
    plan = plan_of(whole_steps(2), Layout.of(), replace(SPEC, num_layers=1))
    prices = Told(plan, forward=(1.0,), input_gradient=(1.0,), weight_gradient=(1.0,), unit=0.5)
    found = Simulation(plan, prices, None).run()
    assert prices.asked == []
    assert found.seconds == pytest.approx(6.0 + found.courses[0].place.numbers * 1e-6)
    assert found.courses[0].spent["optimizer"] == pytest.approx(found.courses[0].place.numbers * 1e-6)


# ---- nodes ----


@dataclass(frozen=True)
class Late(PlanPrices):
    jitter: float = 0.1
    ranks_per_node: int = 4


def paces(per_node: int, places: int, tp: int, seed: int | None) -> list[float]:
    plan = pipelined("1f1b", places, 4, tp=tp)
    return Simulation(plan, Late(plan, ranks_per_node=per_node), seed).paces


def test_the_slowest_of_several_is_later_on_average() -> None:
    assert slowest(1) == 0.0
    assert slowest(2) == pytest.approx(NormalDist().inv_cdf(1.625 / 2.25))
    assert slowest(10) == pytest.approx(NormalDist().inv_cdf(9.625 / 10.25))


def test_without_a_seed_all_places_wait_for_the_slowest_node() -> None:
    assert paces(4, 4, 4, None) == pytest.approx([1 + 0.1 * slowest(4)] * 4)
    assert paces(8, 4, 4, None) == pytest.approx([1 + 0.1 * slowest(2)] * 4)
    assert paces(7, 4, 4, None) == pytest.approx([1 + 0.1 * slowest(3)] * 4)
    assert paces(0, 4, 4, None) == [1.0] * 4  # one node


@pytest.mark.parametrize("seed", range(5))
def test_a_place_waits_for_the_slowest_of_its_own_nodes(seed: int) -> None:
    each = paces(4, 4, 4, seed)
    assert len(set(each)) == 4
    pair = paces(8, 4, 4, seed)
    assert pair[0] == pair[1] == each[0] and pair[2] == pair[3] == each[1]
    across = paces(4, 3, 2, seed)  # places of two ranks: the last has a node of its own
    assert across == [each[0], each[0], each[1]]
    wide = paces(2, 2, 4, seed)  # two nodes a place
    assert wide == [max(each[:2]), max(each[2:])]


def test_parts_of_the_mean_rank_are_weighted_by_ranks() -> None:
    schedule = find_schedule("1f1b", Shape(ranks=2, micro_batches=2))[0]
    plan = plan_of(schedule, Layout(((3, 1), (1, 1))), replace(SPEC, num_layers=2), micro=3)
    simulation = Simulation(plan, PlanPrices(plan), None)
    places = tuple({str(axis): value for axis in AXES} for value in (4.0, 8.0))
    assert Simulated(4.0, places, simulation).exposed == dict.fromkeys(AXES, 5.0)
