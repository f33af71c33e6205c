"""A run's own recording: slow processors, hosts and links are told apart; nobody is named in a clean run."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.core.record.rollup import PROCESSOR
from plait.diagnose.explain import explain
from plait.diagnose.reading import read_run, recorded
from plait.diagnose.recording import ROLLUP, Recording
from plait.diagnose.stragglers import verdicts
from tests.support.recordings.made import TRANSFER, At, Job, plan_of, spans_of_job, write_run


def recording(job: Job, hosts: dict[int, str] | None = None) -> Recording:
    spans = spans_of_job(job)
    return recorded(spans, spans.clear().select("step", "rank"), plan_of(job), hosts=hosts)


@given(seed=st.integers(0, 2**32), jitter=st.floats(0, 0.1), dp=st.integers(1, 4), pp=st.integers(1, 3))
@settings(max_examples=12, deadline=None)
def test_nobody_in_clean_runs(seed: int, jitter: float, dp: int, pp: int) -> None:
    found = verdicts(recording(Job(dp=dp, pp=pp, seed=seed, jitter=jitter, micro_batches=4, steps=20)))
    assert found.stragglers == ()
    assert found.comparable == (dp * pp if dp > 1 else 0)


@pytest.mark.parametrize("slow", [0.1, 0.3, 1.0])
def test_a_slow_processor(slow: float) -> None:
    def compute(at: At) -> float:
        return (0.1 if at.way == "forward" else 0.2) * (1 + slow * ((at.dp, at.stage, at.step >= 20) == (1, 1, True)))

    found = explain(recording(Job(dp=4, pp=2, compute=compute, steps=40)), "run")
    assert [(one.what, one.ranks) for one in found.stragglers] == [("slow processor", (5,))]
    one = found.stragglers[0]
    assert (one.since, one.until) == (20, 39)
    assert one.effect == pytest.approx(slow, abs=0.03)
    assert one.computing == 1.0
    cost = found.costs[0]
    assert cost is not None
    assert found.what_if is not None
    assert 0.4 * one.seconds < cost <= 1.2 * one.seconds


@pytest.mark.parametrize("slow", [0.1, 0.3])
@pytest.mark.parametrize(("dp", "pp"), [(2, 1), (2, 2), (4, 2), (2, 4)])
def test_a_slow_processor_of_a_few_ranks_within_20_steps(slow: float, dp: int, pp: int) -> None:
    def compute(at: At) -> float:
        return (0.1 if at.way == "forward" else 0.2) * (1 + slow * ((at.dp, at.stage) == (1, 0)))

    found = verdicts(recording(Job(dp=dp, pp=pp, compute=compute, micro_batches=4, steps=20, jitter=0.03)))
    assert [(one.what, one.ranks) for one in found.stragglers] == [("slow processor", (1,))]


def test_a_slow_processor_among_ranks_that_are_held_up_now_and_then() -> None:
    """Of a rank's step the sum then says nothing; most of its ops do."""
    draw = random.Random(7)

    def compute(at: At) -> float:
        held = 20.0 if draw.random() < 0.1 else 1.0
        return (0.1 if at.way == "forward" else 0.2) * held * (1.3 if (at.dp, at.stage) == (2, 1) else 1.0)

    found = verdicts(recording(Job(dp=4, pp=2, compute=compute, steps=20)))
    assert [(one.what, one.ranks) for one in found.stragglers] == [("slow processor", (6,))]


def with_processor(recording: Recording, needs: dict[tuple[int, int], float]) -> Recording:
    """needs: by rank and step, how much of a processor a step had."""
    rows = pl.DataFrame(
        [(step, rank, PROCESSOR, "", "", "", 1, had) for (rank, step), had in needs.items()],
        schema=ROLLUP, orient="row",
    )  # fmt: skip
    return replace(recording, rollup=pl.concat([recording.rollup, rows]))


def test_a_slow_processor_that_others_take_away_again_and_again() -> None:
    """By the clock it is one of many that take long; how much of a processor it needs is known anyway."""
    draw = random.Random(3)

    def compute(at: At) -> float:
        return (0.1 if at.way == "forward" else 0.2) * draw.lognormvariate(0, 1.2)

    seen = recording(Job(dp=4, pp=2, compute=compute, steps=20))
    assert verdicts(seen).stragglers == ()
    needs = {(rank, step): 0.9 * draw.gauss(1, 0.03) for rank in range(8) for step in range(20)}
    assert verdicts(with_processor(seen, needs)).stragglers == ()
    slow = {of: had * (1.1 if of[0] == 6 else 1.0) for of, had in needs.items()}
    [found] = verdicts(with_processor(seen, slow)).stragglers
    assert (found.what, found.ranks) == ("slow processor", (6,))
    assert found.effect == pytest.approx(0.1, abs=0.03) and found.computing == 1.0


def test_where_ranks_share_processors_less_is_made_of_what_the_clock_says() -> None:
    seen = recording(Job(dp=4, pp=2, launch=lambda at: 0.02 * (at.dp == 1), steps=20))
    whole = {(rank, step): 2.4 for rank in range(8) for step in range(20)}
    assert {one.ranks for one in verdicts(with_processor(seen, whole)).stragglers} == {(1,), (5,)}
    shared = {of: had / 3 for of, had in whole.items()}
    assert verdicts(with_processor(seen, shared)).stragglers == ()


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
    assert [(one.what, one.ranks) for one in found.stragglers] == [("slow host", (2,))]
    assert found.stragglers[0].computing < 0.2
    assert found.costs[0] is not None
    assert found.costs[0] > 0.1


def test_all_ranks_of_a_host() -> None:
    slow = Job(dp=8, pp=1, compute=lambda at: 0.1 * (1.3 if at.dp in (4, 5) else 1.0))
    found = verdicts(recording(slow, {rank: f"h{rank // 2}" for rank in range(8)}))
    assert [(one.what, one.ranks, one.hosts) for one in found.stragglers] == [("slow host", (4, 5), ("h2",))]
    alone = Job(dp=8, pp=1, compute=lambda at: 0.1 * (1.3 if at.dp == 4 else 1.0))
    found = verdicts(recording(alone, {rank: f"h{rank // 2}" for rank in range(8)}))
    assert [(one.what, one.ranks, one.hosts) for one in found.stragglers] == [("slow processor", (4,), ("h2",))]


@pytest.mark.parametrize("clocks", [True, False])
def test_a_slow_link_is_told_from_a_slow_rank(clocks: bool) -> None:
    def transfer(at: At) -> float:
        return TRANSFER * (40 if (at.dp, at.stage, at.way) == (1, 0, "forward") else 1)

    job = recording(Job(dp=4, pp=2, transfer=transfer))
    found = verdicts(replace(job, clocks_agree=clocks))
    assert [(one.what, one.ranks) for one in found.stragglers] == [("slow link", (1, 5))]
    assert found.stragglers[0].effect == pytest.approx(39, rel=0.1)
    assert found.stragglers[0].where == "pp 1>5"


def test_what_a_slow_link_costs_is_of_all_its_steps() -> None:
    """Of twenty, the last eleven are the slowest."""

    def transfer(at: At) -> float:
        slow = (at.dp, at.stage, at.way) == (1, 0, "forward")
        return TRANSFER * ((60 if at.step >= 9 else 40) if slow else 1)

    [found] = verdicts(recording(Job(dp=4, pp=2, transfer=transfer))).stragglers
    assert (found.what, found.ranks, found.since, found.until) == ("slow link", (1, 5), 0, 19)
    assert found.seconds == pytest.approx(59 * TRANSFER * 8, rel=0.02), "of 8 micro-batches, beyond what others take"


def test_a_hosts_links() -> None:
    """Whatever goes from or to one host is slow: half of all transfers between hosts."""
    hosts = {rank: f"h{rank // 2}" for rank in range(12)}
    slow = Job(dp=4, pp=3, transfer=lambda at: TRANSFER * (40 if touches(at, "h2", hosts) else 1))
    found = verdicts(recording(slow, hosts)).stragglers
    assert [(one.what, one.hosts, one.where) for one in found] == [("slow link", ("h2",), "every link of h2")]


def test_the_path_between_two_hosts() -> None:
    hosts = {rank: f"h{rank // 2}" for rank in range(12)}

    def both(at: At) -> bool:
        return touches(at, "h2", hosts) and touches(at, "h4", hosts)

    slow = Job(dp=4, pp=3, transfer=lambda at: TRANSFER * (40 if both(at) else 1))
    found = verdicts(recording(slow, hosts)).stragglers
    assert [(one.what, one.hosts, one.where) for one in found] == [("slow link", ("h2", "h4"), "between h2 and h4")]


@pytest.mark.parametrize("buffered", [False, True])
@pytest.mark.parametrize(("also", "named"), [("h0", "h2"), ("h1", None)])
def test_of_the_two_ends_of_a_slow_path_the_one_whose_other_transfers_are_slow_too(
    also: str, named: str | None, buffered: bool
) -> None:
    """They are too little slower to be named themselves."""
    hosts = {rank: f"h{rank // 2}" for rank in range(12)}

    def transfer(at: At) -> float:
        if touches(at, "h2", hosts) and touches(at, "h4", hosts):
            return 40 * TRANSFER
        return (1.4 if touches(at, also, hosts) else 1.0) * TRANSFER

    job = Job(dp=4, pp=3, transfer=transfer, blocking=not buffered, buffered=buffered)
    found = verdicts(replace(recording(job, hosts), clocks_agree=True)).stragglers
    wanted = ((named,), f"links of {named}, clearest to h4") if named else (("h2", "h4"), "between h2 and h4")
    assert [(one.what, one.hosts, one.where) for one in found] == [("slow link", *wanted)]
    assert found[0].ranks == ((4, 5) if named else (4, 5, 8, 9))


def touches(at: At, host: str, hosts: dict[int, str]) -> bool:
    """Whether what is sent goes from or to a host."""
    target = at.stage + (1 if at.way == "forward" else -1)
    return host in (hosts[at.stage * 4 + at.dp], hosts.get(target * 4 + at.dp))


def test_clocks_of_hosts_that_do_not_agree() -> None:
    """Lateness is found from the ends, which are one moment, whatever each host's clock says."""

    def compute(at: At) -> float:
        return (0.1 if at.way == "forward" else 0.2) * (1.5 if (at.dp, at.stage) == (1, 1) else 1.0)

    spans = spans_of_job(Job(dp=4, pp=2, compute=compute))
    shift = spans["rank"].cast(float) * 1000
    skewed = spans.with_columns(start=spans["start"] + shift, end=spans["end"] + shift)
    hosts = {rank: f"h{rank}" for rank in range(8)}
    job = recorded(skewed, spans.clear().select("step", "rank"), plan_of(Job(dp=4, pp=2)), hosts=hosts)
    found = explain(job, "run")
    assert [(one.what, one.ranks) for one in found.stragglers] == [("slow processor", (5,))]
    assert found.costs[0] is not None
    assert found.costs[0] > 0.3
    last = found.verdicts.arrivals[0]
    assert last.behind == 5
    assert last.lateness < 10


def test_nobody_to_be_compared_with(tmp_path: Path) -> None:
    found = explain(read_run(write_run(tmp_path / "run", Job(dp=1, pp=2))).recording, "run")
    assert found.stragglers == ()
    assert found.verdicts.comparable == 0


def slower(by: Callable[[At], float]) -> Callable[[At], float]:
    return lambda at: (0.1 if at.way == "forward" else 0.2) * by(at)


@pytest.mark.parametrize(("ranks", "named"), [(7, False), (8, True)])
def test_of_fewer_than_8_ranks_more_is_asked_for(ranks: int, named: bool) -> None:
    """One takes 4 % longer: between what is asked for of few, and of more."""
    slow = slower(lambda at: 1.04 if at.dp == 3 else 1.0)
    found = verdicts(recording(Job(dp=ranks, pp=1, steps=20, micro_batches=4, jitter=0.001, compute=slow)))
    assert [one.ranks for one in found.stragglers] == ([(3,)] if named else [])
    assert (found.spread.unit == 3) != named, "of who is not named the slowest is told"


def test_the_slowest_of_those_that_are_not_named_may_be_the_first_rank() -> None:
    slow = slower(lambda at: 1.015 if at.dp == 0 else 1.0)
    found = verdicts(recording(Job(dp=8, pp=1, steps=20, micro_batches=4, jitter=0.001, compute=slow)))
    assert found.stragglers == () and found.spread.unit == 0
    assert found.lateness[0][:2] == (0, pytest.approx(0.015, abs=0.001))


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
    alone = {one.ranks: one for one in verdicts(recording(job)).stragglers}
    [host] = verdicts(recording(job, {rank: f"h{rank // 2}" for rank in range(8)})).stragglers
    first, second = alone[4,], alone[5,]
    assert (first.since, second.since) == (0, 20)
    assert (host.what, host.ranks, host.where) == ("slow host", (4, 5), "all 2 ranks of h2")
    assert (host.since, host.until) == (0, 39)
    assert (host.z, host.seconds) == (min(first.z, second.z), max(first.seconds, second.seconds))
    assert host.effect == pytest.approx((first.effect + second.effect) / 2)
    ends = slower(lambda at: 1.3 if at.dp == 4 and at.step < 20 else 1.5 if at.dp == 5 and at.step >= 20 else 1.0)
    apart = verdicts(recording(replace(job, compute=ends), {rank: f"h{rank // 2}" for rank in range(8)})).stragglers
    assert {(one.ranks, one.since) for one in apart} == {((4,), 0), ((5,), 20)}, "never at once"


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
    """The last two ranks are the last host's; each is named for itself, and nothing costs nothing."""
    at_end = {size - 2: 0, size - 1: 1}
    job = Job(
        dp=size, pp=1, steps=40, micro_batches=4,
        compute=slower(lambda at: compute[at_end[at.dp]] if at.dp in at_end else 1.0),
        launch=lambda at: launch[at_end[at.dp]] if at.dp in at_end else 0.0,
    )  # fmt: skip
    report = explain(recording(job, {rank: f"h{rank // 2}" for rank in range(size)}), "run")
    assert not any(len(one.ranks) > 1 for one in report.stragglers)
    if size > 2:
        assert {one.ranks for one in report.stragglers} == {(6,), (7,)}
    assert "0.0 ms shorter" not in report.text()


def test_a_host_whose_ranks_together_cost_nothing_is_none() -> None:
    """All wait longer for another stage's rank: the two are slow, each for itself."""

    def compute(at: At) -> float:
        slow = 1.2 if (at.stage, at.dp) in ((0, 0), (0, 1)) else 9.0 if at.stage else 1.0
        return 0.1 * slow

    hosts = {rank: f"h{rank // 2}" for rank in range(16)}
    report = explain(recording(Job(dp=8, pp=2, steps=30, micro_batches=1, jitter=0.0, compute=compute), hosts), "run")
    for one, cost in zip(report.stragglers, report.costs, strict=True):
        assert len(one.ranks) == 1 or (cost or 0.0) > 0


def test_slow_links_of_different_times() -> None:
    def transfer(at: At) -> float:
        first = (at.dp, at.stage, at.way) == (1, 0, "forward") and at.step < 30
        second = (at.dp, at.stage, at.way) == (2, 0, "forward") and at.step >= 10
        return TRANSFER * (40 if first else 60 if second else 1)

    [found] = verdicts(recording(Job(dp=8, pp=2, steps=40, transfer=transfer))).stragglers
    assert (found.what, found.since, found.until) == ("slow link", 0, 39)
    assert found.ranks == (1, 2, 9, 10) and set(found.where.split(" and ")) == {"pp 1>9", "pp 2>10"}
    assert found.effect == pytest.approx(59, rel=0.02), "the dearest one's"


AWAY = {0: "h0", 4: "h0", 9: "h0", 8: "h1", 5: "h2"}


def leaves(at: At) -> bool:
    """Whether a transfer goes from or to h0; what it sends to itself does not."""
    target = at.stage + (1 if at.way == "forward" else -1)
    ends = {AWAY.get(rank, "h3") for rank in (at.stage * 4 + at.dp, target * 4 + at.dp)}
    return len(ends) == 2 and "h0" in ends


def test_links_within_a_host_are_none_of_those_that_leave_it() -> None:
    hosts = {rank: AWAY.get(rank, "h3") for rank in range(12)}
    slow = Job(dp=4, pp=3, transfer=lambda at: TRANSFER * (40 if leaves(at) else 1))
    [found] = verdicts(recording(slow, hosts)).stragglers
    assert (found.hosts, found.where, found.ranks) == (("h0",), "every link of h0", (0, 4, 9))
    one_way = Job(dp=4, pp=3, transfer=lambda at: TRANSFER * (40 if leaves(at) and at.way == "forward" else 1))
    [found] = verdicts(recording(one_way, hosts)).stragglers
    assert (found.hosts, found.where) == (("h0",), "2 links of h0")


def test_where_a_host_of_a_slow_link_is_not_known_its_ranks_are_told() -> None:
    hosts = {rank: AWAY.get(rank, "h3") for rank in range(12) if rank != 9}
    slow = Job(dp=4, pp=3, transfer=lambda at: TRANSFER * (40 if leaves(at) else 1))
    [found] = verdicts(recording(slow, hosts)).stragglers
    assert (found.ranks, found.hosts) == ((4, 5, 8, 9), ("h0", "h1", "h2"))
    assert found.where.count("pp ") == 3, "of four, three are told"


def test_whichever_way_a_rank_is_nearest_to_being_named_is_told() -> None:
    """By the clock all are far from each other; by what they need of a processor one is a little apart."""
    draw = random.Random(3)
    seen = recording(Job(dp=4, pp=2, compute=slower(lambda at: draw.lognormvariate(0, 1.2)), steps=20))
    needs = {(rank, step): 0.9 * draw.gauss(1, 0.001) for rank in range(8) for step in range(20)}
    slow = {of: had * (1.02 if of[0] == 6 else 1.0) for of, had in needs.items()}
    found = verdicts(with_processor(seen, slow))
    assert found.stragglers == ()
    assert found.spread.unit == 6 and found.spread.effect == pytest.approx(0.02, abs=0.002)


def test_links_that_have_a_rank_in_common_are_that_ranks() -> None:
    def transfer(at: At) -> float:
        target = at.stage + (1 if at.way == "forward" else -1)
        return TRANSFER * (40 if at.dp == 2 and 1 in (at.stage, target) else 1)

    [found] = verdicts(recording(Job(dp=8, pp=3, transfer=transfer))).stragglers
    assert (found.what, found.ranks) == ("slow link", (10,))


def test_a_slow_host_recurs_as_its_ranks_do_at_least() -> None:
    """One of them is slow in four steps of five."""
    slow = slower(lambda at: 1.3 if at.dp == 4 and at.step % 5 else 1.5 if at.dp == 5 else 1.0)
    job = Job(dp=8, pp=1, steps=40, micro_batches=4, compute=slow)
    alone = {one.ranks: one.recurs for one in verdicts(recording(job)).stragglers}
    [host] = verdicts(recording(job, {rank: f"h{rank // 2}" for rank in range(8)})).stragglers
    assert host.ranks == (4, 5) and host.recurs == min(alone.values()) == alone[4,] < alone[5,] == 1.0


def test_a_cheap_link_beside_a_dear_one_does_not_hide_it() -> None:
    def transfer(at: At) -> float:
        times = {1: 40, 2: 2}.get(at.dp, 1) if (at.stage, at.way) == (0, "forward") else 1
        return TRANSFER * times

    [found] = verdicts(recording(Job(dp=8, pp=2, transfer=transfer, jitter=0.001))).stragglers
    assert found.ranks == (1, 2, 9, 10) and found.effect == pytest.approx(39, rel=0.02)
    cheap = verdicts(recording(Job(dp=8, pp=2, transfer=lambda at: TRANSFER * (2 if at.dp == 2 else 1))))
    assert cheap.stragglers == ()
