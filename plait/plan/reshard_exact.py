"""The optimum of an ordering problem, or a proven bound of it, by OR-Tools' CP-SAT.

For tests, for `--order exact`, and to know how far a fast order is from the best. Optional intervals, one for
each choice of a job; no two on one NIC at a time; the last end is least. The lower bound is given as a cut:
without it CP-SAT finds the optimum of sixty tasks and cannot prove it in ten seconds, with it the proof takes
a fraction of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from plait.core.base.errors import InfeasiblePlan
from plait.plan.reshard_order import SEED, Job, Slot, bound, ends, list_order

WORK = 20.0  # CP-SAT's own count of effort, the same on every machine; about seconds


class Exact(NamedTuple):
    """slots: the best order found, by start. lower: nanoseconds proven to be needed; the order is optimal if
    it takes no longer."""

    slots: tuple[Slot, ...]
    lower: int
    optimal: bool


def exact(jobs: Sequence[Job], work: float = WORK) -> Exact:
    """The best order. Deterministic: one worker, a fixed seed, a limit on work instead of time."""
    from ortools.sat.python import cp_model

    start, least = list_order(jobs), bound(jobs)
    horizon = ends(jobs, start)
    if horizon <= least:
        return Exact(start, least, True)
    model: Any = cp_model.CpModel()
    end = model.new_int_var(least, horizon, "end")
    begins: list[Any] = []
    taken: list[list[Any]] = []
    on_nic: dict[int, list[Any]] = {}
    hints = {slot.job: slot for slot in start}
    for number, job in enumerate(jobs):
        begin = model.new_int_var(0, horizon, f"begin{number}")
        present = [model.new_bool_var(f"job{number}by{at}") for at in range(len(job))]
        model.add_exactly_one(present)
        for at, choice in enumerate(job):
            interval = model.new_optional_fixed_size_interval_var(
                begin, choice.duration, present[at], f"run{number}by{at}"
            )
            model.add(begin + choice.duration <= end).only_enforce_if(present[at])
            model.add_hint(present[at], hints[number].choice == at)
            for bit in range(choice.uses.bit_length()):
                if choice.uses >> bit & 1:
                    on_nic.setdefault(bit, []).append(interval)
        model.add_hint(begin, hints[number].start)
        begins.append(begin)
        taken.append(present)
    for intervals in on_nic.values():
        model.add_no_overlap(intervals)
    last: dict[Job, int] = {}
    for number, job in enumerate(jobs):  # equal jobs are interchangeable: in their own order
        if job in last and len(job) == 1:
            model.add(begins[last[job]] <= begins[number])
        last[job] = number
    model.minimize(end)
    solver: Any = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = SEED % 2**31
    solver.parameters.max_deterministic_time = work
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):  # it has an order to start from
        raise InfeasiblePlan(
            f"CP-SAT found no order in its limit of work ({work}): {solver.status_name(status)}. Raise the limit."
        )
    slots = [
        Slot(
            number,
            next(at for at, present in enumerate(taken[number]) if solver.boolean_value(present)),
            solver.value(begin),
        )
        for number, begin in enumerate(begins)
    ]
    return Exact(
        tuple(sorted(slots, key=lambda slot: (slot.start, slot.job))),
        int(solver.best_objective_bound),
        status == cp_model.OPTIMAL,
    )
