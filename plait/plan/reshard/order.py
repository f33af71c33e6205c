"""Chooses each unit task's sender and the tasks' order: list scheduling.

Every task occupies its NICs for its whole duration; two tasks that share a NIC cannot overlap
(arXiv
2211.05322, section 3.2: an open shop with tasks on several machines and alternatives, NP-hard). The
largest remaining load comes first, tried with noise, with single tasks and with merged ones; the
search ends at the lower bound. Other searches, for comparison, are in
``benchmarks/baselines/reshard_searches.py``.

Results depend on the arguments alone: seeds are fixed, budgets count rounds instead of seconds, and
compared numbers are integers. So every rank finds the same plan by itself.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from plait.plan.reshard.cost import densest

SEED = 2211_05322
RESTARTS, NOISE = 30, 0.3


class Choice(NamedTuple):
    """One way to do a job. sends: NICs of its senders. uses: every NIC side that it occupies. Both
    are bit sets. duration: nanoseconds."""

    sends: int
    uses: int
    duration: int


Job = tuple[Choice, ...]


class Slot(NamedTuple):
    """A scheduled job: its number, the index of its chosen option, and its start in nanoseconds."""

    job: int
    choice: int
    start: int


def ends(jobs: Sequence[Job], slots: Iterable[Slot]) -> int:
    """Return the end of the last job in a schedule, in nanoseconds from the start; 0 without
    jobs."""
    return max((slot.start + jobs[slot.job][slot.choice].duration for slot in slots), default=0)


def in_order(jobs: Sequence[Job], picks: Iterable[tuple[int, int]]) -> tuple[Slot, ...]:
    """Return the schedule that starts jobs in this order, each as soon as all its NICs are free.
    picks: (job, index of its choice)."""
    free: dict[int, int] = {}
    slots: list[Slot] = []
    for job, choice in picks:
        _, uses, duration = jobs[job][choice]
        start = max((free.get(bit, 0) for bit in bits_of(uses)), default=0)
        for bit in bits_of(uses):
            free[bit] = start + duration
        slots.append(Slot(job, choice, start))
    return tuple(slots)


def bound(jobs: Sequence[Job]) -> int:
    """Return a lower bound, in nanoseconds, on the end of the last job in any order of ``jobs``.

    Jobs that must use the same NIC run one after another. Jobs that only a set of NICs can send
    take at least their sum divided by the number of NICs."""
    forced: dict[int, int] = {}
    sent: dict[frozenset[int], int] = {}
    for job in jobs:
        shortest = min(choice.duration for choice in job)
        for bit in bits_of(used_by_all(job)):
            forced[bit] = forced.get(bit, 0) + shortest
        senders = frozenset(bit for choice in job for bit in bits_of(choice.sends))
        if all(choice.sends for choice in job):
            work = min(choice.duration * choice.sends.bit_count() for choice in job)
            sent[senders] = sent.get(senders, 0) + work
    load, size = densest(sent)
    longest = max((min(choice.duration for choice in job) for job in jobs), default=0)
    return max(longest, -(-load // size), *forced.values(), 0)


def lightest(jobs: Sequence[Job], order: Iterable[int]) -> list[int]:
    """Return, for every job, the index of the choice whose senders have the least load so far.
    order: the jobs in the order in which they choose."""
    load: dict[int, int] = {}
    chosen = [0] * len(jobs)
    for job in order:
        chosen[job] = min(range(len(jobs[job])), key=lambda c: (load_of(load, jobs[job][c]), jobs[job][c].duration, c))
        taken = jobs[job][chosen[job]]
        for bit in bits_of(taken.sends):
            load[bit] = load.get(bit, 0) + taken.duration
    return chosen


def load_of(load: dict[int, int], choice: Choice) -> int:
    """Return the load of the most loaded of a choice's senders, in nanoseconds. load: by NIC."""
    return max((load.get(bit, 0) for bit in bits_of(choice.sends)), default=0)


def list_order(jobs: Sequence[Job], restarts: int = RESTARTS, noise: float = NOISE) -> tuple[Slot, ...]:
    """Return the best list schedule of several: without noise first, then ``restarts`` times with
    noise; with single jobs, and with jobs of equal choices merged.

    Merging keeps jobs together that can follow each other without a gap, while single jobs can fill
    gaps: either can be better. The search ends as soon as the lower bound is reached.
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
        best = min([best, *found] if best else found, key=lambda slots: ends(jobs, slots))
        if ends(jobs, best) <= target:
            break
    return best


def _bundles(jobs: Sequence[Job]) -> list[list[int]]:
    """Return the indices of ``jobs`` in groups; jobs of a group differ in duration only."""
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
    """Return one list schedule: fix senders, jobs with the fewest choices first; then, whenever
    NICs are free, start the job whose NICs have the most work left.

    Jobs with the same NICs and duration are interchangeable and wait in one queue, so the effort
    grows with the number of different jobs.
    """
    order = sorted(
        range(len(jobs)), key=lambda job: (len(jobs[job]), -int(jobs[job][0].duration * _luck(chance, noise)), job)
    )
    chosen = lightest(jobs, order)
    queues: dict[tuple[int, int], list[int]] = {}
    left: dict[int, int] = {}
    for job, number in enumerate(chosen):
        _, uses, duration = jobs[job][number]
        queues.setdefault((uses, duration), []).append(job)
        for bit in bits_of(uses):
            left[bit] = left.get(bit, 0) + duration
    known = {kind: (bits_of(kind[0]), number, _luck(chance, noise)) for number, kind in enumerate(queues)}

    def turn(kind: tuple[int, int]) -> tuple[int, int, int]:
        """Return the sort key of a kind: lowest if its most loaded NIC has the most work left."""
        bits, number, luck = known[kind]
        return -int(max((left[bit] for bit in bits), default=0) * luck), -kind[1], number

    running: list[tuple[int, int]] = []  # (end, uses)
    busy = now = 0
    slots: list[Slot] = []
    while queues:
        ready = [(turn(kind), kind) for kind in queues if not kind[0] & busy]
        heapify(ready)
        while ready:
            priority, kind = heappop(ready)
            uses, duration = kind
            if uses & busy:
                continue
            if (moved := turn(kind)) != priority:  # its NICs have less work left by now
                heappush(ready, (moved, kind))
                continue
            job = queues[kind].pop(0)
            if not queues[kind]:
                del queues[kind]
            elif not uses:
                heappush(ready, (priority, kind))
            slots.append(Slot(job, chosen[job], now))
            running.append((now + duration, uses))
            busy |= uses
            for bit in known[kind][0]:
                left[bit] -= duration
        now = min(running)[0]
        for end, uses in running:
            busy &= ~uses if end <= now else ~0
        running = [(end, uses) for end, uses in running if end > now]
    return tuple(slots)


def _luck(chance: random.Random, noise: float) -> float:
    return 1 + noise * (2 * chance.random() - 1) if noise else 1


def used_by_all(job: Job) -> int:
    """Return the NIC sides, as bits, that every choice of the job uses."""
    common = ~0
    for choice in job:
        common &= choice.uses
    return common


def bits_of(mask: int) -> tuple[int, ...]:
    """Return the indices of the bits that are set."""
    found: list[int] = []
    while mask:
        low = mask & -mask
        found.append(low.bit_length() - 1)
        mask ^= low
    return tuple(found)
