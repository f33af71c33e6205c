"""The inside of a pp rank: gathers ahead, buffers that run out, and phases that begin where others
left off."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.core.step.clock.inside import PhaseSimulator
from plait.core.step.clock.phase import (
    Compute,
    Key,
    Outcome,
    Price,
    Programme,
    Rules,
    Start,
    State,
    UnitPrices,
    UnitStep,
    Wait,
)
from plait.core.step.segments import Phase

RULES = Rules((1.0, 1.0), 0)


def unit(gather: float = 0.0, reduce: float = 0.0, publish: float = 0.0, size: int = 8) -> UnitPrices:
    """Gathered, reduced after every micro-batch and published, each if it takes time; on links of
    its own."""
    price = Price(gather, 1) if gather else None
    return UnitPrices(
        forward=price,
        backward=price,
        reduce=Price(reduce, 1),
        last=Price(reduce, 1),
        publish=Price(publish, 1) if publish else None,
        gradient=(size, 4) if reduce else None,
        parameters=(size, 2) if gather else None,
        whole=False,
    )


def reads(number: int, seconds: float, *, ahead: int | None = None) -> list[Compute | Start | Wait | UnitStep]:
    gathers = [number] if ahead is None else [number, ahead]
    return [
        *(UnitStep("gather", each, True) for each in gathers),
        UnitStep("need", number, True),
        Compute(seconds),
        UnitStep("drop", number, True),
    ]


def adds(number: int, seconds: float) -> list[Compute | Start | Wait | UnitStep]:
    return [UnitStep("open", number, False), Compute(seconds), UnitStep("close", number, False)]


def inside(programme: Programme, units: Sequence[UnitPrices], rules: Rules = RULES) -> PhaseSimulator:
    return PhaseSimulator({(0, "step"): programme}, units, rules)


def test_a_gather_ahead_hides_behind_what_is_computed() -> None:
    units = [unit(gather=3.0), unit(gather=3.0)]
    together = inside([*reads(0, 5.0, ahead=1), *reads(1, 5.0)], units)
    apart = inside([*reads(0, 5.0), *reads(1, 5.0)], units)
    key, state = Key(0, "step"), State(free=(((8, 2), 2),))
    assert together.phase(key, state).seconds == pytest.approx(13.0)
    assert apart.phase(key, state).seconds == pytest.approx(16.0)
    assert together.phase(key, state).spent.dp == pytest.approx(3.0)


def test_a_third_open_gradient_waits_for_the_first_ones_reduction() -> None:
    units = [unit(reduce=10.0) for _ in range(3)]
    programme = [step for number in range(3) for step in adds(number, 1.0)]
    found = inside(programme, units).phase(Key(0, "step"), State(free=(((8, 4), 2),)))
    assert found.seconds == pytest.approx(12.0)  # until 11 the first is reduced
    assert found.after.queue == ((9.0, 1), (10.0, 1))
    assert inside(programme, units).complete(found.after).seconds == pytest.approx(19.0)


def test_what_was_published_is_awaited_by_its_first_reader_only() -> None:
    units = [unit(publish=2.0), unit(publish=2.0)]
    one = inside([*reads(0, 1.0), *reads(1, 1.0), *reads(0, 1.0)], units)
    begun = one.begin((0, "step"), steady=True)
    assert begun.seconds == 0.0
    found = one.phase(Key(0, "step"), begun.after)
    assert [(label[1], start, end) for label, start, end in found.waits] == [(0, 0.0, 2.0), (1, 3.0, 4.0)]
    first = one.begin((0, "step"), steady=False)
    assert [end - start for _, start, end in one.phase(Key(0, "step"), first.after).waits] == [0.0, 0.0]
    hidden = inside([*reads(0, 1.0)], units, Rules((1.0, 1.0), 0, forward=False))
    assert hidden.begin((0, "step"), steady=True).seconds == pytest.approx(4.0)


KEY = Key(0, "step")


def test_a_buffer_that_is_missing_is_made_and_kept() -> None:
    """Two gradients are opened where there is no buffer; after the step's end there are two."""
    units = [unit(reduce=1.0), unit(reduce=1.0)]
    programme = [
        UnitStep("open", 0, False),
        UnitStep("open", 1, False),
        *(UnitStep("close", at, False) for at in (0, 1)),
    ]
    one = inside(programme, units)
    after = one.phase(KEY, State()).after
    assert after.free == ()
    assert one.complete(after).after.free == (((8, 4), 2),)


@pytest.mark.parametrize(
    ("forward", "backward", "phase", "lead"),
    [(True, False, "F", 2), (True, False, "step", 2), (True, False, "B", 0), (False, True, "B", 2),
     (False, True, "F", 0), (False, True, "I", 2)],
)  # fmt: skip
def test_the_next_list_is_led_by_what_it_gathers_first(forward: bool, backward: bool, phase: Phase, lead: int) -> None:
    ahead = [UnitStep("gather", 0, True), UnitStep("gather", 1, False), Compute(1.0), UnitStep("gather", 2, True)]
    rules = Rules((1.0, 1.0), 0, forward=forward, backward=backward)
    units = [unit(gather=1.0) for _ in range(3)]
    one = PhaseSimulator({(0, phase): ahead, (1, "W"): [UnitStep("next", 0, False)]}, units, rules)
    state = State(free=(((8, 2), 3),))
    found = one.phase(Key(1, "W", following=(0, phase)), state)
    assert [label for label, _ in found.sent] == [("gather", 0, True), ("gather", 1, False)][:lead]
    assert one.phase(Key(1, "W"), state).sent == []
    begun = one.begin((0, phase), steady=False)
    assert len(begun.sent) == lead


PRICES = st.floats(0.01, 5)


def ended_with(outcome: Outcome) -> list[float]:
    """When collectives ended, those included of which at the end nothing is left but a rounding."""
    queue = (left for left, _ in outcome.after.queue)
    return [*outcome.ended, *(outcome.seconds for _ in takewhile(lambda left: left < 1e-9, queue))]


@given(st.data())
def test_phases_are_as_long_as_the_list_that_they_are_cut_from(data: st.DataObject) -> None:
    """What is left under way, gathered or without a buffer goes on in the next phase."""
    count = data.draw(st.integers(2, 6))
    units = [
        unit(gather=data.draw(PRICES), reduce=data.draw(PRICES), size=data.draw(st.sampled_from((8, 16))))
        for _ in range(count)
    ]
    pieces = [
        [*reads(number, data.draw(PRICES), ahead=(number + 1) % count), *adds(number, data.draw(PRICES))]
        for number in range(count)
    ]
    cut = data.draw(st.integers(1, count - 1))
    first, second = ([step for piece in part for step in piece] for part in (pieces[:cut], pieces[cut:]))
    state = inside([], units).begin((0, "step"), steady=False).after
    whole = inside([*first, *second], units).phase(Key(0, "step"), state)
    before = inside(first, units).phase(Key(0, "step"), state)
    after = inside(second, units).phase(Key(0, "step"), before.after)
    assert before.seconds + after.seconds == pytest.approx(whole.seconds, abs=1e-9)
    assert [label for label, _ in (*before.sent, *after.sent)] == [label for label, _ in whole.sent]
    ended = [*before.ended, *(before.seconds + at for at in ended_with(after))]
    assert ended == pytest.approx(ended_with(whole), abs=1e-9)


@given(st.lists(PRICES, min_size=1, max_size=5), st.floats(0, 20))
def test_what_is_under_way_goes_on_while_nothing_computes(left: list[float], passed: float) -> None:
    state = State(queue=tuple((round(each, 6), 0) for each in left), here=tuple((i, i) for i in range(len(left))))
    later, ended = state.later(passed)
    rest = sum(each for each, _ in state.queue) - passed
    assert sum(each for each, _ in later.queue) == pytest.approx(max(0.0, rest), abs=1e-9)
    assert len(ended) + len(later.queue) == len(left)
    assert sum(number < 0 for _, number in later.here) == len(ended)


# ---- the host ----


@given(st.lists(st.tuples(PRICES, PRICES), min_size=1, max_size=10), st.floats(1, 3))
def test_a_slower_host_never_makes_a_phase_shorter_nor_longer_than_its_launches(
    ops: list[tuple[float, float]], factor: float
) -> None:
    quick, slow = (
        inside([Compute(seconds, launch * times) for seconds, launch in ops], []).phase(KEY, State()).seconds
        for times in (1.0, factor)
    )
    launched, runs = (sum(each) for each in zip(*((factor * launch, seconds) for seconds, launch in ops), strict=True))
    assert max(quick, launched, runs) - 1e-9 <= slow <= launched + runs + 1e-9
