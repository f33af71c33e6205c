"""Which sender each unit task takes, and in which order tasks start: six searches over one small problem.

Every task occupies its NICs for its whole duration; two tasks that share one cannot overlap (arXiv
2211.05322, section 3.2: an open shop with tasks on several machines and alternatives, NP-hard). The searches:

    naive         the first holder sends, tasks in the order of the destination's tiles
    load_balance  the least loaded holder sends, same order
    greedy        the paper's randomised sets of tasks that do not touch each other, one set after the other
    dfs           depth first over orders and senders, with an admissible bound: optimal if it ends
    list          largest remaining load first, tried with noise, tasks one by one and merged; ends at the
                  lower bound
    exact         CP-SAT (see reshard_exact.py)

All are functions of their arguments alone: fixed seeds, budgets counted in nodes and rounds instead of
seconds, integers where numbers are compared. So every rank finds the same plan by itself.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from statistics import pstdev
from typing import NamedTuple

from plait.plan.reshard_cost import densest

SEED = 2211_05322
DFS_NODES, DFS_JOBS = 40_000, 128  # a few seconds; more jobs than that are hopeless
GREEDY_ROUNDS = 100, 20  # for up to 64 jobs, for more
RESTARTS, NOISE = 30, 0.3


class Choice(NamedTuple):
    """One way to do a job. sends: the NICs of its senders. uses: every NIC side it occupies. Both are bit
    sets. duration: ns."""

    sends: int
    uses: int
    duration: int


Job = tuple[Choice, ...]


class Slot(NamedTuple):
    """A job, the number of the choice taken, and its start in nanoseconds."""

    job: int
    choice: int
    start: int


def ends(jobs: Sequence[Job], slots: Iterable[Slot]) -> int:
    """When the last job ends."""
    return max((slot.start + jobs[slot.job][slot.choice].duration for slot in slots), default=0)


def in_order(jobs: Sequence[Job], picks: Iterable[tuple[int, int]]) -> tuple[Slot, ...]:
    """Start (job, choice) after (job, choice), each as soon as all that it uses is free."""
    free: dict[int, int] = {}
    slots: list[Slot] = []
    for job, choice in picks:
        _, uses, duration = jobs[job][choice]
        start = max((free.get(bit, 0) for bit in _bits(uses)), default=0)
        for bit in _bits(uses):
            free[bit] = start + duration
        slots.append(Slot(job, choice, start))
    return tuple(slots)


def bound(jobs: Sequence[Job]) -> int:
    """Nanoseconds that no order of ``jobs`` can beat.

    What must pass through one NIC passes in sequence; what only the NICs of a set can send takes its sum over
    their number.
    """
    forced: dict[int, int] = {}
    sent: dict[frozenset[int], int] = {}
    for job in jobs:
        shortest = min(choice.duration for choice in job)
        for bit in _bits(_all_use(job)):
            forced[bit] = forced.get(bit, 0) + shortest
        senders = frozenset(bit for choice in job for bit in _bits(choice.sends))
        if all(choice.sends for choice in job):
            work = min(choice.duration * choice.sends.bit_count() for choice in job)
            sent[senders] = sent.get(senders, 0) + work
    load, size = densest(sent)
    longest = max((min(choice.duration for choice in job) for job in jobs), default=0)
    return max(longest, -(-load // size), *forced.values(), 0)


def naive(jobs: Sequence[Job]) -> tuple[Slot, ...]:
    """The first holder always sends."""
    return in_order(jobs, ((job, 0) for job in range(len(jobs))))


def load_balance(jobs: Sequence[Job]) -> tuple[Slot, ...]:
    """The holder that has been given least sends."""
    return in_order(jobs, enumerate(_lightest(jobs, range(len(jobs)))))


def _lightest(jobs: Sequence[Job], order: Iterable[int]) -> list[int]:
    """For every job the choice whose senders have least to do, decided in ``order``."""
    load: dict[int, int] = {}
    chosen = [0] * len(jobs)
    for job in order:
        chosen[job] = min(range(len(jobs[job])), key=lambda c: (_load(load, jobs[job][c]), jobs[job][c].duration, c))
        taken = jobs[job][chosen[job]]
        for bit in _bits(taken.sends):
            load[bit] = load.get(bit, 0) + taken.duration
    return chosen


def _load(load: dict[int, int], choice: Choice) -> int:
    return max((load.get(bit, 0) for bit in _bits(choice.sends)), default=0)


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
                for bit in _bits(jobs[job][choice].sends):
                    total[bit] = total.get(bit, 0) + jobs[job][choice].duration
            found = (-len(tried), round(pstdev(total.values()), 3) if total else 0.0)
            if rank is None or found < rank:
                best, rank = tried, found
        for job, choice in best:
            left.remove(job)
            for bit in _bits(jobs[job][choice].sends):
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
            weights = [most - _load(load, jobs[job][c]) + 1 for c in open_]
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
    search = _Search(jobs, best, nodes if len(jobs) <= DFS_JOBS else 0)
    search.visit(frozenset(range(len(jobs))), {}, [])
    return search.best, search.left > 0 or search.least <= search.target


class _Search:
    def __init__(self, jobs: Sequence[Job], best: tuple[Slot, ...], nodes: int) -> None:
        self.jobs, self.best, self.left = jobs, best, nodes
        self.least, self.target = ends(jobs, best), bound(jobs)
        self.common = [_bits(_all_use(job)) for job in jobs]
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
            after = free | dict.fromkeys(_bits(uses), start + duration)
            rest = open_ - {job}
            state = (rest, tuple(sorted(after.items())))
            if state not in self.seen and self._bound(rest, after) < self.least:
                self.seen.add(state)
                self.visit(rest, after, [*slots, Slot(job, choice, start)])

    def _branches(self, open_: frozenset[int], free: dict[int, int]) -> list[tuple[int, int, int]]:
        found: list[tuple[int, int, int]] = []
        for job in {self.jobs[job]: job for job in sorted(open_, reverse=True)}.values():  # of equal jobs the first
            for number, choice in enumerate(self.jobs[job]):
                found.append((job, number, max((free.get(bit, 0) for bit in _bits(choice.uses)), default=0)))
        return sorted(found, key=lambda branch: (branch[2], -self.jobs[branch[0]][branch[1]].duration, branch))

    def _bound(self, rest: Iterable[int], free: dict[int, int]) -> int:
        """What is done ends; what is left and can go nowhere else is added to it."""
        end = dict(free)
        for job in rest:
            for bit in self.common[job]:
                end[bit] = end.get(bit, 0) + self.short[job]
        return max(end.values(), default=0)


def list_order(jobs: Sequence[Job], restarts: int = RESTARTS, noise: float = NOISE) -> tuple[Slot, ...]:
    """List scheduling, without noise first, then ``restarts`` times with; jobs one by one, and those with
    equal choices merged.

    Merging keeps together what can follow each other without a gap; single jobs can fill gaps: sometimes one
    is better, sometimes the other. Ends as soon as the lower bound is reached.
    """
    target, chance = bound(jobs), random.Random(SEED)
    bundles = _bundles(jobs)
    merged = [
        tuple(
            Choice(c.sends, c.uses, sum(jobs[job][number].duration for job in bundle))
            for number, c in enumerate(jobs[bundle[0]])
        )
        for bundle in bundles
    ]
    best: tuple[Slot, ...] = ()
    for attempt in range(restarts + 1):
        amount = noise if attempt else 0.0
        found = [_listed(jobs, chance, amount)]
        if len(bundles) < len(jobs):
            found.append(_unbundled(jobs, bundles, _listed(merged, chance, amount)))
        best = min((*([best] if best else []), *found), key=lambda slots: ends(jobs, slots))
        if ends(jobs, best) <= target:
            break
    return best


def _bundles(jobs: Sequence[Job]) -> list[list[int]]:
    """Jobs that differ in duration only, together."""
    found: dict[tuple[tuple[int, int], ...], list[int]] = {}
    for number, job in enumerate(jobs):
        found.setdefault(tuple((choice.sends, choice.uses) for choice in job), []).append(number)
    return list(found.values())


def _unbundled(jobs: Sequence[Job], bundles: list[list[int]], slots: Iterable[Slot]) -> tuple[Slot, ...]:
    single: list[Slot] = []
    for bundle, choice, start in slots:
        for job in bundles[bundle]:
            single.append(Slot(job, choice, start))
            start += jobs[job][choice].duration
    return tuple(sorted(single, key=lambda slot: (slot.start, slot.job)))


def _listed(jobs: Sequence[Job], chance: random.Random, noise: float) -> tuple[Slot, ...]:
    """Fix senders, fewest choices first; then, whenever something is free, start the job whose NICs have most
    left to do.

    Jobs with the same NICs and duration are interchangeable and wait in one queue, so that the effort grows
    with what differs.
    """
    order = sorted(
        range(len(jobs)), key=lambda job: (len(jobs[job]), -_noisy(jobs[job][0].duration, chance, noise), job)
    )
    chosen = _lightest(jobs, order)
    queues: dict[tuple[int, int], list[int]] = {}
    left: dict[int, int] = {}
    for job, number in enumerate(chosen):
        _, uses, duration = jobs[job][number]
        queues.setdefault((uses, duration), []).append(job)
        for bit in _bits(uses):
            left[bit] = left.get(bit, 0) + duration
    names = {kind: (_bits(kind[0]), number) for number, kind in enumerate(queues)}
    running: list[tuple[int, int]] = []  # (end, uses)
    busy = now = 0
    slots: list[Slot] = []
    while queues:
        ready = [kind for kind in queues if not kind[0] & busy]
        if not ready:
            now = min(running)[0]
            for end, uses in running:
                busy &= ~uses if end <= now else ~0
            running = [(end, uses) for end, uses in running if end > now]
            continue
        kind = max(
            ready,
            key=lambda kind: (
                _noisy(max((left[b] for b in names[kind][0]), default=0), chance, noise),
                kind[1],
                -names[kind][1],
            ),
        )
        uses, duration = kind
        job = queues[kind].pop(0)
        if not queues[kind]:
            del queues[kind]
        slots.append(Slot(job, chosen[job], now))
        running.append((now + duration, uses))
        busy |= uses
        for bit in names[kind][0]:
            left[bit] -= duration
    return tuple(slots)


def _noisy(value: int, chance: random.Random, noise: float) -> int:
    return int(value * (1 + noise * (2 * chance.random() - 1))) if noise else value


def _all_use(job: Job) -> int:
    """What every choice of the job uses."""
    common = ~0
    for choice in job:
        common &= choice.uses
    return common


def _bits(mask: int) -> tuple[int, ...]:
    """The numbers of the bits that are set."""
    found: list[int] = []
    while mask:
        low = mask & -mask
        found.append(low.bit_length() - 1)
        mask ^= low
    return tuple(found)
