"""Other searches for senders and order than the one that plans take, to compare with:

    naive         the first holder sends, tasks in the order of the destination's tiles
    load_balance  the least loaded holder sends, same order
    greedy        the paper's randomised sets of tasks that do not touch each other, one set after the other
    dfs           depth first over orders and senders, with an admissible bound: optimal if it ends
    exact         OR-Tools' CP-SAT: the optimum, or a proven bound of it

``exact`` has optional intervals, one for each choice of a job; no two on one NIC at a time; the last end is
least. The lower bound is given as a cut: without it CP-SAT finds the optimum of sixty tasks and cannot prove
it in ten seconds, with it the proof takes a fraction of one.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from statistics import pstdev
from typing import Any, NamedTuple

from plait.core.base.errors import InfeasiblePlan
from plait.plan.reshard.boundary import Search
from plait.plan.reshard.order import (
    SEED,
    Job,
    Slot,
    bits_of,
    bound,
    ends,
    in_order,
    lightest,
    list_order,
    load_of,
    used_by_all,
)

DFS_NODES, DFS_JOBS = 40_000, 128  # a few seconds; more jobs than that are hopeless
GREEDY_ROUNDS = 100, 20  # for up to 64 jobs, for more
WORK = 20.0  # CP-SAT's own count of effort, the same on every machine; about seconds


def naive(jobs: Sequence[Job]) -> tuple[Slot, ...]:
    """The first holder always sends."""
    return in_order(jobs, ((job, 0) for job in range(len(jobs))))


def load_balance(jobs: Sequence[Job]) -> tuple[Slot, ...]:
    """The holder that has been given least sends."""
    return in_order(jobs, enumerate(lightest(jobs, range(len(jobs)))))


def greedy(jobs: Sequence[Job]) -> tuple[Slot, ...]:
    """Sets of jobs that use nothing twice, as many jobs in each as some random tries find (Alpa's
    default)."""
    rounds = GREEDY_ROUNDS[len(jobs) > 64]
    chance = random.Random(SEED)
    left, load, picks = list(range(len(jobs))), dict[int, int](), list[tuple[int, int]]()
    while left:
        best: list[tuple[int, int]] = []
        rank: tuple[int, float] | None = None
        for _ in range(rounds):
            tried = _random_set(jobs, left, load, chance)
            total = dict(load)
            for job, choice in tried:
                for bit in bits_of(jobs[job][choice].sends):
                    total[bit] = total.get(bit, 0) + jobs[job][choice].duration
            found = (-len(tried), round(pstdev(total.values()), 3) if total else 0.0)
            if rank is None or found < rank:
                best, rank = tried, found
        for job, choice in best:
            left.remove(job)
            for bit in bits_of(jobs[job][choice].sends):
                load[bit] = load.get(bit, 0) + jobs[job][choice].duration
        picks += best
    return in_order(jobs, picks)


def _random_set(
    jobs: Sequence[Job], left: list[int], load: dict[int, int], chance: random.Random
) -> list[tuple[int, int]]:
    busy, found = 0, list[tuple[int, int]]()
    most = max(load.values(), default=0)
    for job in chance.sample(left, len(left)):
        open_ = [c for c, choice in enumerate(jobs[job]) if not choice.uses & busy]
        if open_:
            weights = [most - load_of(load, jobs[job][c]) + 1 for c in open_]
            choice = chance.choices(open_, weights)[0]
            busy |= jobs[job][choice].uses
            found.append((job, choice))
    return found


def dfs(jobs: Sequence[Job], nodes: int = DFS_NODES) -> tuple[tuple[Slot, ...], bool]:
    """The best order that ``nodes`` steps of a depth-first search find, and whether it is proven optimal.

    A branch is cut when what is left could not end before the best so far even if nothing ever waited: an
    admissible bound. Equal jobs are tried once, and so are equal states.
    """
    best = min((load_balance(jobs), naive(jobs)), key=lambda slots: ends(jobs, slots))
    search = _OrderSearch(jobs, best, nodes if len(jobs) <= DFS_JOBS else 0)
    search.visit(frozenset(range(len(jobs))), {}, [])
    return search.best, search.left > 0 or search.least <= search.target


class _OrderSearch:
    def __init__(self, jobs: Sequence[Job], best: tuple[Slot, ...], nodes: int) -> None:
        self.jobs, self.best, self.left = jobs, best, nodes
        self.least, self.target = ends(jobs, best), bound(jobs)
        self.common = [bits_of(used_by_all(job)) for job in jobs]
        self.short = [min(choice.duration for choice in job) for job in jobs]
        self.seen: set[tuple[frozenset[int], tuple[tuple[int, int], ...]]] = set()

    def visit(self, open_: frozenset[int], free: dict[int, int], slots: list[Slot]) -> None:
        """Try every next job by every choice, those that can start first first."""
        if not open_:
            end = ends(self.jobs, slots)
            if end < self.least:
                self.best, self.least = tuple(slots), end
            return
        for job, choice, start in self._branches(open_, free):
            if self.left <= 0 or self.least <= self.target:
                return
            self.left -= 1
            _, uses, duration = self.jobs[job][choice]
            after = free | dict.fromkeys(bits_of(uses), start + duration)
            rest = open_ - {job}
            state = (rest, tuple(sorted(after.items())))
            if state not in self.seen and self._bound(rest, after) < self.least:
                self.seen.add(state)
                self.visit(rest, after, [*slots, Slot(job, choice, start)])

    def _branches(self, open_: frozenset[int], free: dict[int, int]) -> list[tuple[int, int, int]]:
        found: list[tuple[int, int, int]] = []
        for job in {self.jobs[job]: job for job in sorted(open_, reverse=True)}.values():  # of equal jobs the first
            for number, choice in enumerate(self.jobs[job]):
                found.append((job, number, max((free.get(bit, 0) for bit in bits_of(choice.uses)), default=0)))
        return sorted(found, key=lambda branch: (branch[2], -self.jobs[branch[0]][branch[1]].duration, branch))

    def _bound(self, rest: Iterable[int], free: dict[int, int]) -> int:
        """What is done ends; what is left and can go nowhere else is added to it."""
        end = dict(free)
        for job in rest:
            for bit in self.common[job]:
                end[bit] = end.get(bit, 0) + self.short[job]
        return max(end.values(), default=0)


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


ORDERS: Mapping[str, Search] = {
    "list": list_order, "naive": naive, "load_balance": load_balance, "greedy": greedy,
    "dfs": lambda jobs: dfs(jobs)[0], "exact": lambda jobs: exact(jobs).slots,
}  # fmt: skip
