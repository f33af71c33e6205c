"""Runs as they were trained and published: each fits into its device, and its step is within 12
%."""

from __future__ import annotations

import as_trained
import pytest

from plait.core.job.spec import Job
from plait.plan.answer import Planner
from tests.formats.megatron.test_read import NEMOTRON, read

WITHIN = 0.12
RUNS = list(as_trained.runs())


@pytest.mark.parametrize("run", RUNS, ids=[f"{run.name}-{at}" for at, run in enumerate(RUNS)])
def test_a_run_fits_and_its_step_is_near(run: as_trained.Run) -> None:
    low, high = run.published
    assert run.predicted.memory.fits
    assert (1 - WITHIN) * low < run.predicted.seconds < (1 + WITHIN) * high
    assert run.planner.evaluate().best.seconds == run.predicted.seconds


def test_what_meta_s_runtime_does_otherwise_is_what_lets_it_fit() -> None:
    """Inputs of stages that are let go of, and gradients of one stage at a time: 14 GiB of 94."""
    planner, theirs = RUNS[0].planner, RUNS[0].predicted.most_memory
    one = Job.from_dict(planner.job.to_dict() | {"plan": {"framework": "megatron"}})
    others = Planner(one, planner.cluster, planner.vocab).predict(one)
    assert not others.memory.fits and others.most_memory - theirs > 14 << 30


def test_a_command_line_is_predicted_as_the_run_that_it_started() -> None:
    told, run = read(NEMOTRON), next(one for one in RUNS if one.name == "Nemotron-4 340B")
    one = told.job(["cluster.ranks=1536"])
    found = Planner(one, run.planner.cluster, one.model_spec(1).vocab, configured_framework=told.runs).predict(one)
    assert found.seconds == pytest.approx(run.predicted.seconds, rel=1e-3)
    assert found.most_memory == pytest.approx(run.predicted.most_memory, rel=1e-2)
