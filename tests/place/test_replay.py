"""The replay keeps what every queue must keep, whatever the jobs."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import astuple, replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from plait.core.base.errors import PlacementError
from plait.place.meter import Series
from plait.place.policy import POLICIES, QueuePolicy
from plait.place.replay import ReplayOutcome, ReplayRules, replay
from plait.place.reservation import ClusterShape, Kept, Planned, check_planned
from plait.place.summary import Delay, summary
from plait.place.workload import JobTrace
from tests.support.workloads import jobs_of

NODES, SIZE = 6, 4
CLUSTER = ClusterShape(nodes=NODES, gpus_per_node=SIZE, minipod=2)
ROWS = st.lists(
    st.tuples(
        st.integers(0, 400).map(float), st.sampled_from((1.0, 7.0, 50.0, 300.0, 900.0)), st.integers(1, NODES * SIZE)
    ),
    min_size=1,
    max_size=40,
)
PLANNED = st.builds(
    Planned,
    nodes=st.integers(1, NODES),
    arrival=st.integers(100, 500).map(float),
    notice=st.integers(0, 100).map(float),
    duration=st.sampled_from((10.0, 200.0)),
)


REPLAN = st.sampled_from((0.0, 7.0, 60.0))


@st.composite
def several(draw: st.DrawFn, least: int = 0) -> list[Planned]:
    """Planned jobs that the cluster can take, one after the other or at one time."""
    found = draw(st.lists(PLANNED, min_size=least, max_size=3))
    try:
        check_planned(found, CLUSTER)
    except PlacementError:
        assume(False)
    return found


def check_invariants(jobs: JobTrace, outcome: ReplayOutcome, planned: list[Planned]) -> None:
    """Recomputed from who was where when."""
    by_node: dict[int, list[tuple[float, int]]] = defaultdict(list)
    for run in outcome.runs:
        wanted = jobs.gpus[run.job] if run.job >= 0 else planned[-1 - run.job].nodes * SIZE
        assert sum(gpus for _, gpus in run.held) == wanted
        assert len({node for node, _ in run.held}) == len(run.held) == -(-wanted // SIZE)
        for node, gpus in run.held:
            by_node[node] += [(run.start, gpus), (run.end, -gpus)]
    for changes in by_node.values():
        used = 0
        for _, change in sorted(changes):  # at one time ends come first: they are negative
            used += change
            assert 0 <= used <= SIZE
    assert np.isfinite(outcome.ended).all()
    assert (outcome.started >= jobs.submit).all()
    last = [run for job in range(len(jobs)) for run in outcome.runs if run.job == job and run.end == outcome.ended[job]]
    assert len(last) == len(jobs)
    for job in range(len(jobs)):
        own = [run for run in outcome.runs if run.job == job]
        assert len(own) == outcome.restarts[job] + 1
        if len(own) == 1:
            assert own[0].end - own[0].start == pytest.approx(jobs.duration[job])


@given(rows=ROWS, planned=several(), policy=st.sampled_from(sorted(POLICIES)), delay=st.booleans(),
       stops=st.lists(st.booleans(), min_size=40, max_size=40), replan=REPLAN)  # fmt: skip
def test_no_node_is_over_committed_and_every_job_ends_once(
    rows: list[tuple[float, float, int]], planned: list[Planned], policy: str, delay: bool, stops: list[bool],
    replan: float,
) -> None:  # fmt: skip
    jobs = jobs_of(rows, preemptible=stops[: len(rows)])
    outcome = replay(
        jobs, CLUSTER, POLICIES[policy], planned, rules=ReplayRules(delay_late=delay, checkpoint=20.0, replan=replan)
    )
    check_invariants(jobs, outcome, planned)
    for one, kept in zip(planned, outcome.planned, strict=True):
        assert kept.start is not None and kept.start >= one.arrival
        assert kept.end == kept.start + one.duration


@given(rows=ROWS, planned=several(least=1))
def test_exact_times_leave_nobody_late(rows: list[tuple[float, float, int]], planned: list[Planned]) -> None:
    outcome = replay(jobs_of(rows), CLUSTER, POLICIES["oracle"], planned)
    assert sum(kept.late for kept in outcome.planned) == 0


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


@given(rows=ROWS, planned=several())
def test_fifo_starts_in_the_order_of_submission(rows: list[tuple[float, float, int]], planned: list[Planned]) -> None:
    outcome = replay(jobs_of(rows), CLUSTER, POLICIES["fifo"], planned)
    assert (np.diff(outcome.started) >= 0).all()


@given(rows=ROWS, planned=PLANNED)
def test_nobody_enters_the_zone_who_is_not_let_in(rows: list[tuple[float, float, int]], planned: Planned) -> None:
    outcome = replay(jobs_of(rows), CLUSTER, POLICIES["no-jct"], [planned])
    (kept,) = outcome.planned
    assert kept.admitted == 0 and kept.end is not None
    for run in outcome.runs:
        if run.job >= 0 and planned.announced < run.start < kept.end:
            assert not {node for node, _ in run.held} & set(kept.zone)


def test_a_walk_over_the_sorted_queue_starts_the_same_jobs() -> None:
    """Algorithm 1 as it is printed, job by job, against lists by size."""

    class Walk:
        def __init__(self) -> None:
            self.there: dict[int, int] = {}
            self.inside: set[int] = set()

        def __len__(self) -> int:
            return len(self.there)

        def __iter__(self):
            return iter(sorted(self.there))

        def add(self, job: int, gpus: int) -> None:
            self.there[job] = gpus

        def admit(self, job: int, gpus: int, zone: int) -> None:
            self.inside.add(job)

        def remove(self, job: int) -> None:
            del self.there[job]

        def next(self, fits, rooms, still):
            for job, gpus in sorted(self.there.items()):
                for room in rooms:
                    if all(still(job, zone) for zone in room if zone) and fits(gpus, room):
                        return job, room
            return None

    import plait.place.replay as module

    draw = np.random.default_rng(3)
    for _ in range(15):
        rows = [
            (float(draw.integers(0, 300)), float(draw.exponential(80) + 1), int(draw.integers(1, 13)))
            for _ in range(80)
        ]
        planned = [
            Planned(nodes=3, arrival=200.0, notice=80.0, duration=50.0),
            Planned(nodes=2, arrival=230.0, notice=90.0, duration=20.0),
        ]
        fast = replay(jobs_of(rows), CLUSTER, POLICIES["oracle"], planned)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "Waiting", Walk)
            slow = replay(jobs_of(rows), CLUSTER, POLICIES["oracle"], planned)
        assert (fast.started == slow.started).all() and fast.runs == slow.runs


def test_short_jobs_use_the_zone_and_long_ones_do_not() -> None:
    rows = [(0.0, 1000.0, 8), (50.0, 30.0, 4), (50.0, 300.0, 4)]
    planned = Planned(nodes=4, arrival=100.0, notice=60.0, duration=100.0)
    outcome = replay(jobs_of(rows), CLUSTER, POLICIES["oracle"], [planned])
    (kept,) = outcome.planned
    assert outcome.started.tolist() == [0.0, 50.0, 200.0]
    assert (kept.admitted, kept.flexible, kept.late, kept.held) == (1, 0, 0, 0)


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


def test_preemptible_jobs_may_sit_in_the_zone_and_leave_it() -> None:
    rows = [(0.0, 1000.0, 8), (50.0, 300.0, 4)]
    planned = Planned(nodes=4, arrival=100.0, notice=60.0, duration=100.0)
    jobs = jobs_of(rows, preemptible=[False, True])
    for delay in (False, True):
        outcome = replay(jobs, CLUSTER, POLICIES["no-jct"], [planned], rules=ReplayRules(delay_late=delay))
        (kept,) = outcome.planned
        assert (outcome.started[1], kept.spared, kept.late, kept.start) == (50.0, 1, 0, 100.0)
        assert (kept.admitted, kept.flexible) == (1, 1)


def test_reserve_and_pack_ends_with_a_zone_that_is_not_empty() -> None:
    rows = [(0.0, 1000.0, 8), (50.0, 300.0, 4)]
    planned = Planned(nodes=4, arrival=100.0, notice=60.0, duration=100.0)
    outcome = replay(jobs_of(rows), CLUSTER, POLICIES["reserve-and-pack"], [planned])
    (kept,) = outcome.planned
    assert kept.at == kept.before == 0.25
    assert kept.start == 350.0


def test_a_job_that_runs_at_the_start_ends_when_it_would() -> None:
    outcome = replay(jobs_of([(-100.0, 150.0, 4), (10.0, 5.0, 24)]), CLUSTER, POLICIES["no-jct"])
    assert outcome.ended.tolist() == [50.0, 55.0]
    assert outcome.started.tolist() == [-100.0, 50.0]


def test_a_preempted_job_that_ran_before_the_replay_keeps_its_work() -> None:
    planned = Planned(nodes=6, arrival=20.0, notice=10.0, duration=5.0)
    outcome = replay(
        jobs_of([(-100.0, 150.0, 4)]), CLUSTER, POLICIES["no-jct"], [planned], rules=ReplayRules(checkpoint=50.0)
    )
    assert outcome.ended[0] == 25.0 + 150.0 - 100.0
    assert outcome.lost == 20.0 * 4


def test_a_zone_that_a_placement_has_chosen() -> None:
    planned = Planned(nodes=2, arrival=20.0, notice=10.0, zone=(5, 1))
    assert replay(jobs_of([(0.0, 1.0, 1)]), CLUSTER, POLICIES["no-jct"], [planned]).planned[0].zone == (1, 5)


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


def test_numbers_of_a_replay_by_hand() -> None:
    """Two nodes of four GPUs; one job takes one of them, half the time."""
    jobs = replace(jobs_of([(0.0, 1800.0, 4), (0.0, 900.0, 8)]), window=3600.0)
    shape = ClusterShape(nodes=2, gpus_per_node=4)
    found = summary(replay(jobs, shape, POLICIES["no-jct"]), jobs, [], 2, 8)
    assert found.idle_node_hours == pytest.approx(0.5 + 2 * 0.25)
    assert found.idle_gpu_hours == pytest.approx(4 * 0.5 + 8 * 0.25)
    assert found.allocation == pytest.approx(0.5)
    assert (found.delay.jobs, found.delay.mean, found.delay.p50) == (2, 900.0, 900.0)


def test_an_empty_workload_and_one_job() -> None:
    planned = Planned(nodes=2, arrival=20.0, notice=10.0, duration=30.0)
    for policy in POLICIES.values():
        assert replay(jobs_of([]), CLUSTER, policy, [planned]).planned[0].start == 20.0
        assert replay(jobs_of([(0.0, 5.0, 1)]), CLUSTER, policy).ended.tolist() == [5.0]


def test_a_policy_of_ones_own_needs_a_row() -> None:
    own = QueuePolicy(name="twice the mean", says="", jct=lambda jobs: 2 * jobs.mean, foresees=True)
    planned = Planned(nodes=4, arrival=100.0, notice=60.0, duration=100.0)
    rows = [(0.0, 1000.0, 8), (50.0, 30.0, 4), (50.0, 20.0, 4)]
    assert replay(jobs_of(rows), CLUSTER, own, [planned]).started.tolist() == [0.0, 200.0, 50.0]


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
    """Two zones take the whole cluster; what ends between their arrivals may be in the later one."""
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


def test_a_planned_job_gets_its_nodes_when_a_late_one_has_left_them() -> None:
    """The first waits for a job that nobody foresaw; the second is announced when that should be over."""
    planned = [
        Planned(nodes=4, arrival=50.0, notice=50.0, duration=100.0),
        Planned(nodes=4, arrival=260.0, notice=60.0, duration=10.0),
    ]
    jobs = jobs_of([(1.0, 249.0, 12)], guesses=[20.0])
    outcome = replay(jobs, CLUSTER, POLICIES["jct-mean"], planned, rules=ReplayRules(delay_late=True))
    assert [kept.start for kept in outcome.planned] == [250.0, 350.0]


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


def test_waiting_is_told_of_jobs_that_arrive_and_of_those_under_notice() -> None:
    """The third arrives when the planned job is announced, the fifth when it comes; the first was there."""
    jobs = jobs_of([(-5.0, 1.0, 1), (10.0, 1.0, 1), (20.0, 1.0, 1), (25.0, 1.0, 1), (40.0, 1.0, 1)])
    planned = Planned(nodes=1, arrival=40.0, notice=20.0, duration=10.0)
    outcome = replay(jobs, CLUSTER, POLICIES["fifo"], [planned])
    late = replace(outcome, started=jobs.submit + np.array([9.0, 0.0, 2.0, 4.0, 6.0]))
    found = summary(late, jobs, [planned], NODES, NODES * SIZE)
    assert astuple(found.delay) == pytest.approx((4, 3.0, 3.0, 5.7))
    assert astuple(found.notice) == pytest.approx((2, 3.0, 3.0, 3.9))
    assert summary(outcome, jobs, [], NODES, NODES * SIZE).notice == Delay(jobs=0, mean=0.0, p50=0.0, p95=0.0)


def test_of_several_planned_jobs_the_worst_is_told() -> None:
    planned = [Planned(nodes=2, arrival=30.0, notice=5.0), Planned(nodes=3, arrival=50.0, notice=5.0)]
    kept = (
        Kept(start=31.0, announced=0.5, before=0.4, at=0.3, moved=1, admitted=8, flexible=3, late=1, held=2),
        Kept(start=57.0, announced=0.1, before=0.2, at=0.6, admitted=2, flexible=1, late=2, held=5),
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
    nothing = summary(replace(outcome, planned=(Kept(),)), jobs_of([]), planned[:1], NODES, NODES * SIZE)
    assert (nothing.planned_delay, nothing.retention_at) == (None, None)


def test_progress_is_told_of_every_hundredth() -> None:
    told: list[float] = []
    replay(jobs_of([(float(at), 0.5, 1) for at in range(400)]), CLUSTER, POLICIES["fifo"], progress=told.append)
    assert told == sorted(told) and 90 <= len(told) <= 110 and told[0] == 0.0 and told[-1] <= 1.0
    few: list[float] = []
    replay(jobs_of([(0.0, 1.0, 1), (5.0, 1.0, 1)]), CLUSTER, POLICIES["fifo"], progress=few.append)
    assert few == [0.0, 0.5, 1.0]


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


def test_the_course_of_a_cluster_is_integrated_exactly() -> None:
    """Idle nodes 2, 1, 0 from 0, 10 and 30 s on, and idle GPUs 8, 5, 0."""
    steps = np.array([[0.0, 2, 8], [10.0, 1, 5], [30.0, 0, 0]])
    series = Series(time=steps[:, 0], allocation=steps[:, 0], gpus=steps[:, 0], retention=steps[:, 0], steps=steps)
    assert series.idle(0.0, 40.0) == (40.0, 180.0)
    assert series.idle(5.0, 20.0) == (20.0, 90.0)
    assert series.idle(20.0, 20.0) == series.idle(20.0, 10.0) == (0.0, 0.0)
    assert replace(series, steps=np.zeros((0, 3))).idle(0.0, 9.0) == (0.0, 0.0)
    assert replace(series, steps=steps[:1]).idle(0.0, 9.0) == (18.0, 72.0)


def test_points_of_a_series_show_what_is_from_then_on() -> None:
    """Two of six nodes for 20 s, and half of another from second 10 on; a point every 10 s."""
    outcome = replay(
        jobs_of([(0.0, 20.0, 8), (10.0, 30.0, 2)]), CLUSTER, POLICIES["fifo"], rules=ReplayRules(sample=10.0)
    )
    assert outcome.series.time.tolist() == [0.0, 10.0, 20.0, 30.0]
    assert outcome.series.allocation.tolist() == pytest.approx([2 / 6, 3 / 6, 1 / 6, 1 / 6])
    assert outcome.series.gpus.tolist() == pytest.approx([8 / 24, 10 / 24, 2 / 24, 2 / 24])
    assert np.isnan(outcome.series.retention).all()
    assert outcome.series.steps[:, 0].tolist() == [0.0, 10.0, 20.0, 40.0]


def test_how_much_of_a_zone_others_hold() -> None:
    """Three of the four that are kept when it is announced: it is known that they will be free in time."""
    rows = [(0.0, 45.0, 10), (60.0, 10.0, 4)]
    planned = Planned(nodes=4, arrival=100.0, notice=60.0, duration=100.0)
    outcome = replay(jobs_of(rows), CLUSTER, POLICIES["oracle"], [planned], rules=ReplayRules(sample=10.0))
    (kept,) = outcome.planned
    assert (kept.announced, kept.before, kept.at) == (0.75, 0.0, 0.0)
    assert outcome.series.retention[3:6].tolist() == pytest.approx([np.nan, 0.75, 0.0], nan_ok=True)


def test_idle_hours_count_from_the_first_announcement() -> None:
    planned = [Planned(nodes=2, arrival=3600.0, notice=1800.0), Planned(nodes=2, arrival=7200.0, notice=600.0)]
    jobs = replace(jobs_of([(0.0, 1.0, 1)]), window=7200.0)
    outcome = replay(jobs, CLUSTER, POLICIES["fifo"])
    found = summary(outcome, jobs, planned, NODES, NODES * SIZE)
    assert found.idle_node_hours == pytest.approx(NODES * 1.5)
    assert summary(outcome, jobs, [], NODES, NODES * SIZE).idle_node_hours == pytest.approx(NODES * 2, rel=1e-3)


def test_who_finds_room_outside_of_a_zone_is_not_let_into_it() -> None:
    planned = Planned(nodes=2, arrival=100.0, notice=90.0, duration=10.0)
    outcome = replay(jobs_of([(20.0, 5.0, 4), (20.0, 5.0, 2)]), CLUSTER, POLICIES["oracle"], [planned])
    (kept,) = outcome.planned
    assert kept.admitted == 0 and outcome.started.tolist() == [20.0, 20.0]
