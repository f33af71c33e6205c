"""Why nothing can be planned: the space is searched again with one condition after another relaxed.

A condition is a key that the job fixes, or a constraint. The first without which there is a strategy that
fits is the reason; where no one alone is, conditions are relaxed together, and those that are not needed are
put back. Then each gets the nearest value that does. So all that is advised was tried. Where no condition is
to blame, sequences and numbers of ranks are tried.
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
from plait.core.parallel.strategy import WORDS
from plait.core.step.columns.points import RECOMPUTES, SCHEDULES, Points
from plait.plan.needs import Needs
from plait.plan.space import SearchRequest, any_point, arrangements, column_of, enumerate_space

Memory = Callable[[Points], Needs]
"""What the fullest rank of every point needs."""
KEYS = {
    "micro": "train.micro_batch_size", "virtual": "strategy.virtual_stages", "ring": "strategy.cp_comm_type",
    "recompute_layers": "strategy.recompute", "shard_overlap": "strategy.overlap", "p1": "strategy.slices",
    "p2": "strategy.slices", "params": "strategy.shard", "grads": "strategy.shard", "optim": "strategy.shard",
    "secondary": "strategy.shard", "graphs": "strategy.cuda_graphs",
}  # fmt: skip
"""Where a job says what a column holds; all others are keys of ``[strategy]``."""
DEFAULTS = {
    "graphs": 0, "dp": 1, "recompute": 0, "recompute_layers": -1, "pp": 1,
    "schedule": WORDS["schedule"].index("eager-1f1b"), "virtual": 1, "cp": 1, "ring": 1, "tp": 1,
    "sequence_parallel": 0, "ep": 1,
    "overlap": WORDS["overlap"].index("domino"), "shard_overlap": WORDS["shard_overlap"].index("both"),
}  # fmt: skip
"""What a job with a ``[strategy]`` fixes without saying it, in the order in which it is relaxed."""
SHARD, DEFAULT_SHARD = "strategy.shard", "ddp"
FRUGAL: Mapping[str, Sequence[int]] = {
    "recompute": [RECOMPUTES.index("full")], "recompute_layers": [-1], "micro": [1], "p1": [1], "p2": [1],
    "schedule": [SCHEDULES.index("1f1b")], "virtual": [1],
}  # fmt: skip
"""What takes least memory, where the job does not say otherwise."""
FEW, MOST = 1 << 9, 1 << 11
"""Points of a space that is searched again, at most, if it can be made so small; of these, whose memory is
asked."""
SURE = 0.97
"""Of the memory there is, what advice has to fit into: closed forms may be a little low."""
MEMORY_STEP = 1 << 28
"""Limits of memory are named in multiples of this many bytes."""
TRIES = 4
"""Values in place of a condition that are tried, the nearest first."""
LOOKED_AT = 4096
"""Arrangements of ranks whose values are compared, at most."""
SHOWN = 8
"""Values that are listed."""
NEAR_LENGTH, NEAR_RANKS = 15 / 16, 32
"""Of a sequence's length, what is left of it at least; numbers of ranks that are tried on either side."""
FACTORS = (2, 4, 8, 16, 32, 64)
"""So many times as many ranks are tried where nothing fits."""
MOST_TRIED = 4096
"""The largest degree that is tried where one is asked for that is not tried unasked."""


@dataclass(frozen=True)
class _Condition:
    """A constraint, or columns that one key of the job fixes."""

    key: str
    names: tuple[str, ...] = ()
    constraint: Constraint | None = None

    @property
    def name(self) -> str:
        """Its column; nothing where it has several."""
        return column_of(self.constraint) if self.constraint else self.names[0] if len(self.names) == 1 else ""

    def said(self, asked: SearchRequest) -> str:
        """As the job has it."""
        if self.constraint:
            return f"'{self.constraint.text}'"
        word = _word(asked, self.name, asked.fixed[self.name][0]) if self.name else ""
        return f"{self.key}={word}" if word else self.key


@dataclass(frozen=True)
class Relaxing:
    """A request that leaves nothing. limit: bytes of a device that a plan may fill."""

    asked: SearchRequest
    memory: Memory
    limit: float = math.inf

    def empty(self) -> JobError:
        """What is said of a request without any strategy, memory aside."""
        asked, (needed, fix) = self.asked, self._advice()
        if not needed:
            sequences = f"{asked.global_batch:,} sequences of {asked.sequence:,} tokens of this model"
            return JobError(f"{asked.ranks:,} ranks cannot share {sequences}", key="cluster.ranks", fix=fix)
        told = f"{_listed([one.said(asked) for one in needed])} leave{'s' * (len(needed) == 1)}"
        told += f" no strategy for {asked.ranks:,} ranks with the rest that the job says"
        if len(needed) == 1 and (values := self._values(self._without(needed), needed[0])):
            words = [_word(asked, needed[0].name, value) for value in sorted(values)]
            shown = words if len(words) <= SHOWN else [*words[: SHOWN - 2], "...", words[-1]]
            name = needed[0].constraint.quantity if needed[0].constraint else "it"
            told += f": {name} can be {', '.join(filter(None, shown))}"
        return JobError(told, key=needed[0].key, fix=fix)

    def within(self, needs: Needs) -> NDArray[np.bool_]:
        """What fits into the limit, and into what the job sets below it."""
        return self._within(self.asked, needs)

    def short(self, space: Points, smallest: int, needs: Needs, kinds: str = "") -> InfeasiblePlan:
        """What is said of a space of which nothing fits. smallest: the number of the point that needs least
        memory. needs: what that needs; what all need, where it is less than the bound. kinds: of that point's
        memory, in words."""
        bound, row, least = int(self._bound(self.asked)), space.row(smallest), int(np.argmin(needs.all))
        missing, kept = int(needs.total[least]), int(needs.kept[least])
        if self.within(needs).any():
            fitting = [in_bytes(int(some(needs.total[needs.fits()]))) for some in (np.min, np.max)]
            texts = _listed([f"'{one.text}'" for one in self.asked.constraints if one.quantity == "memory"])
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
                told += f"{in_bytes(int(self.limit))} there are {in_bytes(kept)} are to stay free, "
                told += (
                    f"{self.asked.margin.why}. {MARGIN_KEY}=fastest would do, at the risk that it runs out of memory"
                )
        return InfeasiblePlan(f"{told}. {self._advice()[1]}.")

    # ---- searching again ----

    def works(self, asked: SearchRequest) -> bool:
        """Whether a request surely has a strategy that fits."""
        return len(self._memory_of(asked)) > 0

    def _memory_of(self, asked: SearchRequest) -> NDArray[np.float64]:
        """Bytes of some strategies that surely fit."""
        for one in (asked, replace(asked, fixed={**FRUGAL, **asked.fixed})):
            space = enumerate_space(one, most=FEW)
            if not len(space):
                continue
            space = space.take(slice(0, None, -(-len(space) // MOST)))
            needs = self.memory(space)
            memory, held = needs.total, self._within(asked, needs, SURE)
            for limit in asked.constraints:
                if limit.quantity == "memory" and not _is_limit(limit):
                    held &= limit.holds(memory)
            if held.any():
                return memory[held]
        return np.zeros(0)

    def _within(self, asked: SearchRequest, needs: Needs, share: float = 1.0) -> NDArray[np.bool_]:
        return needs.fits(share) & (needs.total <= share * self._bound(asked))

    def _bound(self, asked: SearchRequest) -> float:
        """The limit, or what a job sets below it."""
        return min([self.limit, *(one.values[0] for one in asked.constraints if _is_limit(one))])

    # ---- conditions ----

    def _advice(self) -> tuple[list[_Condition], str]:
        """The conditions that are to blame, and what would do in their place: of constraints that contradict
        each other any one, of others all."""
        constraints, defaults, said = self._conditions()
        if ways := [one for one in constraints if self.works(self._without([one]))]:
            return ways, "; or ".join(self._instead([one]) for one in ways)
        every = [*defaults, *said]
        if one := next((one for one in every if self.works(self._without([one]))), None):
            return [one], self._instead([one])
        every = [*constraints, *every]
        if not every or not self.works(self._without(every)):
            return [], self._sizes(self._without(every))
        needed = every
        for one in (*said[::-1], *constraints[::-1], *defaults[::-1]):  # what is not needed stays
            fewer = [other for other in needed if other is not one]
            if self.works(self._without(fewer)):
                needed = fewer
        return needed, self._instead(needed)

    def _conditions(self) -> tuple[list[_Condition], list[_Condition], list[_Condition]]:
        """Constraints; keys that the job does not say, and that are fixed since it says others; what it
        says."""
        asked = self.asked
        names = sorted(asked.fixed, key=lambda name: list(DEFAULTS).index(name) if name in DEFAULTS else len(DEFAULTS))
        by_key = dict[str, list[str]]()
        for name in names:
            by_key.setdefault(key_of(name), []).append(name)
        defaults, said = list[_Condition](), list[_Condition]()
        for key, own in by_key.items():
            unsaid = all(list(asked.fixed[name]) == [DEFAULTS.get(name)] for name in own)
            (defaults if unsaid else said).append(_Condition(key, tuple(own)))
        if asked.shard:
            (defaults if asked.shard == DEFAULT_SHARD else said)[1:1] = [_Condition(SHARD)]
        return [_Condition("plan.constraints", constraint=one) for one in asked.constraints], defaults, said

    def _without(self, conditions: Iterable[_Condition]) -> SearchRequest:
        """The request with conditions relaxed."""
        names, texts = set[str](), list[Constraint | None]()
        shard = self.asked.shard
        for one in conditions:
            names.update(one.names)
            texts.append(one.constraint)
            shard = None if one.key == SHARD else shard
        fixed = {name: values for name, values in self.asked.fixed.items() if name not in names}
        constraints = [one for one in self.asked.constraints if not any(one is each for each in texts)]
        return replace(self.asked, constraints=constraints, fixed=fixed, shard=shard)

    def _instead(self, needed: Sequence[_Condition]) -> str:
        """What would do in place of conditions: of each, beside those before it, the nearest value."""
        there, parts = self._without(needed), list[str]()
        for one in needed:
            near = islice(self._nearest(there, one), TRIES)
            there, part = next(((with_it, part) for with_it, part in near if self.works(with_it)), (there, ""))
            if one.constraint:
                parts.append(
                    f"{part} in place of '{one.constraint.text}'" if part else f"A job without '{one.constraint.text}'"
                )
            else:
                parts.append(f"{part}{' or auto' * (len(needed) == 1)}" if part else f"{one.key}=auto")
        return f"{_listed(parts)} would do{self._unasked(needed)}"

    def _nearest(self, there: SearchRequest, one: _Condition) -> Iterator[tuple[SearchRequest, str]]:
        """Requests with a value in place of a condition, the nearest first, and how a job says it."""
        if one.constraint and one.constraint.quantity == "memory":
            texts = list(self._memory_texts(there, one.constraint))
        elif one.constraint:
            low, high = one.constraint.sign in ("<", "<="), one.constraint.sign in (">", ">=")
            sign, name = "<=" if low else ">=" if high else "=", one.name
            values = self._values(there, one)
            words = [f"{value}" if name == "ring" else _word(there, name, value) for value in values]
            texts = [f"{one.constraint.quantity} {sign} {word}" for word in words]
        else:
            for value in self._values(there, one):
                if word := _word(there, one.name, value):
                    yield replace(there, fixed={**there.fixed, one.name: [value]}), f"{one.key}={word}"
            return
        for text in texts:
            yield replace(there, constraints=[*there.constraints, Constraint.parse(text)]), f"'{text}'"

    def _values(self, there: SearchRequest, one: _Condition) -> list[int]:
        """Of a condition's column, over all arrangements, the nearest to what is asked first."""
        if not one.name or one.name == "memory":
            return []
        values = set[int]()
        for columns in islice(arrangements(there), LOOKED_AT):
            values |= columns.get(one.name, set())
        sign = one.constraint.sign if one.constraint else "="
        if sign[0] in "<>":
            return sorted(values, reverse=sign[0] == ">")
        wanted = one.constraint.values if one.constraint else self.asked.fixed[one.name]
        return sorted(values, key=lambda value: (min(_apart(value, each) for each in wanted), value))

    def _memory_texts(self, there: SearchRequest, one: Constraint) -> Iterator[str]:
        """A limit in place of one of memory: what the most frugal takes, what there is; or what most take."""
        found = self._memory_of(there)
        if not len(found):
            return
        if _is_limit(one):
            enough = -(-float(found.min()) // (SURE * MEMORY_STEP)) * MEMORY_STEP
            yield from (f"memory <= {in_bytes(int(size))}" for size in (enough, self.limit) if size <= self.limit)
        else:
            yield f"memory >= {in_bytes(int(float(found.min()) * SURE))}"

    def _unasked(self, needed: Sequence[_Condition]) -> str:
        """A degree that is only tried where the job says it."""
        one = needed[0]
        if len(needed) > 1 or one.constraint is None or one.name not in ("tp", "pp", "cp"):
            return ""
        divisors = (value for value in range(2, min(self.asked.ranks, MOST_TRIED) + 1) if self.asked.ranks % value == 0)
        for value in islice(filter(one.constraint.holds, divisors), SHOWN):
            if self.works(replace(self.asked, fixed={**self.asked.fixed, one.name: [value]})):
                return f"; or say strategy.{one.name}={value}, which is not tried unasked"
        return ""

    # ---- sizes ----

    def _sizes(self, free: SearchRequest) -> str:
        """A sequence or a number of ranks that would do. free: the request without conditions."""
        asked = self.asked
        if not any_point(free):
            near = [f"{ranks:,}" for ranks in _shareable(free) if self.works(_on(free, ranks))]
            told = f"{' or '.join(near)} ranks would do"
            return told if near else "Use a number of ranks, or of sequences, with more divisors"
        lengths = {asked.sequence >> at << at for at in range(1, asked.sequence.bit_length())} - {asked.sequence}
        for length in sorted((one for one in lengths if one >= NEAR_LENGTH * asked.sequence), reverse=True):
            # Memory is asked of the longer sequence, which needs no less.
            if self.works(replace(asked, sequence=length)):
                return f"data.sequence_length={length} would do, which more ranks can share"
        for factor in FACTORS:
            if self.works(replace(asked, ranks=asked.ranks * factor)):
                more = f"{asked.ranks * factor:,} ranks would do, {factor} times as many"
                return f"{more}; or use a smaller model, shorter sequences"
        return f"Use a smaller model, shorter sequences: {FACTORS[-1]} times as many ranks would not do"


def _on(asked: SearchRequest, ranks: int) -> SearchRequest:
    return replace(asked, ranks=ranks, domain=min(ranks, asked.domain))


def _shareable(asked: SearchRequest) -> list[int]:
    """The nearest numbers of ranks that have an arrangement: fewer and more; of far too many ranks, fewer."""

    def possible(ranks: int) -> bool:
        return any_point(_on(asked, ranks))

    fewer = next(filter(possible, islice(range(asked.ranks - 1, 0, -1), NEAR_RANKS)), 0)
    more = next(filter(possible, islice(count(asked.ranks + 1), NEAR_RANKS)), 0)
    if not fewer and not more:
        near = _divisors(asked.ranks) | {asked.ranks >> at for at in range(1, asked.ranks.bit_length())}
        near |= {each << at for each in _divisors(asked.global_batch) for at in range(asked.ranks.bit_length())}
        fewer = next(filter(possible, sorted((one for one in near if 0 < one < asked.ranks), reverse=True)), 0)
    return [ranks for ranks in (fewer, more) if ranks]


def _divisors(number: int) -> set[int]:
    small = [one for one in range(1, math.isqrt(number) + 1) if number % one == 0]
    return {*small, *(number // one for one in small)}


def key_of(name: str) -> str:
    """Where a job says what a column holds."""
    return KEYS.get(name, f"strategy.{name}")


def _is_limit(one: Constraint) -> bool:
    return one.quantity == "memory" and one.sign[0] == "<"


def _apart(value: float, wanted: float) -> float:
    return abs(math.log(value / wanted)) if value > 0 < wanted else abs(value - wanted)


def _word(asked: SearchRequest, name: str, value: int) -> str:
    """A column's value as a job of these degrees says it; nothing where it takes one that is not known."""
    if name in WORDS:
        return WORDS[name][value]
    if name in ("sequence_parallel", "graphs"):
        return "true" if value else "false"
    if name != "ring":
        return f"{value}"
    cp = asked.fixed.get("cp", [0])[0]
    if value == 1:
        return '"ulysses"'
    if not cp or cp % value:
        return ""
    return '"ring"' if value == cp else f"{{ ulysses = {cp // value}, ring = {value} }}"


def _listed(parts: Sequence[str]) -> str:
    return " and ".join(part for part in (", ".join(parts[:-1]), parts[-1]) if part)
