"""The benchmark of memory as a risk: planted errors are found again, and sweeps are judged by
hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import planner_memory as memory
import planner_risk
import pytest
from planner_risk import RISKS, Sizes, coverage, fit_doubt, kept_free, risk
from planner_rows import DATA, read_rows

TABLE = DATA / "measurements" / "measurements.csv"
GB = 1e9
PLANTED = np.array([0.03, 0.1, 0.8])


def drawn(count: int, seed: int = 7) -> Sizes:
    """Rows of ten sources whose memory errs as planted; a third measured devices, a third
    tensors."""
    random = np.random.default_rng(seed)
    kinds = random.uniform([[5], [5], [1]], [[60], [60], [4]], (3, count)) * GB
    parts = random.normal(size=(3, count)) * PLANTED[:, None] * kinds
    which = np.arange(count) % 3
    limit, needed = np.full(count, 80 * GB), (kinds + parts).sum(axis=0)
    error = np.where(which == 0, parts.sum(axis=0), np.where(which == 1, parts[:2].sum(axis=0), np.nan))
    source = np.array([f"source {at % 10}" for at in range(count)])
    return Sizes(kinds, limit, error, (which == 0).astype(float), needed > limit, source)


def test_planted_errors_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing is known before, and all rows count."""
    monkeypatch.setattr(planner_risk, "MOST", 10**9)
    monkeypatch.setattr(planner_risk, "LOOSE", 10.0)
    sizes = drawn(6000)
    assert fit_doubt(sizes) == pytest.approx(PLANTED, rel=0.15)
    inside = coverage(sizes, dict.fromkeys(np.unique(sizes.source), PLANTED))
    assert sum(rows for rows, _ in inside.values()) == 4000
    assert np.mean([share for _, share in inside.values()]) == pytest.approx(0.8, abs=0.03)


def row(job: str, seconds: float | None, *, source: str = "a") -> Any:
    """One that ran, or, without seconds, ran out of memory."""
    return SimpleNamespace(source=source, job=(job,), seconds=seconds, oom=seconds is None)


def test_sweeps_by_hand() -> None:
    """Of three sweeps with rows that ran out, the first's best ran and loses a tenth, the second's
    did not, and of the third nothing is said to fit; the last job has no row that ran out."""
    rows = [
        row("one", 10.0), row("one", 11.0), row("one", None),
        row("two", 5.0), row("two", None),
        row("three", 5.0), row("three", None),
        row("four", 4.0), row("four", 3.0),
    ]  # fmt: skip
    seconds = np.array([12.0, 9, 8, 6, 5, 5, 5, 1, 2])
    fits = np.array([True, True, False, True, True, False, False, True, True])
    found = risk(rows, seconds, fits)
    assert found == dict(zip(RISKS, (9, 5 / 6, 2 / 3, 5 / 6, 2, 1, pytest.approx(0.1), pytest.approx(0.1)),
                             strict=True))  # fmt: skip
    none = risk(rows[:2], seconds[:2], fits[:2])
    assert (none["out_does_not"], none["sweeps"], none["mean_loss"]) == (None, 0, None)


TITAN = {"framework": "torchtitan", "notes": "torch.compile"}


@pytest.mark.parametrize(
    ("date", "notes", "compiled"),
    [
        ("2024-10", "torch.compile", True), ("2024-10-21", "torch.compile", False), ("2024-11-02", "compile", True),
        ("2024-12", "torch.compile", False), ("2025-01-30", "torch.compile", False), ("2025-06", "compile", True),
        ("2025-06", "eager", False),
    ],
)  # fmt: skip
def test_when_torchtitan_compiled_its_loss(date: str, notes: str, compiled: bool) -> None:
    assert memory.compiled_loss({"date": date, "notes": notes}) == compiled


@pytest.mark.skipif(not TABLE.is_file(), reason="no measurements beside the project")
def test_published_memory_as_a_risk() -> None:
    """Of what is said to fit more ran with the margin that plans keep than without."""
    rows = [one for one in read_rows([TABLE]).rows if one.told.get("outcome")]
    sizes = Sizes.of(rows)
    needed = sizes.kinds.sum(axis=0)
    assert needed == pytest.approx([one.needed for one in memory.judge(rows)])
    for kept, said in ((0.0, 0.975), (kept_free(sizes), 0.985)):
        fits = needed + kept <= sizes.limit
        assert (~sizes.oom)[fits].mean() > said
