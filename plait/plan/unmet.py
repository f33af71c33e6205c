"""Why a strategy space is empty: which condition of the job leaves nothing, and what would be enough.

Conditions are what the job fixes (``strategy.tp = 4``) and its constraints (``tp <= 8``). One that alone is
too much is looked for first; otherwise they are taken up one after the other, and those that leave nothing
beside the ones before are what has to change.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice
from typing import TYPE_CHECKING

from plait.core.base.errors import JobError
from plait.core.job.constraint import WORDS, Constraint

if TYPE_CHECKING:
    from plait.plan.space import SearchRequest

Found = Callable[["SearchRequest"], Iterator[Mapping[str, set[int]]]]
"""Of every arrangement of ranks with any strategy, the values of its columns."""
Fits = Callable[["SearchRequest"], bool]
"""Whether a request that has strategies has one that fits into memory."""

KEYS = {
    "micro": "train.micro_batch_size", "virtual": "strategy.virtual_stages", "ring": "strategy.cp_kind",
    "recompute_layers": "strategy.recompute", "overlap": "strategy.overlap", "shard_overlap": "strategy.overlap",
    "p1": "strategy.slices", "p2": "strategy.slices", "params": "strategy.shard.params",
    "grads": "strategy.shard.grads", "optim": "strategy.shard.optim", "secondary": "strategy.shard.secondary",
}  # fmt: skip
"""Where a job says what a column holds; all others are keys of ``[strategy]``."""
COLUMNS = {"micro_batch_size": "micro", "num_micro_batches": "num_micro", "virtual_stages": "virtual"}
"""Of quantities of constraints that have another name."""
LOOKED_AT = 4096
"""Arrangements of ranks whose values are compared, at most."""
NEAR = 32
"""Numbers of ranks that are tried, upwards and downwards."""
SHOWN = 8
"""Values that are listed."""
MOST_TRIED = 4096
"""The largest degree that is looked at where one is asked for that is not tried unasked."""


DEFAULTS = {
    "dp": 1, "recompute": 0, "recompute_layers": -1, "pp": 1, "schedule": WORDS["schedule"].index("eager-1f1b"),
    "virtual": 1, "cp": 1, "ring": 1, "tp": 1, "sequence_parallel": 0, "ep": 1,
    "overlap": WORDS["overlap"].index("domino"), "shard_overlap": WORDS["shard_overlap"].index("both"),
}  # fmt: skip
"""What a job with a ``[strategy]`` fixes without saying it, in the order in which it is left open."""
DEFAULT_SHARD = "ddp"


@dataclass(frozen=True)
class _Condition:
    """A constraint, or what the job fixes of a column."""

    name: str
    constraint: Constraint | None = None

    def key(self) -> str:
        """Of the job file."""
        return "plan.constraints" if self.constraint else key_of(self.name)


class Unmet(JobError):
    """A request without any strategy. What its fix names has strategies; of memory it knows nothing."""

    def __init__(self, told: JobError, asked: SearchRequest, found: Found) -> None:
        super().__init__(told.problem, key=told.key, fix=told.fix)
        self.asked, self.found = asked, found

    def fitting(self, fits: Fits) -> JobError:
        """The same, with a fix that also fits into memory."""
        return _Unmet(self.asked, self.found, fits).told()


def key_of(name: str) -> str:
    """Where a job says what a column holds."""
    return KEYS.get(name, f"strategy.{name}")


def column_of(one: Constraint) -> str:
    """What it is about."""
    return COLUMNS.get(one.quantity, one.quantity)


def nothing(asked: SearchRequest, found: Found) -> Unmet:
    """What to say of a request without any strategy."""
    return Unmet(_Unmet(asked, found, lambda _: True).told(), asked, found)


@dataclass(frozen=True)
class _Unmet:
    """What would be enough for a request without any strategy."""

    asked: SearchRequest
    found: Found
    fits: Fits

    def told(self) -> JobError:
        """The smallest change that is found."""
        asked = self.asked
        conditions = [*(_Condition(column_of(one), one) for one in asked.constraints), *map(_Condition, asked.fixed)]
        constraints = [one for one in conditions if one.constraint]
        said = [one for one in conditions if not one.constraint and not _is_default(asked, one.name)]
        return (
            self._first_alone(constraints, conditions)
            or self._left_open()
            or self._first_alone(said, conditions)
            or self._together(conditions)
        )

    def _any(self, asked: SearchRequest) -> bool:
        return _has_any(asked, self.found)

    def _works(self, asked: SearchRequest) -> bool:
        return self._any(asked) and self.fits(asked)

    def _first_alone(self, some: Iterable[_Condition], conditions: Sequence[_Condition]) -> JobError | None:
        """A condition without which there would be something, if one is enough."""
        for one in some:
            rest = _only(self.asked, [other for other in conditions if other is not one])
            if self._any(rest) and (error := self._alone(one, rest)):
                return error
        return None

    def _alone(self, one: _Condition, rest: SearchRequest) -> JobError | None:
        """What in place of this condition would do."""
        asked, values = self.asked, _values(rest, one.name, self.found)
        if one.constraint is None:
            near = _nearest(values, asked.fixed[one.name])
            word = _word_in(rest, one.name, near)
            problem = (
                f"{_word_in(asked, one.name, asked.fixed[one.name][0])} fits no arrangement of {asked.ranks:,} ranks "
                "with the rest that the job says"
            )
            if word and self.fits(replace(rest, fixed={**rest.fixed, one.name: [near]})):
                return JobError(problem, key=one.key(), fix=f"{word} would do, or auto")
            return JobError(problem, key=one.key(), fix="auto would do") if self.fits(rest) else None
        text, instead = one.constraint.text, _instead(one.constraint, one.name, values)
        if not self.fits(replace(rest, constraints=[*rest.constraints, Constraint.parse(instead)])):
            return None
        problem = f"'{text}' leaves no strategy for {asked.ranks:,} ranks: {_told(one, values)}"
        return JobError(
            problem, key=one.key(), fix=f"'{instead}' would do{_beyond(asked, one, rest, self.found, self.fits)}"
        )

    def _left_open(self) -> JobError | None:
        """Keys that the job does not say, and that are fixed since it says others: the fewest that are enough
        when they are left open."""
        asked = self.asked
        keys = list(dict.fromkeys(key_of(name) for name in DEFAULTS if _is_default(asked, name)))
        keys[1:1] = ["strategy.shard"] if asked.shard == DEFAULT_SHARD else []
        alone = next(([key] for key in keys if self._works(_opened(asked, [key]))), None)
        needed = alone or list(keys)
        if not alone:
            if not keys or not self._works(_opened(asked, keys)):
                return None
            for key in reversed(keys):  # what is not needed stays
                fewer = [other for other in needed if other != key]
                if self._works(_opened(asked, fewer)):
                    needed = fewer
        names = [name for name in asked.fixed if key_of(name) == needed[0]]
        given = _word_in(asked, names[0], asked.fixed[names[0]][0]) if names else asked.shard
        problem = f"{given} fits no arrangement of {asked.ranks:,} ranks with the rest that the job says"
        if not alone:
            problem = f"{_listed(needed)} as they are leave no strategy for {asked.ranks:,} ranks"
        fix = f"{_listed([f'{key}=auto' for key in needed])} would do"
        if alone and len(names) == 1 and names[0] != "ring":
            open_ = _opened(asked, needed)
            near = _nearest(_values(open_, names[0], self.found), asked.fixed[names[0]])
            if self.fits(replace(open_, fixed={**open_.fixed, names[0]: [near]})):
                fix += f", or {word_of(names[0], near)}"
        return JobError(problem, key=needed[0], fix=fix)

    def _together(self, conditions: Sequence[_Condition]) -> JobError:
        """Conditions of which several would have to change; or none of which is to blame."""
        asked = self.asked
        there = _only(asked, [])
        if not self._any(there):
            return _ranks(asked, self.found)
        left = [one for one in conditions if not one.constraint] + [one for one in conditions if one.constraint]
        refused, swaps = list[_Condition](), list[str]()
        for one in left:
            with_it = _with(there, asked, one)
            if self._any(with_it):
                there = with_it
                continue
            values = _values(there, one.name, self.found)
            refused.append(one)
            if one.constraint:
                instead = _instead(one.constraint, one.name, values)
                swaps.append(f"'{instead}' for '{one.constraint.text}'")
                there = replace(there, constraints=[*there.constraints, Constraint.parse(instead)])
            else:
                there = replace(there, fixed={**there.fixed, one.name: [_nearest(values, asked.fixed[one.name])]})
        if not refused:  # rules that only whole points break
            return _ranks(asked, self.found)
        said = [f"'{one.constraint.text}'" if one.constraint else one.key() for one in refused]
        problem = (
            f"{_listed(said)} leave{'s' * (len(said) == 1)} no strategy for {asked.ranks:,} ranks with the rest that "
            "the job says"
        )
        changed = [f"{one.key()} = {_word_in(there, one.name, there.fixed[one.name][0]) or 'auto'}"
                   for one in refused if not one.constraint]  # fmt: skip
        fix = f"{_listed([*changed, *swaps])} would do" if self.fits(there) else self._much()
        return JobError(problem, key=refused[0].key(), fix=fix)

    def _much(self) -> str:
        """Where what would be enough takes too much memory."""
        free = replace(self.asked, fixed={}, shard=None)
        if self._works(free):
            return "A job without [strategy] would do"
        if self._works(replace(free, constraints=[one for one in free.constraints if one.quantity == "memory"])):
            return "A job without [strategy], and with nothing but memory in plan.constraints, would do"
        return "What would do in their place does not fit into memory: use more ranks, or a smaller model"


def _has_any(asked: SearchRequest, found: Found) -> bool:
    """Whether there is an arrangement."""
    return next(found(asked), None) is not None


def _is_default(asked: SearchRequest, name: str) -> bool:
    """Whether a column is fixed at what it is where the job does not say."""
    return name in DEFAULTS and list(asked.fixed.get(name, ())) == [DEFAULTS[name]]


def _opened(asked: SearchRequest, keys: Sequence[str]) -> SearchRequest:
    """The request with some keys called auto."""
    fixed = {name: values for name, values in asked.fixed.items() if key_of(name) not in keys}
    return replace(asked, fixed=fixed, shard=None if "strategy.shard" in keys else asked.shard)


def _only(asked: SearchRequest, conditions: Sequence[_Condition]) -> SearchRequest:
    """The request with no others."""
    return replace(
        asked,
        constraints=[one.constraint for one in conditions if one.constraint],
        fixed={one.name: asked.fixed[one.name] for one in conditions if not one.constraint},
    )


def _with(there: SearchRequest, asked: SearchRequest, one: _Condition) -> SearchRequest:
    if one.constraint:
        return replace(there, constraints=[*there.constraints, one.constraint])
    return replace(there, fixed={**there.fixed, one.name: asked.fixed[one.name]})


def _ranks(asked: SearchRequest, found: Found) -> JobError:
    """No arrangement at all: the nearest number of ranks that has one."""

    def possible(ranks: int) -> bool:
        other = replace(asked, ranks=ranks, domain=min(ranks, asked.domain), constraints=(), fixed={})
        return _has_any(other, found)

    fewer = next(filter(possible, islice(range(asked.ranks - 1, 0, -1), NEAR)), None)
    more = next(filter(possible, islice(count(asked.ranks + 1), NEAR)), None)
    if not fewer and not more:  # too many by far
        near = _parts(asked.ranks) | _products(asked.ranks, asked.global_batch)
        fewer = next(filter(possible, sorted(near, reverse=True)), None)
    near = " or ".join(f"{ranks:,}" for ranks in (fewer, more) if ranks)
    fix = f"{near} ranks would do" if near else "Use a number of ranks, or of sequences, with more divisors"
    problem = (
        f"{asked.ranks:,} ranks cannot share {asked.global_batch:,} sequences of {asked.sequence:,} tokens of this "
        "model"
    )
    return JobError(problem, key="cluster.ranks", fix=fix)


def _parts(ranks: int) -> set[int]:
    """Halves, quarters and so on of a number, and its divisors."""
    small = [d for d in range(1, math.isqrt(ranks) + 1) if ranks % d == 0]
    return {*(ranks >> at for at in range(1, ranks.bit_length())), *small, *(ranks // d for d in small)} - {ranks}


def _products(ranks: int, batch: int) -> set[int]:
    """Divisors of a batch times powers of two, below a number of ranks."""
    small = [d for d in range(1, math.isqrt(batch) + 1) if batch % d == 0]
    shares = [share for share in {1, *small, *(batch // d for d in small)} if share < ranks]
    return {share << at for share in shares for at in range(((ranks - 1) // share).bit_length())}


def _beyond(asked: SearchRequest, one: _Condition, rest: SearchRequest, found: Found, fits: Fits) -> str:
    """Values that are only tried where the job says them."""
    if one.constraint is None or one.name not in ("tp", "pp", "cp"):
        return ""
    divisors = (value for value in range(2, min(asked.ranks, MOST_TRIED) + 1) if asked.ranks % value == 0)
    holding = filter(one.constraint.holds, divisors)
    for value in islice(holding, SHOWN):
        said = replace(rest, fixed={**rest.fixed, one.name: [value]}, constraints=asked.constraints)
        if _has_any(said, found) and fits(said):
            return f"; or say strategy.{one.name} = {value}, which is not tried unasked"
    return ""


# ---- values ----


def _values(rest: SearchRequest, name: str, found: Found) -> list[int]:
    """Of a column, over all arrangements, in order."""
    values = set[int]()
    for columns in islice(found(rest), LOOKED_AT):
        values |= columns.get(name, set())
    return sorted(values)


def _told(one: _Condition, values: Sequence[int]) -> str:
    assert one.constraint
    words = [word_of(one.name, value) for value in values]
    shown = words if len(words) <= SHOWN else [*words[: SHOWN - 2], "...", words[-1]]
    return f"{one.constraint.quantity} can be {', '.join(shown)}"


def _instead(given: Constraint, name: str, values: Sequence[int]) -> str:
    """The nearest constraint that leaves something."""
    quantity, sign = given.quantity, given.sign
    if sign in ("<", "<="):
        return f"{quantity} <= {values[0]}"
    if sign in (">", ">="):
        return f"{quantity} >= {values[-1]}"
    return f"{quantity} = {word_of(name, _nearest(values, given.values))}"


def _nearest(values: Sequence[int], wanted: Sequence[float]) -> int:
    """By ratio; of words, any."""
    return min(values, key=lambda value: min(_apart(value, one) for one in wanted))


def _apart(value: float, wanted: float) -> float:
    return abs(math.log(value / wanted)) if value > 0 < wanted else abs(value - wanted)


def word_of(name: str, value: float) -> str:
    """A column's value as a job says it."""
    return WORDS[name][int(value)] if name in WORDS else f"{int(value)}"


def _word_in(asked: SearchRequest, name: str, value: int) -> str:
    """As ``word_of``, as a job of these degrees says it; nothing where it takes one that is not known."""
    if name != "ring":
        return word_of(name, value)
    cp = asked.fixed.get("cp", [0])[0]
    if value == 1:
        return '"ulysses"'
    if not cp or cp % value:
        return ""
    return '"ring"' if value == cp else f"{{ ulysses = {cp // value}, ring = {value} }}"


def _listed(parts: Sequence[str]) -> str:
    return " and ".join(part for part in (", ".join(parts[:-1]), parts[-1]) if part)
