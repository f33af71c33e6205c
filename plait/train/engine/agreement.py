"""What all ranks must have alike before the first step: the plan, the package, their lists of ops.

Lists are made on every rank, from floats, and collectives are matched by their order alone: gloo adds what
does not belong together without a word, NCCL hangs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import plait
from plait.core.base.errors import ScheduleError
from plait.train.comm.objects import gather
from plait.train.engine.assembly import RankPart


class Statement(NamedTuple):
    """What a rank goes by. place: of the pipeline; ranks of one place have the same lists."""

    version: str
    plan: str
    schedule: str
    place: int
    lists: str


def statement(part: RankPart) -> Statement:
    """This rank's, over the very lists that it will run."""
    lists = hashlib.sha256()
    for stage, executor in sorted(part.pipeline.executors.items()):
        for phase, programme in executor.programmes.items():
            words = " ".join(f"{action.verb}:{action.op}" for action, _ in programme)
            lists.update(f"{stage} {phase} {words}\n".encode())
    schedule = hashlib.sha256(str(part.pipeline.schedule).encode()).hexdigest()
    return Statement(plait.__version__, part.plan.hash, schedule, part.groups.place, lists.hexdigest())


def agree(part: RankPart) -> None:
    """Raise ScheduleError on every rank, naming the ranks that go by something else than rank 0 (lists: than
    the first rank of their place), and what it is."""
    own = statement(part)
    raise_if_different([Statement(*one) for one in gather(own)])


def raise_if_different(found: Sequence[Statement]) -> None:
    """``agree`` once everybody's statement is known, in the order of ranks."""
    first = {one.place: one for one in reversed(found)}
    checks: list[tuple[str, Callable[[Statement], tuple[str, str]], str]] = [
        ("version of Plait", lambda one: (one.version, found[0].version), "every host needs the same"),
        ("plan", lambda one: (one.plan, found[0].plan), "every host needs the same plan.json"),
        ("pipeline schedule", lambda one: (one.schedule, found[0].schedule), "every host needs the same software"),
        ("order of segment ops", lambda one: (one.lists, first[one.place].lists), "hosts compute costs differently"),
    ]
    for what, pair, why in checks:
        others = [rank for rank, one in enumerate(found) if len(set(pair(one))) > 1]
        if others:
            rank, (theirs, ours) = others[0], pair(found[others[0]])
            names = ", ".join(map(str, others))
            raise ScheduleError(
                f"rank{'s' * (len(others) > 1)} {names} would run another {what} than the others (rank {rank} has "
                f"{theirs[:12]}, not {ours[:12]}): {why}."
            )
