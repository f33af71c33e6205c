"""What a job's pipeline and its layers forbid each other."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from plait.core.errors import JobError
from plait.core.schedules import GENERATORS, chunks_problem, own_chunks
from plait.core.settings import RecomputeLayers, StrategySection

MOST_STAGES = 1_000


def check_stages(section: StrategySection, layers: int, left_open: Collection[str]) -> None:
    """Raise JobError before anything is written out for every stage. layers: of the model. left_open: keys
    that the planner chooses."""
    stages, most = section.pp * section.virtual_stages, min(layers, MOST_STAGES)
    if stages > most:
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


def _check_chunks(schedule: str, given: int) -> None:
    """How many stages a rank a schedule has; 1, the default, stands for what it has of itself."""
    if given > 1 and (problem := chunks_problem(schedule, given)):
        changes = [{"strategy.virtual_stages": own_chunks(schedule)}, {"strategy.schedule": "interleaved"}]
        raise JobError(problem, key="strategy.virtual_stages", changes=changes)
