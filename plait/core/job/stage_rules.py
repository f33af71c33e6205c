"""What a job's pipeline and its layers forbid each other."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from plait.core.base.errors import JobError, nearest
from plait.core.job.settings import RecomputeLayers, StrategySection
from plait.core.parallel.strategy import slice_sizes
from plait.core.step.schedules import GENERATORS, chunks_problem, own_chunks

MOST_STAGES = 1_000


def check_stages(section: StrategySection, layers: int, left_open: Collection[str]) -> None:
    """Raise JobError before anything is written out for every stage. layers: of the model. left_open: keys
    that the planner chooses."""
    stages, most = section.pp * section.virtual_stages, min(layers, MOST_STAGES)
    if stages > most:
        _check_name(section.schedule)  # no change of numbers helps a schedule that nobody knows
        problem = f"{layers} layers leave one of {stages} stages without a layer"
        if stages <= layers:
            problem = f"{stages} stages are more than {MOST_STAGES}"
        fewer = [one for one in (most // section.virtual_stages, 1) if one and one < section.pp]
        changes: list[dict[str, Any]] = [{"strategy.pp": one} for one in dict.fromkeys(fewer)]
        if section.virtual_stages > 1:
            changes += [{"strategy.virtual_stages": 1}, {"strategy.pp": 1, "strategy.virtual_stages": 1}]
        raise JobError(problem, key="strategy.pp", changes=changes)
    again = section.recompute
    if isinstance(again, RecomputeLayers) and again.layers > layers:
        problem = f"{again.layers} are more than the model's {layers} layers"
        raise JobError(problem, key="strategy.recompute.layers",
                       changes=[{"strategy.recompute.layers": layers}])  # fmt: skip
    if section.schedule in GENERATORS and "strategy.schedule" not in left_open:
        _check_chunks(section.schedule, section.virtual_stages)
        if section.slack:
            _check_slack(section, left_open)
    _check_layers(section, layers, left_open)


def _check_name(schedule: str) -> None:
    """Raise JobError for what neither names a schedule nor may be a file with one."""
    if schedule not in GENERATORS and not Path(schedule).exists():
        problem = f"no schedule is called '{schedule}'{nearest(schedule, GENERATORS)}"
        raise JobError(problem, key="strategy.schedule", fix=f"There are {', '.join(GENERATORS)}, and files with one")


def _check_layers(section: StrategySection, layers: int, left_open: Collection[str]) -> None:
    """Layers of every stage, where the job says both and how many stages there are."""
    given, known = section.stage_layers, section.schedule in GENERATORS
    if (
        not given
        or not known
        or {"strategy.pp", "strategy.virtual_stages", "strategy.schedule"}.intersection(left_open)
    ):
        return
    stages = section.pp * max(section.virtual_stages, own_chunks(section.schedule))
    if len(given) != stages or sum(given) != layers:
        changes: list[dict[str, Any]] = [{"strategy.stage_layers": None}]
        if stages <= layers:
            changes.insert(0, {"strategy.stage_layers": list(slice_sizes(layers, stages))})
        problem = f"{list(given)} does not divide {layers} layers over {stages} stage{'s' * (stages > 1)}"
        raise JobError(problem, key="strategy.stage_layers", changes=changes)


def _check_slack(section: StrategySection, left_open: Collection[str]) -> None:
    """The slack of slack-1f1b, one for every boundary between stages."""
    changes: list[dict[str, Any]] = [{"strategy.slack": None}]
    if section.schedule != "slack-1f1b":
        problem = f"{list(section.slack)} is for slack-1f1b, and the schedule is {section.schedule}"
        changes.append({"strategy.schedule": "slack-1f1b"})
        raise JobError(problem, key="strategy.slack", changes=changes)
    if "strategy.pp" not in left_open and len(section.slack) != section.pp - 1:
        problem = f"{list(section.slack)} has {len(section.slack)} numbers for {section.pp - 1} boundaries of stages"
        raise JobError(problem, key="strategy.slack", changes=changes)


def _check_chunks(schedule: str, given: int) -> None:
    """How many stages a rank a schedule has; 1, the default, stands for what it has of itself."""
    if given > 1 and (problem := chunks_problem(schedule, given)):
        changes = [{"strategy.virtual_stages": own_chunks(schedule)}, {"strategy.schedule": "interleaved"}]
        raise JobError(problem, key="strategy.virtual_stages", changes=changes)
