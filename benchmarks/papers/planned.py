"""Predictions of a paper's jobs, each by the command that a page shows."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from functools import cache
from statistics import median

from benchmarks.papers.found import ROOT, job_file
from plait.api.planning import Planning, plan_job
from plait.core.base.errors import PlaitError
from plait.core.step.clock.pipeline_clock import PipelineCosts
from plait.core.step.schedule import Schedule
from plait.plan.search.candidate import Candidate

Settings = tuple[str, ...]


def settings(**values: object) -> Settings:
    """Settings of a command: ``__`` stands for the dot.

    >>> settings(strategy__tp=8, model__preset="gpt3-13b")
    ('strategy.tp=8', 'model.preset=gpt3-13b')
    """
    return tuple(f"{key.replace('__', '.')}={value}" for key, value in values.items())


def command(paper: str, asked: Sequence[str], *flags: str, verb: str = "plan") -> str:
    """What prints the prediction, or trains the job."""
    words = ["plait", verb, str(job_file(paper).relative_to(ROOT)), *flags, *asked]
    return " ".join(f'"{word}"' if "'" in word else shlex.quote(word) for word in words)


@cache
def planning(paper: str, asked: Settings, changes: Settings = (), *, evaluate: bool = False) -> Planning:
    """The paper's job with settings, and with the cluster changed. evaluate: for the strategy that they
    give."""
    return plan_job(job_file(paper), asked, changes=changes, evaluate=evaluate)


@cache
def predict(paper: str, asked: Settings, changes: Settings = ()) -> Candidate | None:
    """The strategy that the settings give (``--evaluate``), as predicted; None where it does not fit."""
    planner = planning(paper, asked, changes, evaluate=True).planner
    found = planner.predict(planner.job)
    return found if found.memory.fits else None


@cache
def best(paper: str, asked: Settings) -> Candidate | None:
    """The planner's answer; None where nothing fits, or no strategy is left."""
    try:
        return planning(paper, asked).planner.answer().best
    except PlaitError:
        return None


def stage_costs(found: Planning) -> tuple[Schedule, PipelineCosts]:
    """The schedule of a job's own strategy, and seconds of its stages and edges as they are simulated:
    medians of a step's micro-batches; a whole backward counts as the input's gradient."""
    planner = found.planner
    simulation = planner.simulated(planner.job).simulation
    schedule = simulation.step.schedule
    taken: dict[tuple[int, bool], list[float]] = {}
    for course in simulation.run().courses:
        for turn in course.turns:
            if turn.op is not None:
                key = turn.op.stage, turn.op.work.forward
                taken.setdefault(key, []).append(turn.outcome.seconds)
    each = {key: median(values) for key, values in taken.items()}
    stages = range(schedule.num_stages)
    edges = {
        (min(way.transfer[:2]), max(way.transfer[:2])): simulation.travel(way)[0] for way in simulation.script.ways
    }
    forward, backward = (tuple(each[stage, which] for stage in stages) for which in (True, False))
    return schedule, PipelineCosts(forward, backward, (0.0,) * schedule.num_stages, edges)


def full_mfu(one: Candidate) -> float:
    """Utilisation with all of attention's scores, as papers count it, on devices whose peak is known."""
    assert one.mfu_full is not None
    return one.mfu_full
