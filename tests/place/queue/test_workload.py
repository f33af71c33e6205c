"""Copies of a trace that load a cluster, the cluster's GPUs, and the zone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.core.base.errors import DataError, JobError
from plait.place.queue.admission import POLICIES, find_policies
from plait.place.queue.pool import NodePool
from plait.place.queue.replay import replay
from plait.place.queue.reservation import ClusterShape, Planned, choose_zone
from plait.place.queue.workload import workload
from plait.place.summary import summary
from tests.support.workloads import heavy_tailed, known, trace_of


def test_a_trace_as_it_is(tmp_path: Path) -> None:
    trace = trace_of(heavy_tailed(200), tmp_path)
    jobs = workload(trace, known(trace), gpus=32)
    assert len(jobs) == len(trace) - len(jobs.oversize)
    assert [int(trace.gpus[job]) for job in jobs.oversize] == [64] * len(jobs.oversize) != []
    np.testing.assert_array_equal(jobs.submit, trace.submit[jobs.job])


@given(load=st.floats(0.3, 1.5), seed=st.integers(0, 5))
def test_copies_ask_for_what_they_should(tmp_path: Path, load: float, seed: int) -> None:
    trace = trace_of(heavy_tailed(300, seed), tmp_path)
    jobs = workload(trace, known(trace), gpus=1000, load=load, window=trace.span)
    work = jobs.gpus * (np.minimum(jobs.submit + jobs.duration, trace.span) - np.maximum(jobs.submit, 0))
    assert work.sum() / trace.span / 1000 == pytest.approx(load, rel=0.25)  # parts of a copy are only roughly so much
    assert (np.diff(jobs.submit) >= 0).all() and jobs.submit.max() < trace.span
    assert (jobs.submit + jobs.duration > 0).all()


def test_whole_copies_ask_for_exactly_so_much(tmp_path: Path) -> None:
    trace = trace_of(heavy_tailed(300), tmp_path)
    jobs = workload(trace, known(trace), gpus=1000, copies=3, window=trace.span)
    work = jobs.gpus * (np.minimum(jobs.submit + jobs.duration, trace.span) - np.maximum(jobs.submit, 0))
    assert work.sum() == pytest.approx(3 * float(trace.gpus @ trace.duration))
    assert jobs.offered == pytest.approx(3 * trace.busy() / 1000)
    assert np.bincount(jobs.job[jobs.submit >= 0]).tolist() == [3] * 300


def test_policies_differ_as_they_should(tmp_path: Path) -> None:
    """Whoever knows more waits less; the zone is held when the planned job comes only where it is
    packed."""
    trace = trace_of(heavy_tailed(600), tmp_path)
    jobs = workload(trace, known(trace), gpus=640, load=0.85, window=18 * 3600.0)
    planned = Planned(nodes=48, arrival=12 * 3600.0, notice=4 * 3600.0, duration=3 * 3600.0)
    found = {
        name: summary(replay(jobs, ClusterShape(nodes=80, minipod=10), policy, [planned]), jobs, [planned], 80, 640)
        for name, policy in POLICIES.items()
    }
    assert found["oracle"].notice.mean < found["no-jct"].notice.mean
    assert found["oracle"].idle_gpu_hours < found["no-jct"].idle_gpu_hours
    assert found["oracle"].late == 0
    assert found["oracle"].retention_at == found["no-jct"].retention_at == 0
    assert (found["reserve-and-pack"].retention_at or 0) > 0
    assert (found["fifo"].planned_delay or 0) > 0 == found["oracle"].planned_delay


def test_a_load_of_less_than_a_job(tmp_path: Path) -> None:
    trace = trace_of("submit,duration,gpus\n0,1e8,8\n", tmp_path)
    with pytest.raises(DataError, match="less than one of its jobs"):
        workload(trace, known(trace), gpus=8, load=0.5, window=3600.0)


def test_no_job_fits(tmp_path: Path) -> None:
    trace = trace_of("submit,duration,gpus\n0,10,9\n", tmp_path)
    with pytest.raises(DataError, match="no job fits"):
        workload(trace, known(trace), gpus=8, load=0.9)
    jobs = workload(trace, known(trace), gpus=8)
    assert jobs.oversize == (0,) and len(jobs) == 0


@pytest.mark.parametrize("text", ["0,10,1\n", "0,10,1\n0,20,1\n", "0,1e8,1\n"])
def test_few_jobs_in_copies(tmp_path: Path, text: str) -> None:
    trace = trace_of(f"submit,duration,gpus\n{text}", tmp_path)
    jobs = workload(trace, known(trace), gpus=8, copies=1.5, window=3600.0)
    assert len(jobs) and np.isfinite(replay(jobs, ClusterShape(nodes=1), POLICIES["fifo"]).ended).all()


# ---- GPUs ----


@given(
    steps=st.lists(st.tuples(st.integers(1, 30), st.booleans(), st.booleans()), max_size=60),
    zone=st.sets(st.integers(0, 5)),
)
def test_gpus_are_given_once_and_come_back(steps: list[tuple[int, bool, bool]], zone: set[int]) -> None:
    pool = NodePool(6, 4, zones=1)
    pool.reserve(zone, 1)
    held: list[list[tuple[int, int]]] = []
    for gpus, inside, back in steps:
        if back and held:
            pool.release(held.pop(0))
        free = [sum(1 for node in range(6) if pool.free[node] == 4 and (inside or node not in zone)), gpus // 4]
        if pool.fits(gpus, (0, 1) if inside else (0,)):
            found = pool.take(gpus, (0, 1) if inside else (0,))
            assert inside or not {node for node, _ in found} & zone
            held.append(found)
        else:
            rest = gpus % 4
            part = [n for n in range(6) if pool.free[n] >= rest and (inside or n not in zone)]
            assert free[0] < free[1] or (rest and len(part) <= free[1])
        used = [sum(gpus for job in held for node, gpus in job if node == number) for number in range(6)]
        assert pool.free == [4 - one for one in used]
        assert pool.used == sum(used) and pool.busy == sum(1 for one in used if one)
        assert pool.busy_in[1] == sum(1 for node in zone if used[node])


@given(st.lists(st.integers(1, 30), max_size=12), st.sampled_from([(0,), (0, 1)]))
def test_what_fits_is_monotone_in_the_number_of_gpus(taken: list[int], parts: tuple[int, ...]) -> None:
    pool = NodePool(6, 4, zones=1)
    pool.reserve([1, 4], 1)
    for gpus in taken:
        if pool.fits(gpus, (0, 1)):
            pool.take(gpus, (0, 1))
    fits = [pool.fits(gpus, parts) for gpus in range(1, 26)]
    assert fits == sorted(fits, reverse=True)


def test_small_jobs_go_where_least_is_left() -> None:
    pool = NodePool(3, 8)
    assert pool.take(5, (0,)) == [(0, 5)]
    assert pool.take(6, (0,)) == [(1, 6)]
    assert pool.take(2, (0,)) == [(1, 2)]
    assert pool.take(9, (0,)) == [(2, 8), (0, 1)]


# ---- the zone, the names ----


@given(stays=st.lists(st.integers(0, 8), min_size=1, max_size=30), minipod=st.integers(1, 7), part=st.floats(0.01, 1))
def test_a_zone_has_its_nodes_and_prefers_those_that_empty(stays: list[int], minipod: int, part: float) -> None:
    wanted = max(1, int(part * len(stays)))
    zone = choose_zone(stays, wanted, minipod)
    assert len(set(zone)) == wanted and set(zone) <= set(range(len(stays)))
    if minipod == 1:
        assert sum(stays[node] for node in zone) == sum(sorted(stays)[:wanted])
    pods = {node // minipod for node in zone}
    assert len(pods) <= -(-wanted // minipod) + 2 * (len(stays) % minipod > 0)


def test_policies_by_name() -> None:
    assert [one.name for one in find_policies("all")] == list(POLICIES)
    with pytest.raises(JobError, match="did you mean 'oracle'"):
        find_policies("fifo,orakel")


def test_jobs_from_the_end_of_a_window_on_do_not_arrive(tmp_path: Path) -> None:
    trace = trace_of("submit,duration,gpus\n0,10,1\n50,10,1\n100,10,1\n", tmp_path)
    assert workload(trace, known(trace), gpus=8, window=100.0).submit.tolist() == [0.0, 50.0]
    assert workload(trace, known(trace), gpus=8, window=100.5).submit.tolist() == [0.0, 50.0, 100.0]


def test_what_runs_at_the_start_of_copies_began_before(tmp_path: Path) -> None:
    """A span of 110 s, of which two lie 55 s apart; a job of 60 s runs on from the turn before."""
    trace = trace_of("submit,duration,gpus\n0,5,1\n100,60,2\n", tmp_path)
    span = trace.span
    jobs = workload(trace, known(trace), gpus=8, copies=2, window=span)
    arrive = sorted({0.0, 100.0, span / 2, (100.0 + span / 2) % span})
    assert jobs.submit[jobs.submit >= 0].tolist() == pytest.approx(arrive)
    before = sorted(at - span for at in (100.0, (100.0 + span / 2) % span) if at - span + 60 > 0)
    assert jobs.submit[jobs.submit < 0].tolist() == pytest.approx(before)
    assert set(jobs.gpus[jobs.submit < 0]) == {2} or not before


@pytest.mark.parametrize("more", [0, 1])
def test_what_ends_as_the_replay_begins_is_not_there(tmp_path: Path, more: int) -> None:
    """Of the copy before, the last job has ended at 0, or runs for a second more."""
    trace = trace_of(f"submit,duration_s,gpus\n0,10,1\n3000,{3000 + more},1\n", tmp_path)
    assert trace.span == 6000
    jobs = workload(trace, known(trace), gpus=8, copies=1, window=100.0)
    assert jobs.submit.tolist() == ([-3000, 0] if more else [0])
