"""What is said where no strategy of a space fits into memory: by how much the most frugal does not, and the
nearest change with which something would: a condition of the job left open, or more ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plait.core.base.errors import InfeasiblePlan, JobError
from plait.core.base.text import in_bytes
from plait.core.job.constraint import Constraint
from plait.plan.points import RECOMPUTES, SCHEDULES, Points
from plait.plan.space import SearchRequest, enumerate_space
from plait.plan.unmet import column_of, key_of, word_of

FACTORS = (2, 4, 8, 16, 32, 64)
"""So many times as many ranks are tried where nothing fits."""
FEW = 1 << 9
"""Points of each of these spaces, at most."""
MOST = 1 << 11
"""Of these, whose memory is asked."""
SURE = 0.97
"""Of the memory there is, what a change has to fit into to be named: closed forms may be a little low."""
FRUGAL: Mapping[str, Sequence[int]] = {
    "recompute": [RECOMPUTES.index("full")], "recompute_layers": [-1], "micro": [1], "p1": [1], "p2": [1],
    "schedule": [SCHEDULES.index("1f1b")], "virtual": [1],
}  # fmt: skip
"""What takes least memory, where the job does not say otherwise."""
NEAR = 15 / 16
"""Of a sequence's length, what is left of it at least where a shorter one is named."""
MEMORY_STEP = 1 << 28
"""Limits of memory are named in multiples of this many bytes."""
Memory = Callable[[Points], NDArray[np.float64]]


@dataclass(frozen=True)
class Shortage:
    """A space of which nothing fits. limit: bytes of a device that a plan may fill. memory: of the fullest
    rank of every point, in bytes."""

    asked: SearchRequest
    limit: float
    memory: Memory

    @property
    def bound(self) -> float:
        """The limit, or what the job sets below it."""
        return min([self.limit, *(one.values[0] for one in self.asked.constraints if _is_limit(one))])

    def told(self, space: Points, memory: NDArray[np.float64]) -> InfeasiblePlan:
        """Of ``space``, and what it needs."""
        least = int(np.argmin(memory))
        if memory[least] <= self.bound:
            return self._too_frugal(len(space), memory)
        row, missing, bound = space.row(least), int(memory[least]), int(self.bound)
        shape = " ".join(f"{key}={row[key]}" for key in ("pp", "dp", "cp", "tp"))
        there = f"the {in_bytes(bound)} there are" if bound >= int(self.limit) else f"the {in_bytes(bound)} allowed"
        return InfeasiblePlan(
            f"No strategy fits: the smallest of {len(space):,} needs {in_bytes(missing)} on a rank ({shape}, "
            f"micro-batches of {row['micro']}), {in_bytes(missing - bound)} more than {there}. {self._advice(missing)}."
        )

    def _too_frugal(self, count: int, memory: NDArray[np.float64]) -> InfeasiblePlan:
        """Something fits, and the job asks for more or other memory than it takes."""
        asked = " and ".join(f"'{one.text}'" for one in self.asked.constraints if one.quantity == "memory")
        fitting = memory[memory <= self.limit]
        least, most = (in_bytes(int(some(fitting))) for some in (np.min, np.max))
        near = in_bytes(int(np.min(fitting) * SURE))
        return InfeasiblePlan(
            f"No strategy meets {asked} in plan.constraints: those that fit into the {in_bytes(int(self.limit))} there "
            f"are, of {count:,}, need {least} to {most} on a rank. 'memory >= {near}' would do."
        )

    def _advice(self, missing: int) -> str:
        """The nearest change with which something fits."""
        asked = self.asked
        if missing <= SURE * self.limit:  # so it is the job's own limit that is too low
            enough = -(-missing // (SURE * MEMORY_STEP)) * MEMORY_STEP
            raised = in_bytes(int(enough)) if enough <= self.limit else in_bytes(int(self.limit))
            limits = " and ".join(f"'{one.text}'" for one in asked.constraints if _is_limit(one))
            return f"'memory <= {raised}' in place of {limits} would do"
        for one in asked.constraints:
            others = [other for other in asked.constraints if other is not one]
            if not _is_limit(one) and (row := self._fitting(replace(asked, constraints=others))):
                return f"It would fit without '{one.text}' in plan.constraints, as with {_said(one, row)}"
        if asked.shard and (row := self._fitting(replace(asked, shard=None))):
            factors = ", ".join(f"{name} = {row[name]}" for name in ("params", "grads", "optim"))
            return f"It would fit with strategy.shard=auto, as with {factors}"
        for name in asked.fixed:
            fixed = {other: values for other, values in asked.fixed.items() if other != name}
            if row := self._fitting(replace(asked, fixed=fixed)):
                return f"It would fit with {_open(key_of(name))}=auto"
        if length := self._shorter():
            return f"data.sequence_length = {length} would do, which more ranks can share"
        if factor := self._more_ranks():
            more = f"{asked.ranks * factor:,} ranks would do, {factor} times as many"
            return f"{more}; or use a smaller model, shorter sequences"
        free = replace(asked, constraints=[one for one in asked.constraints if _is_limit(one)], fixed={}, shard=None)
        if free != asked and self._fitting(free):
            return "It would fit if everything in plan.constraints but memory, and in strategy, were left open"
        return f"Use a smaller model, shorter sequences: {FACTORS[-1]} times as many ranks would not do"

    def fits(self, asked: SearchRequest) -> bool:
        """Whether a request that has strategies surely has one that fits, and meets what the job says of
        memory."""
        one = replace(self, asked=asked)
        return one._fitting(asked) is not None or one._fitting(_frugal(asked)) is not None

    def _shorter(self) -> int | None:
        """The nearest shorter sequence that more ranks can share, if one is near and enough."""
        asked = self.asked
        lengths = {asked.sequence >> at << at for at in range(1, asked.sequence.bit_length())} - {asked.sequence}
        near = [length for length in lengths if length >= NEAR * asked.sequence]
        # Memory is asked of the longer sequence, which needs no less.
        return next((n for n in sorted(near, reverse=True) if self._fitting(_frugal(replace(asked, sequence=n)))), None)

    def _fitting(self, asked: SearchRequest) -> Mapping[str, Any] | None:
        """The most frugal point of a space, if it surely fits."""
        try:
            space = enumerate_space(asked, most=FEW)
            if len(space) > MOST:  # of many arrangements of ranks
                space = space.take(slice(0, None, -(-len(space) // MOST)))
        except JobError:
            return None
        memory = self.memory(space)
        for one in asked.constraints:  # the others of a request are met by all of its points
            if one.quantity == "memory" and not _is_limit(one):
                memory = np.where(one.holds(memory), memory, np.inf)
        least = int(np.argmin(memory))
        return space.row(least) if memory[least] <= SURE * self.bound else None

    def _more_ranks(self) -> int | None:
        """How many times as many ranks are enough, of ``FACTORS``."""
        asked = self.asked

        def enough(factor: int) -> bool:
            return self._fitting(_frugal(replace(asked, ranks=asked.ranks * factor))) is not None

        # More ranks never need more memory each, but not every number of them can share the batch.
        return next(filter(enough, FACTORS), None) if any(map(enough, FACTORS[-2:])) else None


def _frugal(asked: SearchRequest) -> SearchRequest:
    """The request with what takes least memory where it leaves a choice."""
    return replace(asked, fixed={**FRUGAL, **asked.fixed})


def _is_limit(one: Constraint) -> bool:
    return one.quantity == "memory" and one.sign[0] == "<"


def _said(one: Constraint, row: Mapping[str, Any]) -> str:
    name = column_of(one)
    value = row["cp"] // row["ring"] if name == "ulysses" else row[name]
    return f"{one.quantity} = {word_of(name, value)}"


def _open(key: str) -> str:
    """What may be called auto: of a factor, all of them together."""
    return "strategy.shard" if key.startswith("strategy.shard.") else key
