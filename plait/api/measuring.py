"""``plait plan --measure``: the best strategies, each run for a few steps, as ``plait train`` runs them."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plait.api.places.base import LaunchTarget
    from plait.api.plan_answer import PlanAnswer
    from plait.api.planning import Planning
    from plait.core.job.plan import Plan

STEPS, SKIPPED = 10, 4
"""Steps of a run, and of these the first, which do not count."""


def measure_plans(plans: Sequence[Plan], place: LaunchTarget) -> Iterator[float]:
    """Seconds of a median step of each plan. Raises JobError where its ranks do not exist here, and what a
    run raises."""
    for plan in plans:
        _check_ranks(plan, place)
    with TemporaryDirectory(prefix="plait-measure-") as folder:
        for number, plan in enumerate(plans):
            yield _seconds(_short(plan, Path(folder), f"{number + 1}"), place)


def measure_best(
    asked: Planning, found: PlanAnswer, place: LaunchTarget, count: int, told: Callable[[str], None] | None = None
) -> PlanAnswer:
    """The same answer with measured seconds of its first ``count`` candidates. told: takes a line for each.
    Raises as ``measure_plans`` does."""
    from plait.core.base.text import in_seconds

    plans, measured = [asked.plan(one) for one in found.candidates[:count]], dict[int, float]()
    for at, seconds in enumerate(measure_plans(plans, place)):
        measured[at] = seconds
        if told:
            told(f"measured {at + 1} of {len(plans)}: {in_seconds(seconds)} a step")
    return replace(found, measured=measured)


def _check_ranks(plan: Plan, place: LaunchTarget) -> None:
    """Raise JobError for a plan whose ranks do not exist here."""
    from plait.core.base.errors import JobError
    from plait.plan.this_machine import ranks_here

    assert plan.job
    world, lab = plan.layout.world_size, place.lab
    there = lab.world_size if lab else ranks_here(plan.job.run.device)
    enough = world == there if lab else world <= there
    if not enough:
        where = "the lab" if lab else "this machine"
        fix = "Change --on" if lab else "Plan for fewer with cluster.ranks, or emulate them: --on lab:HOSTSxRANKS@RATE"
        raise JobError(f"the plans have {world:,} ranks, and {where} has {there}", key="--measure", fix=fix)


def _short(plan: Plan, folder: Path, name: str) -> Plan:
    """The same plan for a few steps without evaluations or checkpoints on the way."""
    assert plan.job
    changes = {
        "train.tokens": 0, "train.steps": STEPS, "train.warmup_steps": 0, "train.lr_decay_steps": 0,
        "train.lr_wsd_decay_steps": 0, "train.eval_every": 0, "train.checkpoint_every": 0, "train.log_every": STEPS,
        "run.timeline_steps": 0,
        "run.restarts": 0,
    }  # fmt: skip
    names = [f"run.folder={json.dumps(str(folder))}", f"run.name={json.dumps(name)}"]
    job = plan.job.changed([*(f"{key}={value}" for key, value in changes.items()), *names])
    return of_whole_batches(replace(plan, job=job))


def of_whole_batches(plan: Plan) -> Plan:
    """The same plan without a ramp: every step has the whole batch, as is predicted."""
    assert plan.job
    train = plan.job.train.model_copy(update={"rampup_batch_size": None})
    return replace(plan, job=plan.job.model_copy(update={"train": train}))


def _seconds(plan: Plan, place: LaunchTarget) -> float:
    from plait.api.training import run_plan
    from plait.core.base.errors import LaunchError
    from plait.plan.recorded import read_seconds

    assert plan.job
    folder = plan.job.run.path
    if run_plan(plan, folder, place, silent=True):
        raise LaunchError("a measured run was stopped; nothing is chosen")
    return statistics.median(read_seconds(folder)[SKIPPED:])
