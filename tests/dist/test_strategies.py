"""A hundred strategies drawn from the whole space are the unsharded computation; what the rules refuse is not
drawn."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import lcm
from typing import Any, get_args

import pytest

from plait.core.errors import JobError
from plait.core.layout import SequenceCut
from plait.core.model import ModelSpec
from plait.core.schedules import GENERATORS
from plait.core.sharding import Sharding
from plait.core.strategy import Recompute, ShardOverlap, Strategy
from tests.dist import pipelining
from tests.dist.equality import SEQUENCE
from tests.dist.test_pipeline import GPT, LLAMA, TOLERANCE
from tests.ranks import Ranks

COUNT, IN_SUITE, SEED = 100, 8, 20261121  # in the suite: the first that need no more than four ranks


@dataclass(frozen=True)
class Drawn:
    """One strategy: degrees of every place, and what else there is to choose."""

    spec: ModelSpec
    degrees: tuple[tuple[int, int], ...]
    schedule: str
    p1: int
    sequence_parallel: bool
    shardings: tuple[Sharding, ...]
    cut: SequenceCut
    more: dict[str, Any]

    @property
    def world(self) -> int:
        return self.cut.cp * sum(dp * tp for dp, tp in self.degrees)

    def check(self) -> None:
        """Raise JobError where the planner's rules refuse it."""
        for (dp, tp), sharding in zip(self.degrees, self.shardings, strict=True):
            strategy = Strategy(
                tp=tp, p1=self.p1, sequence_parallel=self.sequence_parallel, cp=self.cut.cp, ring=self.cut.ring
            )
            strategy.check(self.spec, batch=pipelining.MICRO // dp, sequence=SEQUENCE)
            sharding.check(dp * self.cut.cp)


def draw(chance: random.Random) -> Drawn:
    """Any strategy of up to 8 ranks, valid or not."""
    name = chance.choice(list(GENERATORS))
    pp = chance.choice((1, 1, 2, 2, 3, 4))
    degrees = [(chance.choice((1, 2, 4)), chance.choice((1, 2, 4)))] * pp
    if chance.random() < 0.3:
        degrees = [(chance.choice((1, 2)), chance.choice((1, 2))) for _ in degrees]
    cp = chance.choice((1, 1, 2, 4))
    cut = SequenceCut(cp=cp, ring=chance.choice((1, 2, 4)))
    shardings = []
    for dp, _ in degrees:
        params, grads, optim = sorted(chance.choice((1, 2, 4, 8)) for _ in range(3))
        optim = min(optim, dp * cp)
        shardings.append(
            Sharding(
                params=min(params, optim), grads=min(grads, optim), optim=optim, secondary=chance.choice((0, 0, 2))
            )
        )
    stages = pp * pipelining.CHUNKS.get(name, 1)
    spec = replace(chance.choice((GPT, LLAMA)), num_layers=lcm(stages, 2), tied_embeddings=chance.random() < 0.5)
    spec = replace(spec, attention_dropout=0.0) if cut.ring > 1 else spec
    spec = replace(spec, parallel_block=chance.random() < 0.25)
    kinds: tuple[Recompute, ...] = ("none", "selective", "full")
    more = {"recompute": chance.choice(kinds), "recompute_layers": chance.choice((None, None, 1))}
    more["shard_overlap"] = chance.choice(("both", "both", *get_args(ShardOverlap)))
    return Drawn(spec, tuple(degrees), name, chance.choice((1, 2)), chance.random() < 0.3, tuple(shardings), cut, more)


def sample() -> list[Drawn]:
    """The first ``COUNT`` that the rules allow, on 2 to 8 ranks."""
    chance, found = random.Random(SEED), list[Drawn]()
    while len(found) < COUNT:
        one = draw(chance)
        try:
            one.check()
        except (JobError, AssertionError):
            continue
        if one.world in (2, 4, 6, 8) and one.cut.cp % one.cut.ring == 0:
            found.append(one)
    return found


def cases() -> Iterator[Any]:
    """The sample, a part of it in the suite."""
    small = 0
    for number, one in enumerate(sample()):
        small += one.world <= 4
        yield pytest.param(
            one, id=str(number), marks=() if one.world <= 4 and small <= IN_SUITE else pytest.mark.contract
        )


@pytest.mark.parametrize("one", list(cases()))
def test_a_strategy_of_the_space_equals_the_reference(pool: Callable[[int], Ranks], one: Drawn) -> None:
    args = (
        one.spec,
        one.degrees,
        one.schedule,
        one.p1,
        one.sequence_parallel,
        None,
        (),
        one.shardings,
        one.cut,
        one.more,
    )
    for error, what in pool(one.world).run(pipelining.worst_error, *args):
        assert error < TOLERANCE, f"{one}: {what} is off by {error:.1e}"
