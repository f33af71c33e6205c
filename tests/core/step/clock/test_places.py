"""Places of a pipeline as a simulation sees them: what their ranks hold, and what their collectives take."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from plait.core.job.plan import Plan
from plait.core.parallel.layout import Layout
from plait.core.parallel.sharding import Sharding
from plait.core.step.clock.inside import Inside
from plait.core.step.clock.phase import Price, Programme, Start, UnitPrices, UnitStep
from plait.core.step.clock.places import PlaceLists
from plait.core.step.schedules import Shape, find_schedule, whole_steps
from plait.core.step.segments import Collective
from plait.core.step.step import Place
from plait.core.step.traffic import replicated_numbers
from plait.core.step.unit_traffic import unit_sizes
from plait.plan.simulate import PlanPrices
from tests.plan.machines import SPEC, pipelined, plan_of


@dataclass(frozen=True)
class Links(PlanPrices):
    """A collective takes a second for every rank and a thousandth for each step between them; links have the
    number of how far they reach."""

    slow: tuple[float, float] = (1.5, 1.25)
    asked: list[tuple[str, float, int, int]] = field(default_factory=list[tuple[str, float, int, int]])

    def collective(self, kind: Collective, nbytes: float, ranks: int, stride: int, place: int | None = None) -> float:
        self.asked.append((kind, nbytes, ranks, stride))
        return ranks + stride * 1e-3

    def tier(self, ranks: int, stride: int) -> int:
        return ranks * stride


def one_place(sharding: Sharding | None = None, *, dp: int = 8, micro: int = 8, **strategy: Any) -> Place:
    layout = Layout.of(dp=dp, tp=strategy.get("tp", 1), cp=strategy.pop("cp", 1))
    plan = plan_of(whole_steps(2), layout, replace(SPEC, num_layers=2), micro=micro,
                   shardings=(sharding or Sharding(),), **strategy)  # fmt: skip
    return Place(plan, 0)


def plan_at(place: Place) -> Plan:
    assert isinstance(place.step, Plan)
    return place.step


def inside(place: Place) -> Inside:
    return PlaceLists(place, Links(plan_at(place))).inside


def unit(place: Place, name: str = "mlp") -> UnitPrices:
    at = next(number for number, one in enumerate(place.units) if one.unit[0] == name)
    return inside(place).units[at]


def test_what_a_rank_holds() -> None:
    chain = Sharding(params=2, grads=4, optim=8)
    place = one_place(chain, tp=2)
    sizes = unit_sizes(place.step.model, place.strategy, place.step.stages[0], chain)
    assert {one.unit: one.numel for one in place.units} == sizes
    assert {(one.ranks, one.itemsize, one.gradient) for one in place.units} == {(8, 4, 4)}
    assert place.numbers == sum(sizes.values()) // 8
    assert one_place(dp=1).units == []
    assert one_place(dp=1).numbers == sum(unit_sizes(place.step.model, replace(place.strategy, tp=1),
                                                     place.step.stages[0], Sharding()).values())  # fmt: skip
    assert [one_place(precision=name).step.workload.master for name in ("bf16-mixed", "fp32", "fp64")] == [4, 4, 8]


def test_copies_of_tensor_parallel_ranks() -> None:
    flat = one_place(Sharding(optim=8), tp=2, sequence_parallel=True)
    numbers = replicated_numbers(flat.step.model, flat.strategy, flat.step.stages[0])
    assert flat.copies == -(-numbers // 8) * 4
    assert one_place(tp=2).copies == one_place().copies == 0
    assert one_place(tp=2, sequence_parallel=True, precision="fp64").copies == numbers * 8


def test_prices_of_a_unit_are_those_of_its_collectives() -> None:
    """Over replicas that lie two ranks apart; one after the other, on the links of the longest."""
    one = unit(one_place(Sharding(params=2, grads=4, optim=8), tp=2))
    assert one.forward == one.backward == Price(2.002, 4)
    assert one.reduce == Price(2.002 + 2.004, 8)
    assert one.last == Price(2.002 + 2.004 + 2.008, 16)
    assert one.publish == Price(2.008 + 2.004, 16)
    assert (one.gradient, one.parameters, one.whole) == ((32768 // 2, 4), (32768 // 2, 4), False)


@pytest.mark.parametrize(
    ("sharding", "forward", "reduce", "last", "publish", "buffers"),
    [
        (Sharding(), None, Price(0.0, -1), Price(8.001, 8), None, (False, False)),
        (Sharding(optim=8), None, Price(0.0, -1), Price(8.001, 8), Price(8.001, 8), (False, False)),
        (Sharding(grads=8, optim=8), None, Price(8.001, 8), Price(8.001, 8), Price(8.001, 8), (False, True)),
        (Sharding(params=8, grads=8, optim=8), Price(8.001, 8), Price(8.001, 8), Price(8.001, 8), None, (True, True)),
        (Sharding(params=4, grads=4, optim=4), Price(4.001, 4), Price(4.001, 4), Price(4.001 + 2.004, 4), None,
         (True, True)),
        (Sharding(params=2, grads=2, optim=2), Price(2.001, 2), Price(2.001, 2), Price(2.001 + 4.002, 8), None,
         (True, True)),
    ],
)  # fmt: skip
def test_what_is_not_shared_out_has_no_price(
    sharding: Sharding, forward: Price | None, reduce: Price, last: Price, publish: Price | None,
    buffers: tuple[bool, bool],
) -> None:  # fmt: skip
    one = unit(one_place(sharding))
    assert (one.forward, one.publish) == (forward, publish)
    assert (one.reduce.tier, one.last.tier) == (reduce.tier, last.tier)
    assert (one.reduce.seconds, one.last.seconds) == pytest.approx((reduce.seconds, last.seconds))
    assert (one.parameters is not None, one.gradient is not None) == buffers


def test_near_copies_are_priced_for_the_backward() -> None:
    one = unit(one_place(Sharding(params=8, grads=8, optim=8, secondary=2)))
    assert (one.forward, one.backward) == (Price(8.001, 8), Price(2.001, 2))
    vectors = unit(one_place(Sharding(params=8, grads=8, optim=8)), "vectors")
    assert (vectors.forward, vectors.publish, vectors.whole) == (None, Price(8.001, 8), True)
    assert (vectors.parameters, vectors.gradient) == (None, None)


def test_rules_are_the_strategys() -> None:
    hidden = inside(one_place(Sharding(optim=8), tp=2)).rules
    assert (hidden.slow, hidden.tp_tier, hidden.forward, hidden.backward, hidden.sent) == (
        (1.5, 1.25), 2, True, True, True,
    )  # fmt: skip
    ahead = inside(one_place(Sharding(optim=8), shard_overlap="forward", overlap="no-communication")).rules
    assert (ahead.forward, ahead.backward, ahead.sent) == (True, False, False)
    behind = inside(one_place(Sharding(optim=8), shard_overlap="backward", overlap="sync")).rules
    assert (behind.forward, behind.backward, behind.sent) == (False, True, True)


def tiers(place: Place) -> set[int | None]:
    programmes = inside(place).programmes.values()
    return {step.tier for programme in programmes for step in programme if isinstance(step, Start)}


@pytest.mark.parametrize(
    ("strategy", "links"),
    [
        ({"tp": 2}, {None}),
        ({"cp": 4, "ring": 1}, {4}),  # four that lie side by side
        ({"cp": 4, "ring": 4}, {4}),
        ({"cp": 4, "ring": 2}, {2, 4}),  # pairs, and rings of two that lie two apart
        ({"cp": 4, "ring": 2, "tp": 2}, {None, 4, 8}),
    ],
)
def test_exchanges_of_attention_use_the_links_between_their_ranks(
    strategy: dict[str, Any], links: set[int | None]
) -> None:
    assert tiers(one_place(dp=1, micro=2, **strategy)) == links


def places(plan: Plan) -> list[Place]:
    return [Place(plan, index) for index in range(len(plan.layout.degrees))]


def test_places_that_differ_in_their_layers_alone_are_of_a_kind() -> None:
    first, second, third, last = places(pipelined("1f1b", 4, 8))
    assert second.kind == third.kind != first.kind
    assert last.kind not in (first.kind, second.kind)
    unequal = find_schedule("1f1b", Shape(ranks=4, micro_batches=4))[0]
    _, two, three, _ = places(plan_of(unequal, Layout(((1, 2), (2, 1), (1, 2), (1, 2))), SPEC))
    assert two.kind != three.kind
    sharded = pipelined("1f1b", 4, 8, dp=2, shardings=(Sharding(), Sharding(optim=2), Sharding(), Sharding()))
    assert places(sharded)[1].kind != places(sharded)[2].kind
    v = places(pipelined("zb-v", 3, 6))[1]
    assert v.order == {1: 0, 4: 1}
    assert set(v.phases) == {(at, phase) for at in (0, 1) for phase in ("F", "I", "W")}
    assert [stage.index for stage in v.stages] == [1, 4]


def test_lists_of_another_place_of_the_kind_are_those_of_its_layers() -> None:
    _, second, third, _ = places(pipelined("1f1b", 4, 8))
    lists = PlaceLists(second, Links(plan_at(second)))
    own, other = lists.of(second, 0, "F"), lists.of(third, 0, "F")
    assert own == lists.listed(0, "F")
    assert [str(action).replace("attn1", "attn2").replace("mlp1", "mlp2") for action in own] == list(map(str, other))


SHARDED = Sharding(params=2, grads=2, optim=2)


@pytest.mark.parametrize(
    ("name", "strategy", "kinds"),
    [
        ("interleaved", {}, 3), ("interleaved", {"recompute": "full", "recompute_layers": 1}, 3), ("zb-v", {}, 3),
        ("1f1b", {"sequence_parallel": True, "overlap": "domino", "p1": 2}, 3),
    ],
)  # fmt: skip
def test_stages_with_equal_layers_are_listed_once_and_do_the_same(
    name: str, strategy: dict[str, Any], kinds: int
) -> None:
    """As if each was listed on its own, with the numbers of its own units."""
    plan = pipelined(name, 4, 8, dp=2, tp=2, micro=4, model=replace(SPEC, num_layers=16),
                     shardings=(SHARDED,) * 4, **strategy)  # fmt: skip
    known = dict[object, Programme]()
    for place in places(plan):
        found = PlaceLists(place, Links(plan), known).inside
        for at, phase in place.phases:
            alone = PlaceLists(place, Links(plan))._programme(at, phase)  # pyright: ignore[reportPrivateUsage]
            assert found.programmes[at, phase] == alone
            of = {place.units[step.unit].unit for step in alone if isinstance(step, UnitStep) and step.unit >= 0}
            assert of <= {*place.held[at]} and len(of) > 1
    assert len(known) == kinds * len({phase for _, phase in places(plan)[0].phases})


def test_traffic_is_of_a_share() -> None:
    place = one_place(dp=1, micro=5, tp=2, p1=2, cp=2)
    found = place.traffic(0, 5)
    assert (list(found.shares), found.sequence, found.itemsize, found.loss_itemsize) == ([3, 2], 16, 4, 4)
