"""What is advised where nothing fits, for memory that a formula makes up: each kind of advice, the nearest
first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from plait.core.base.errors import InfeasiblePlan
from plait.core.job.constraint import Constraint
from plait.core.model.spec import ModelSpec
from plait.plan.points import RECOMPUTES, Points
from plait.plan.shortage import SURE, Shortage
from plait.plan.space import SearchRequest, enumerate_space

MODEL = ModelSpec(family="gpt", num_layers=8, hidden=1024, num_heads=16, vocab=32000, max_sequence=8200)
DEEP = ModelSpec(family="gpt", num_layers=64, hidden=1024, num_heads=64, vocab=32000, max_sequence=8200)
FULL = RECOMPUTES.index("full")
GIB = 1 << 30
Memory = Callable[[Points], Any]


def asked(*constraints: str, ranks: int = 4, batch: int = 8, **more: Any) -> SearchRequest:
    sequence, shard = more.pop("sequence", 1024), more.pop("shard", None)
    return SearchRequest(
        model=MODEL, ranks=ranks, domain=min(8, ranks), global_batch=batch, sequence=sequence, fixed=more, shard=shard,
        constraints=tuple(map(Constraint.parse, constraints)),
    )  # fmt: skip


def even(gib: float) -> Memory:
    """The same at every point."""
    return lambda points: np.full(len(points), gib)


def short(one: SearchRequest, limit: float, memory: Memory) -> Shortage:
    """limit, memory: in GiB."""
    return Shortage(one, limit * GIB, lambda points: memory(points) * GIB)


def told(one: SearchRequest, limit: float, memory: Memory) -> str:
    points = enumerate_space(one, most=2_000)
    error = short(one, limit, memory).told(points, memory(points) * GIB)
    assert isinstance(error, InfeasiblePlan)
    return str(error)


@pytest.mark.parametrize(
    ("one", "memory", "advice"),
    [
        (asked("tp = 1", "pp <= 2"), lambda p: 2 / p.tp,
         "It would fit without 'tp = 1' in plan.constraints, as with tp = 4"),
        (asked("pp <= 2", "tp = 1"), lambda p: 2 / p.tp,
         "It would fit without 'tp = 1' in plan.constraints, as with tp = 4"),
        (asked("recompute = none"), lambda p: np.where(p.recompute == FULL, 0.5, 2),
         "It would fit without 'recompute = none' in plan.constraints, as with recompute = full"),
        (asked("ulysses = 1", cp=[4], sequence=8192), lambda p: 2 * p.ring / p.cp,
         "It would fit without 'ulysses = 1' in plan.constraints, as with ulysses = 4"),
        (asked(shard="zero1"), lambda p: 2 / p.params,
         "It would fit with strategy.shard=auto, as with params = 4, grads = 4, optim = 4"),
        (asked(params=[1]), lambda p: 2 / p.params, "It would fit with strategy.shard=auto"),
        (asked(tp=[1], pp=[1]), lambda p: 2 / p.pp, "It would fit with strategy.pp=auto"),
        (asked(recompute=[0], recompute_layers=[-1]), lambda p: np.where(p.recompute == FULL, 0.5, 2),
         "It would fit with strategy.recompute=auto"),
        (asked(micro=[4]), lambda p: p.micro / 2, "It would fit with train.micro_batch_size=auto"),
        (asked(ranks=16, batch=16, sequence=8200), lambda p: 12.5 / p.cp / p.tp,
         "data.sequence_length = 8192 would do, which more ranks can share"),
        (asked(), lambda p: 24 / p.ranks,
         "32 ranks would do, 8 times as many; or use a smaller model, shorter sequences"),
        (asked(), lambda p: 4 * 62 / p.ranks, "256 ranks would do, 64 times as many; or use a smaller model, shorter"),
        (asked(), lambda p: 4 * 63 / p.ranks,
         "Use a smaller model, shorter sequences: 64 times as many ranks would not do"),
        (asked("tp = 1", "pp = 1"), lambda p: np.where((p.tp == 2) & (p.pp == 2), 0.5, 3),
         "It would fit if everything in plan.constraints but memory, and in strategy, were left open"),
        (asked(tp=[1], pp=[1]), lambda p: np.where((p.tp == 2) & (p.pp == 2), 0.5, 3),
         "It would fit if everything in plan.constraints but memory, and in strategy, were left open"),
    ],
)  # fmt: skip
def test_the_nearest_change_is_named(one: SearchRequest, memory: Memory, advice: str) -> None:
    """With which what is asked for takes at most 97 % of what there is."""
    said = told(one, 1, memory)
    assert said.startswith("No strategy fits: the smallest of ")
    assert f" than the 1 GiB there are. {advice}" in said


@pytest.mark.parametrize(
    ("limit", "advice"),
    [
        (80, "'memory <= 2.25 GiB' in place of 'memory <= 1 GiB' would do"),
        (2.25, "'memory <= 2.25 GiB' in place of 'memory <= 1 GiB' would do"),
        (2.1, "'memory <= 2.1 GiB' in place of 'memory <= 1 GiB' would do"),
        (2 / SURE, "in place of 'memory <= 1 GiB' would do"),
        (2.05, "64 times as many ranks would not do"),
    ],
)
def test_a_limit_that_is_set_too_low_is_raised_as_far_as_there_is_memory(limit: float, advice: str) -> None:
    said = told(asked("memory <= 1 GiB"), limit, even(2))
    assert "needs 2 GiB on a rank (pp=1 dp=4 cp=1 tp=1, micro-batches of 1), 1 GiB more than the 1 GiB allowed" in said
    assert advice in said


def test_the_lowest_of_several_limits_counts() -> None:
    limits = ["memory <= 3 GiB", "memory < 1 GiB", "memory >= 0.5 GiB"]
    assert short(asked(*limits), 80, even(1)).bound == GIB
    assert short(asked("memory >= 3 GiB"), 2, even(1)).bound == 2 * GIB
    assert short(asked("memory <= 3 GiB"), 2, even(1)).bound == 2 * GIB
    said = told(asked(*limits), 80, even(2))
    assert "'memory <= 2.25 GiB' in place of 'memory <= 3 GiB' and 'memory < 1 GiB' would do" in said


def test_a_limit_that_holds_is_no_condition_to_be_dropped() -> None:
    said = told(asked("memory <= 1 GiB", "tp = 1"), 1, lambda points: 2 / points.tp)
    assert "It would fit without 'tp = 1'" in said


def test_more_memory_than_anything_takes_is_asked_for() -> None:
    said = told(asked("memory >= 3 GiB"), 2, lambda points: 8 / points.tp / points.pp)
    assert said.startswith(
        "No strategy meets 'memory >= 3 GiB' in plan.constraints: those that fit into the 2 GiB there are, of "
    )
    assert "need 2 GiB to 2 GiB on a rank. 'memory >= 1.94 GiB' would do" in said


@pytest.mark.parametrize(
    ("constraints", "fixed", "memory", "fits"),
    [
        ((), {}, even(0.97), True),
        ((), {}, even(0.98), False),
        (("memory <= 0.5 GiB",), {}, even(0.6), False),
        (("memory >= 0.5 GiB",), {}, even(0.4), False),
        (("memory >= 0.5 GiB",), {}, even(0.6), True),
        (("memory = 0.5 GiB",), {}, even(0.6), False),
        (("tp = 3",), {}, even(0.1), False),
        ((), {"micro": [4]}, lambda points: points.micro / 4, False),
        ((), {"micro": [2, 4]}, lambda points: points.micro / 4, True),
    ],
)
def test_what_surely_fits(constraints: Sequence[str], fixed: dict[str, Any], memory: Memory, fits: bool) -> None:
    one = asked(*constraints, **fixed)
    assert short(asked(), 1, memory).fits(one) == fits
    assert short(replace(one, ranks=8), 1, memory).fits(one) == fits


def test_what_is_not_frugal_may_fit_all_the_same() -> None:
    """Where recomputation takes more, or a micro-batch of one."""
    assert short(asked(), 1, lambda points: np.where(points.recompute == FULL, 2, 0.5)).fits(asked())
    assert short(asked(), 1, lambda points: np.where(points.micro > 1, 0.5, 2)).fits(asked())
    assert not short(asked(), 1, even(2)).fits(asked())
    # Of a space too large to be listed, what is frugal is found where it is fixed.
    many = asked(ranks=64, batch=4096)
    assert short(many, 1, lambda points: np.where((points.recompute == FULL) & (points.micro == 1), 0.5, 2)).fits(many)


def test_a_limit_that_is_all_there_is_is_named_as_it_is() -> None:
    """Of 2 GiB, nine quarters would be named."""
    said = told(asked("memory <= 1 GiB"), 2.25, even(2))
    assert "'memory <= 2.25 GiB' in place" in said
    exact = told(asked("memory <= 1 GiB"), 2 / SURE, even(2))
    assert "would do" in exact and "64 times" not in exact


def test_no_sequence_is_named_that_is_much_shorter() -> None:
    """Of 1,100 tokens that 128 ranks cannot share: 1,024 could be, a fourteenth shorter."""
    one = asked(ranks=128, batch=128, sequence=1100, cp=[128])
    space = enumerate_space(replace(one, sequence=8192), most=2_000)
    error = short(one, 1, lambda points: np.where(points.cp == 128, 0.5, 3)).told(space, np.full(len(space), 3.0 * GIB))
    assert "data.sequence_length" not in str(error)
    near = asked(ranks=16, batch=16, sequence=8200)
    assert "data.sequence_length = 8192 would do" in told(near, 1, lambda p: 12.5 / p.cp / p.tp)
    flat = told(near, 1, even(3))
    assert "data.sequence_length" not in flat


def test_many_ranks_are_looked_for_where_many_would_do() -> None:
    """Not every number can share the batch; the fewest that can are named."""
    assert "8 ranks would do, 2 times as many" in told(asked(), 1, lambda p: np.where(p.ranks >= 8, 0.5, 2))
    said = told(asked(), 1, lambda p: np.where(p.ranks >= 128, 0.5, 2))
    assert "128 ranks would do, 32 times as many" in said
    alone = told(asked(), 1, lambda p: np.where(p.ranks == 8, 0.5, 2))
    assert "64 times as many ranks would not do" in alone  # of which many make no sense
    assert "256 ranks would do" in told(asked(), 1, lambda p: np.where(p.ranks == 256, 0.5, 2))


def test_the_most_frugal_of_many_arrangements_is_looked_for_among_some() -> None:
    """A space of more than two thousand points has every second or third of them asked."""
    sizes = list[int]()

    def memory(points: Points) -> Any:
        sizes.append(len(points))
        return np.full(len(points), 2.0)

    big = replace(asked(ranks=512, batch=512), model=DEEP)
    assert not short(big, 1, memory).fits(big)
    assert max(sizes) <= 1 << 11
