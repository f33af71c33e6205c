"""A processor and two streams: fluid, exact, work-conserving."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.core.step.orders.streams import DP, TP, Rank
from plait.core.step.seconds.rates import overlapped
from tests.plan.machines import cluster

SECONDS = st.floats(0.001, 10)


@given(SECONDS, SECONDS, st.floats(1, 2), st.floats(1, 2))
def test_two_side_by_side_end_when_the_formula_says(compute: float, sent: float, slow: float, other: float) -> None:
    rank = Rank((slow, other))
    flight = rank.start(TP, sent, 0)
    rank.compute(compute)
    rank.wait(flight)
    machine = cluster(slow_computation=slow, slow_communication=other)
    assert rank.now == pytest.approx(float(overlapped(machine, compute, sent)))
    assert rank.compute_seconds + sum(rank.exposed) == pytest.approx(rank.now)


@given(SECONDS, SECONDS)
def test_streams_share_links_of_one_tier_and_no_others(one: float, other: float) -> None:
    for tier, want in ((0, one + other), (1, max(one, other))):
        rank = Rank((1.0, 1.0))
        flights = rank.start(TP, one, 0), rank.start(DP, other, tier)
        rank.wait(flights[0])
        rank.wait(flights[1])
        assert rank.now == pytest.approx(want)


COMPUTES, LAUNCHES = -1, -2


@given(st.lists(st.tuples(st.sampled_from((TP, DP, COMPUTES, LAUNCHES)), SECONDS), min_size=1, max_size=20))
def test_a_stream_carries_one_at_a_time_in_order(actions: list[tuple[int, float]]) -> None:
    rank, flights = Rank((1.3, 1.2)), [[], []]
    for stream, seconds in actions:
        if stream == COMPUTES:
            rank.compute(seconds)
        elif stream == LAUNCHES:
            rank.launch(seconds)
        else:
            flights[stream].append((rank.start(stream, seconds, 0), rank.now))
    for own in flights:
        before = 0.0
        for flight, started in own:
            rank.wait(flight)
            assert flight.began == pytest.approx(max(started, before))
            before = flight.ended
    assert rank.compute_seconds + sum(rank.exposed) == pytest.approx(rank.now)


# ---- the host ----


@given(st.lists(st.tuples(st.floats(0, 5), st.floats(0, 5)), min_size=1, max_size=20))
def test_nothing_runs_before_its_host_has_launched_it_and_a_host_waits_for_nothing(
    ops: list[tuple[float, float]],
) -> None:
    """(seconds of the host, of the processor): the latest of all moments from which only the
    processor is busy."""
    rank, launched = Rank((1.3, 1.2)), 0.0
    for launch, seconds in ops:
        launched += launch
        rank.launch(launch)
        assert rank.host == pytest.approx(launched)
        assert rank.now >= rank.host - 1e-9
        rank.compute(seconds)
    ends = [sum(launch for launch, _ in ops[: at + 1]) + sum(each for _, each in ops[at:]) for at in range(len(ops))]
    assert rank.now == pytest.approx(max(ends))
    assert rank.compute_seconds == pytest.approx(rank.now), "standing still is no communication"


def test_collectives_go_on_while_the_processor_waits_for_its_host() -> None:
    """At their own rate: nothing computes that disturbs them. One after the other, two at a time on
    different links; on the same ones half as fast."""
    for tier, ended in ((1, (1.0, 3.0, 2.0)), (0, (2.0, 5.0, 4.0))):
        rank = Rank((1.5, 1.5))
        first, second, other = rank.start(TP, 1.0, 0), rank.start(TP, 2.0, 0), rank.start(DP, 2.0, tier)
        rank.launch(6.0)
        assert (first.ended, second.ended, other.ended) == pytest.approx(ended)
        assert (rank.now, rank.compute_seconds) == (6.0, 6.0)
    rank = Rank((1.5, 1.5))
    flight = rank.start(DP, 4.0, 0)
    rank.launch(1.0)
    assert (flight.left, flight.ended) == (3.0, None)
    rank.launch(3.0)
    assert (flight.left, flight.ended, rank.now) == (0.0, 4.0, 4.0)
