"""A run's own recording: slow processors, hosts and links are told apart; nobody is named in a
clean run."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.core.record.rollup import PROCESSOR
from plait.diagnose.measured.reading import recorded
from plait.diagnose.measured.recording import ROLLUP, Recording
from plait.diagnose.report import explain
from plait.diagnose.verdicts.stragglers import Straggler, verdicts
from tests.support.recordings.made import TRANSFER, At, Job, plan_of, spans_of_job


def recording(job: Job, hosts: dict[int, str] | None = None) -> Recording:
    spans = spans_of_job(job)
    return recorded(spans, spans.clear().select("step", "rank"), plan_of(job), hosts=hosts)


def stragglers(job: Job, hosts: dict[int, str] | None = None) -> tuple[Straggler, ...]:
    return verdicts(recording(job, hosts)).stragglers


def slower(by: Callable[[At], float]) -> Callable[[At], float]:
    return lambda at: (0.1 if at.way == "forward" else 0.2) * by(at)


def moving(by: Callable[[At], float]) -> Callable[[At], float]:
    return lambda at: TRANSFER * by(at)


@given(seed=st.integers(0, 2**32), jitter=st.floats(0, 0.1), dp=st.integers(1, 4), pp=st.integers(1, 3))
@settings(max_examples=12, deadline=None)
def test_nobody_in_clean_runs(seed: int, jitter: float, dp: int, pp: int) -> None:
    found = verdicts(recording(Job(dp=dp, pp=pp, seed=seed, jitter=jitter, micro_batches=4, steps=20)))
    assert found.stragglers == ()
    assert found.comparable == (dp * pp if dp > 1 else 0)


@pytest.mark.parametrize("slow", [0.1, 0.3, 1.0])
def test_a_slow_processor(slow: float) -> None:
    compute = slower(lambda at: 1 + slow * ((at.dp, at.stage, at.step >= 20) == (1, 1, True)))
    found = explain(recording(Job(dp=4, pp=2, compute=compute, steps=40)), "run")
    [one] = found.stragglers
    assert (one.what, one.ranks) == ("slow processor", (5,))
    assert (one.since, one.until) == (20, 39)
    assert one.effect == pytest.approx(slow, abs=0.03)
    assert one.computing == 1.0
    cost = found.costs[0]
    assert cost is not None
    assert found.what_if is not None
    assert 0.4 * one.seconds < cost <= 1.2 * one.seconds


HOSTS = {rank: f"h{rank // 2}" for rank in range(12)}
AWAY = {0: "h0", 4: "h0", 9: "h0", 8: "h1", 5: "h2"}
SCATTERED = {rank: AWAY.get(rank, "h3") for rank in range(12)}
Named = tuple[str, tuple[int, ...], tuple[str, ...], str]


def ends(at: At, hosts: dict[int, str]) -> set[str]:
    """Hosts that a transfer goes from and to, in a job of four replicas."""
    target = at.stage + (1 if at.way == "forward" else -1)
    return {hosts[rank] for rank in (at.stage * 4 + at.dp, target * 4 + at.dp) if rank in hosts}


def leaves(at: At) -> bool:
    """Whether a transfer goes from or to h0; what it sends to itself does not."""
    return len(ends(at, SCATTERED)) == 2 and "h0" in ends(at, SCATTERED)


def path(at: At) -> bool:
    return {"h2", "h4"} <= ends(at, HOSTS)


def few(dp: int, pp: int, slow: float) -> Job:
    compute = slower(lambda at: 1 + slow * ((at.dp, at.stage) == (1, 0)))
    return Job(dp=dp, pp=pp, compute=compute, micro_batches=4, steps=20, jitter=0.03)


def links(by: Callable[[At], float], *, dp: int = 4, pp: int = 3, **more: bool) -> Job:
    return Job(dp=dp, pp=pp, transfer=moving(by), **more)  # type: ignore[arg-type]


NAMED: dict[str, tuple[Job, dict[int, str] | None, list[Named]]] = {
    "of two": (few(2, 1, 0.1), None, [("slow processor", (1,), (), "dp 1")]),
    "of two in two stages": (few(2, 2, 0.1), None, [("slow processor", (1,), (), "stage 0, dp 1")]),
    "of eight": (few(4, 2, 0.3), None, [("slow processor", (1,), (), "stage 0, dp 1")]),
    "of four stages": (few(2, 4, 0.1), None, [("slow processor", (1,), (), "stage 0, dp 1")]),
    "two ranks of a host": (
        Job(dp=8, pp=1, compute=lambda at: 0.1 * (1.3 if at.dp in (4, 5) else 1.0)), HOSTS,
        [("slow host", (4, 5), ("h2",), "all 2 ranks of h2")],
    ),
    "one of them": (
        Job(dp=8, pp=1, compute=lambda at: 0.1 * (1.3 if at.dp == 4 else 1.0)), HOSTS,
        [("slow processor", (4,), ("h2",), "dp 4")],
    ),
    "every link of a host": (
        links(lambda at: 40 if "h2" in ends(at, HOSTS) else 1), HOSTS,
        [("slow link", (4, 5), ("h2",), "every link of h2")],
    ),
    "a path": (
        links(lambda at: 40 if path(at) else 1), HOSTS, [("slow link", (4, 5, 8, 9), ("h2", "h4"), "between h2 and h4")]
    ),
    "links that leave a host": (
        links(lambda at: 40 if leaves(at) else 1), SCATTERED, [("slow link", (0, 4, 9), ("h0",), "every link of h0")]
    ),
    "in one direction": (
        links(lambda at: 40 if leaves(at) and at.way == "forward" else 1), SCATTERED,
        [("slow link", (0, 4, 9), ("h0",), "2 links of h0")],
    ),
    "of a host that is not known": (  # of four, three are told
        links(lambda at: 40 if leaves(at) else 1), {rank: host for rank, host in SCATTERED.items() if rank != 9},
        [("slow link", (4, 5, 8, 9), ("h0", "h1", "h2"), "pp 4>8 and pp 5>9 and pp 8>4")],
    ),
    "links of one rank": (
        links(lambda at: 40 if at.dp == 2 and 1 in (at.stage, at.stage + (1 if at.way == "forward" else -1)) else 1,
              dp=8), None, [("slow link", (10,), (), "pp 2>10 and pp 10>18 and pp 10>2")],
    ),
    "a link that is hardly slow": (links(lambda at: 2 if at.dp == 2 else 1, dp=8, pp=2), None, []),
}  # fmt: skip


@pytest.mark.parametrize("case", NAMED)
def test_who_is_named(case: str) -> None:
    job, hosts, named = NAMED[case]
    found = [(one.what, one.ranks, one.hosts, one.where) for one in stragglers(job, hosts)]
    assert found == named


def test_a_slow_processor_among_ranks_that_are_held_up_now_and_then() -> None:
    """Of a rank's step the sum then says nothing; most of its ops do."""
    draw = random.Random(7)

    def held(at: At) -> float:
        return (20.0 if draw.random() < 0.1 else 1.0) * (1.3 if (at.dp, at.stage) == (2, 1) else 1.0)

    [one] = stragglers(Job(dp=4, pp=2, compute=slower(held), steps=20))
    assert (one.what, one.ranks) == ("slow processor", (6,))


def with_processor(recording: Recording, needs: dict[tuple[int, int], float]) -> Recording:
    """needs: by rank and step, how much of a processor a step had."""
    rows = pl.DataFrame(
        [(step, rank, PROCESSOR, "", "", "", 1, had) for (rank, step), had in needs.items()],
        schema=ROLLUP, orient="row",
    )  # fmt: skip
    return replace(recording, rollup=pl.concat([recording.rollup, rows]))


def test_a_slow_processor_that_others_take_away_again_and_again() -> None:
    """By the clock it is one of many that take long; how much of a processor it needs is known
    anyway."""
    draw = random.Random(3)
    seen = recording(Job(dp=4, pp=2, compute=slower(lambda at: draw.lognormvariate(0, 1.2)), steps=20))
    assert verdicts(seen).stragglers == ()
    needs = {(rank, step): 0.9 * draw.gauss(1, 0.03) for rank in range(8) for step in range(20)}
    assert verdicts(with_processor(seen, needs)).stragglers == ()
    slow = {of: had * (1.1 if of[0] == 6 else 1.0) for of, had in needs.items()}
    [found] = verdicts(with_processor(seen, slow)).stragglers
    assert (found.what, found.ranks) == ("slow processor", (6,))
    assert found.effect == pytest.approx(0.1, abs=0.03) and found.computing == 1.0
    needs = {(rank, step): 0.9 * draw.gauss(1, 0.001) for rank in range(8) for step in range(20)}
    near = verdicts(with_processor(seen, {of: had * (1.02 if of[0] == 6 else 1.0) for of, had in needs.items()}))
    assert near.stragglers == () and near.spread.peer == 6, "whichever way a rank is nearest to being named"
    assert near.spread.effect == pytest.approx(0.02, abs=0.002)


def test_of_two_ranks_beside_other_work_one_may_be_the_slower_for_it() -> None:
    seen = recording(Job(dp=2, pp=1, steps=20))
    draw = random.Random(4)
    needs = {(rank, step): (1 + 0.3 * (rank == 1)) * draw.gauss(1, 0.03) for rank in range(2) for step in range(20)}
    for share, named in ((2.4, [(1,)]), (0.7, [])):  # with processors of their own, and without
        had = {of: share * need for of, need in needs.items()}
        assert [one.ranks for one in verdicts(with_processor(seen, had)).stragglers] == named


def test_a_host_that_launches_late() -> None:
    late = Job(dp=4, pp=2, launch=lambda at: 0.03 if (at.dp, at.stage) == (2, 0) else 0.001)
    found = explain(recording(late), "run")
    [one] = found.stragglers
    assert (one.what, one.ranks) == ("slow host", (2,)) and one.computing < 0.2
    assert (found.costs[0] or 0) > 0.1


@pytest.mark.parametrize("clocks", [True, False])
def test_a_slow_link_is_told_from_a_slow_rank(clocks: bool) -> None:
    job = recording(links(lambda at: 40 if (at.dp, at.stage, at.way) == (1, 0, "forward") else 1, pp=2))
    [one] = verdicts(replace(job, clocks_agree=clocks)).stragglers
    assert (one.what, one.ranks, one.where) == ("slow link", (1, 5), "pp 1>5")
    assert one.effect == pytest.approx(39, rel=0.1)


def test_what_a_slow_link_costs_is_of_all_its_steps() -> None:
    """Of twenty, the last eleven are the slowest."""

    def times(at: At) -> float:
        return (60 if at.step >= 9 else 40) if (at.dp, at.stage, at.way) == (1, 0, "forward") else 1

    [found] = stragglers(links(times, pp=2))
    assert (found.what, found.ranks, found.since, found.until) == ("slow link", (1, 5), 0, 19)
    assert found.seconds == pytest.approx(59 * TRANSFER * 8, rel=0.02), "of 8 micro-batches, beyond what others take"


@pytest.mark.parametrize("buffered", [False, True])
@pytest.mark.parametrize(("also", "named"), [("h0", "h2"), ("h1", None)])
def test_of_the_two_ends_of_a_slow_path_the_one_whose_other_transfers_are_slow_too(
    also: str, named: str | None, buffered: bool
) -> None:
    """They are too little slower to be named themselves."""
    job = links(
        lambda at: 40 if path(at) else 1.4 if also in ends(at, HOSTS) else 1, blocking=not buffered, buffered=buffered
    )
    [one] = verdicts(replace(recording(job, HOSTS), clocks_agree=True)).stragglers
    wanted = ((named,), f"links of {named}, clearest to h4") if named else (("h2", "h4"), "between h2 and h4")
    assert (one.what, one.hosts, one.where) == ("slow link", *wanted)
    assert one.ranks == ((4, 5) if named else (4, 5, 8, 9))


def test_clocks_of_hosts_that_do_not_agree() -> None:
    """Lateness is found from the ends, which are one moment, whatever each host's clock says."""
    spans = spans_of_job(Job(dp=4, pp=2, compute=slower(lambda at: 1.5 if (at.dp, at.stage) == (1, 1) else 1.0)))
    shift = spans["rank"].cast(float) * 1000
    skewed = spans.with_columns(start=spans["start"] + shift, end=spans["end"] + shift)
    hosts = {rank: f"h{rank}" for rank in range(8)}
    job = recorded(skewed, spans.clear().select("step", "rank"), plan_of(Job(dp=4, pp=2)), hosts=hosts)
    found = explain(job, "run")
    assert [(one.what, one.ranks) for one in found.stragglers] == [("slow processor", (5,))]
    assert (found.costs[0] or 0) > 0.3
    last = found.verdicts.arrivals[0]
    assert last.behind == 5 and last.lateness < 10


@pytest.mark.parametrize(("ranks", "named"), [(7, False), (8, True)])
def test_of_fewer_than_8_ranks_more_is_asked_for(ranks: int, named: bool) -> None:
    """One takes 4 % longer: between what is asked for of few, and of more."""
    slow = slower(lambda at: 1.04 if at.dp == 3 else 1.0)
    found = verdicts(recording(Job(dp=ranks, pp=1, steps=20, micro_batches=4, jitter=0.001, compute=slow)))
    assert [one.ranks for one in found.stragglers] == ([(3,)] if named else [])
    assert (found.spread.peer == 3) != named, "of who is not named the slowest is told"


def test_who_comes_last_how_late_and_because_of_whom() -> None:
    slow = slower(lambda at: 1.5 if (at.dp, at.stage) == (2, 0) else 1.0)
    found = verdicts(recording(Job(dp=4, pp=2, steps=20, micro_batches=1, jitter=0.0, compute=slow))).arrivals
    [one] = found
    assert (one.axis, one.what, one.rank, one.share, one.behind) == ("dp", "mlp backward", 2, 0.5, 2), "of both stages"
    assert one.lateness == pytest.approx(0.15), "half of forward and backward"
    later = slower(lambda at: 1.5 if (at.dp, at.stage) == (2, 1) else 1.0)
    [one] = verdicts(recording(Job(dp=4, pp=2, steps=20, micro_batches=1, jitter=0.0, compute=later))).arrivals
    assert one.behind == 6, "who comes last waited for the other stage"
    [one] = verdicts(recording(Job(dp=4, pp=2, steps=20, micro_batches=1, jitter=0.0))).arrivals
    assert one.behind is None and one.lateness == pytest.approx(0, abs=1e-9)
    assert verdicts(recording(Job(dp=1, pp=2, steps=20))).arrivals == ()


def test_a_slow_host_is_what_its_ranks_are_together() -> None:
    """One of its two ranks is slow from the beginning, the other slower and later."""
    late = slower(lambda at: 1.3 if at.dp == 4 else 1.5 if at.dp == 5 and at.step >= 20 else 1.0)
    job = Job(dp=8, pp=1, steps=40, micro_batches=4, compute=late)
    alone = {one.ranks: one for one in stragglers(job)}
    [host] = stragglers(job, HOSTS)
    first, second = alone[4,], alone[5,]
    assert (first.since, second.since) == (0, 20)
    assert (host.what, host.ranks, host.where) == ("slow host", (4, 5), "all 2 ranks of h2")
    assert (host.since, host.until) == (0, 39)
    assert (host.z, host.seconds) == (min(first.z, second.z), max(first.seconds, second.seconds))
    assert host.effect == pytest.approx((first.effect + second.effect) / 2)
    ends = slower(lambda at: 1.3 if at.dp == 4 and at.step < 20 else 1.5 if at.dp == 5 and at.step >= 20 else 1.0)
    apart = stragglers(replace(job, compute=ends), HOSTS)
    assert {(one.ranks, one.since) for one in apart} == {((4,), 0), ((5,), 20)}, "never at once"
    often = slower(lambda at: 1.3 if at.dp == 4 and at.step % 5 else 1.5 if at.dp == 5 else 1.0)
    recurs = {one.ranks: one.recurs for one in stragglers(replace(job, compute=often))}
    [host] = stragglers(replace(job, compute=often), HOSTS)
    assert host.ranks == (4, 5) and host.recurs == recurs[4,] < recurs[5,] == 1.0, "as its ranks do at least"


@pytest.mark.parametrize(
    ("compute", "launch", "size"),
    [
        ((1.5, 1.0), (0.0, 0.1), 8), ((1.1, 2.0), (0.0, 0.0), 8), ((1.5, 1.0), (0.0, 0.1), 2),
        ((1.5, 1.5), (0.0, 0.0), 2),
    ],
    ids=["other causes", "other amounts", "other causes, no equals elsewhere", "no equals elsewhere"],
)  # fmt: skip
def test_what_is_wrong_with_two_ranks_of_a_host_for_two_reasons_is_no_slow_host(
    compute: tuple[float, float], launch: tuple[float, float], size: int
) -> None:
    """The last two ranks are the last host's; each is named for itself, and nothing costs
    nothing."""
    at_end = {size - 2: 0, size - 1: 1}
    job = Job(
        dp=size, pp=1, steps=40, micro_batches=4,
        compute=slower(lambda at: compute[at_end[at.dp]] if at.dp in at_end else 1.0),
        launch=lambda at: launch[at_end[at.dp]] if at.dp in at_end else 0.0,
    )  # fmt: skip
    report = explain(recording(job, HOSTS), "run")
    assert not any(len(one.ranks) > 1 for one in report.stragglers)
    if size > 2:
        assert {one.ranks for one in report.stragglers} == {(6,), (7,)}
    assert " 0 µs shorter" not in report.text()


def test_a_host_whose_ranks_together_cost_nothing_is_none() -> None:
    """All wait longer for another stage's rank: the two are slow, each for itself."""

    def compute(at: At) -> float:
        return 0.12 if (at.stage, at.dp) in ((0, 0), (0, 1)) else 0.9 if at.stage else 0.1

    hosts = {rank: f"h{rank // 2}" for rank in range(16)}
    report = explain(recording(Job(dp=8, pp=2, steps=30, micro_batches=1, jitter=0.0, compute=compute), hosts), "run")
    for one, cost in zip(report.stragglers, report.costs, strict=True):
        assert len(one.ranks) == 1 or (cost or 0.0) > 0


def test_slow_links_of_different_times() -> None:
    def times(at: At) -> float:
        begins = (at.stage, at.way) == (0, "forward")
        return 40 if begins and at.dp == 1 and at.step < 30 else 60 if begins and at.dp == 2 and at.step >= 10 else 1

    [found] = stragglers(Job(dp=8, pp=2, steps=40, transfer=moving(times)))
    assert (found.what, found.since, found.until) == ("slow link", 0, 39)
    assert found.ranks == (1, 2, 9, 10) and set(found.where.split(" and ")) == {"pp 1>9", "pp 2>10"}
    assert found.effect == pytest.approx(59, rel=0.02), "the dearest one's"


def test_a_cheap_link_beside_a_dear_one_does_not_hide_it() -> None:
    by = moving(lambda at: {1: 40, 2: 2}.get(at.dp, 1) if (at.stage, at.way) == (0, "forward") else 1)
    [found] = stragglers(Job(dp=8, pp=2, transfer=by, jitter=0.001))
    assert found.ranks == (1, 2, 9, 10) and found.effect == pytest.approx(39, rel=0.02)
