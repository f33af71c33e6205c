"""Hints that come from divisors: a batch, or a number of ranks, nearby that can be shared out better.

Replicas share a batch evenly: 64 ranks make one replica for 1,023 sequences, and up to 64 for 1,024. Nearby
are batches and whole nodes with more divisors in common. Each is searched as the job is, in closed form over
fewer points; what comes first is predicted as an answer's candidates are. Only what was found so is told, and
only if it is clearly better per token. A job whose ranks can all share its batch costs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import Any

from plait.core.base.errors import PlaitError
from plait.core.base.text import in_seconds
from plait.plan.answer import Planner
from plait.plan.asking import job_at
from plait.plan.candidate import Candidate
from plait.plan.search import search

NEAR_BATCH, NEAR_RANKS = 0.05, 0.15
"""How far off a batch and a number of ranks may be, as a share of it."""
TRIES = 2
"""Of each that are searched, at most: the first that is worth it is told."""
POINTS = 20_000
"""Of each search: a tenth of a second to a third."""
FIRST = 3
"""Strategies of each search, of which the first that fits is told."""
WORTH = 0.05
"""Tokens more per second of a rank, as a share: less is not told."""


@dataclass(frozen=True)
class Hint:
    """What is ``given`` of ``key`` (a setting of the job), another number near it, seconds of a step of both,
    and how many tokens more a second of a rank gives with the other, as a share."""

    key: str
    given: int | str
    nearby: int
    seconds: float
    seconds_nearby: float
    more: float

    @property
    def told(self) -> str:
        """In a sentence."""
        what = "sequences" if self.key == BATCH else "ranks"
        bad = "have few divisors in common with the ranks" if self.key == BATCH else "cannot all share the batch"
        unit = "tokens a second" if self.key == BATCH else "tokens a second of a rank"
        more = f"{self.more:.0%} more" if self.more < 1 else f"{1 + self.more:.3g} times as many"
        return (
            f"{self.given:,} {what} {bad}: with {self.nearby:,} a step takes {in_seconds(self.seconds_nearby)} in "
            f"place of {in_seconds(self.seconds)}, {more} {unit} ({self.key}={self.nearby})."
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


BATCH, RANKS = "train.global_batch_size", "cluster.ranks"


def divisor_hints(planner: Planner, best: Candidate) -> list[Hint]:
    """Of a job that was searched. best: the fastest strategy that was found."""
    batch, ranks = best.job.train.global_batch_size, best.job.world_size
    asked = [(BATCH, batch, near_batches(batch, ranks))]
    section, cluster = planner.job.cluster, planner.cluster
    if section.ranks and section.preset != "here" and planner.job.leaves_ranks_open:
        most = cluster.nodes * cluster.ranks_per_node or math.inf
        near = [one for one in near_ranks(ranks, batch, cluster.ranks_per_node) if one <= most]
        asked.append((RANKS, ranks, near))
    found = list[Hint]()
    for key, given, near in asked:
        tried = (_tried(planner, best, key, given, one) for one in near)
        found += islice((hint for hint in tried if hint and hint.more > WORTH), 1)
    return found


def near_batches(batch: int, ranks: int) -> list[int]:
    """Batches near one of which ranks can share more: multiples of more of their divisors.

    >>> near_batches(1023, 64), near_batches(1000, 64), near_batches(1024, 64), near_batches(1536, 1024)
    ([1024], [1024, 992], [], [])
    """
    shared = math.gcd(batch, 2 * ranks)  # twice, for micro-batches of two
    better = [each for each in range(2 * ranks, shared, -1) if 2 * ranks % each == 0] if ranks > 1 else []
    near = (max(1, round(batch / each)) * each for each in better)
    return _first(one for one in near if abs(one - batch) <= NEAR_BATCH * batch)


def near_ranks(ranks: int, batch: int, node: int) -> list[int]:
    """Numbers of ranks near one, whole nodes if it has some, of which twice the share and more can share a
    batch.

    >>> near_ranks(60, 1024, 8), near_ranks(7, 1024, 8), near_ranks(64, 1024, 8), near_ranks(96, 1024, 8)
    ([64, 56], [8, 6], [], [])
    """
    unit, room = max(1, node) if ranks >= node else 1, int(NEAR_RANKS * ranks)
    share = {one: math.gcd(batch, one) / one for one in range(ranks - room, ranks + room + 1) if one % unit == 0}
    least = math.gcd(batch, ranks) / ranks
    better = [one for one, each in share.items() if each >= 2 * least]
    return _first(sorted(better, key=lambda one: (-share[one], abs(one - ranks))))


def _first(numbers: Iterator[int] | Sequence[int]) -> list[int]:
    return list(dict.fromkeys(numbers))[:TRIES]


def _tried(planner: Planner, best: Candidate, key: str, given: int, nearby: int) -> Hint | None:
    """What the job is predicted to take with another number; None where nothing is found that fits."""
    try:
        other = replace(planner, job=planner.job.changed([f"{key}={nearby}"]))
        ranked = search(other.asked, other.cluster, other.job.train.precision, keep=FIRST, most=POINTS)
    except PlaitError:
        return None
    rate = other.job.train.global_batch_size / (ranked.seconds[0] * other.asked.ranks)
    if rate < (1 + WORTH) * best.job.train.global_batch_size / (
        (best.closed_form or best.seconds) * best.job.world_size
    ):
        return None  # not even in closed form
    for at in range(len(ranked.points)):
        try:
            one = other.predict(job_at(other.job, ranked.points.row(at)))
        except PlaitError:
            continue
        if one.memory.safe:
            rates = [each.tokens_per_second / each.job.world_size for each in (one, best)]
            return Hint(key, given, nearby, best.seconds, one.seconds, rates[0] / rates[1] - 1)
    return None
