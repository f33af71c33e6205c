"""The search's rounds, on seconds and bytes that are drawn: some points at a time find what all
would."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from plait.core.base.errors import InfeasiblePlan
from plait.core.job.constraint import Constraint
from plait.core.model.spec import ModelSpec
from plait.core.step.columns.points import StrategyTable
from plait.core.step.memory.closed_memory import device_overhead, usable
from plait.plan.search import search as module
from plait.plan.search.search import FAMILY, search
from plait.plan.search.space import SearchRequest, enumerate_space
from tests.plan.search.test_search import A100

GPT = ModelSpec(family="gpt", num_layers=4, hidden=64, num_heads=4, vocab=96, max_sequence=1024)
U = ModelSpec(family="utransformer", levels=1, num_layers=3, hidden=64, num_heads=4, vocab=96, max_sequence=1024)
LIMIT = usable(A100.device, A100.overhead)


def drawn(points: StrategyTable, seed: int) -> np.ndarray:
    """A number from 0 to 1 for each point, the same wherever it stands."""
    code = np.full(len(points), float(seed))
    for at, column in enumerate(points.columns().values(), 1):
        code = np.modf(np.abs(code + column * at) * 1.6180339887)[0] * 97
    return code / 97


def request(model: ModelSpec, *constraints: str) -> SearchRequest:
    fixed = {"cp": [1], "p1": [1], "p2": [1], "recompute_layers": [-1]}
    return SearchRequest(model=model, ranks=4, domain=4, global_batch=4, sequence=1024, fixed=fixed,
                         constraints=tuple(map(Constraint.parse, constraints)))  # fmt: skip


class Found:
    """Seconds, bytes of all that a point needs, and of what it needs at least; which points were
    asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, share: float) -> None:
        self.exact = self.rough = 0

        def memory(_model: ModelSpec, points: StrategyTable, *, among: Any = None, **_: Any) -> Any:
            at_least = among is not None
            self.rough += at_least * len(points)
            self.exact += (not at_least) * len(points)
            total = self.total(points)
            held = device_overhead(A100.overhead, points, np.zeros(len(points)))
            allocated = total * (0.9 if at_least and not _model.levels else 1.0) - held
            kinds = dict.fromkeys(("parameters", "gradients", "optimizer", "buffers"), 0 * total)
            return SimpleNamespace(allocated=allocated, overhead=held, activations=allocated, **kinds)

        self.share = share
        monkeypatch.setattr(module, "step_memory", memory)
        monkeypatch.setattr(module, "total_seconds", lambda _, points, *__, **___: drawn(points, 1))
        for name, value in {"FIRST": 3, "BLOCK": 20, "SURE": 2, "FIRST_TRACED": 2}.items():
            monkeypatch.setattr(module, name, value)

    def total(self, points: StrategyTable) -> np.ndarray:
        """Of which a share fits."""
        return LIMIT * (drawn(points, 2) + 1 - self.share)

    def best(self, points: StrategyTable, keep: int, *constraints: Constraint) -> list[tuple[int, ...]]:
        """The first of each family that fits, of all points."""
        memory, seconds = self.total(points), drawn(points, 1)
        fits = memory <= LIMIT
        for one in constraints:
            fits &= one.holds(memory)
        families, found = set[tuple[int, ...]](), list[tuple[int, ...]]()
        for at in np.argsort(seconds, kind="stable").tolist():
            row = points.row(at)
            family = tuple(row[name] for name in FAMILY)
            if fits[at] and family not in families:
                families.add(family)
                found.append(tuple(row.values()))
        return found[:keep]


@pytest.mark.parametrize("model", [GPT, U], ids=["gpt", "u"])
@pytest.mark.parametrize("share", [1.0, 0.5, 0.1, 0.02])
@pytest.mark.parametrize("keep", [1, 4, 10_000])
def test_rounds_find_the_first_that_fit_of_every_family(
    monkeypatch: pytest.MonkeyPatch, model: ModelSpec, share: float, keep: int
) -> None:
    asked = request(model)
    points, found = enumerate_space(asked, most=10**9), Found(monkeypatch, share)
    ranked = search(asked, A100, "bf16-mixed", keep=keep, most=10**9)
    rows = [tuple(ranked.points.row(at).values()) for at in range(len(ranked.points))]
    assert rows == found.best(points, keep)
    assert ranked.seconds == pytest.approx(drawn(ranked.points, 1))
    assert ranked.memory == pytest.approx(found.total(ranked.points))
    assert len(ranked.space) == len(ranked.closed_form_seconds) > len(points), (
        "the best arrangements are looked at again"
    )
    searched = ranked.space.take(slice(len(points)))
    assert all((column == points.columns()[name]).all() for name, column in searched.columns().items())
    assert np.array_equal(ranked.closed_form_seconds, drawn(ranked.space, 1))
    if keep == 1 and share == 1.0:
        assert found.rough < len(points) and found.exact <= 3 * 2 * (model is GPT), "three spaces"


@pytest.mark.parametrize("model", [GPT, U], ids=["gpt", "u"])
def test_the_smallest_of_all_is_told_where_nothing_fits(monkeypatch: pytest.MonkeyPatch, model: ModelSpec) -> None:
    asked = request(model)
    points, found = enumerate_space(asked, most=10**9), Found(monkeypatch, -0.001)
    least = int(np.argmin(found.total(points)))
    row = points.row(least)
    shape = " ".join(f"{key}={row[key]}" for key in ("pp", "dp", "cp", "tp"))
    with pytest.raises(
        InfeasiblePlan, match=rf"the smallest of {len(points):,} needs .* on a rank \({shape}, .* of it activations "
    ):
        search(asked, A100, "bf16-mixed", keep=4, most=10**9)
