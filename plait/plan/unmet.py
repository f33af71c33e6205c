"""Why a strategy space is empty: which condition of the job leaves nothing, and what would be enough.

Conditions are what the job fixes (``strategy.tp = 4``) and its constraints (``tp <= 8``). One that alone is
too much is looked for first; otherwise they are taken up one after the other, and those that leave nothing
beside the ones before are what has to change.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice
from typing import TYPE_CHECKING

from plait.core.constraint import WORDS, Constraint
from plait.core.errors import JobError

if TYPE_CHECKING:
    from plait.plan.space import SearchRequest

Found = Callable[["SearchRequest"], Iterator[Mapping[str, set[int]]]]
"""Of every arrangement of ranks with any strategy, the values of its columns."""

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


@dataclass(frozen=True)
class _Condition:
    """A constraint, or what the job fixes of a column."""

    name: str
    constraint: Constraint | None = None

    def key(self) -> str:
        """Of the job file."""
        return "plan.constraints" if self.constraint else key_of(self.name)


def key_of(name: str) -> str:
    """Where a job says what a column holds."""
    return KEYS.get(name, f"strategy.{name}")


def column_of(one: Constraint) -> str:
    """What it is about."""
    return COLUMNS.get(one.quantity, one.quantity)


def nothing(asked: SearchRequest, found: Found) -> JobError:
    """What to say of a request without any strategy."""
    conditions = [*(_Condition(column_of(one), one) for one in asked.constraints), *map(_Condition, asked.fixed)]
    for one in conditions:
        rest = _only(asked, [other for other in conditions if other is not one])
        if any(True for _ in found(rest)):
            return _alone(asked, one, rest, found)
    return _together(asked, conditions, found)


def _only(asked: SearchRequest, conditions: Sequence[_Condition]) -> SearchRequest:
    """The request with no others."""
    return replace(
        asked,
        constraints=[one.constraint for one in conditions if one.constraint],
        fixed={one.name: asked.fixed[one.name] for one in conditions if not one.constraint},
    )


def _alone(asked: SearchRequest, one: _Condition, rest: SearchRequest, found: Found) -> JobError:
    """A condition without which there would be something."""
    values = _values(rest, one.name, found)
    if one.constraint is None:
        said = word_of(one.name, asked.fixed[one.name][0])
        near = word_of(one.name, _nearest(values, asked.fixed[one.name]))
        problem = f"{said} fits no arrangement of {asked.ranks:,} ranks with the rest that the job says"
        return JobError(problem, key=one.key(), fix=f"{near} would do, or auto")
    text = one.constraint.text
    problem = f"'{text}' leaves no strategy for {asked.ranks:,} ranks: {_told(one, values)}"
    fix = f"'{_instead(one.constraint, one.name, values)}' would do"
    beyond = _beyond(asked, one, rest, found)
    return JobError(problem, key=one.key(), fix=f"{fix}{beyond}")


def _together(asked: SearchRequest, conditions: Sequence[_Condition], found: Found) -> JobError:
    """Conditions of which several would have to change; or none of which is to blame."""
    kept = list[_Condition]()
    if not any(True for _ in found(_only(asked, kept))):
        return _ranks(asked, found)
    changed, there = list[str](), _only(asked, kept)
    left = [one for one in conditions if not one.constraint] + [one for one in conditions if one.constraint]
    refused = list[_Condition]()
    for one in left:
        with_it = _with(there, asked, one)
        if any(True for _ in found(with_it)):
            there, kept = with_it, [*kept, one]
            continue
        values = _values(there, one.name, found)
        refused.append(one)
        if one.constraint:
            instead = _instead(one.constraint, one.name, values)
            changed.append(f"'{instead}' for '{one.constraint.text}'")
            there = replace(there, constraints=[*there.constraints, Constraint.parse(instead)])
        else:
            near = _nearest(values, asked.fixed[one.name])
            changed.append(f"{one.key()} = {word_of(one.name, near)}")
            there = replace(there, fixed={**there.fixed, one.name: [near]})
    if not refused:  # rules that only whole points break
        return _ranks(asked, found)
    said = [f"'{one.constraint.text}'" if one.constraint else one.key() for one in refused]
    problem = f"{_listed(said)} leave no strategy for {asked.ranks:,} ranks with the rest that the job says"
    return JobError(problem, key=refused[0].key(), fix=f"{_listed(changed)} would do")


def _with(there: SearchRequest, asked: SearchRequest, one: _Condition) -> SearchRequest:
    if one.constraint:
        return replace(there, constraints=[*there.constraints, one.constraint])
    return replace(there, fixed={**there.fixed, one.name: asked.fixed[one.name]})


def _ranks(asked: SearchRequest, found: Found) -> JobError:
    """No arrangement at all: the nearest number of ranks that has one."""

    def possible(ranks: int) -> bool:
        other = replace(asked, ranks=ranks, domain=min(ranks, asked.domain), constraints=(), fixed={})
        return any(True for _ in found(other))

    fewer = next(filter(possible, islice(range(asked.ranks - 1, 0, -1), NEAR)), None)
    more = next(filter(possible, islice(count(asked.ranks + 1), NEAR)), None)
    if not fewer and not more:  # too many by far
        fewer = next(filter(possible, sorted(_parts(asked.ranks), reverse=True)), None)
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


def _beyond(asked: SearchRequest, one: _Condition, rest: SearchRequest, found: Found) -> str:
    """Values that are only tried where the job says them."""
    if one.constraint is None or one.name not in ("tp", "pp", "cp"):
        return ""
    divisors = (value for value in range(2, min(asked.ranks, MOST_TRIED) + 1) if asked.ranks % value == 0)
    holding = filter(one.constraint.holds, divisors)
    for value in islice(holding, SHOWN):
        if any(True for _ in found(replace(rest, fixed={**rest.fixed, one.name: [value]}))):
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


def _listed(parts: Sequence[str]) -> str:
    return " and ".join(part for part in (", ".join(parts[:-1]), parts[-1]) if part)
