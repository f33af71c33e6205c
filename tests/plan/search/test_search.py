"""The search finds what brute force finds, and says what is missing where nothing fits."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.core.base.errors import InfeasiblePlan
from plait.core.cluster.hardware import Cluster
from plait.core.job.constraint import Constraint
from plait.core.job.spec import Job
from plait.core.model.spec import ModelSpec
from plait.core.step.columns.points import RECOMPUTES, StrategyTable
from plait.core.step.memory.closed_memory import step_memory, usable
from plait.core.step.seconds.closed_form import step_seconds, total_seconds
from plait.plan.answer import Planner
from plait.plan.search import search as forked
from plait.plan.search.candidate import Answer, Candidate
from plait.plan.search.request import job_at
from plait.plan.search.search import FAMILY, search
from plait.plan.search.space import SearchRequest, enumerate_space

SHAPES = {"family": "gpt", "num_layers": 8, "hidden": 1024, "num_heads": 8, "vocab": 32000, "max_sequence": 1024}
MODEL = ModelSpec.from_dict(SHAPES)
A100 = Cluster.preset("a100-80")


def cluster(gib: float) -> Cluster:
    """With devices so small."""
    memory = A100.device.memory.model_copy(update={"value": gib * 2**30})
    return A100.model_copy(update={"device": A100.device.model_copy(update={"memory": memory})})


def asked(ranks: int, batch: int, *constraints: str, **fixed: list[int]) -> SearchRequest:
    return SearchRequest(
        model=MODEL, ranks=ranks, domain=min(8, ranks), global_batch=batch, sequence=1024, fixed=fixed,
        constraints=tuple(map(Constraint.parse, constraints)),
    )  # fmt: skip


SMALL = {"cp": [1], "recompute": [0, 2], "recompute_layers": [-1], "p2": [1]}
"""What makes a space small enough to have the memory of every point computed."""


def brute_force(one: SearchRequest, on: Cluster) -> tuple[Any, np.ndarray, np.ndarray]:
    """Seconds of every point of the whole space, and which fit."""
    points = enumerate_space(one, most=10**9)
    load: dict[str, Any] = {"sequence": one.sequence, "precision": "bf16-mixed"}
    seconds = step_seconds(one.model, points, on, **load).total
    memory = step_memory(one.model, points, overhead=on.overhead, **load).total
    fits = memory <= usable(on.device, on.overhead)
    for limit in one.constraints:
        if limit.quantity == "memory":
            fits &= limit.holds(memory)
    return points, seconds, fits


@settings(max_examples=8)
@given(
    ranks=st.sampled_from([1, 2, 4]),
    batch=st.sampled_from([2, 4]),
    gib=st.sampled_from([3.0, 5.0, 6.0, 80.0]),
    chosen=st.lists(st.sampled_from(["tp <= 2", "pp in 1, 2", "memory <= 5 GiB", "micro_batch_size <= 2"]), max_size=2),
)
def test_the_best_in_closed_form_is_brute_forces(ranks: int, batch: int, gib: float, chosen: Sequence[str]) -> None:
    one, on = asked(ranks, batch, *chosen, **SMALL), cluster(gib)
    points, seconds, fits = brute_force(one, on)
    if not fits.any():
        with pytest.raises(InfeasiblePlan, match="No strategy fits"):
            search(one, on, "bf16-mixed")
        return
    found = search(one, on, "bf16-mixed", keep=5, most=max(64, len(points) // 2))
    assert found.seconds[0] <= seconds[fits].min() * 1.02  # coarser, then in full around its best
    assert np.all(np.diff(found.seconds) >= 0)
    families = np.stack([getattr(found.points, name) for name in FAMILY])
    assert np.unique(families, axis=1).shape[1] == len(found.points)
    whole = search(one, on, "bf16-mixed", keep=5, most=10**9)
    family = np.stack([getattr(points, name) for name in FAMILY])[:, fits]
    best = [seconds[fits][(family == family[:, [at]]).all(axis=0)].min() for at in _firsts(family)]
    assert whole.seconds.tolist() == sorted(best)[:5]


def _firsts(family: np.ndarray) -> list[int]:
    return np.unique(family, axis=1, return_index=True)[1].tolist()


def test_the_answer_is_the_best_of_all_simulated_points() -> None:
    """By level 2, on a space that is small enough to simulate whole."""
    job = Job.from_dict(
        {
            "model": SHAPES,
            "data": {"sequence_length": 1024},
            "train": {"global_batch_size": 4, "precision": "bf16-mixed"},
            "cluster": {"preset": "a100-80", "ranks": 2},
            "plan": {
                "constraints": [
                    "cp = 1",
                    "recompute = none",
                    "batch_slices = 1",
                    "column_slices = 1",
                    "schedule in 1f1b, zb-h1",
                ]
            },
        }
    )
    planner = Planner(job, A100, 32000)
    points = enumerate_space(planner.request)
    assert 20 <= len(points) < 100
    simulated = [planner.simulated(job_at(job, points.row(at))).seconds for at in range(len(points))]
    found = planner.answer()
    assert found.best.seconds <= min(simulated) * 1.01
    assert planner.chosen().seconds <= min(simulated) * 1.02
    assert [one.seconds for one in found.candidates] == sorted(one.seconds for one in found.candidates)
    assert all(one.memory.fits for one in found.candidates)


@pytest.mark.system
def test_two_processes_answer_as_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job.from_dict(
        {
            "model": SHAPES,
            "data": {"sequence_length": 1024},
            "train": {"global_batch_size": 8, "precision": "bf16-mixed"},
            "cluster": {"preset": "a100-80", "ranks": 4},
            "plan": {"constraints": ["cp = 1", "column_slices = 1"], "points": 2000, "top": 4},
        }
    )
    done = list[int]()
    predict = Planner._predicted  # pyright: ignore[reportPrivateUsage]

    def counted(self: Planner, one: Job, *known: Any) -> Candidate:
        done.append(os.getpid())
        return predict(self, one, *known)

    monkeypatch.setattr(Planner, "_predicted", counted)
    found, here = list[Answer](), list[int]()
    for shares in (False, True):
        monkeypatch.setattr(forked, "can_fork", lambda shares=shares: shares)
        done.clear()
        found.append(Planner(job, A100, 32000).answer())
        here.append(len(done))
    assert here[1] < here[0]  # the other process did some, and could say what it found
    assert found[0] == found[1]
    assert [one.to_dict() for one in found[0].candidates] == [one.to_dict() for one in found[1].candidates]


@pytest.mark.parametrize("size", [1, 7, 1000, 1 << 20])
def test_many_points_are_timed_in_pieces(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Of no more than so many points each; what is said of every point is the same."""
    one, pieces = asked(4, 8, **SMALL, micro=[1, 2]), list[int]()
    whole, total = search(one, A100, "bf16-mixed", keep=5), total_seconds

    def counted(model: ModelSpec, points: StrategyTable, *rest: Any, **more: Any) -> Any:
        pieces.append(len(points))
        return total(model, points, *rest, **more)

    monkeypatch.setattr(forked, "can_fork", lambda: False)
    monkeypatch.setattr("plait.plan.search.search.SHARED", size)
    monkeypatch.setattr("plait.plan.search.search.total_seconds", counted)
    found = search(one, A100, "bf16-mixed", keep=5)
    np.testing.assert_array_equal(found.closed_form_seconds, whole.closed_form_seconds)
    assert found.points.row(0) == whole.points.row(0) and len(whole.closed_form_seconds) > 20
    assert max(pieces) <= size and sum(pieces) == len(whole.closed_form_seconds)


def test_one_stream_a_layer_is_the_last_resort() -> None:
    """Where full recomputation does not fit and no job says which there is; it is found where it is
    named."""
    one = asked(1, 8, micro=[8])
    kinds = [RECOMPUTES[search(one, cluster(gib), "bf16-mixed").points.row(0)["recompute"]] for gib in (6, 5)]
    assert kinds == ["full", "layer"]
    with pytest.raises(InfeasiblePlan):
        search(asked(1, 8, micro=[8], recompute=[RECOMPUTES.index("full")]), cluster(5), "bf16-mixed")
    named = search(asked(1, 8, "recompute = layer", micro=[8]), cluster(6), "bf16-mixed")
    assert {RECOMPUTES[kind] for kind in named.points.recompute.tolist()} == {"layer"}


@pytest.mark.parametrize(
    ("memory", "constraints"),
    [(4.5, ("recompute = none", "tp <= 8", "micro_batch_size >= 4")), (80, ("memory <= 1 GiB",))],
)
def test_nothing_fits_names_what_would_do_in_place_of_a_condition(memory: float, constraints: Sequence[str]) -> None:
    one = asked(2, 8, *constraints, params=[1], grads=[1], optim=[1], pp=[1], tp=[1])
    with pytest.raises(InfeasiblePlan, match=r"'[^']*' in place of '[^']*' would do") as caught:
        search(one, cluster(memory), "bf16-mixed")
    for new, old in re.findall(r"'([^']*)' in place of '([^']*)'", str(caught.value)):
        others = tuple(each for each in one.constraints if each.text != old)
        assert len(others) == len(constraints) - 1
        search(replace(one, constraints=(*others, Constraint.parse(new))), cluster(memory), "bf16-mixed")
