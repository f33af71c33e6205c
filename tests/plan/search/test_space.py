"""The strategy space: every point makes a job that ``Job.check`` accepts, and respects what the job
asks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.core.base.errors import JobError
from plait.core.job.constraint import Constraint
from plait.core.job.spec import Job
from plait.core.model.experts import Experts
from plait.core.model.spec import ModelSpec
from plait.core.step.columns.points import OVERLAPS, SCHEDULES, SHARD_OVERLAPS, WORDS, StrategyTable
from plait.core.step.schedules import GENERATORS
from plait.plan.search.choices import CellChoices, factors
from plait.plan.search.request import job_at
from plait.plan.search.space import (
    COARSEST,
    QUANTITIES,
    Cell,
    Coarseness,
    SearchRequest,
    any_point,
    cells_of,
    coarseness_of,
    enumerate_around,
    enumerate_space,
    other_stream,
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

TRIED = {SCHEDULES.index(name) for name, one in GENERATORS.items() if one.tried}


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


def rows(points: StrategyTable) -> set[tuple[int, ...]]:
    return set(zip(*(getattr(points, one.name).tolist() for one in fields(StrategyTable)), strict=True))


@settings(max_examples=20)
@given(
    ranks=st.sampled_from([2, 4, 8]),
    chosen=st.lists(
        st.sampled_from(
            ["tp <= 2", "pp in 1, 2", "cp = 1", "schedule in 1f1b, zb-v", "recompute != full", "params == 1",
             "micro_batch_size >= 2", "sequence_parallel = false", "optim >= 2",
              "batch_slices <= 2", "num_micro_batches <= 8",
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
    assert rows(enumerate_space(space(ranks, 8, *chosen), most=10**9)) == rows(every.take(held))


def test_points_are_different_and_coarser_spaces_are_parts_of_the_whole() -> None:
    asked = space(8, 8)
    whole = enumerate_space(asked, most=10**9)
    assert len(rows(whole)) == len(whole)
    for most in (100, 1_000):
        assert rows(enumerate_space(asked, most=most)) < rows(whole)
    cells = list(cells_of(asked, Coarseness()))
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


def test_a_coarse_space_has_a_few_strategies_of_sequences_that_are_cut_short() -> None:
    """Of 2,048 tokens in two. What is around the best of them is searched; without them nothing
    would be."""
    asked = space(8, 64)
    points = enumerate_space(asked, most=1)
    cut, whole = points.take(points.cp == 2), points.take(points.cp == 1)
    assert set(points.cp.tolist()) == {1, 2}
    assert set(cut.optim.tolist()) == set(cut.replicas.tolist()) | {1}, "shared out over all, or over none"
    assert max(cut.p1.tolist()) == 2 < max(whole.take(whole.tp > 1).p1.tolist())
    around = enumerate_around(asked, cut.take(slice(0, 1)))
    assert len(set(around.optim.tolist())) > 2


def test_what_the_job_fixes_is_all_there_is() -> None:
    points = enumerate_space(space(16, 16, fixed={"pp": [4], "schedule": [SCHEDULES.index("gpipe")]}))
    assert set(points.pp.tolist()) == {4}
    assert set(points.schedule.tolist()) == {SCHEDULES.index("gpipe")}


@given(replicas=st.integers(1, 600), local=st.sampled_from([1, 2, 4, 8]), few=st.booleans())
def test_shard_factors_divide_and_have_both_ends(replicas: int, local: int, few: bool) -> None:
    found = factors(replicas, local, few=few)
    assert found == tuple(sorted(set(found)))
    assert (found[0], found[-1]) == (1, replicas)
    assert all(replicas % one == 0 for one in found)
    if not few:
        assert set(found) >= {one for one in range(1, local + 1) if local % one == 0 == replicas % one}


def test_the_other_stream_of_an_arrangement_is_tried_where_it_is_allowed() -> None:
    cell = Cell(pp=1, dp=2, cp=1, ring=1, tp=2, sequence_parallel=1, ep=1)
    assert other_stream(space(4, 8), cell) == replace(cell, sequence_parallel=0)
    assert other_stream(space(4, 8), replace(cell, sequence_parallel=0)) == cell
    assert other_stream(space(4, 8, fixed={"sequence_parallel": [1]}), cell) is None
    assert other_stream(space(4, 8, "sequence_parallel == 1"), cell) is None
    assert other_stream(space(4, 8), replace(cell, dp=4, tp=1, sequence_parallel=0)) is None


@pytest.mark.parametrize(("layers", "most", "virtual"), [
    (64, 10**9, {2, 4, 8, 16}), (64, 1, {2, 4}), (12, 10**9, {2, 3, 6}), (12, 1, {2, 3}), (2, 10**9, set()),
])  # fmt: skip
def test_stages_of_a_rank_divide_its_layers(layers: int, most: int, virtual: set[int]) -> None:
    """Sixteen at most, four in the coarsest space."""
    one = {"pp": [2], "tp": [1], "cp": [1], "schedule": [SCHEDULES.index("interleaved"), SCHEDULES.index("1f1b")]}
    points = enumerate_space(replace(space(2, 2, fixed=one), model=replace(MODEL, num_layers=layers)), most=most)
    assert set(points.virtual.tolist()) == virtual | {1}
    assert set(points.virtual[points.schedule == SCHEDULES.index("1f1b")].tolist()) == {1}


# ---- what is tried unasked ----


def tried(asked: SearchRequest, name: str, level: int = 0) -> set[int]:
    """Values of a column, in a space of a coarseness."""
    cells = list(cells_of(asked, Coarseness(level)))
    if name in {one.name for one in fields(Cell)}:
        return {getattr(cell, name) for cell in cells}
    known = CellChoices(asked)
    return {
        value[names.index(name)]
        for cell in cells
        for names, values in known.choices(cell, Coarseness(level)).items() if name in names
        for value in values
    }  # fmt: skip


ONE: dict[str, Any] = {"pp": [1], "tp": [1], "cp": [1]}


def tried_in(
    ranks: int, batch: int, *constraints: str, layers: int = 12, domain: int = 8, shard: str | None = None, **fixed: Any
) -> SearchRequest:
    """A request; what is fixed as a value or several, words as the job has them."""
    columns = {
        name: [WORDS[name].index(one) if isinstance(one, str) else one for one in each]
        for name, each in ((name, value if isinstance(value, list) else [value]) for name, value in fixed.items())
    }
    asked = space(ranks, batch, *constraints, fixed=columns)
    model = replace(MODEL, num_layers=layers)
    return replace(asked, model=model, domain=min(domain, ranks), shard=shard)


def powers(most: int) -> set[int]:
    return {1 << at for at in range(most.bit_length())}


@pytest.mark.parametrize(
    ("asked", "name", "level", "values"),
    [
        # Within a node, to the depth of the model or 64.
        (tried_in(64, 64), "tp", 0, {1, 2, 4, 8}),
        (tried_in(64, 64, tp=2), "tp", 0, {2}),
        (tried_in(64, 64, domain=4), "tp", 0, {1, 2, 4}),
        (tried_in(64, 64, tp=8, domain=4), "tp", 0, {8}),
        (tried_in(64, 64), "pp", 0, {1, 2, 4, 8}),
        (tried_in(128, 128, layers=128), "pp", 0, powers(64)),
        (tried_in(128, 128, pp=128, layers=128), "pp", 0, {128}),
        # Sequences of 2,048 are not cut to less than 512 tokens, nor, in a coarse space, to less than 1,024.
        (tried_in(8, 8), "cp", 0, {1, 2, 4}),
        (tried_in(8, 8), "cp", 2, {1, 2, 4}),
        (tried_in(8, 8), "cp", 3, {1, 2}),
        (tried_in(8, 8, cp=8), "cp", 3, {8}),
        (tried_in(6, 6), "dp", 0, {1, 2, 3, 6}),
        (tried_in(8, 4), "dp", 0, {1, 2, 4}),
        (tried_in(8, 8, "dp <= 2"), "dp", 0, {1, 2}),
        (tried_in(8, 8, "ulysses >= 2"), "ring", 0, {1, 2}),
        # Without tensor parallelism no stream is cut; with it the coarse space has it always.
        (tried_in(2, 2, tp=1), "sequence_parallel", 0, {0}),
        (tried_in(2, 2, tp=1), "sequence_parallel", 7, {0}),
        (tried_in(2, 2, tp=2), "sequence_parallel", 6, {0, 1}),
        (tried_in(2, 2, tp=2), "sequence_parallel", 7, {1}),
        # Micro-batches
        (tried_in(1, 48, **ONE), "micro", 3, {1, 2, 3, 4, 6, 8, 12, 16, 24, 48}),
        (tried_in(1, 48, **ONE), "micro", 4, {1, 2, 4, 8, 16}),
        (tried_in(1, 128, **ONE), "micro", 0, powers(64)),
        (tried_in(1, 128, **ONE), "micro", 4, powers(16)),
        (tried_in(1, 8192, **ONE), "num_micro", 0, {128 << at for at in range(6)}),
        (tried_in(1, 128, **ONE, micro=128), "num_micro", 0, {1}),
        (tried_in(1, 48, "num_micro_batches in 3, 4", **ONE), "micro", 0, {12, 16}),
        (tried_in(1, 48, **ONE, micro=[5, 6]), "micro", 0, {6}),
        # Recomputation of a quarter, a half, three quarters of a stage's layers
        (tried_in(1, 2, **ONE), "recompute_layers", 0, {-1, 3, 6, 9}),
        (tried_in(1, 2, **ONE), "recompute_layers", 1, {-1}),
        (tried_in(2, 2, pp=2, schedule="1f1b"), "recompute_layers", 0, {-1, 1, 3, 4}),
        (tried_in(1, 2, **ONE, layers=2), "recompute_layers", 0, {-1, 1}),
        (tried_in(1, 2, **ONE, layers=1), "recompute_layers", 0, {-1}),
        (tried_in(1, 2, **ONE, recompute=1), "recompute_layers", 0, {-1}),
        (tried_in(1, 2, **ONE, recompute_layers=2), "recompute_layers", 0, {2}),
        (tried_in(1, 2, **ONE), "recompute", 0, {0, 1, 2}),
        # Schedules
        (tried_in(1, 2, **ONE), "schedule", 0, {SCHEDULES.index("1f1b")}),
        (tried_in(1, 2, **ONE, schedule="zb-v"), "schedule", 0, {SCHEDULES.index("1f1b")}),
        (tried_in(2, 2, pp=2), "schedule", 0, TRIED),
        (tried_in(2, 2, pp=2, schedule="zb-v"), "virtual", 0, {2}),
        (tried_in(2, 2, pp=2, schedule="zb-v", virtual=1), "virtual", 0, set()),
        (tried_in(2, 2, pp=2, schedule="1f1b", virtual=2), "virtual", 0, set()),
        (tried_in(2, 2, pp=2, schedule="interleaved", virtual=5), "virtual", 0, {5}),
        (tried_in(2, 2, pp=2, schedule="interleaved", virtual=[6, 7]), "virtual", 0, {6}),
        (tried_in(2, 2, pp=2, schedule="zb-v", layers=3), "virtual", 0, set()),
        # A replica's batch that is no power of two may be one micro-batch
        (tried_in(4, 12, dp=4), "micro", 4, {1, 3}),
        (tried_in(2, 36, dp=2), "micro", 4, {1, 2}),
        # Sharding
        (tried_in(8, 8, **ONE), "params", 0, {1, 2, 4, 8}),
        (tried_in(8, 8, **ONE), "params", 5, {1, 8}),
        (tried_in(64, 64, **ONE), "optim", 0, {1, 2, 4, 8, 32, 64}),
        (tried_in(64, 64, **ONE), "secondary", 0, {0, 8}),
        (tried_in(64, 64, pp=1, tp=8, cp=1), "secondary", 0, {0}),
        (tried_in(64, 64, pp=1, tp=4, cp=1), "secondary", 0, {0, 2}),
        (tried_in(8, 8, **ONE), "secondary", 0, {0}),
        (tried_in(8, 8, **ONE, shard="zero2"), "params", 0, {1}),
        (tried_in(8, 8, **ONE, shard="zero2"), "grads", 0, {8}),
        # Slices, where something is sent
        (tried_in(1, 8, **ONE), "p1", 0, {1}),
        (tried_in(2, 8, tp=2), "p1", 5, {1, 2, 4, 8}),
        (tried_in(2, 8, tp=2), "p1", 6, {1, 2, 4}),
        (tried_in(2, 8, cp=2), "p1", 0, {1, 2, 4, 8}),
        (tried_in(2, 4, tp=2), "p1", 0, {1, 2, 4}),
        (tried_in(2, 8, tp=2), "p2", 5, {1, 2}),
        (tried_in(2, 8, tp=2), "p2", 6, {1}),
        (tried_in(2, 8, cp=2), "p2", 0, {1}),
        (tried_in(2, 8, tp=2, p2=3), "p2", 0, set()),
        (tried_in(2, 8, tp=2, overlap="async"), "p1", 0, {1}),
        (tried_in(2, 8, tp=2, overlap="async", p1=2), "p1", 0, {2}),
        (tried_in(2, 8, tp=2), "overlap", 0, {OVERLAPS.index("domino")}),
        (tried_in(2, 8, tp=2), "shard_overlap", 0, {SHARD_OVERLAPS.index("both")}),
        (tried_in(2, 8, shard_overlap=1), "shard_overlap", 0, {1}),
        (tried_in(8, 8), "ep", 0, {1}),
        (tried_in(8, 8, tp=2, shard_overlap=0, dp=2), "cp", 0, {1, 2}),
    ],
)  # fmt: skip
def test_values_that_are_tried(asked: SearchRequest, name: str, level: int, values: set[int]) -> None:
    assert tried(asked, name, level) == values


EXPERTS = replace(MODEL, experts=Experts(count=6, per_token=1, ffn_hidden=64))


def test_experts_are_shared_out_over_replicas_and_their_tokens_are_not_sliced() -> None:
    asked = replace(space(8, 8, fixed={"tp": [2], "pp": [1], "cp": [1]}), model=EXPERTS)
    assert tried(asked, "ep") == {1, 2}
    assert tried(replace(asked, ranks=12, domain=8, global_batch=12), "ep") == {1, 2, 3, 6}
    assert tried(replace(asked, fixed={**asked.fixed, "ep": [4]}), "ep") == set()
    assert (tried(asked, "p1"), tried(asked, "p2")) == ({1}, {1})


def test_every_factor_divides_the_next() -> None:
    points = enumerate_space(space(16, 16, fixed=ONE | {"micro": [1]}), most=10**9)
    chain = {(p, g, o) for p, g, o in zip(*(getattr(points, n).tolist() for n in ("params", "grads", "optim")),
                                          strict=True)}  # fmt: skip
    some = (1, 2, 4, 8, 16)
    assert chain == {(p, g, o) for p in some for g in some for o in some if p <= g <= o}
    pairs = set(zip(points.params.tolist(), points.secondary.tolist(), strict=True))
    assert pairs == {(one, 0) for one in some} | {(16, 8)}


@pytest.mark.parametrize(
    ("replicas", "local", "few", "told"),
    [
        (1024, 8, False, (1, 2, 4, 8, 32, 128, 1024)), (1024, 8, True, (1, 8, 128, 1024)),
        (16, 8, False, (1, 2, 4, 8, 16)),
        (64, 8, False, (1, 2, 4, 8, 32, 64)), (12, 8, False, (1, 2, 4, 12)), (1, 8, False, (1,)), (5, 1, False, (1, 5)),
        (36, 4, False, (1, 2, 4, 36)), (48, 4, False, (1, 2, 4, 12, 24, 48)), (6, 1, True, (1, 3, 6)),
    ],
)  # fmt: skip
def test_factors_within_a_node_and_a_few_beyond(replicas: int, local: int, few: bool, told: tuple[int, ...]) -> None:
    assert factors(replicas, local, few=few) == told


KINDS = (("micro", "num_micro", "overlap", "p1", "p2"), ("schedule", "virtual", "recompute", "recompute_layers"),
         ("params", "grads", "optim", "secondary"))  # fmt: skip


def test_around_a_point_are_all_that_differ_in_two_kinds_of_choices() -> None:
    """By trying every point of the whole space."""
    asked = space(32, 16)
    whole = enumerate_space(asked, most=10**9)
    base = whole.take(np.flatnonzero((whole.pp == 4) & (whole.tp == 2) & (whole.dp == 4))[[777]])
    kinds = [np.any([getattr(whole, name) != getattr(base, name)[0] for name in names], axis=0) for names in KINDS]
    same = [getattr(whole, name) == getattr(base, name)[0] for name in ("pp", "dp", "cp", "ring", "tp", "ep")]
    near = np.all(same, axis=0) & (np.sum(kinds, axis=0) <= 2)
    assert rows(enumerate_around(asked, base, most=10**9)) == rows(whole.take(near))
    assert 0 < near.sum() < np.all(same, axis=0).sum()


def test_around_as_many_points_as_have_so_many_and_one_at_least() -> None:
    asked = space(8, 8)
    bases = enumerate_space(asked, most=10**9).take(np.array([0, 5_000, 10_000]))
    counts = [len(enumerate_around(asked, bases.take(slice(at, at + 1)), most=1)) for at in range(3)]
    assert len(enumerate_around(asked, bases, most=1)) == counts[0]
    assert len(enumerate_around(asked, bases, most=sum(counts))) == sum(counts)
    assert len(enumerate_around(asked, bases, most=sum(counts) - 1)) == sum(counts[:2])


def test_around_a_point_with_two_kinds_of_choices_is_all_of_its_arrangement() -> None:
    asked = space(4, 8, "schedule == 1f1b", "recompute == none", "pp == 1", "tp == 2")
    whole = enumerate_space(asked, most=10**9)
    assert rows(enumerate_around(asked, whole.take(slice(0, 1)), most=1)) == rows(
        whole.take((whole.dp == whole.dp[0]) & (whole.cp == whole.cp[0]) & (whole.ring == whole.ring[0]))
    )


def test_the_finest_space_that_is_no_larger_is_taken() -> None:
    asked, sizes = space(8, 8), list[int]()
    for level in range(COARSEST + 1):
        known = CellChoices(asked)
        cells = cells_of(asked, Coarseness(level))
        each = [known.choices(cell, coarseness_of(asked, cell, level)) for cell in cells]
        sizes.append(sum(math.prod(map(len, one.values())) for one in each))
    assert sizes == sorted(sizes, reverse=True)
    for size in set(sizes):
        assert len(enumerate_space(asked, most=size)) == size
    assert len(enumerate_space(asked, most=sizes[0] - 1)) == max(size for size in sizes if size < sizes[0])
    assert len(enumerate_space(asked, most=1)) == sizes[-1]


def test_whether_there_is_a_strategy_at_all() -> None:
    assert any_point(space(16, 16))
    assert not any_point(space(17, 16))
    assert not any_point(space(16, 16, fixed={"micro": [3]}))
    assert not any_point(space(2, 2, fixed={"pp": [2], "schedule": [SCHEDULES.index("zb-v")], "virtual": [1]}))


def test_a_column_is_allowed_by_what_the_job_says_and_by_constraints_of_its_name() -> None:
    one = space(8, 8, "micro_batch_size <= 2", "tp >= 2", fixed={"tp": [2, 4]})
    assert [one.allows("tp", value) for value in (1, 2, 4, 8)] == [False, True, True, False]
    assert [one.allows("micro", value) for value in (2, 4)] == [True, False]
    assert one.values_to_try("tp", [8]) == [2, 4]
    assert one.values_to_try("pp", [1, 3]) == [1, 3]
