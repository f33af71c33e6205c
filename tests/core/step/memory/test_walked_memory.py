"""Memory of a utransformer's points: short walks say what whole ones do."""

from __future__ import annotations

import time

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from plait.core.base.errors import JobError, ScheduleError
from plait.core.model.spec import ModelSpec
from plait.core.step.columns.points import OVERLAPS, RECOMPUTES, SCHEDULES, StrategyTable
from plait.core.step.memory.closed_memory import step_memory
from plait.core.step.memory.estimate import estimate, step_of
from plait.core.step.memory.memory_options import MemoryOptions

MODEL = ModelSpec(
    family="utransformer", levels=2, num_layers=15, hidden=64, num_heads=4, vocab=100, max_sequence=256
)  # fmt: skip
OVERLAP = {"overlap": OVERLAPS.index("async")}


@st.composite
def rows(draw: st.DrawFn) -> dict[str, int]:
    """A point; rules may still forbid it."""
    dp, schedule = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from(SCHEDULES))
    params, optim = draw(st.sampled_from([(1, 1), (1, 2), (2, 2), (1, 4), (2, 4)]))
    pp = draw(st.integers(2, 5))
    return {
        "pp": pp, "dp": dp, "tp": draw(st.sampled_from([1, 2])), "micro": draw(st.integers(1, 3)),
        "num_micro": draw(st.one_of(st.integers(1, 60), st.integers(3, 12).map(lambda turns: turns * pp))),
        "schedule": SCHEDULES.index(schedule), "virtual": draw(st.integers(1, 2)) if schedule == "interleaved" else 1,
        "recompute": draw(st.integers(0, len(RECOMPUTES) - 1)), "params": params, "grads": params, "optim": optim,
    } | OVERLAP  # fmt: skip


@given(rows(), st.booleans())
@settings(max_examples=30)
def test_short_walks_are_exact(row: dict[str, int], gpu: bool) -> None:
    points = StrategyTable.of([row])
    try:
        walked = estimate(step_of(MODEL, points.row(0), sequence=256, precision="bf16-mixed"), gpu=gpu).most
    except (JobError, ScheduleError):
        assume(False)
        return
    found = step_memory(MODEL, points, sequence=256, options=MemoryOptions(gpu=gpu))
    for kind in ("parameters", "gradients", "optimizer", "buffers", "activations"):
        assert getattr(found, kind)[0] == getattr(walked.memory, kind), kind
    assert found.pp_rank[0] == walked.index


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-v"])
def test_micro_batches_cost_nothing(schedule: str) -> None:
    row = OVERLAP | {"pp": 4, "schedule": SCHEDULES.index(schedule), "virtual": 2 if schedule == "interleaved" else 1}
    rows = [row | {"dp": dp, "optim": dp, "num_micro": (1 << 40) // dp} for dp in (1, 2, 4, 8)]
    start = time.process_time()
    found = step_memory(MODEL, StrategyTable.of(rows), sequence=256)
    assert time.process_time() - start < 5
    few = step_memory(MODEL, StrategyTable.of([row | {"num_micro": 32}]), sequence=256)
    assert found.activations.tolist() == [few.activations[0]] * 4
    assert found.optimizer[0] > 7 * found.optimizer[3]
