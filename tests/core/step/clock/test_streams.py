"""A processor and two streams: fluid, exact, work-conserving."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.core.step.clock.streams import DP, TP, Rank
from plait.core.step.seconds.rates import together
from tests.plan.machines import cluster

SECONDS = st.floats(0.001, 10)


@given(SECONDS, SECONDS, st.floats(1, 2), st.floats(1, 2))
def test_two_side_by_side_end_when_the_formula_says(compute: float, sent: float, slow: float, other: float) -> None:
    rank = Rank((slow, other))
    flight = rank.start(TP, sent, 0)
    rank.compute(compute)
    rank.wait(flight)
    machine = cluster(slow_computation=slow, slow_communication=other)
    assert rank.now == pytest.approx(float(together(machine, compute, sent)))
    assert rank.compute_seconds + sum(rank.exposed) == pytest.approx(rank.now)


@given(SECONDS, SECONDS)
def test_streams_share_links_of_one_tier_and_no_others(one: float, other: float) -> None:
    for tier, want in ((0, one + other), (1, max(one, other))):
        rank = Rank((1.0, 1.0))
        flights = rank.start(TP, one, 0), rank.start(DP, other, tier)
        rank.wait(flights[0])
        rank.wait(flights[1])
        assert rank.now == pytest.approx(want)


@given(st.lists(st.tuples(st.sampled_from((TP, DP, -1)), SECONDS), min_size=1, max_size=20))
def test_a_stream_carries_one_at_a_time_in_order(actions: list[tuple[int, float]]) -> None:
    rank, flights = Rank((1.3, 1.2)), [[], []]
    for stream, seconds in actions:
        if stream < 0:
            rank.compute(seconds)
        else:
            flights[stream].append((rank.start(stream, seconds, 0), rank.now))
    for own in flights:
        before = 0.0
        for flight, started in own:
            rank.wait(flight)
            assert flight.began == pytest.approx(max(started, before))
            before = flight.ended
    assert rank.compute_seconds + sum(rank.exposed) == pytest.approx(rank.now)
