"""The inside of a place: gathers ahead, buffers that run out, and phases that begin where others left off."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.core.step.clock.inside import Inside
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
    """Gathered, reduced after every micro-batch and published, each if it takes time; on links of its own."""
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


def inside(programme: Programme, units: Sequence[UnitPrices], rules: Rules = RULES) -> Inside:
    return Inside({(0, "step"): programme}, units, rules)


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


def test_what_is_there_before_any_list_is_published_first() -> None:
    """Else a step's beginning waits for all that is published."""
    units = [unit(publish=2.0), unit(publish=3.0), replace(unit(publish=0.5), whole=True)]
    begun = inside([*reads(0, 1.0)], units).begin((0, "step"), steady=True)
    assert begun.seconds == pytest.approx(0.5)
    assert [label[1] for label, _ in begun.sent] == [2, 0, 1]


def test_a_collective_of_the_list_shares_links_with_one_of_a_unit() -> None:
    programme = [UnitStep("gather", 0, True), Start(0, 2.0), Wait(0), UnitStep("need", 0, True)]
    key, state = Key(0, "step"), State(free=(((8, 2), 2),))
    assert inside(programme, [unit(gather=2.0)], Rules((1.0, 1.0), 0)).phase(key, state).seconds == pytest.approx(2.0)
    assert inside(programme, [unit(gather=2.0)], Rules((1.0, 1.0), 1)).phase(key, state).seconds == pytest.approx(4.0)


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


def test_one_buffer_of_a_size_where_there_is_one_such_unit() -> None:
    units = [
        unit(gather=1.0, reduce=1.0),
        unit(gather=1.0, size=16),
        unit(gather=1.0, size=16),
        unit(gather=1.0, size=16),
    ]
    begun = inside([], units).begin((0, "step"), steady=False)
    assert begun.after.free == (((8, 2), 1), ((8, 4), 1), ((16, 2), 2))


def test_what_is_gathered_already_is_not_gathered_again_and_what_is_not_there_cannot_be_dropped() -> None:
    units = [unit(gather=3.0), unit(publish=1.0)]
    programme = [UnitStep("gather", 0, True), UnitStep("gather", 0, False), UnitStep("gather", 1, True),
                 UnitStep("drop", 1, True), UnitStep("need", 0, True)]  # fmt: skip
    found = inside(programme, units).phase(KEY, State(free=(((8, 2), 2),)))
    assert found.sent == [(("gather", 0, True), 0.0)]
    assert found.waits == [(("need", 0, True), 0.0, 3.0)]
    assert (found.after.here, found.after.free) == (((0, -1),), (((8, 2), 1),))
    dropped = inside([*programme, UnitStep("drop", 0, True)], units).phase(KEY, State(free=(((8, 2), 2),)))
    assert (dropped.after.here, dropped.after.free) == ((), (((8, 2), 2),))


def test_a_way_backward_has_a_price_of_its_own() -> None:
    one = replace(unit(gather=3.0), backward=Price(1.0, 1))
    programme = [UnitStep("need", 0, False), UnitStep("drop", 0, False), UnitStep("need", 0, True)]
    found = inside(programme, [one]).phase(KEY, State(free=(((8, 2), 1),)))
    assert [label for label, _ in found.sent] == [("gather", 0, False), ("gather", 0, True)]
    assert found.seconds == pytest.approx(4.0)


def test_a_reader_of_whole_parameters_waits_once_a_step() -> None:
    one = inside([UnitStep("need", 0, True), UnitStep("need", 0, True)], [unit(publish=2.0)])
    begun = one.begin((0, "step"), steady=True)
    assert begun.after.unread == {0}
    found = one.phase(KEY, begun.after)
    assert found.waits == [(("need", 0, True), 0.0, 2.0)]
    assert found.after.unread == frozenset()


def test_the_last_micro_batch_reduces_to_the_owner() -> None:
    """Also what was never opened, which has no buffer; of others nothing is reduced."""
    price = replace(unit(reduce=1.0), last=Price(4.0, 1))
    units = [price, replace(price, gradient=None)]
    programme = [UnitStep("open", 0, False), UnitStep("close", 0, False), UnitStep("close", 1, False)]
    one = inside(programme, units)
    for last, told in ((False, [(("reduce", 0, False), 0.0)]),
                       (True, [(("reduce last", 0, False), 0.0), (("reduce last", 1, False), 0.0)])):  # fmt: skip
        found = one.phase(Key(0, "step", last), State(free=(((8, 4), 1),)))
        assert found.sent == told
        assert found.after.reducing == (((0, (8, 4)), (1, None)) if last else ((0, (8, 4)),))
        assert found.after.queue == (((4.0, 1), (4.0, 1)) if last else ((1.0, 1),))


def test_a_gradient_that_is_open_is_not_opened_again() -> None:
    programme = [UnitStep("open", 0, False), UnitStep("open", 0, False), UnitStep("close", 0, False)]
    found = inside(programme, [unit(reduce=1.0)]).phase(KEY, State(free=(((8, 4), 2),)))
    assert found.after.free == (((8, 4), 1),)


def test_what_is_whole_until_the_end_is_reduced_then_and_waited_for() -> None:
    units = [unit(reduce=5.0), replace(unit(reduce=3.0), whole=True)]
    done = inside([], units).complete(State())
    assert done.sent == [(("reduce last", 1, False), 0.0)]
    assert done.waits == [(("settle", 0, False), 0.0, 3.0)]
    assert (done.seconds, done.spent.dp) == (3.0, 3.0)
    assert inside([], []).complete(State()).waits == []


def test_a_list_may_settle_in_the_middle() -> None:
    programme = [*adds(0, 1.0), UnitStep("settle", 0, False), Compute(1.0)]
    found = inside(programme, [unit(reduce=3.0)]).phase(KEY, State(free=(((8, 4), 1),)))
    assert found.waits == [(("settle", 0, False), 1.0, 4.0)]
    assert found.done == [(1, "compute", 0.0, 1.0), (4, "compute", 4.0, 5.0)]


@pytest.mark.parametrize(
    ("forward", "backward", "phase", "lead"),
    [(True, False, "F", 2), (True, False, "step", 2), (True, False, "B", 0), (False, True, "B", 2),
     (False, True, "F", 0), (False, True, "I", 2)],
)  # fmt: skip
def test_the_next_list_is_led_by_what_it_gathers_first(forward: bool, backward: bool, phase: Phase, lead: int) -> None:
    ahead = [UnitStep("gather", 0, True), UnitStep("gather", 1, False), Compute(1.0), UnitStep("gather", 2, True)]
    rules = Rules((1.0, 1.0), 0, forward=forward, backward=backward)
    units = [unit(gather=1.0) for _ in range(3)]
    one = Inside({(0, phase): ahead, (1, "W"): [UnitStep("next", 0, False)]}, units, rules)
    state = State(free=(((8, 2), 3),))
    found = one.phase(Key(1, "W", following=(0, phase)), state)
    assert [label for label, _ in found.sent] == [("gather", 0, True), ("gather", 1, False)][:lead]
    assert one.phase(Key(1, "W"), state).sent == []
    begun = one.begin((0, phase), steady=False)
    assert len(begun.sent) == lead


def test_collectives_that_are_not_recorded_take_no_time() -> None:
    programme = [Start(0, 2.0), Compute(1.0), Wait(0), Start(1, 3.0, 1), Wait(1)]
    silent = inside(programme, [], Rules((1.0, 1.0), 0, sent=False)).phase(KEY, State())
    assert silent.done == [(1, "compute", 0.0, 1.0), (2, "wait", 1.0, 1.0), (4, "wait", 1.0, 1.0)]
    found = inside(programme, []).phase(KEY, State())
    assert found.done == [
        (1, "compute", 0.0, 1.0), (0, "comm", 0.0, 2.0), (2, "wait", 1.0, 2.0),
        (3, "comm", 2.0, 5.0), (4, "wait", 2.0, 5.0),
    ]  # fmt: skip
    assert (found.spent.compute, found.spent.tp, found.spent.cp, found.spent.dp) == (1.0, 1.0, 3.0, 0.0)


def test_exchanges_of_attention_use_links_of_their_own() -> None:
    """A gather on tier 1 shares its rate with an exchange there, not with one of tensor parallelism."""
    for tier, seconds in ((1, 4.0), (2, 2.0), (None, 2.0)):
        programme = [UnitStep("gather", 0, True), Start(0, 2.0, tier), Wait(0), UnitStep("need", 0, True)]
        found = inside(programme, [unit(gather=2.0)]).phase(KEY, State(free=(((8, 2), 1),)))
        assert found.seconds == pytest.approx(seconds)


def test_a_phase_goes_on_with_what_was_under_way() -> None:
    """The first of two reductions began before; the second begins when it is over."""
    state = State(queue=((1.0, 1), (2.0, 1)), reducing=((0, (8, 4)), (1, (8, 4))), published=((0, 0), (1, -1)))
    found = inside([Compute(2.0)], [unit(reduce=1.0), unit(reduce=1.0)]).phase(KEY, state)
    assert found.ended == [1.0]
    assert found.after.queue == ((1.0, 1),)
    assert found.after.reducing == ((-1, (8, 4)), (0, (8, 4)))
    assert found.after.published == ((0, -1), (1, -1))


def test_more_of_the_first_collectives_time_is_taken_by_others() -> None:
    assert State(queue=((1.0, 2), (3.0, 2))).behind(0.5).queue == ((1.5, 2), (3.0, 2))


def test_a_collective_that_ends_at_the_very_moment_has_ended() -> None:
    state = State(queue=((1.0, 0), (2.0, 1)), here=((4, 0), (5, 1)), published=((6, 1),), reducing=((0, (8, 4)),))
    later, ended = state.later(1.0)
    assert ended == [1.0]
    assert later == State(queue=((2.0, 1),), here=((4, -1), (5, 0)), published=((6, 0),), reducing=((-1, (8, 4)),))
    last, ended = later.later(2.5)
    assert (last.queue, last.here, ended) == ((), ((4, -1), (5, -1)), [2.0])


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


def test_ops_and_collectives_of_a_list_are_launched_one_after_the_other() -> None:
    """What a host has launched waits for the processor, and that for what it has not."""
    programme = [Compute(1.0, 2.0), Compute(4.0, 1.0), Start(0, 3.0, launch=1.0), Compute(1.0, 6.0), Wait(0)]
    found = inside(programme, []).phase(KEY, State())
    assert found.done == [
        (0, "compute", 2.0, 3.0), (1, "compute", 3.0, 7.0), (3, "compute", 10.0, 11.0), (2, "comm", 7.0, 10.0),
        (4, "wait", 11.0, 11.0),
    ]  # fmt: skip
    assert (found.seconds, found.spent.compute, found.spent.tp) == (11.0, 11.0, 0.0)


def test_a_collective_waits_for_its_launch() -> None:
    found = inside([Start(0, 2.0, 1, launch=3.0), Wait(0)], []).phase(KEY, State())
    assert found.done == [(0, "comm", 3.0, 5.0), (1, "wait", 3.0, 5.0)]
    assert (found.spent.compute, found.spent.cp) == (3.0, 2.0)


def test_collectives_that_are_not_sent_are_not_launched() -> None:
    silent = inside([Start(0, 2.0, launch=3.0), Wait(0), Compute(1.0)], [], Rules((1.0, 1.0), 0, sent=False))
    assert silent.phase(KEY, State()).seconds == 1.0


def test_a_host_begins_with_its_phase() -> None:
    """However long the one before has computed, or nothing has."""
    programme = [Compute(1.0, 2.0), Compute(9.0, 1.0)]
    one = inside(programme, [])
    first = one.phase(KEY, State())
    assert first.seconds == 12.0
    assert first.after == State()
    assert one.phase(KEY, first.after).seconds == 12.0
    rested, _ = State(queue=((50.0, 1),)).later(40.0)
    assert one.phase(KEY, rested).seconds == 12.0


def test_a_host_goes_on_while_gradients_are_reduced() -> None:
    """What is waited for in the middle of a list is time for what stands behind it."""
    programme = [*adds(0, 1.0), UnitStep("settle", 0, False), Compute(1.0, 3.0)]
    found = inside(programme, [unit(reduce=5.0)]).phase(KEY, State(free=(((8, 4), 1),)))
    assert found.seconds == 7.0
    assert (found.spent.compute, found.spent.dp) == (2.0, 5.0)


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
