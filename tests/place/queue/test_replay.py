"""The replay keeps what every queue must keep, whatever the jobs."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import astuple, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.place.queue.admission import POLICIES, QueuePolicy
from plait.place.queue.pool import Series
from plait.place.queue.replay import ReplayOutcome, ReplayRules, replay
from plait.place.queue.reservation import ClusterShape, Planned
from plait.place.queue.workload import JobTrace
from plait.place.summary import Delay, summary
from tests.place.queues import CLUSTER, NODES, REPLAN, ROWS, SIZE, several
from tests.support.workloads import jobs_of


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


@given(rows=ROWS, priority=st.lists(st.integers(-2, 2), min_size=40, max_size=40))
def test_fifo_starts_nobody_before_one_of_higher_priority(
    rows: list[tuple[float, float, int]], priority: list[int]
) -> None:
    jobs = jobs_of(rows, priority=priority[: len(rows)])
    started = replay(jobs, CLUSTER, POLICIES["fifo"]).started
    for first in range(len(jobs)):
        waiting = (jobs.submit <= started[first]) & (jobs.priority > jobs.priority[first])
        assert (started[waiting] <= started[first]).all()


def test_priority_goes_before_submission_and_submission_decides_among_equals() -> None:
    rows = [(0.0, 10.0, 24), (1.0, 10.0, 24), (2.0, 10.0, 24), (3.0, 10.0, 24)]
    for policy in POLICIES.values():
        outcome = replay(jobs_of(rows, priority=[0, 0, 5, 5]), CLUSTER, policy)
        assert outcome.started.tolist() == [0.0, 30.0, 10.0, 20.0], policy.name


def test_a_walk_over_the_sorted_queue_starts_the_same_jobs() -> None:
    """Algorithm 1 as it is printed, job by job, against lists by size."""

    class Walk:
        def __init__(self, places) -> None:
            self.places = places
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
            for job, gpus in sorted(self.there.items(), key=lambda one: self.places[one[0]]):
                for room in rooms:
                    if all(still(job, zone) for zone in room if zone) and fits(gpus, room):
                        return job, room
            return None

    import plait.place.queue.admission as module

    draw = np.random.default_rng(3)
    for _ in range(5):
        rows = [
            (float(draw.integers(0, 300)), float(draw.exponential(80) + 1), int(draw.integers(1, 13)))
            for _ in range(80)
        ]
        planned = [
            Planned(nodes=3, arrival=200.0, notice=80.0, duration=50.0),
            Planned(nodes=1, arrival=230.0, notice=90.0, duration=20.0, spares=1),
        ]
        jobs = jobs_of(rows, priority=draw.integers(0, 3, 80).tolist(), preemptible=(draw.random(80) < 0.2).tolist())
        fast = replay(jobs, CLUSTER, POLICIES["oracle"], planned)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "Waiting", Walk)
            slow = replay(jobs, CLUSTER, POLICIES["oracle"], planned)
        assert (fast.started == slow.started).all() and fast.runs == slow.runs


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
    own = QueuePolicy(name="twice the mean", description="", jct=lambda jobs: 2 * jobs.mean, foresees=True)
    planned = Planned(nodes=4, arrival=100.0, notice=60.0, duration=100.0)
    rows = [(0.0, 1000.0, 8), (50.0, 30.0, 4), (50.0, 20.0, 4)]
    assert replay(jobs_of(rows), CLUSTER, own, [planned]).started.tolist() == [0.0, 200.0, 50.0]


def test_waiting_is_told_of_jobs_that_arrive_and_of_those_under_notice() -> None:
    """The third arrives when the planned job is announced, the fifth when it comes; the first was
    there."""
    jobs = jobs_of([(-5.0, 1.0, 1), (10.0, 1.0, 1), (20.0, 1.0, 1), (25.0, 1.0, 1), (40.0, 1.0, 1)])
    planned = Planned(nodes=1, arrival=40.0, notice=20.0, duration=10.0)
    outcome = replay(jobs, CLUSTER, POLICIES["fifo"], [planned])
    late = replace(outcome, started=jobs.submit + np.array([9.0, 0.0, 2.0, 4.0, 6.0]))
    found = summary(late, jobs, [planned], NODES, NODES * SIZE)
    assert astuple(found.delay) == pytest.approx((4, 3.0, 3.0, 5.7))
    assert astuple(found.notice) == pytest.approx((2, 3.0, 3.0, 3.9))
    assert summary(outcome, jobs, [], NODES, NODES * SIZE).notice == Delay(jobs=0, mean=0.0, p50=0.0, p95=0.0)


def test_progress_is_told_of_every_hundredth() -> None:
    told: list[float] = []
    replay(jobs_of([(float(at), 0.5, 1) for at in range(400)]), CLUSTER, POLICIES["fifo"], progress=told.append)
    assert told == sorted(told) and 90 <= len(told) <= 110 and told[0] == 0.0 and told[-1] <= 1.0
    few: list[float] = []
    replay(jobs_of([(0.0, 1.0, 1), (5.0, 1.0, 1)]), CLUSTER, POLICIES["fifo"], progress=few.append)
    assert few == [0.0, 0.5, 1.0]


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


def test_idle_hours_count_from_the_first_announcement() -> None:
    planned = [Planned(nodes=2, arrival=3600.0, notice=1800.0), Planned(nodes=2, arrival=7200.0, notice=600.0)]
    jobs = replace(jobs_of([(0.0, 1.0, 1)]), window=7200.0)
    outcome = replay(jobs, CLUSTER, POLICIES["fifo"])
    found = summary(outcome, jobs, planned, NODES, NODES * SIZE)
    assert found.idle_node_hours == pytest.approx(NODES * 1.5)
    assert summary(outcome, jobs, [], NODES, NODES * SIZE).idle_node_hours == pytest.approx(NODES * 2, rel=1e-3)
