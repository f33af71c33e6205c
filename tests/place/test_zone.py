"""Zones of planned jobs whose groups are known are placements; spare nodes beside them are lent."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.core.base.errors import PlacementError
from plait.place.queue.admission import POLICIES
from plait.place.queue.replay import ReplayRules, replay
from plait.place.queue.reservation import ClusterShape, JobShape, Planned, check_planned, make_zone
from plait.place.solve.problem import Problem, spread_of
from tests.place.queues import CLUSTER, ROWS
from tests.support.workloads import jobs_of


def spreads(nodes: list[int], shape: JobShape, minipod: int) -> tuple[int, int]:
    """Of PP groups and of DP groups, from node numbers by rank."""
    pods = np.array(nodes).reshape(shape.columns, shape.rows) // minipod
    return max(len(set(row)) for row in pods.T.tolist()), max(len(set(column)) for column in pods.tolist())


@given(stays=st.lists(st.sampled_from((0.0, 0.25, 1.0)), min_size=8, max_size=12), spares=st.integers(0, 2),
       shape=st.sampled_from(((2, 3), (3, 2), (6, 1), (1, 4))), alpha=st.sampled_from((0.0, 0.3, 1.0)))  # fmt: skip
def test_a_zone_of_a_shape_is_a_placement(
    stays: list[float], spares: int, shape: tuple[int, int], alpha: float
) -> None:
    asked = JobShape(rows=shape[0], columns=shape[1], alpha=alpha)
    many = shape[0] * shape[1]
    zone = make_zone(stays, many, spares, 4, asked)
    assert len({*zone.nodes, *zone.spares}) == many + spares == len(zone.nodes) + len(zone.spares)
    assert spreads(zone.nodes, asked, 4) == (zone.pp_spread, zone.dp_spread)
    score = alpha * spreads(zone.nodes, asked, 4)[1] + (1 - alpha) * spreads(zone.nodes, asked, 4)[0]
    used = sum(stays[node] for node in (*zone.nodes, *zone.spares))
    assert zone.cost(stays) == pytest.approx(4 * score + used), "a minipod of spread is worth emptying one of four"
    plain = make_zone(stays, many, spares, 4, None)
    assert zone.cost(stays) <= _cost_in_order(plain.nodes, plain.spares, stays, asked) + 1e-9


def _cost_in_order(nodes: list[int], spares: list[int], stays: list[float], asked: JobShape) -> float:
    """Of the same objective, with the nodes that a job of no shape gets, ranked as they are
    numbered."""
    rows, columns = spreads(nodes, asked, 4)
    return 4 * (asked.alpha * columns + (1 - asked.alpha) * rows) + sum(stays[node] for node in (*nodes, *spares))


def test_on_empty_nodes_the_spread_is_the_least_there_is() -> None:
    """Against every order of every choice of nodes: two stages of two nodes in minipods of two."""
    for alpha in (0.0, 0.5, 1.0):
        asked = JobShape(rows=2, columns=2, alpha=alpha)
        zone = make_zone([0.0] * 6, 4, 0, 2, asked)
        best = min(
            alpha * two + (1 - alpha) * one
            for nodes in combinations(range(6), 4)
            for order in permutations(nodes)
            for one, two in [spreads(list(order), asked, 2)]
        )
        assert zone.cost([0.0] * 6) == pytest.approx(2 * best)


def test_a_price_trades_spread_for_nodes_that_others_keep() -> None:
    """Pods of two: 0 and 1 stay half busy; empty are 2, 4 and 5 (3 may not be taken)."""
    stays = [0.5, 0.5, 0.0, np.inf, 0.0, np.inf]
    together = JobShape(rows=1, columns=2, alpha=0.0, price=0.5)
    apart = replace(together, price=2.0)
    assert make_zone(stays, 2, 0, 2, together).nodes == [0, 1], "a minipod less for one node's worth of work"
    assert sorted(make_zone(stays, 2, 0, 2, apart).nodes) == [2, 4], "work that would be lost is worth more"


def test_the_replay_places_a_planned_job_when_it_is_announced() -> None:
    """Minipod 0 is half busy for long; one stage in each of the two others keeps DP groups
    whole."""
    cluster = ClusterShape(nodes=6, gpus_per_node=4, minipod=2)
    jobs = jobs_of([(0.0, 1000.0, 4)])
    planned = Planned(nodes=4, arrival=100.0, notice=50.0, duration=10.0, shape=JobShape(rows=2, columns=2, alpha=1.0))
    (kept,) = replay(jobs, cluster, POLICIES["jct-mean"], [planned]).planned
    assert (kept.zone, kept.dp_spread, kept.pp_spread) == ((2, 3, 4, 5), 1, 2)
    rows = replace(planned, shape=JobShape(rows=2, columns=2, alpha=0.0))
    (kept,) = replay(jobs, cluster, POLICIES["jct-mean"], [rows]).planned
    assert (set(kept.zone[0::2]), set(kept.zone[1::2])) == ({2, 3}, {4, 5})
    assert (kept.dp_spread, kept.pp_spread) == (2, 1)
    problem = Problem.plain(2, 2, [1, 2, 2], alpha=0.0)
    found = spread_of(problem, tuple(node // 2 for node in kept.zone))
    assert (found.rows, found.columns) == (1, 2)


def test_spares_are_lent_to_preemptible_jobs_alone_while_the_planned_job_runs() -> None:
    planned = Planned(nodes=4, arrival=20.0, notice=10.0, duration=100.0, spares=2)
    rows = [(30.0, 50.0, 4), (30.0, 50.0, 4), (30.0, 50.0, 4)]
    jobs = jobs_of(rows, preemptible=[False, True, True])
    for policy in ("no-jct", "jct-mean", "jct-quantile", "oracle"):
        outcome = replay(jobs, CLUSTER, POLICIES[policy], [planned])
        (kept,) = outcome.planned
        assert outcome.started.tolist() == [120.0, 30.0, 30.0], policy
        assert (kept.lent, kept.admitted, kept.start) == (2, 0, 20.0)
        assert {node for run in outcome.runs if run.job in (1, 2) for node, _ in run.held} == set(kept.spares)


def test_who_may_not_be_preempted_leaves_spares_at_the_arrival_and_the_others_stay() -> None:
    planned = Planned(nodes=4, arrival=20.0, notice=10.0, duration=100.0, spares=2)
    jobs = jobs_of([(11.0, 50.0, 24)], guesses=[5.0])
    outcome = replay(jobs, CLUSTER, POLICIES["jct-mean"], [planned], rules=ReplayRules(checkpoint=1.0))
    assert (outcome.planned[0].late, outcome.restarts.tolist()) == (1, [1])
    for stops, restarts in ((False, 1), (True, 0)):
        rows = [(0.0, 15.0, 16), (0.5, 200.0, 8)]  # the second has the last two nodes, which are the spares
        jobs = jobs_of(rows, guesses=[15.0, 5.0], preemptible=[False, stops])
        outcome = replay(jobs, CLUSTER, POLICIES["jct-mean"], [planned])
        assert outcome.planned[0].spares == (4, 5) and outcome.restarts.tolist() == [0, restarts]


@given(rows=ROWS, stops=st.lists(st.booleans(), min_size=40, max_size=40), spares=st.integers(1, 3))
def test_nobody_else_is_ever_on_spares_while_they_are_lent(
    rows: list[tuple[float, float, int]], stops: list[bool], spares: int
) -> None:
    planned = Planned(nodes=3, arrival=150.0, notice=100.0, duration=200.0, spares=spares)
    jobs = jobs_of(rows, preemptible=stops[: len(rows)])
    outcome = replay(jobs, CLUSTER, POLICIES["oracle"], [planned])
    (kept,) = outcome.planned
    assert kept.start is not None and kept.start == 150.0 and kept.end is not None and kept.spares
    for run in outcome.runs:
        there = run.job >= 0 and run.start < kept.end and run.end > kept.start
        if there and {node for node, _ in run.held} & set(kept.spares):
            assert jobs.preemptible[run.job]


@pytest.mark.parametrize(
    ("change", "says"),
    [({"spares": 4}, "4 nodes and 4 spare"), ({"shape": JobShape(rows=3, columns=2)}, "3 PP groups and 2 stages has")],
)
def test_planned_jobs_of_no_possible_shape(change: dict[str, object], says: str) -> None:
    with pytest.raises(PlacementError, match=says):
        check_planned([replace(Planned(nodes=4, arrival=20.0, notice=10.0), **change)], CLUSTER)
