"""A run's timeline beside what a plan predicts, or beside another run's."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait.core.base.passed_over import PassedOver

if TYPE_CHECKING:
    from plait.diagnose.compare import Comparison
    from plait.diagnose.reading import Tables

COMPARED = 50
"""Steps that are compared, the last ones."""


@dataclass(frozen=True)
class TimelineComparison:
    """Two timelines joined. predicted: whether the other one is a plan's. notes: sentences on files and on
    the plan. over: what readers passed over."""

    result: Comparison
    predicted: bool
    notes: Sequence[str]
    over: PassedOver


def compare_run(run: Path, measured: Tables, against: Path) -> TimelineComparison:
    """Compare a run that was read with a plan (``plan.json``), as predicted, or with another run's folder.
    Raises JobError for a plan that the run has not obeyed, DataError for files that cannot be read."""
    from plait.diagnose.compare import UNMEASURED, compare
    from plait.diagnose.reading import last_steps, planned_kinds, read_timeline

    recent, notes, over = last_steps(measured.spans, COMPARED), [*measured.notes], PassedOver()
    over.add(measured.passed_over)
    if against.is_dir():
        there = read_timeline(against)
        notes += [f"{against}: {note}" for note in there.notes]
        over.add(there.passed_over, str(against))
        return TimelineComparison(compare(there.spans, recent, timed=None), False, notes, over)
    steps = recent["step"].unique().sort().to_list()
    other, timed = _predicted(run, measured.plan_hash, against, steps)
    notes += [] if timed else [UNMEASURED]
    return TimelineComparison(compare(other, planned_kinds(recent), timed=timed), True, notes, over)


def _predicted(run: Path, obeyed: str, file: Path, steps: Sequence[int]) -> tuple[Any, Collection[str]]:
    """What a plan predicts for ``steps``, in columns, and the kinds whose times are made of measured costs.
    Raises JobError for a plan that the run has not obeyed."""
    from plait.core.base.errors import JobError
    from plait.core.job.plan import Plan
    from plait.diagnose.compare import kinds_of_measured_costs, table_of
    from plait.plan.simulate import simulate_plan

    plan = Plan.read(file)
    if plan.key != obeyed:
        problem = f"is plan {plan.key[:12]}, and the last steps in {run} were of plan {obeyed[:12]}"
        raise JobError(problem, file=str(file), fix=f"The plan that it obeyed is {run / 'plan.json'}")
    table = table_of(simulate_plan(plan).timeline(steps))
    return table, kinds_of_measured_costs(table) if plan.costs else ()
