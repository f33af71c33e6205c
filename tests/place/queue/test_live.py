"""A live queue at one moment decides what the replay decides at that moment."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from plait.place.queue.admission import POLICIES
from plait.place.queue.live import LiveCluster, LiveJob, LiveZone, decide
from plait.place.queue.replay import replay
from plait.place.queue.reservation import ClusterShape, Planned
from plait.place.queue.workload import JobTrace

NODES, SIZE = 6, 4
NAMES = [f"n{at}" for at in range(NODES)]
FREE = dict.fromkeys(NAMES, 0)

JOBS = st.lists(
    st.builds(
        LiveJob,
        name=st.just(""),
        submit=st.integers(0, 5).map(float),
        gpus=st.integers(1, NODES * SIZE),
        jct=st.sampled_from((10.0, 90.0, 100.0, 101.0, inf)),
        preemptible=st.booleans(),
        priority=st.integers(-1, 2),
    ),
    max_size=12,
)


def replayed(
    jobs: list[LiveJob], zone: tuple[int, ...], due: float, closes: float
) -> list[tuple[str, tuple[str, ...]]]:
    """Who starts at once, where, when all come at one time; numbered by submission."""
    if not jobs:
        return []
    ordered = sorted(jobs, key=lambda job: (job.submit, job.name))
    trace = JobTrace(
        submit=np.zeros(len(jobs)), duration=np.full(len(jobs), 1e6), gpus=np.array([job.gpus for job in ordered]),
        mean=np.array([job.jct for job in ordered]), upper=np.zeros(len(jobs)),
        preemptible=np.array([job.preemptible for job in ordered]),
        priority=np.array([job.priority for job in ordered]), job=np.arange(len(jobs)), window=1.0,
    )  # fmt: skip
    planned = Planned(nodes=len(zone), arrival=due, notice=due, zone=zone, duration=1.0, closes=closes)
    cluster = ClusterShape(nodes=NODES, gpus_per_node=SIZE, minipod=NODES)
    runs = replay(trace, cluster, POLICIES["jct-mean"], [planned] if zone else []).runs
    first = {run.job: run for run in reversed(runs) if run.job >= 0 and run.start == 0.0}
    return sorted((ordered[job].name, tuple(NAMES[node] for node, _ in run.held)) for job, run in first.items())


@given(
    drawn=JOBS, zone=st.sampled_from(((), (4, 5), (0, 3), (0, 1, 2, 3, 4))), closes=st.sampled_from((0.0, 60.0, 120.0))
)
def test_what_starts_now_is_what_the_replay_starts(drawn: list[LiveJob], zone: tuple[int, ...], closes: float) -> None:
    jobs = [replace(job, name=f"j{at:02}") for at, job in enumerate(drawn)]
    zones = [LiveZone(name="lpj", nodes=frozenset(NAMES[at] for at in zone), due=100.0, closes=closes)] if zone else []
    found = decide(jobs, LiveCluster(used=FREE, size=SIZE, zones=zones), 0.0)
    assert sorted((one.job.name, one.nodes) for one in found) == replayed(jobs, zone, 100.0, closes)
    for one in found:
        inside = {NAMES[at] for at in zone} & set(one.nodes)
        assert (one.zones, one.until) == ((("lpj",), 100.0) if inside else ((), inf))


def test_the_three_ways_in_and_the_queue() -> None:
    """Two nodes outside, two in the zone, due at 100: as Algorithm 1 lists them."""
    cluster = LiveCluster(
        used=dict.fromkeys(("a", "b", "y", "z"), 0), size=1,
        zones=[LiveZone(name="lpj", nodes=frozenset("yz"), due=100.0)],
    )  # fmt: skip

    def started(now: float = 0.0, **jobs: LiveJob) -> dict[str, tuple[str, ...]]:
        return {one.job.name: one.nodes for one in decide(list(jobs.values()), cluster, now)}

    long = LiveJob(name="long", submit=0.0, gpus=2)
    other = LiveJob(name="other", submit=1.0, gpus=1, jct=101.0)
    short = LiveJob(name="short", submit=2.0, gpus=1, jct=100.0)
    spot = LiveJob(name="spot", submit=3.0, gpus=1, preemptible=True)
    assert started(a=long, b=other, c=short, d=spot) == {"long": ("a", "b"), "short": ("y",), "spot": ("z",)}
    assert started(now=1.0, a=long, b=other, c=short) == {"long": ("a", "b")}, "no longer in time"
    first = LiveJob(name="first", submit=9.0, gpus=2, priority=1)
    assert started(a=long, b=first) == {"first": ("a", "b")}
    assert started(now=100.0, a=long, b=spot) == {"long": ("a", "b")}, "nobody enters once the planned job is due"


def test_what_is_in_use_is_not_given_away() -> None:
    cluster = LiveCluster(used={"a": 4, "b": 3, "c": 1}, size=4)
    jobs = [LiveJob(name="big", submit=0.0, gpus=4), LiveJob(name="small", submit=1.0, gpus=1),
            LiveJob(name="three", submit=2.0, gpus=3)]  # fmt: skip
    assert [(one.job.name, one.nodes) for one in decide(jobs, cluster, 0.0)] == [("small", ("b",)), ("three", ("c",))]
