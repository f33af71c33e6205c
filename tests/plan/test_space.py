"""The strategy space: every point makes a job that ``Job.check`` accepts, and respects what the job asks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.core.constraint import Constraint
from plait.core.errors import JobError
from plait.core.job import Job
from plait.core.model import ModelSpec
from plait.plan.asking import job_at
from plait.plan.points import SCHEDULES, Points
from plait.plan.space import (
    COARSEST,
    QUANTITIES,
    Coarseness,
    SearchRequest,
    cells_of,
    enumerate_cells,
    enumerate_space,
    factors,
)

SHAPES = {
    "family": "llama",
    "num_layers": 12,
    "hidden": 64,
    "num_heads": 8,
    "num_kv_heads": 4,
    "ffn_hidden": 192,
    "vocab": 1000,
}
SEQUENCE = 2048
MODEL = ModelSpec.from_dict({**SHAPES, "max_sequence": SEQUENCE})


def space(ranks: int, batch: int, *constraints: str, fixed: dict[str, list[int]] | None = None) -> SearchRequest:
    return SearchRequest(
        model=MODEL, ranks=ranks, domain=min(8, ranks), global_batch=batch, sequence=SEQUENCE, fixed=fixed or {},
        constraints=tuple(map(Constraint.parse, constraints)),
    )  # fmt: skip


def job(batch: int, ranks: int) -> Job:
    return Job.from_dict(
        {
            "model": {**SHAPES, "max_sequence": SEQUENCE},
            "data": {"sequence_length": SEQUENCE},
            "train": {"global_batch_size": batch},
            "cluster": {"preset": "h100", "ranks": ranks},
        }
    )


@given(
    ranks=st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16, 24, 64]),
    batch=st.sampled_from([1, 4, 12, 48, 96]),
    most=st.sampled_from([300, 3_000, 30_000]),
    seed=st.integers(0, 99),
)
def test_every_point_makes_a_job(ranks: int, batch: int, most: int, seed: int) -> None:
    asked, one = space(ranks, batch), job(batch, ranks)
    if next(cells_of(asked, Coarseness()), None) is None:
        with pytest.raises(JobError, match="ranks"):
            enumerate_space(asked, most=most)
        return
    points = enumerate_space(asked, most=most)
    assert np.all(points.ranks == ranks)
    assert np.all(points.micro * points.num_micro * points.dp == batch)
    for at in np.random.default_rng(seed).integers(len(points), size=8):
        made = job_at(one, points.row(int(at)))  # raises JobError for what Job.check refuses
        assert made.world_size == ranks
        assert made.num_micro_batches == points.num_micro[at]


def rows(points: Points) -> set[tuple[int, ...]]:
    return set(zip(*(getattr(points, one.name).tolist() for one in fields(Points)), strict=True))


@settings(max_examples=20)
@given(
    ranks=st.sampled_from([2, 4, 8]),
    chosen=st.lists(
        st.sampled_from(
            ["tp <= 2", "pp in 1, 2", "cp = 1", "schedule in 1f1b, zb-v", "recompute != full", "params == 1",
             "micro_batch_size >= 2", "sequence_parallel = false", "optim >= 2", "p1 <= 2", "num_micro_batches <= 8",
             "schedule = zb-v", "virtual_stages >= 2", "ulysses <= 1", "ring >= 2", "dp != 2"]
        ), min_size=1, max_size=3, unique=True,
    ),
)  # fmt: skip
def test_constraints_leave_exactly_what_meets_them(ranks: int, chosen: Sequence[str]) -> None:
    every = enumerate_space(space(ranks, 8), most=10**9)
    constraints = [Constraint.parse(text) for text in chosen]
    columns = {QUANTITIES.get(name, name): column for name, column in every.columns().items()}
    columns["ulysses"] = every.cp // every.ring
    held = np.all([one.holds(columns[one.quantity]) for one in constraints], axis=0)
    if not held.any():
        with pytest.raises(JobError):
            enumerate_space(space(ranks, 8, *chosen), most=10**9)
        return
    assert rows(enumerate_space(space(ranks, 8, *chosen), most=10**9)) == rows(every.take(held))


def test_points_are_different_and_coarser_spaces_are_parts_of_the_whole() -> None:
    asked = space(8, 8)
    whole = enumerate_space(asked, most=10**9)
    assert len(rows(whole)) == len(whole)
    for most in (100, 1_000):
        assert rows(enumerate_space(asked, most=most)) < rows(whole)
    cells = list(cells_of(asked, Coarseness()))
    assert rows(enumerate_cells(asked, cells, most=10**9)) == rows(whole)
    assert len(list(cells_of(asked, Coarseness(COARSEST)))) <= len(cells)


@pytest.mark.parametrize(
    ("tp", "domain", "fine", "coarse"),
    [(1, 8, {1, 2, 4, 8}, {1, 8}), (2, 8, {1, 2, 4, 8}, {1, 2, 8}), (4, 8, {1, 2, 4, 8}, {1, 4, 8}),
     (2, 4, {1, 2, 4, 8}, {1, 4, 8}), (2, 1, {1, 2, 4, 8}, {1, 8})],
)  # fmt: skip
def test_coarse_rings_exchange_heads_within_the_innermost_links(
    tp: int, domain: int, fine: set[int], coarse: set[int]
) -> None:
    """All heads, all rings, and heads among the ranks of a domain with rings between them."""
    model = replace(MODEL, num_heads=64, num_kv_heads=64)
    asked = replace(space(8 * tp, 8, fixed={"pp": [1], "tp": [tp], "cp": [8]}), model=model, domain=domain)
    for level, want in ((1, fine), (2, coarse)):
        assert {cell.ring for cell in cells_of(asked, Coarseness(level))} == want


def test_a_coarser_space_keeps_what_the_job_asks_for() -> None:
    """Though a coarse one has no sequences cut so short."""
    points = enumerate_space(space(6, 5, "cp = 2"), most=300)
    assert set(points.cp.tolist()) == {2}


def test_what_the_job_fixes_is_all_there_is() -> None:
    points = enumerate_space(space(16, 16, fixed={"pp": [4], "schedule": [SCHEDULES.index("gpipe")]}))
    assert set(points.pp.tolist()) == {4}
    assert set(points.schedule.tolist()) == {SCHEDULES.index("gpipe")}


@pytest.mark.parametrize(
    ("asked", "key", "words"),
    [
        (space(16, 16, "tp > 8"), "plan.constraints", "'tp > 8' leaves no strategy for 16 ranks"),
        (space(16, 16, "tp = 1", "dp > 16"), "plan.constraints", "'dp > 16' leaves no strategy"),
        (space(16, 16, fixed={"pp": [3]}), "strategy.pp", "3 fits no arrangement of 16 ranks"),
        (space(17, 16), "cluster.ranks", "17 ranks cannot share 16 sequences"),
        (
            space(16, 16, fixed={"schedule": [SCHEDULES.index("zb-v")], "virtual": [1], "pp": [4]}),
            "strategy.virtual_stages",
            "1 fits no arrangement.*strategy.virtual_stages=auto would do, or 2",
        ),
    ],
)
def test_the_condition_that_leaves_nothing_is_named(asked: SearchRequest, key: str, words: str) -> None:
    with pytest.raises(JobError, match=words) as caught:
        enumerate_space(asked)
    assert caught.value.key == key


@given(replicas=st.integers(1, 600), local=st.sampled_from([1, 2, 4, 8]), few=st.booleans())
def test_shard_factors_divide_and_have_both_ends(replicas: int, local: int, few: bool) -> None:
    found = factors(replicas, local, few=few)
    assert found == tuple(sorted(set(found)))
    assert (found[0], found[-1]) == (1, replicas)
    assert all(replicas % one == 0 for one in found)
    if not few:
        assert set(found) >= {one for one in range(1, local + 1) if local % one == 0 == replicas % one}


@pytest.mark.parametrize(("layers", "most", "virtual"), [
    (64, 10**9, {2, 4, 8, 16}), (64, 1, {2, 4}), (12, 10**9, {2, 3, 6}), (12, 1, {2, 3}), (2, 10**9, set()),
])  # fmt: skip
def test_stages_of_a_rank_divide_its_layers(layers: int, most: int, virtual: set[int]) -> None:
    """Sixteen at most, four in the coarsest space."""
    one = {"pp": [2], "tp": [1], "cp": [1], "schedule": [SCHEDULES.index("interleaved"), SCHEDULES.index("1f1b")]}
    points = enumerate_space(replace(space(2, 2, fixed=one), model=replace(MODEL, num_layers=layers)), most=most)
    assert set(points.virtual.tolist()) == virtual | {1}
    assert set(points.virtual[points.schedule == SCHEDULES.index("1f1b")].tolist()) == {1}
