"""Planned jobs of a replay: their zones, who enters and who leaves them, who is late."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.core.base.errors import PlacementError
from plait.place.queue.admission import POLICIES
from plait.place.queue.replay import ReplayRules, replay
from plait.place.queue.reservation import KeptZone, Planned, check_planned
from plait.place.summary import summary
from tests.place.queues import CLUSTER, NODES, PLANNED, REPLAN, ROWS, SIZE, several
from tests.support.workloads import jobs_of


@given(rows=ROWS, planned=several(least=1), guess=st.sampled_from((0.0, 5.0, 1e9)), replan=REPLAN,
       policy=st.sampled_from(("no-jct", "jct-mean", "jct-quantile", "oracle")))  # fmt: skip
def test_zones_are_empty_when_their_planned_jobs_arrive(
    rows: list[tuple[float, float, int]], planned: list[Planned], guess: float, replan: float, policy: str
) -> None:
    """However wrong the predictions are, and wherever the zones have moved."""
    jobs = jobs_of(rows, guesses=[guess] * len(rows))
    outcome = replay(jobs, CLUSTER, POLICIES[policy], planned, rules=ReplayRules(replan=replan))
    for number, (one, kept) in enumerate(zip(planned, outcome.planned, strict=True), 1):
        assert kept.at == 0
        assert kept.start == one.arrival
        own = next(run for run in outcome.runs if run.job == -number)
        assert tuple(node for node, _ in own.held) == kept.zone and len(kept.zone) == one.nodes


@given(rows=ROWS, planned=PLANNED)
def test_nobody_enters_the_zone_who_is_not_let_in(rows: list[tuple[float, float, int]], planned: Planned) -> None:
    outcome = replay(jobs_of(rows), CLUSTER, POLICIES["no-jct"], [planned])
    (kept,) = outcome.planned
    assert kept.admitted == 0 and kept.end is not None
    for run in outcome.runs:
        if run.job >= 0 and planned.announced < run.start < kept.end:
            assert not {node for node, _ in run.held} & set(kept.zone)


def test_short_jobs_use_the_zone_and_long_ones_do_not() -> None:
    rows = [(0.0, 1000.0, 8), (50.0, 30.0, 4), (50.0, 300.0, 4)]
    planned = Planned(nodes=4, arrival=100.0, notice=60.0, duration=100.0)
    outcome = replay(jobs_of(rows), CLUSTER, POLICIES["oracle"], [planned])
    (kept,) = outcome.planned
    assert outcome.started.tolist() == [0.0, 50.0, 200.0]
    assert (kept.admitted, kept.flexible, kept.late, kept.held) == (1, 0, 0, 0)


def test_preemptible_jobs_may_sit_in_the_zone_and_leave_it() -> None:
    rows = [(0.0, 1000.0, 8), (50.0, 300.0, 4)]
    planned = Planned(nodes=4, arrival=100.0, notice=60.0, duration=100.0)
    jobs = jobs_of(rows, preemptible=[False, True])
    for delay in (False, True):
        outcome = replay(jobs, CLUSTER, POLICIES["no-jct"], [planned], rules=ReplayRules(delay_late=delay))
        (kept,) = outcome.planned
        assert (outcome.started[1], kept.spared, kept.late, kept.start) == (50.0, 1, 0, 100.0)
        assert (kept.admitted, kept.flexible) == (1, 1)


def test_who_is_late_is_preempted_and_goes_on_from_its_checkpoint() -> None:
    rows = [(0.0, 1000.0, 8), (50.0, 300.0, 4)]
    planned = Planned(nodes=4, arrival=100.0, notice=60.0, duration=100.0)
    jobs = jobs_of(rows, guesses=[1000.0, 10.0])
    outcome = replay(jobs, CLUSTER, POLICIES["jct-quantile"], [planned], rules=ReplayRules(checkpoint=20.0))
    (kept,) = outcome.planned
    assert (kept.late, kept.start, outcome.restarts.tolist()) == (1, 100.0, [0, 1])
    assert outcome.lost == 10.0 * 4  # 50 s ran, 40 s were saved
    assert outcome.ended[1] == 200.0 + 300.0 - 40.0
    waits = replay(jobs, CLUSTER, POLICIES["jct-quantile"], [planned], rules=ReplayRules(delay_late=True))
    (kept,) = waits.planned
    assert (kept.late, kept.start, waits.restarts.sum()) == (1, 350.0, 0)


def test_reserve_and_pack_ends_with_a_zone_that_is_not_empty() -> None:
    rows = [(0.0, 1000.0, 8), (50.0, 300.0, 4)]
    planned = Planned(nodes=4, arrival=100.0, notice=60.0, duration=100.0)
    outcome = replay(jobs_of(rows), CLUSTER, POLICIES["reserve-and-pack"], [planned])
    (kept,) = outcome.planned
    assert kept.at == kept.before == 0.25
    assert kept.start == 350.0


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"nodes": 7}, "wants 7 nodes; the cluster has 6"),
        ({"notice": 30.0}, "Let it arrive later"),
        ({"notice": -1.0}, "Let it arrive later"),
        ({"zone": ()}, "has 0 nodes; 2 different ones"),
        ({"zone": (0, 0)}, "has 1 nodes; 2 different ones"),
        ({"zone": (0, 6)}, "from 0 to 5"),
    ],
)
def test_planned_jobs_that_cannot_be(change: dict[str, object], says: str) -> None:
    planned = replace(Planned(nodes=2, arrival=20.0, notice=10.0), **change)
    with pytest.raises(PlacementError, match=says):
        replay(jobs_of([(0.0, 1.0, 1)]), CLUSTER, POLICIES["fifo"], [planned])


def test_a_zone_moves_to_nodes_that_are_empty_sooner() -> None:
    """Nodes 0 to 3 are thought to be free in time and are not; 4 and 5 become so."""
    rows = [(0.0, 10.0, 8), (0.0, 1000.0, 8), (0.0, 60.0, 8)]
    jobs = jobs_of(rows, guesses=[20.0, 50.0, 1000.0])
    planned = Planned(nodes=4, arrival=100.0, notice=80.0, duration=10.0)
    stays = replay(jobs, CLUSTER, POLICIES["jct-mean"], [planned])
    moves = replay(jobs, CLUSTER, POLICIES["jct-mean"], [planned], rules=ReplayRules(replan=10.0))
    assert (stays.planned[0].zone, stays.planned[0].held, stays.planned[0].before) == ((0, 1, 2, 3), 1, 0.5)
    assert (moves.planned[0].zone, moves.planned[0].held, moves.planned[0].before) == ((0, 1, 4, 5), 0, 0.0)
    assert moves.planned[0].moved == 2
    assert moves.restarts.sum() == 0 < stays.restarts.sum()


def test_a_job_enters_the_zones_of_planned_jobs_that_come_after_its_end() -> None:
    """Two zones take the whole cluster; what ends between their arrivals may be in the later
    one."""
    planned = [
        Planned(nodes=3, arrival=100.0, notice=60.0, duration=10.0),
        Planned(nodes=3, arrival=200.0, notice=160.0, duration=10.0),
    ]
    outcome = replay(jobs_of([(50.0, 40.0, 12), (50.0, 120.0, 12)]), CLUSTER, POLICIES["oracle"], planned)
    first, second = outcome.planned
    where = {run.job: {node for node, _ in run.held} for run in outcome.runs}
    assert outcome.started.tolist() == [50.0, 110.0]  # the second waits for the first planned job's nodes
    assert where[0] == set(second.zone) and where[1] == set(first.zone)
    assert [kept.start for kept in outcome.planned] == [100.0, 200.0]
    swapped = replay(jobs_of([(50.0, 120.0, 12), (51.0, 40.0, 12)]), CLUSTER, POLICIES["oracle"], planned)
    assert swapped.started.tolist() == [50.0, 51.0]  # the long one leaves the earlier zone to the short one


@pytest.mark.parametrize(
    ("second", "says"),
    [
        (Planned(nodes=4, arrival=140.0, notice=50.0, duration=10.0), "2 planned jobs want 7 nodes at one time"),
        (Planned(nodes=2, arrival=140.0, notice=50.0, zone=(2, 3)), "share nodes at one time"),
    ],
)
def test_planned_jobs_that_cannot_be_together(second: Planned, says: str) -> None:
    first = Planned(nodes=3, arrival=100.0, notice=50.0, duration=10.0, zone=(0, 1, 2))
    with pytest.raises(PlacementError, match=says):
        check_planned([first, second], CLUSTER)
    check_planned([first, replace(second, arrival=200.0)], CLUSTER)


def test_of_several_planned_jobs_the_worst_is_told() -> None:
    planned = [Planned(nodes=2, arrival=30.0, notice=5.0), Planned(nodes=3, arrival=50.0, notice=5.0)]
    kept = (
        KeptZone(start=31.0, announced=0.5, before=0.4, at=0.3, moved=1, admitted=8, flexible=3, late=1, held=2),
        KeptZone(start=57.0, announced=0.1, before=0.2, at=0.6, admitted=2, flexible=1, late=2, held=5),
    )
    outcome = replay(jobs_of([(0.0, 3.0, 1)]), CLUSTER, POLICIES["fifo"])
    one = replace(outcome, planned=kept, restarts=np.array([2]), lost=7200.0)
    found = summary(one, jobs_of([(0.0, 3.0, 1)]), planned, NODES, NODES * SIZE)
    assert summary(outcome, jobs_of([(0.0, 3.0, 1)]), [], NODES, NODES * SIZE).preempted == 0
    assert (found.planned_delay, found.retention_before, found.retention_at) == (7.0, 0.4, 0.6)
    assert (found.admitted, found.late, found.held, found.preempted, found.lost_gpu_hours) == (10, 3, 7, 1, 2.0)
    assert found.late_share == 0.5, "of those that were let in for good"
    told = found.to_dict()
    assert {name: told[name] for name in ("planned_delay", "retention_before", "retention_at")} == {
        "planned_delay": 7.0, "retention_before": 0.4, "retention_at": 0.6,
    }  # fmt: skip
    assert [(each.nodes, each.delay, each.moved) for each in found.planned] == [(2, 1.0, 1), (3, 7.0, 0)]
    nothing = summary(replace(outcome, planned=(KeptZone(),)), jobs_of([]), planned[:1], NODES, NODES * SIZE)
    assert (nothing.planned_delay, nothing.retention_at) == (None, None)


def test_a_planned_job_whose_nodes_another_one_has_gets_them_when_that_ends() -> None:
    """The first is late; its nodes are those of the second, which is announced meanwhile."""
    zone = (0, 1, 2, 3)
    planned = [
        Planned(nodes=4, arrival=50.0, notice=50.0, duration=100.0, zone=zone),
        Planned(nodes=4, arrival=260.0, notice=60.0, duration=10.0, zone=zone),
    ]
    jobs = jobs_of([(1.0, 249.0, 24)], guesses=[20.0])
    outcome = replay(jobs, CLUSTER, POLICIES["jct-mean"], planned, rules=ReplayRules(delay_late=True))
    assert [kept.start for kept in outcome.planned] == [250.0, 350.0]
    assert [kept.zone for kept in outcome.planned] == [zone, zone]


def test_a_zone_of_which_another_planned_job_has_a_part_is_waited_for() -> None:
    """As above, but only one of the nodes is that of the first."""
    planned = [
        Planned(nodes=4, arrival=50.0, notice=50.0, duration=100.0, zone=(0, 1, 2, 3)),
        Planned(nodes=2, arrival=260.0, notice=60.0, duration=10.0, zone=(3, 4)),
    ]
    jobs = jobs_of([(1.0, 249.0, 24)], guesses=[20.0])
    outcome = replay(jobs, CLUSTER, POLICIES["jct-mean"], planned, rules=ReplayRules(delay_late=True))
    assert [kept.start for kept in outcome.planned] == [250.0, 350.0]
    apart = [planned[0], replace(planned[1], zone=(4, 5))]
    outcome = replay(jobs, CLUSTER, POLICIES["jct-mean"], apart, rules=ReplayRules(delay_late=True))
    assert [kept.start for kept in outcome.planned] == [250.0, 260.0]


def test_how_much_of_a_zone_others_hold() -> None:
    """Three of the four that are kept when it is announced: it is known that they will be free in
    time."""
    rows = [(0.0, 45.0, 10), (60.0, 10.0, 4)]
    planned = Planned(nodes=4, arrival=100.0, notice=60.0, duration=100.0)
    outcome = replay(jobs_of(rows), CLUSTER, POLICIES["oracle"], [planned], rules=ReplayRules(sample=10.0))
    (kept,) = outcome.planned
    assert (kept.announced, kept.before, kept.at) == (0.75, 0.0, 0.0)
    assert outcome.series.retention[3:6].tolist() == pytest.approx([np.nan, 0.75, 0.0], nan_ok=True)


def test_who_finds_room_outside_of_a_zone_is_not_let_into_it() -> None:
    planned = Planned(nodes=2, arrival=100.0, notice=90.0, duration=10.0)
    outcome = replay(jobs_of([(20.0, 5.0, 4), (20.0, 5.0, 2)]), CLUSTER, POLICIES["oracle"], [planned])
    (kept,) = outcome.planned
    assert kept.admitted == 0 and outcome.started.tolist() == [20.0, 20.0]
