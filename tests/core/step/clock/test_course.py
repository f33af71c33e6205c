"""A pp rank's course through a step: what it spends, what ends while it rests; and transfers between
pp ranks."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from plait.core.parallel.layout import Layout
from plait.core.parallel.sharding import Sharding
from plait.core.step.clock.pipeline import Simulated, Simulation, StepClock, slowest
from plait.core.step.clock.pipeline_ranks import AXES
from plait.core.step.schedules import Shape, find_schedule
from plait.core.step.segments import Collective
from plait.plan.search.simulate import PlanPrices
from tests.plan.machines import SPEC, Given, pipelined, plan_of

# ---- between pp ranks ----


@dataclass(frozen=True)
class Told(Given):
    """With factors of disturbance, and the links that transfers use; writes down what is asked of
    links."""

    slow: tuple[float, float] = (1.0, 1.0)
    buffered: bool = True
    links: int = 1
    step_overhead: float = 0.0
    asked: list[tuple[str, float, int, int]] = field(default_factory=list[tuple[str, float, int, int]])

    def way(self, source: int, target: int) -> int:
        return self.links

    def collective(self, kind: Collective, nbytes: float, ranks: int, stride: int, pp_rank: int | None = None) -> float:
        self.asked.append((kind, nbytes, ranks, stride))
        return self.unit

    def update(self, numbers: int) -> float:
        return numbers * 1e-6


def run(plan: Any, *, steady: bool = False, seconds: float = 1.0, **given: Any) -> StepClock:
    each = (seconds,) * len(plan.layout.degrees)
    prices = Told(plan, forward=each, input_gradient=each, weight_gradient=each, **given)
    return Simulation(plan, prices, None).run(steady=steady)


def moved(one: StepClock, pp_rank: int, *, sends: bool) -> list[tuple[float, float]]:
    return [(each.start, each.end) for each in one.courses[pp_rank].moved if each.sends == sends]


def ended(one: StepClock) -> float:
    """When the last collective of pp rank 1's units was over."""
    moment, scale, several = one.courses[1].ended[-1]
    return moment + scale * several[-1]


SHARED = Sharding(grads=2, optim=2)


@pytest.mark.parametrize(("links", "end"), [(1, 12.0), (0, 16.0)])
def test_a_transfer_shares_its_rate_with_what_sharding_sends_on_the_same_links(links: int, end: float) -> None:
    """Pp rank 1 begins at 5, when what pp rank 0 computed until 1 has come; from 7 on it sends a
    gradient, and still reduces."""
    plan = pipelined("1f1b", 2, 1, dp=2, shardings=(SHARED, SHARED))
    one = run(plan, hop=4.0, unit=10.0, links=links)
    assert moved(one, 0, sends=True) == [(1.0, 5.0)]
    assert moved(one, 1, sends=True) == [(8.0, end)]
    other = run(plan, hop=4.0, unit=10.0, links=1 - links)
    last = [ended(each) for each in (one, other)]
    assert last[0] - last[1] == pytest.approx(4.0 if links == 0 else -4.0)


def test_transfers_slow_computation_down_as_long_as_they_last() -> None:
    one = run(pipelined("1f1b", 2, 2), hop=0.5, slow=(2.0, 1.0))
    turns = [(turn.start, turn.scale) for turn in one.courses[0].turns]
    assert turns[:2] == [(0.0, 1.0), (1.0, 1.25)]  # for half a second at half the rate
    long = run(pipelined("1f1b", 2, 2), hop=50.0, slow=(2.0, 1.0))
    assert long.courses[0].turns[1].scale == 1.5  # no longer than it takes
    assert long.courses[0].spent["pp"] >= 0.5
    assert run(pipelined("1f1b", 2, 2), hop=0.0, slow=(2.0, 1.0)).courses[0].turns[1].scale == 1.0


def test_a_transfer_moves_when_it_is_sent_or_when_its_receive_is_posted() -> None:
    """A schedule in which stage 1 asks for its second micro-batch only when it is done with the
    first."""
    schedule = find_schedule("1f1b", Shape(ranks=2, micro_batches=2))[0]
    plan = plan_of(schedule, Layout.of(pp=2), replace(SPEC, num_layers=2))
    early, late = run(plan, hop=0.25), run(plan, hop=0.25, buffered=False)
    assert moved(early, 0, sends=True)[0] == (1.0, 1.25)
    assert moved(early, 0, sends=True)[1][0] == 2.0
    assert moved(late, 0, sends=True)[1][0] >= moved(early, 0, sends=True)[1][0]
    assert early.seconds <= late.seconds


# ---- nodes ----


@dataclass(frozen=True)
class Late(PlanPrices):
    jitter: float = 0.1
    ranks_per_node: int = 4


def paces(per_node: int, pp: int, tp: int, seed: int | None) -> list[float]:
    plan = pipelined("1f1b", pp, 4, tp=tp)
    return Simulation(plan, Late(plan, ranks_per_node=per_node), seed).paces


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
    across = paces(4, 3, 2, seed)  # pp ranks of two ranks: the last has a node of its own
    assert across == [each[0], each[0], each[1]]
    wide = paces(2, 2, 4, seed)  # two nodes a pp rank
    assert wide == [max(each[:2]), max(each[2:])]


def test_parts_of_the_mean_rank_are_weighted_by_ranks() -> None:
    schedule = find_schedule("1f1b", Shape(ranks=2, micro_batches=2))[0]
    plan = plan_of(schedule, Layout(((3, 1), (1, 1))), replace(SPEC, num_layers=2), micro=3)
    simulation = Simulation(plan, PlanPrices(plan), None)
    pp_ranks = tuple({str(axis): value for axis in AXES} for value in (4.0, 8.0))
    assert Simulated(4.0, pp_ranks, simulation).exposed == dict.fromkeys(AXES, 5.0)
