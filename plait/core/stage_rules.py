"""What a job's pipeline and its layers forbid each other."""

from __future__ import annotations

from collections.abc import Collection

from plait.core.errors import JobError
from plait.core.schedules import GENERATORS, chunks_problem, own_chunks
from plait.core.settings import RecomputeLayers, StrategySection

MOST_STAGES = 1_000


def check_stages(section: StrategySection, layers: int, left_open: Collection[str]) -> None:
    """Raise JobError before anything is written out for every stage. layers: of the model. left_open: keys
    that the planner chooses."""
    stages = section.pp * section.virtual_stages
    if stages > min(layers, MOST_STAGES):
        problem = f"{layers} layers leave one of {stages} stages without a layer"
        if stages <= layers:
            problem = f"{stages} stages are more than {MOST_STAGES}"
        raise JobError(problem, key="strategy.pp", fix="Use fewer stages")
    again = section.recompute
    if isinstance(again, RecomputeLayers) and again.layers > layers:
        problem = f"{again.layers} are more than the model's {layers} layers"
        raise JobError(problem, key="strategy.recompute.layers", fix=f"Use at most {layers}")
    if section.schedule in GENERATORS and "strategy.schedule" not in left_open:
        _check_chunks(section.schedule, section.virtual_stages)


def _check_chunks(schedule: str, given: int) -> None:
    """How many stages a rank a schedule has; 1, the default, stands for what it has of itself."""
    if given > 1 and (problem := chunks_problem(schedule, given)):
        fix = f'Use {own_chunks(schedule)}, or schedule = "interleaved"'
        raise JobError(problem, key="strategy.virtual_stages", fix=fix)
