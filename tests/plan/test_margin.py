"""Memory as a risk: bands, what stays free, what is refused, and what the safest strategy gives
up."""

from __future__ import annotations

from dataclasses import replace
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest

from plait.core.base.errors import InfeasiblePlan, JobError
from plait.core.cluster.efficiency import Overhead
from plait.core.cluster.hardware import Cluster
from plait.core.job.constraint import NO_MARGIN, SURE, Margin
from plait.core.job.spec import Job
from plait.core.step.memory.closed_memory import step_memory
from plait.core.step.seconds.closed_form import total_seconds
from plait.plan.answer import Planner
from plait.plan.explain.memory_report import DeviceMemory, MemoryReport, percent
from plait.plan.search.candidate import Answer
from plait.plan.search.needs import Needs, memory_deviation
from plait.plan.search.search import LONGER, SURELY, safest
from tests.plan.search.test_search import A100, MODEL, SMALL, asked, brute_force, cluster

GIB = 1 << 30
P90 = NormalDist().inv_cdf(SURE)


def job(margin: float | str = "auto", **sections: Any) -> Job:
    given = {
        "model": {"preset": "llama2-7b"}, "data": {"sequence_length": 4096},
        "train": {"global_batch_size": 64, "precision": "bf16-mixed"}, "cluster": {"preset": "h100", "ranks": 8},
        "plan": {"memory_margin": margin, "top": 4, "points": 20_000},
    }  # fmt: skip
    return Job.from_dict(given | sections)


def answer(margin: float | str) -> Answer:
    return Planner(job(margin), Cluster.preset("h100"), 32_000).answer()


def test_kinds_of_memory_err_apart() -> None:
    """By hand: a share of each, squares added up."""
    sizes = [np.array([value]) for value in (20e9, 40e9, 3e9, 2e9)]
    doubt = Overhead().doubt
    told = [one.value * float(size[0]) for (_, one), size in zip(doubt, sizes, strict=False)]
    told.append(2e9)
    assert memory_deviation(Overhead(), *sizes)[0] == pytest.approx(sum(each**2 for each in told) ** 0.5)
    assert memory_deviation(Overhead(), *(0 * size for size in sizes))[0] == 0


@pytest.mark.parametrize("margin", ["400 GiB", "79 GiB", 0.999])
def test_a_margin_that_leaves_nothing_is_refused_by_key(margin: float | str) -> None:
    """At once, and not by advice that cannot help."""
    planner = Planner(job(margin), Cluster.preset("h100"), 32_000)
    told = rf"^plan\.memory_margin: a margin of {margin} leaves no memory on H100-.*, .* fill 7\S* GiB\. Allowed: less"
    for ask in (lambda: planner.request, lambda: planner.margin):
        with pytest.raises(JobError, match=told):
            ask()
    assert Planner(job("60 GiB"), Cluster.preset("h100"), 32_000).request.margin.size == 60 * GIB


def test_needs_are_memory_and_what_stays_free() -> None:
    points, _, _ = brute_force(asked(4, 4, **SMALL), A100)
    found = step_memory(MODEL, points, sequence=1024, overhead=A100.overhead)
    none, likely = (Needs.of(found, margin, A100) for margin in (NO_MARGIN, Margin(confidence=SURE)))
    assert (none.all == found.total).all() and (likely.total == found.total).all()
    deviation = memory_deviation(A100.overhead, found.lasting, found.moving, found.overhead, found.doubted)
    assert likely.kept == pytest.approx(P90 * deviation)
    halves = Needs.joined([likely.take(np.arange(3)), likely.take(np.arange(3, len(points)))])
    assert (halves.all == likely.all).all() and (likely.fits() <= none.fits()).all()


def report(total: float, deviation: float, margin: Margin = NO_MARGIN) -> MemoryReport:
    """Of 80 GiB."""
    planner = Planner(job(), Cluster.preset("h100"), 32_000)
    estimate = planner.predict(planner.job.changed(["strategy.dp=8"])).memory.pp_ranks[0].estimate
    beside = int(total * GIB) - estimate.memory.total
    return MemoryReport((DeviceMemory(estimate, beside, deviation * GIB),), 80 * GIB, margin)


def test_a_report_says_how_sure_a_plan_is_to_fit() -> None:
    tight = report(70, 5, Margin(confidence=SURE))
    assert tight.fits and tight.safe
    assert tight.likely == pytest.approx(NormalDist().cdf(2))
    assert tight.fullest.band == (int((70 - 5 * P90) * GIB), int((70 + 5 * P90) * GIB))
    assert tight.summary == (
        "fills 70 GiB of 80 GiB, 10 GiB stay free: 98% sure to fit (6.408 GiB must stay free, to be 90% sure that "
        "it fits)"
    )
    full = report(75, 5, Margin(confidence=SURE))
    assert full.fits and not full.safe
    assert full.summary.endswith(
        "84% sure to fit (6.408 GiB must stay free, to be 90% sure that it fits: more than do)"
    )
    risky = report(81, 5)
    assert not risky.fits
    assert risky.summary == "fills 81 GiB of 80 GiB, 1 GiB too much: 42% sure to fit, 58% to run out of memory"
    assert tight.description(gpu=True).startswith("Memory of strategy 1 on the fullest GPU: 70.0 of 80.0 GiB (")
    assert tight.description(gpu=True).endswith(" CUDA and NCCL); it fits with a chance of 98%.")
    assert full.description(gpu=False).endswith("chance of 84%, less than plan.memory_margin asks of a search.")
    values = tight.to_dict()
    assert values["memory_kept_free"] == int(P90 * 5 * GIB) and values["probability_to_fit"] == tight.likely
    assert (report(70, 0).likely, report(81, 0).likely) == (1.0, 0.0)
    assert [percent(each) for each in (0.5, 0.995, 0.005, 1.0, 0.0)] == ["50%", "99.5%", "0.5%", "over 99.9%",
                                                                         "under 0.1%"]  # fmt: skip


def test_the_least_sure_place_counts() -> None:
    """Not the fullest, whose memory is known better."""
    one = report(70, 1).pp_ranks[0]
    other = replace(one, overhead=one.overhead - 2 * GIB, deviation=20.0 * GIB)
    assert MemoryReport((one, other), 80 * GIB).likely == pytest.approx(NormalDist().cdf(12 / 20))


@pytest.mark.parametrize("margin", [Margin(), Margin(share=0.3), Margin(size=2 * GIB), Margin(confidence=SURE)])
def test_a_search_keeps_its_margin(margin: Margin) -> None:
    """The best in closed form is the best of all that leave so much free."""
    from plait.plan.search.search import search

    one, on = replace(asked(4, 4, **SMALL), margin=margin), cluster(6.0)
    points, seconds, _ = brute_force(one, on)
    needs = Needs.of(step_memory(MODEL, points, sequence=1024, overhead=on.overhead), margin, on)
    found = search(one, on, "bf16-mixed", most=10**9)
    assert found.seconds[0] == pytest.approx(seconds[needs.fits()].min())
    assert Needs.of(step_memory(MODEL, found.points, sequence=1024, overhead=on.overhead), margin, on).fits().all()


def test_margins_change_the_plan_and_its_risk() -> None:
    plans = {margin: answer(margin) for margin in ("auto", "fastest", "safest", 0.2)}
    auto, fastest, safest, share = plans.values()
    assert auto.best.memory.likely >= SURE > fastest.best.memory.likely
    assert fastest.best.seconds < auto.best.seconds
    assert safest.best.memory.likely > auto.best.memory.likely
    assert safest.best.seconds <= LONGER * auto.best.seconds
    assert safest.candidates[1].seconds == pytest.approx(auto.best.seconds)
    assert "longer than that of the fastest (" in safest.why[1] and "instead of" in safest.why[1]
    assert share.best.most_memory <= 0.8 * share.best.memory.usable
    values = auto.to_dict()
    assert values["memory_margin"] == {"sure": 0.9, "share": 0.0, "size": 0.0, "safest": False}
    assert values["candidates"][0]["probability_to_fit"] == auto.best.memory.likely
    assert [one["kind"] for one in values["would_free_memory"]] == [one.move.kind for one in auto.frees]


def test_the_surest_are_tried_the_fastest_of_them_first() -> None:
    """Of points that take no longer than a limit: those as good as sure by seconds, then by
    room."""
    one, on = replace(asked(4, 4, **SMALL), margin=Margin(confidence=SURE)), cluster(10.0)
    points, seconds, _ = brute_force(one, on)
    limit = float(np.quantile(seconds, 0.5))
    found = safest(one, on, "bf16-mixed", seconds=limit, keep=10**6, most=10**9)
    taken = total_seconds(MODEL, found, on, sequence=1024, precision="bf16-mixed")
    memory = step_memory(MODEL, found, sequence=1024, overhead=on.overhead)
    sure, likely = (Needs.of(memory, Margin(confidence=each), on) for each in (SURELY, SURE))
    count = int(sure.fits().sum())
    assert 0 < count < len(found) < len(points) and (taken <= limit).all()
    assert sure.fits()[:count].all() and (np.diff(taken[:count]) >= 0).all()
    assert (np.diff(likely.all[count:]) >= 0).all() and likely.fits().all()


def test_what_is_as_good_as_sure_gives_up_nothing() -> None:
    roomy = Planner(job("safest", model={"preset": "gpt3-125m"}, data={"sequence_length": 1024}),
                    Cluster.preset("h100"), 32_000)  # fmt: skip
    found = roomy.answer()
    assert found.best.seconds == min(one.seconds for one in found.candidates)
    assert found.why[1].startswith("The fastest strategy is also the safest: it fits with a chance of over 99.9%")


def test_what_leaves_too_little_free_is_refused_and_the_risk_is_named() -> None:
    """A device that just holds what takes least."""
    near = Cluster.preset("h100")
    memory = near.device.memory.model_copy(update={"value": 16.6 * GIB})
    near = near.model_copy(update={"device": near.device.model_copy(update={"memory": memory})})
    risky = Planner(job("fastest"), near, 32_000).answer()
    assert risky.best.memory.likely < SURE
    with pytest.raises(InfeasiblePlan) as caught:
        Planner(job("auto"), near, 32_000).answer()
    told = str(caught.value)
    assert told.startswith("No strategy leaves enough memory free: the smallest of")
    assert "must stay free, to be 90% sure that it fits. plan.memory_margin=fastest would do" in told
