"""How one strategy stands to what its job asks of every strategy (``plan.constraints``).

A search leaves out what does not meet them. A strategy that was evaluated on its own is told whether it does:
that is asked of it, not of others, so that a constraint which it breaks is an answer and no refusal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from plait.core.base.text import in_bytes
from plait.core.job.constraint import SIZES, Constraint
from plait.core.job.spec import Job
from plait.core.parallel.strategy import WORDS
from plait.core.step.columns.points import SCHEDULES
from plait.plan.reasons import schedule_of
from plait.plan.space import column_of


@dataclass(frozen=True)
class Respected:
    """A constraint as the job has it, whether it is met, and the values that the strategy has instead: one,
    or one for every place of a pipeline where these differ."""

    text: str
    met: bool
    found: tuple[str, ...]

    @property
    def told(self) -> str:
        """In words."""
        return f"'{self.text}' is {'' if self.met else 'not '}met ({', '.join(self.found)})"

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


def respected(job: Job, point: Mapping[str, int], memory: int) -> list[Respected]:
    """Every constraint of a job that leaves nothing open, in its order. point: at which it stands. memory:
    bytes of the fullest rank."""
    places = [values | {"memory": memory} for values in _places(job, point)]
    found = list[Respected]()
    for one in map(Constraint.parse, job.plan.constraints):
        values = list(dict.fromkeys(place[column_of(one)] for place in places))
        words = tuple(_word(one.quantity, value) for value in values)
        found.append(Respected(one.text, all(bool(one.holds(value)) for value in values), words))
    return found


def told_constraints(found: Sequence[Respected]) -> list[str]:
    """All of them in a sentence, those that are not met first; none where there are none."""
    parts = [one.told for one in sorted(found, key=lambda one: one.met)]
    return [f"plan.constraints: {'; '.join(parts)}."] if parts else []


def _places(job: Job, point: Mapping[str, int]) -> list[dict[str, int | str]]:
    """What constraints are about, of every place of a job's pipeline. A schedule that is no known one has its
    own name: 1f1b stands for it in points."""
    known = job.strategy.schedule in SCHEDULES
    more = {"ulysses": point["cp"] // point["ring"]} | ({} if known else {"schedule": schedule_of(job, point)})
    if len(set(job.degrees)) == 1:
        return [{**point, **more}]
    found = list[dict[str, int | str]]()
    for dp, tp in dict.fromkeys(job.degrees):
        sharding = job.sharding(dp * point["cp"])
        shard = {key: getattr(sharding, key) for key in ("params", "grads", "optim", "secondary")}
        found.append({**point, **more, **shard, "dp": dp, "tp": tp, "micro": -(-job.micro_batch // dp)})
    return found


def _word(quantity: str, value: int | str) -> str:
    if isinstance(value, str):
        return value
    if quantity in SIZES:
        return in_bytes(value)
    if quantity == "sequence_parallel":
        return "true" if value else "false"
    return WORDS[quantity][value] if quantity in WORDS else f"{value}"
