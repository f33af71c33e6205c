"""Hints on faster steps: a nearby batch size or number of ranks with more common divisors, and CUDA
graphs.

Replicas share a batch evenly: 64 ranks make one replica for 1,023 sequences, and up to 64 for
1,024. Nearby batch sizes and whole nodes with more common divisors are searched like the job, in
closed form with fewer strategies. The best one is predicted like the answer's candidates. A hint
needs a clear gain in tokens per second of a rank. If all ranks can share the job's batch, nothing
is searched.

CUDA graphs need static shapes and extra memory, so a search tries them only if the job sets them.
If small steps wait for the host, graphs make a plan several times as fast. So the best strategy is
predicted once more with graphs, and the hint reports that prediction.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import Any

from plait.core.base.errors import PlaitError
from plait.core.base.text import in_seconds
from plait.core.step.columns.points import StrategyTable
from plait.plan.answer import Planner
from plait.plan.search.candidate import Candidate
from plait.plan.search.request import job_at
from plait.plan.search.search import search

NEAR_BATCH, NEAR_RANKS = 0.05, 0.15
"""Maximum distance of a nearby batch size and of a nearby number of ranks, as a fraction of the
job's value."""
TRIES = 2
"""Maximum number of nearby values searched for each setting; the first with enough gain becomes the
hint."""
POINTS = 20_000
"""Maximum number of strategies in each search, which then takes a tenth to a third of a second."""
FIRST = 3
"""Number of strategies kept from each search; the first one that fits is used for the hint."""
WORTH = 0.05
"""Minimum gain in tokens per second of a rank, as a fraction: smaller gains give no hint."""


@dataclass(frozen=True)
class Hint:
    """A nearby value of a job setting with which training is faster.

    key: the setting, as in the job file. given: the job's value. nearby: the better value. seconds,
    seconds_nearby: predicted seconds per step with each value. more: gain in tokens per second of a
    rank, as a fraction."""

    key: str
    given: int | str
    nearby: int
    seconds: float
    seconds_nearby: float
    more: float

    @property
    def sentence(self) -> str:
        """The hint as a sentence."""
        what = "sequences" if self.key == BATCH else "ranks"
        bad = "have few divisors in common with the ranks" if self.key == BATCH else "cannot all share the batch"
        unit = "tokens a second" if self.key == BATCH else "tokens a second of a rank"
        more = f"{self.more:.0%} more" if self.more < 1 else f"{1 + self.more:.3g} times as many"
        return (
            f"{self.given:,} {what} {bad}: with {self.nearby:,} a step takes {in_seconds(self.seconds_nearby)} in "
            f"place of {in_seconds(self.seconds)}, {more} {unit} ({self.key}={self.nearby})."
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return asdict(self)


BATCH, RANKS = "train.global_batch_size", "cluster.ranks"


def divisor_hints(planner: Planner, best: Candidate) -> list[Hint]:
    """Return hints on the batch size and the number of ranks of a searched job. best: the fastest
    strategy found."""
    batch, ranks = best.job.train.global_batch_size, best.job.world_size
    asked = [(BATCH, batch, near_batches(batch, ranks))]
    section, cluster = planner.job.cluster, planner.cluster
    if section.ranks and section.preset != "here" and planner.job.leaves_ranks_open:
        most = cluster.nodes * cluster.ranks_per_node or math.inf
        near = [one for one in near_ranks(ranks, batch, cluster.ranks_per_node) if one <= most]
        asked.append((RANKS, ranks, near))
    found = list[Hint]()
    for key, given, near in asked:
        tried = (_hint_for(planner, best, key, given, one) for one in near)
        found += islice((hint for hint in tried if hint and hint.more > WORTH), 1)
    return found


def near_batches(batch: int, ranks: int) -> list[int]:
    """Return batch sizes near ``batch`` that more of the ranks can share: multiples of larger
    divisors of 2 x ``ranks``.

    >>> near_batches(1023, 64), near_batches(1000, 64), near_batches(1024, 64), near_batches(1536, 1024)
    ([1024], [1024, 992], [], [])
    """
    shared = math.gcd(batch, 2 * ranks)  # twice, for micro-batches of two
    better = [each for each in range(2 * ranks, shared, -1) if 2 * ranks % each == 0] if ranks > 1 else []
    near = (max(1, round(batch / each)) * each for each in better)
    return _first(one for one in near if abs(one - batch) <= NEAR_BATCH * batch)


def near_ranks(ranks: int, batch: int, node: int) -> list[int]:
    """Return numbers of ranks near ``ranks`` of which at least twice the fraction can share the
    batch; whole nodes if the job has at least one node of ranks.

    >>> near_ranks(60, 1024, 8), near_ranks(7, 1024, 8), near_ranks(64, 1024, 8), near_ranks(96, 1024, 8)
    ([64, 56], [8, 6], [], [])
    """
    multiple, room = max(1, node) if ranks >= node else 1, int(NEAR_RANKS * ranks)
    share = {one: math.gcd(batch, one) / one for one in range(ranks - room, ranks + room + 1) if one % multiple == 0}
    least = math.gcd(batch, ranks) / ranks
    better = [one for one, each in share.items() if each >= 2 * least]
    return _first(sorted(better, key=lambda one: (-share[one], abs(one - ranks))))


def _first(numbers: Iterator[int] | Sequence[int]) -> list[int]:
    return list(dict.fromkeys(numbers))[:TRIES]


def _hint_for(planner: Planner, best: Candidate, key: str, current: int, nearby: int) -> Hint | None:
    """Return the hint for ``nearby`` in place of ``current``; None if no strategy fits, or if
    closed form predicts too little gain."""
    try:
        other = replace(planner, job=planner.job.changed([f"{key}={nearby}"]))
        ranked = search(other.request, other.cluster, other.job.train.precision, keep=FIRST, most=POINTS)
    except PlaitError:
        return None
    rate = other.job.train.global_batch_size / (ranked.seconds[0] * other.request.ranks)
    if rate < (1 + WORTH) * best.job.train.global_batch_size / (
        (best.closed_form or best.seconds) * best.job.world_size
    ):
        return None  # no gain even in closed form
    for at in range(len(ranked.points)):
        try:
            one = other.predict(job_at(other.job, ranked.points.row(at)))
        except PlaitError:
            continue
        if one.memory.safe:
            rates = [each.tokens_per_second / each.job.world_size for each in (one, best)]
            return Hint(key, current, nearby, best.seconds, one.seconds, rates[0] / rates[1] - 1)
    return None


GRAPHS = "strategy.cuda_graphs"
GRAPHS_WORTH = 0.03
"""Minimum fraction of the step's time that CUDA graphs must save for a hint."""


@dataclass(frozen=True)
class CudaGraphsHint(Hint):
    """The gain of the best strategy from CUDA graphs. given: the job's value, false or "auto";
    nearby: true."""

    @property
    def sentence(self) -> str:
        """The hint as a sentence."""
        auto = " (auto: steps are timed with and without before training)" if self.given == "auto" else ""
        return (
            f"CUDA graphs would take the host's time away: with {GRAPHS}=true this plan takes "
            f"{in_seconds(self.seconds_nearby)} in place of {in_seconds(self.seconds)}{auto}; "
            "planned with it, another may take less."
        )


def cuda_graphs_hints(planner: Planner, best: Candidate) -> list[Hint]:
    """Return the hint on CUDA graphs, for a plan that Plait runs on GPUs and whose job leaves
    graphs open. Only a plan that gains in closed form is predicted."""
    section = planner.job.strategy
    said = "cuda_graphs" in section.model_fields_set and section.cuda_graphs != "auto"
    if said or planner.closed_form_only or planner.cluster.device.kind != "cuda" or not _may_gain(planner, best):
        return []
    try:
        one = planner.predict(best.job.changed([f"{GRAPHS}=true"]))
    except PlaitError:  # a rule forbids graphs, e.g. for sharding that gathers weights into temporary memory
        return []
    if not one.memory.safe or one.seconds > (1 - GRAPHS_WORTH) * best.seconds:
        return []
    more = one.tokens_per_second / best.tokens_per_second - 1
    return [CudaGraphsHint(GRAPHS, section.cuda_graphs, True, best.seconds, one.seconds, more)]


def _may_gain(planner: Planner, best: Candidate) -> bool:
    """True if the closed form predicts a shorter step with graphs, or if it does not apply: unequal
    pp ranks."""
    plain, graphed = planner.closed_seconds(best.job, StrategyTable.of([best.point, {**best.point, "graphs": 1}])).total
    return len(set(best.job.degrees)) > 1 or bool(graphed <= (1 - GRAPHS_WORTH / 2) * plain)
