"""Diagnosis of a job for which nothing can be planned: search again with conditions relaxed.

A condition is a key that the job fixes, or a constraint. The first condition without which some
strategy fits is the reason. If no single condition is, conditions are relaxed together, and those
that are not needed are put back. Then each one gets the nearest value with which a strategy fits.
So all advice has been tried. If no condition is the reason, other sequence lengths and numbers of
ranks are tried.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice

import numpy as np
from numpy.typing import NDArray

from plait.core.base.errors import InfeasiblePlan, JobError
from plait.core.base.text import in_bytes
from plait.core.job.constraint import MARGIN_KEY, Constraint
from plait.core.step.columns.points import JOB_DEFAULTS, RECOMPUTES, SCHEDULES, StrategyTable
from plait.plan.search.choices import divisors_of
from plait.plan.search.needs import Needs
from plait.plan.search.space import SearchRequest, any_point, arrangements, column_of, enumerate_space, spelled

Memory = Callable[[StrategyTable], Needs]
"""Function that predicts the bytes on the fullest device of each strategy in a table."""
KEYS = {
    "micro": "train.micro_batch_size", "virtual": "strategy.virtual_stages", "ring": "strategy.cp_comm_type",
    "recompute_layers": "strategy.recompute", "shard_overlap": "strategy.overlap", "p1": "strategy.slices",
    "p2": "strategy.slices", "params": "strategy.shard", "grads": "strategy.shard", "optim": "strategy.shard",
    "secondary": "strategy.shard", "graphs": "strategy.cuda_graphs",
}  # fmt: skip
"""Job-file keys that fix a column; all other columns are keys of ``[strategy]``."""
SHARD, DEFAULT_SHARD = "strategy.shard", "ddp"
FRUGAL: Mapping[str, Sequence[int]] = {
    "recompute": [RECOMPUTES.index("full")], "recompute_layers": [-1], "micro": [1], "p1": [1], "p2": [1],
    "schedule": [SCHEDULES.index("1f1b")], "virtual": [1],
}  # fmt: skip
"""Values that take the least memory, by column of ``StrategyTable``, tried for columns that the job
leaves open."""
FEW, MOST = 1 << 9, 1 << 11
"""FEW: maximum number of strategies in a space that is searched again, if it can be made that
small. MOST: maximum number of these whose memory is computed."""
SURE = 0.97
"""Fraction of the available memory into which advice must fit, since closed forms may predict
slightly too little."""
MEMORY_STEP = 1 << 28
"""Unit in bytes to which suggested memory limits are rounded up."""
TRIES = 4
"""Maximum number of values tried in place of a condition, the nearest first."""
MAX_ARRANGEMENTS = 4096
"""Maximum number of rank arrangements whose values are compared."""
SHOWN = 8
"""Maximum number of values listed in a message."""
NEAR_LENGTH, NEAR_RANKS = 15 / 16, 32
"""NEAR_LENGTH: smallest sequence length tried, as a fraction of the job's. NEAR_RANKS: how many
numbers of ranks directly below and above the job's are tried."""
FACTORS = (2, 4, 8, 16, 32, 64)
"""Multiples of the job's ranks that are tried if nothing fits."""


@dataclass(frozen=True)
class _Condition:
    """A condition that can be relaxed: a constraint of the job, or the columns of ``StrategyTable``
    (``names``) that one key of the job fixes."""

    key: str
    names: tuple[str, ...] = ()
    constraint: Constraint | None = None

    @property
    def name(self) -> str:
        """The column of ``StrategyTable`` that the condition fixes; empty if it fixes several."""
        return column_of(self.constraint) if self.constraint else self.names[0] if len(self.names) == 1 else ""

    def text(self, request: SearchRequest) -> str:
        """Return the condition as the job writes it."""
        if self.constraint:
            return f"'{self.constraint.text}'"
        word = _word(request, self.name, request.fixed[self.name][0]) if self.name else ""
        return f"{self.key}={word}" if word else self.key


@dataclass(frozen=True)
class InfeasibilityDiagnosis:
    """Diagnosis of a search request for which no strategy fits. memory: predicts the bytes that
    strategies need. limit: bytes of a device that a plan may fill."""

    request: SearchRequest
    memory: Memory
    limit: float = math.inf

    def no_strategy_error(self) -> JobError:
        """Return the error for a request without any strategy, even with unlimited memory."""
        asked, (needed, fix) = self.request, self._advice()
        if not needed:
            sequences = f"{asked.global_batch:,} sequences of {asked.sequence:,} tokens of this model"
            return JobError(f"{asked.ranks:,} ranks cannot share {sequences}", key="cluster.ranks", fix=fix)
        told = f"{_listed([one.text(asked) for one in needed])} leave{'s' * (len(needed) == 1)}"
        told += f" no strategy for {asked.ranks:,} ranks with the job's other settings"
        if len(needed) == 1 and (values := self._values(self._without(needed), needed[0])):
            words = [_word(asked, needed[0].name, value) for value in sorted(values)]
            shown = words if len(words) <= SHOWN else [*words[: SHOWN - 2], "...", words[-1]]
            name = needed[0].constraint.quantity if needed[0].constraint else "it"
            told += f": {name} can be {', '.join(filter(None, shown))}"
        return JobError(told, key=needed[0].key, fix=fix + self._other_ranks())

    def _other_ranks(self) -> str:
        """Return a phrase on a number of ranks that the job's degrees divide, if they do not divide
        its own; empty if that would not do."""
        product = math.prod(self.request.fixed.get(name, [1])[0] for name in ("pp", "dp", "cp", "tp"))
        ranks = -(-self.request.ranks // product) * product
        other = replace(self.request, ranks=ranks)
        return f"; or cluster.ranks={ranks}" if ranks != self.request.ranks and self.is_feasible(other) else ""

    def within(self, needs: Needs) -> NDArray[np.bool_]:
        """Return True for each strategy that fits into the limit, and into any lower limit that the
        job sets: an array."""
        return self._within(self.request, needs)

    def too_large_error(self, space: StrategyTable, smallest: int, needs: Needs, kinds: str = "") -> InfeasiblePlan:
        """Return the error for a space in which no strategy fits. smallest: index in ``space`` of
        the strategy that needs the least memory. needs: its bytes, or those of all strategies if
        any is below the bound. kinds: its memory by kind, in words."""
        bound, row, least = int(self._bound(self.request)), space.row(smallest), int(np.argmin(needs.all))
        missing, kept = int(needs.total[least]), int(needs.kept[least])
        if self.within(needs).any():
            fitting = [in_bytes(int(some(needs.total[needs.fits()]))) for some in (np.min, np.max)]
            texts = _listed([f"'{one.text}'" for one in self.request.constraints if one.quantity == "memory"])
            told = (
                f"No strategy meets {texts}: those that fit, of {len(space):,}, need {' to '.join(fitting)} on a rank"
            )
        else:
            shape = " ".join(f"{key}={row[key]}" for key in ("pp", "dp", "cp", "tp"))
            shape = f"needs {in_bytes(missing)} on a rank ({shape}, micro-batches of {row['micro']})"
            shape += f", of it {kinds}" if kinds else ""
            there = f"the {in_bytes(bound)} {'there are' if bound >= int(self.limit) else 'allowed'}"
            if missing > bound:
                told = f"No strategy fits: the smallest of {len(space):,} {shape}, {in_bytes(missing - bound)} more "
                told += f"than {there}"
            else:
                told = f"No strategy leaves enough memory free: the smallest of {len(space):,} {shape}, and of the "
                told += f"{in_bytes(int(self.limit))} there are {in_bytes(kept)} must stay free, "
                told += f"{self.request.margin.reason}. {MARGIN_KEY}=fastest would do, at the risk that it runs out of "
                told += "memory"
        return InfeasiblePlan(f"{told}. {self._advice()[1]}.")

    # ---- searching again ----

    def is_feasible(self, request: SearchRequest) -> bool:
        """True if a request certainly has a strategy that fits."""
        return len(self._memory_of(request)) > 0

    def _memory_of(self, request: SearchRequest) -> NDArray[np.float64]:
        """Return the bytes on the fullest device of some strategies that certainly fit; empty if
        none was found."""
        for one in (request, replace(request, fixed={**FRUGAL, **request.fixed})):
            space = enumerate_space(one, most=FEW)
            if not len(space):
                continue
            space = space.take(slice(0, None, -(-len(space) // MOST)))
            needs = self.memory(space)
            memory, held = needs.total, self._within(request, needs, SURE)
            for limit in request.constraints:
                if limit.quantity == "memory" and not _is_limit(limit):
                    held &= limit.holds(memory)
            if held.any():
                return memory[held]
        return np.zeros(0)

    def _within(self, request: SearchRequest, needs: Needs, share: float = 1.0) -> NDArray[np.bool_]:
        return needs.fits(share) & (needs.total <= share * self._bound(request))

    def _bound(self, request: SearchRequest) -> float:
        """Return the bytes that a strategy may use on a device: ``limit``, or a lower one that the
        job sets."""
        return min([self.limit, *(one.values[0] for one in request.constraints if _is_limit(one))])

    # ---- conditions ----

    def _advice(self) -> tuple[list[_Condition], str]:
        """Return the conditions that are the reason, and a sentence on values that would work. Of
        constraints that contradict each other, changing any one is enough; other conditions must
        all change."""
        constraints, defaults, said = self._conditions()
        if ways := [one for one in constraints if self.is_feasible(self._without([one]))]:
            return ways, "; or ".join(self._instead([one]) for one in ways)
        every = [*defaults, *said]
        if one := next((one for one in every if self.is_feasible(self._without([one]))), None):
            return [one], self._instead([one])
        every = [*constraints, *every]
        if not every or not self.is_feasible(self._without(every)):
            return [], self._sizes(self._without(every))
        needed = every
        for one in (*said[::-1], *constraints[::-1], *defaults[::-1]):  # keep conditions that need no change
            fewer = [other for other in needed if other is not one]
            if self.is_feasible(self._without(fewer)):
                needed = fewer
        return needed, self._instead(needed)

    def _conditions(self) -> tuple[list[_Condition], list[_Condition], list[_Condition]]:
        """Return (constraints, keys fixed at a default because the job sets other keys, keys that
        the job sets)."""
        asked = self.request
        names = sorted(
            asked.fixed, key=lambda name: list(JOB_DEFAULTS).index(name) if name in JOB_DEFAULTS else len(JOB_DEFAULTS)
        )
        by_key = dict[str, list[str]]()
        for name in names:
            by_key.setdefault(key_of(name), []).append(name)
        defaults, said = list[_Condition](), list[_Condition]()
        for key, own in by_key.items():
            unsaid = all(list(asked.fixed[name]) == [JOB_DEFAULTS.get(name)] for name in own)
            (defaults if unsaid else said).append(_Condition(key, tuple(own)))
        if asked.shard:
            (defaults if asked.shard == DEFAULT_SHARD else said)[1:1] = [_Condition(SHARD)]
        return [_Condition("plan.constraints", constraint=one) for one in asked.constraints], defaults, said

    def _without(self, conditions: Iterable[_Condition]) -> SearchRequest:
        """Return the request without these conditions."""
        names, texts = set[str](), list[Constraint | None]()
        shard = self.request.shard
        for one in conditions:
            names.update(one.names)
            texts.append(one.constraint)
            shard = None if one.key == SHARD else shard
        fixed = {name: values for name, values in self.request.fixed.items() if name not in names}
        constraints = [one for one in self.request.constraints if not any(one is each for each in texts)]
        return replace(self.request, constraints=constraints, fixed=fixed, shard=shard)

    def _instead(self, needed: Sequence[_Condition]) -> str:
        """Return a sentence on what would work in place of conditions: the nearest value of each,
        given the values chosen for the ones before it."""
        there, parts = self._without(needed), list[str]()
        for one in needed:
            near = islice(self._nearest(there, one), TRIES)
            there, part = next(((with_it, part) for with_it, part in near if self.is_feasible(with_it)), (there, ""))
            if one.constraint:
                parts.append(
                    f"{part} in place of '{one.constraint.text}'" if part else f"A job without '{one.constraint.text}'"
                )
            else:
                parts.append(f"{part}{' or auto' * (len(needed) == 1)}" if part else f"{one.key}=auto")
        return f"{_listed(parts)} would do"

    def _nearest(self, request: SearchRequest, condition: _Condition) -> Iterator[tuple[SearchRequest, str]]:
        """Yield (request with another value in place of a condition, that value as a job writes
        it), the value nearest to the job's first."""
        if condition.constraint and condition.constraint.quantity == "memory":
            texts = list(self._memory_texts(request, condition.constraint))
        elif condition.constraint:
            low, high = condition.constraint.sign in ("<", "<="), condition.constraint.sign in (">", ">=")
            sign, name = "<=" if low else ">=" if high else "=", condition.name
            values = self._values(request, condition)
            words = [f"{value}" if name == "ring" else _word(request, name, value) for value in values]
            texts = [f"{condition.constraint.quantity} {sign} {word}" for word in words]
        else:
            for value in self._values(request, condition):
                if word := _word(request, condition.name, value):
                    yield replace(request, fixed={**request.fixed, condition.name: [value]}), f"{condition.key}={word}"
            return
        for text in texts:
            yield replace(request, constraints=[*request.constraints, Constraint.parse(text)]), f"'{text}'"

    def _values(self, request: SearchRequest, condition: _Condition) -> list[int]:
        """Return the values of a condition's column over all arrangements, the nearest to the job's
        value first."""
        if not condition.name or condition.name == "memory":
            return []
        values = set[int]()
        for columns in islice(arrangements(request), MAX_ARRANGEMENTS):
            values |= columns.get(condition.name, set())
        sign = condition.constraint.sign if condition.constraint else "="
        if sign[0] in "<>":
            return sorted(values, reverse=sign[0] == ">")
        wanted = condition.constraint.values if condition.constraint else self.request.fixed[condition.name]
        return sorted(values, key=lambda value: (min(_apart(value, each) for each in wanted), value))

    def _memory_texts(self, request: SearchRequest, constraint: Constraint) -> Iterator[str]:
        """Yield constraints that could replace a memory constraint. For an upper limit: the memory
        of the most frugal strategy, then all available memory. Otherwise a lower limit that
        strategies reach."""
        found = self._memory_of(request)
        if not len(found):
            return
        if _is_limit(constraint):
            enough = -(-float(found.min()) // (SURE * MEMORY_STEP)) * MEMORY_STEP
            yield from (f"memory <= {in_bytes(int(size))}" for size in (enough, self.limit) if size <= self.limit)
        else:
            yield f"memory >= {in_bytes(int(float(found.min()) * SURE))}"

    # ---- sizes ----

    def _sizes(self, free: SearchRequest) -> str:
        """Return a sentence on a sequence length or a number of ranks that would work; empty if
        none does. free: the request without conditions."""
        asked = self.request
        if not any_point(free):
            near = [f"{ranks:,}" for ranks in _shareable(free) if self.is_feasible(_on(free, ranks))]
            told = f"{' or '.join(near)} ranks would do"
            return told if near else "Use a number of ranks, or of sequences, with more divisors"
        lengths = {asked.sequence >> at << at for at in range(1, asked.sequence.bit_length())} - {asked.sequence}
        for length in sorted((one for one in lengths if one >= NEAR_LENGTH * asked.sequence), reverse=True):
            # ``memory`` still predicts for the job's longer sequence, which needs at least as much.
            if self.is_feasible(replace(asked, sequence=length)):
                return f"data.sequence_length={length} would do, which more ranks can share"
        for factor in FACTORS:
            if self.is_feasible(replace(asked, ranks=asked.ranks * factor)):
                more = f"{asked.ranks * factor:,} ranks would do, {factor} times as many"
                return f"{more}; or use a smaller model, shorter sequences"
        return f"Use a smaller model, shorter sequences: {FACTORS[-1]} times as many ranks would not do"


def _on(request: SearchRequest, ranks: int) -> SearchRequest:
    return replace(request, ranks=ranks, domain=min(ranks, request.domain))


def _shareable(request: SearchRequest) -> list[int]:
    """Return the nearest numbers of ranks that have an arrangement: one below and one above. If
    there is none near, only a smaller number is returned."""

    def possible(ranks: int) -> bool:
        return any_point(_on(request, ranks))

    fewer = next(filter(possible, islice(range(request.ranks - 1, 0, -1), NEAR_RANKS)), 0)
    more = next(filter(possible, islice(count(request.ranks + 1), NEAR_RANKS)), 0)
    if not fewer and not more:
        near = {*divisors_of(request.ranks)} | {request.ranks >> at for at in range(1, request.ranks.bit_length())}
        near |= {each << at for each in divisors_of(request.global_batch) for at in range(request.ranks.bit_length())}
        fewer = next(filter(possible, sorted((one for one in near if 0 < one < request.ranks), reverse=True)), 0)
    return [ranks for ranks in (fewer, more) if ranks]


def key_of(name: str) -> str:
    """Return the job-file key that fixes a column."""
    return KEYS.get(name, f"strategy.{name}")


def _is_limit(constraint: Constraint) -> bool:
    return constraint.quantity == "memory" and constraint.sign[0] == "<"


def _apart(value: float, wanted: float) -> float:
    return abs(math.log(value / wanted)) if value > 0 < wanted else abs(value - wanted)


def _word(request: SearchRequest, name: str, value: int) -> str:
    """Return a column's value as a job with these degrees writes it; empty if that depends on an
    open degree."""
    if name != "ring":
        return spelled(name, value)
    cp = request.fixed.get("cp", [0])[0]
    if value == 1:
        return '"ulysses"'
    if not cp or cp % value:
        return ""
    return '"ring"' if value == cp else f"{{ ulysses = {cp // value}, ring = {value} }}"


def _listed(parts: Sequence[str]) -> str:
    return " and ".join(part for part in (", ".join(parts[:-1]), parts[-1]) if part)
