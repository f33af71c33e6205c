"""Finalists: which points of a ranking are simulated, which of them are answered, and in what
words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from plait.core.base.errors import InfeasiblePlan, JobError
from plait.core.cluster.hardware import Cluster
from plait.core.job.plan import Plan
from plait.core.job.spec import Job
from plait.core.step.columns.points import OVERLAPS, SHARD_OVERLAPS, StrategyTable
from plait.plan import answer
from plait.plan.answer import Planner
from plait.plan.explain.memory_report import MemoryReport
from plait.plan.search.candidate import Candidate
from plait.plan.search.finalists import Finalists
from plait.plan.search.request import job_at
from plait.plan.search.search import Ranked

A100 = Cluster.preset("a100-80")
MODEL = {"family": "gpt", "num_layers": 2, "hidden": 64, "num_heads": 4, "max_sequence": 64, "vocab": 256}
BATCH = 1 << 14


def job(**sections: Any) -> Job:
    given = {"model": MODEL, "data": {"sequence_length": 64}, "train": {"global_batch_size": BATCH},
             "cluster": {"preset": "a100-80", "ranks": 1}}  # fmt: skip
    return Job.from_dict(given | sections)


@cache
def one_candidate() -> Candidate:
    """Of a small job, to be changed."""
    small = job(train={"global_batch_size": 2}, strategy={"tp": 1})
    return Planner(small, A100, 256).predict(small)


class Ranking:
    """Points whose micro-batches are of 1, 2, 4 sequences and so on, each sliced into single ones,
    so that none is another's neighbour: what level 1 says of each, and what the simulation finds.
    huge: those that do not fit."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, said: Sequence[float], found: Sequence[float], huge: Sequence[int] = ()
    ) -> None:
        self.predicted, self.kept = list[int](), list[int]()
        base = one_candidate()
        rows = [{"micro": 1 << at, "num_micro": BATCH >> at, "p1": 1 << at} for at in range(len(said))]
        points = StrategyTable.of(rows)
        ranked = Ranked(points, np.array(said), np.zeros(len(said)), points, np.array(said))

        def search(*_: Any, keep: int, most: int) -> Ranked:
            self.kept.append(keep)
            return ranked

        def memory(_self: Planner, one: Job, _plan: Plan | None) -> MemoryReport:
            at = int(one.train.micro_batch_size).bit_length() - 1
            self.predicted.append(at)
            if np.isnan(found[at]):
                raise JobError("is forbidden", key="strategy.pp")
            return replace(base.memory, usable=1) if at in huge else base.memory

        def predict(
            planner: Planner, one: Job, plan: Plan | None = None, known: MemoryReport | None = None
        ) -> Candidate:
            at, filled = int(one.train.micro_batch_size).bit_length() - 1, known or memory(planner, one, plan)
            point = StrategyTable.of([{"micro": 1 << at}]).row(0)
            return replace(base, job=one, seconds=float(found[at]), point=point, memory=filled, closed_form=None)

        monkeypatch.setattr(answer, "search", search)
        monkeypatch.setattr(Planner, "draft", lambda *_: None)
        monkeypatch.setattr(Planner, "memory", memory)
        monkeypatch.setattr(Planner, "_predicted", predict)
        monkeypatch.setattr(Planner, "_with_closed_form", lambda _self, some: some)  # so none corrects another


def finalists(sure: int, more: int, monkeypatch: pytest.MonkeyPatch, searched: int, **sections: Any) -> list[int]:
    """Numbers of the points that are answered, in order. sure: as ``plan.top``; searched: how many
    are."""
    monkeypatch.setattr(answer, "SIMULATED", more)
    monkeypatch.setattr(answer, "LIGHT", 0)
    monkeypatch.setattr(Planner, "why", lambda *_: [])
    told = Planner(job(plan={"top": sure}, **sections), A100, 256).answer()
    assert told.searched == searched
    seconds = [one.seconds for one in told.candidates]
    assert seconds == sorted(seconds)
    return [one.point["micro"].bit_length() - 1 for one in told.candidates]


def test_those_that_may_be_the_best_are_simulated_and_the_first_of_these_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Which these are, ``search/test_finalists.py`` asks."""
    ranking = Ranking(monkeypatch, [1.0, 1.1, 1.2, 1.3, 1.4], [np.nan, 1.1, np.nan, 1.3, 1.4])
    assert finalists(2, 2, monkeypatch, 5) == [1, 3]
    assert (sorted(ranking.predicted), ranking.kept) == ([0, 1, 2, 3], [20])


def test_of_models_that_are_simulated_quickly_more_are_and_further_from_the_best(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = [1.0, 1.03, 1.05, 1.07]
    ranking = Ranking(monkeypatch, said, [1.0, 1.0, 0.9, 0.8])
    monkeypatch.setattr(Planner, "why", lambda *_: [])
    monkeypatch.setattr(Finalists, "climb", lambda _: None)
    told = Planner(job(plan={"top": 1}), A100, 256).answer()
    assert sorted(ranking.predicted) == [0, 1, 2]
    assert told.best.seconds == 0.9


def test_the_chosen_one_is_the_best_of_four(monkeypatch: pytest.MonkeyPatch) -> None:
    ranking = Ranking(monkeypatch, [1.0, 1.1, 1.2, 1.3, 1.35, 1.6], [1.9, 1.8, 1.5, 1.7, 1.4, 1.0])
    assert Planner(job(), A100, 256).chosen().seconds == 1.4
    assert (sorted(ranking.predicted), ranking.kept) == ([0, 1, 2, 3, 4], [20])


def test_many_more_are_walked_where_the_first_are_all_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    ranking = Ranking(monkeypatch, [1.0, 1.1, 1.2], [1.0, 1.1, 1.2], huge=[0, 1, 2])
    with pytest.raises(InfeasiblePlan, match=r"None of the 3 best strategies can be planned\. The fastest: The strat"):
        finalists(2, 1, monkeypatch, 3)
    assert ranking.kept == [15, 24]
    some = Ranking(monkeypatch, [1.0, 1.1, 1.2], [1.0, 1.1, 1.2], huge=[0, 1])
    assert finalists(2, 1, monkeypatch, 3) == [2]
    assert some.kept == [15]


def test_a_limit_of_memory_that_the_walk_does_not_keep_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    Ranking(monkeypatch, [1.0], [1.0])
    most = one_candidate().most_memory
    with pytest.raises(InfeasiblePlan, match=r"The fastest: a rank needs .*, against 'memory <= 1 KiB' in plan\."):
        Planner(job(plan={"constraints": ["tp = 1", "memory <= 1 KiB"]}), A100, 256).chosen()
    limit = f"memory <= {most / (1 << 30) + 1e-6:.6f} GiB"  # rounded up
    kept = Planner(job(plan={"constraints": [limit, "memory >= 1 KiB"]}), A100, 256)
    assert kept.chosen().seconds == 1.0


def test_what_a_rule_says_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    Ranking(monkeypatch, [1.0], [np.nan])
    with pytest.raises(InfeasiblePlan, match=r"The fastest: strategy\.pp: is forbidden"):
        Planner(job(), A100, 256).chosen()


# ---- why ----


def planner(**strategy: Any) -> Planner:
    return Planner(job(train={"global_batch_size": 4}, strategy={"tp": 1, **strategy}), A100, 256)


def candidate(seconds: float, **point: int) -> Candidate:
    base = one_candidate()
    parts = dict.fromkeys(base.parts, 0.0) | {"compute": seconds}
    return replace(base, seconds=seconds, parts=parts, point=StrategyTable.of([point]).row(0))


@pytest.mark.parametrize(
    ("seconds", "told"),
    [
        (
            1.5,
            "takes 500 ms (50.0%) longer: 500 ms more for computation.",
        ),
        (1.00005, "takes as long."),
        (
            1.0002,
            "takes 200 us (0.02%) longer: 200 us more for computation.",
        ),
    ],
)
def test_what_the_runner_up_loses(seconds: float, told: str) -> None:
    one = planner()
    assert (
        one.why([candidate(1.0), candidate(seconds, tp=2)])[1]
        == f"The runner-up, strategy 2, has tp 2 (not 1), sequence parallel no, tp overlap domino. Its step {told}"
    )
    assert one.why([candidate(1.0)]) == ["A step is 100% computation."]


@pytest.mark.parametrize(("slower", "told"), [
    (1.25, "1.25 s, 25.0% longer."), (0.9, "900 ms, 10.0% less."), (1.0, "1.00 s, 0.0% longer."), (None, ""),
])  # fmt: skip
def test_what_an_overlap_gains_or_costs(monkeypatch: pytest.MonkeyPatch, slower: float | None, told: str) -> None:
    asked = list[int]()

    def without(_self: Planner, best: Candidate, off: dict[str, int]) -> float | None:
        asked.append(off["overlap"])
        return slower

    monkeypatch.setattr(Planner, "_without", without)
    lines = planner().why([candidate(1.0, tp=2)])[1:]
    assert lines == ([f"Without overlap of tensor-parallel communication, a step takes {told}"] if told else [])
    assert asked == [OVERLAPS.index("sync")]


def test_of_changes_that_fit_in_closed_form_some_are_walked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first that fits as it would be run is told."""
    huge, walked = replace(one_candidate(), memory=replace(one_candidate().memory, usable=1)), list[Job]()
    asked = job(train={"global_batch_size": 2}, strategy={"tp": 1}, cluster={"preset": "a100-80", "ranks": 1})

    def memory(_self: Planner, one: Job, _plan: object) -> Any:
        walked.append(one)
        return replace(huge.memory, usable=1 << 40 if len(walked) == 3 else 1)

    monkeypatch.setattr(Planner, "predict", lambda *_: replace(huge, job=asked))
    monkeypatch.setattr(Planner, "memory", memory)
    monkeypatch.setattr(Planner, "memory_savings", lambda *_: [])
    with pytest.raises(InfeasiblePlan, match=r"It would fit with ") as caught:
        Planner(asked, A100, 256).evaluate()
    assert len(walked) == 3
    said = dict(pair.split("=") for pair in str(caught.value).partition("fit with ")[2].rstrip(".").split())
    assert asked.changed([f"{key}={value}" for key, value in said.items()]).strategy == walked[-1].strategy
    walked.extend([asked] * 3)  # none fits
    with pytest.raises(InfeasiblePlan, match="None of the usual changes is enough"):
        Planner(asked, A100, 256).evaluate()


def test_shares_of_a_peak_are_of_all_ranks() -> None:
    small = job(train={"global_batch_size": 2, "precision": "bf16-mixed"}, strategy={"tp": 2},
                cluster={"preset": "a100-80", "ranks": 2})  # fmt: skip
    one = Planner(small, A100, 256)
    found = one.predict(small)
    peak = 2 * 312e12 * found.seconds
    assert found.mfu == pytest.approx(one.model.causal_step_flops(64, 2) / peak)
    assert found.mfu_full == pytest.approx(one.model.step_flops(64, 2) / peak)
    plan = one.draft(small)
    again = one.predict(small, replace(plan, strategy=replace(plan.strategy, overlap="sync", p1=2)))
    assert (again.point["overlap"], again.point["p1"]) == (OVERLAPS.index("sync"), 2)
    assert again.seconds != found.seconds
    assert one.simulated(small, plan).seconds == found.seconds
    assert found.to_dict()["micro_batch_size"] == small.train.micro_batch_size
    assert found.to_dict()["memory"][0]["total"] == found.memory.pp_ranks[0].total


def test_where_running_side_by_side_costs_more_than_it_hides_sharding_hides_less() -> None:
    asked = Job.from_dict({
        "model": {"preset": "gpt3-1.3b"}, "data": {"sequence_length": 1024},
        "train": {"global_batch_size": 64, "precision": "bf16-mixed"}, "cluster": {"preset": "h100", "ranks": 16},
        "plan": {"constraints": ["tp = 1", "cp = 1", "pp = 1"]},
    })  # fmt: skip
    h100 = Cluster.preset("h100")
    slow = h100.efficiency.slow_computation.model_copy(update={"value": 6.0})
    contended = h100.model_copy(
        update={"efficiency": h100.efficiency.model_copy(update={"slow_computation": slow, "slow_communication": slow})}
    )
    planner = Planner(asked, contended, vocab=50257)
    best = planner.answer().best
    every = [
        planner.predict(job_at(asked, dict(best.point) | {"shard_overlap": kind})).seconds
        for kind in range(len(SHARD_OVERLAPS))
    ]
    assert best.point["shard_overlap"] != SHARD_OVERLAPS.index("both")
    assert best.seconds == pytest.approx(min(every))
