"""The table of steps: what follows from it agrees with the table of weights, for numbers and for columns."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest

from plait.core.model.weights import Letters, count, matrices_of, widths
from plait.core.step.attention_ops import SharedAttention
from plait.core.step.ops import STEPS, Branch, Dims, Kind, SendSizes, branches_of, orders_of, parts_of, steps_of
from plait.core.step.segments import SegmentGraph, Site

LETTERS = Letters(H=8, Q=8, K=4, F=32, V=9, P=4, biased=0, gated=1, learned=0, tied=0, block=0)
FIRST, LAST = widths("attn", LETTERS)


@pytest.mark.parametrize("branch", ["attn", "mlp", "head"])
def test_a_matrix_is_multiplied_forward_for_its_input_and_for_its_own_gradient(branch: Branch) -> None:
    first, last = widths(branch, LETTERS) if branch != "head" else (0, 0)  # type: ignore[arg-type]
    dims = Dims(T=5, H=8, Z=first, O=last, V=9)
    found = sum(dims.flops(step) for step in STEPS if step.branch == branch)
    assert found == 3 * 2 * 5 * count(matrices_of(branch), LETTERS)  # type: ignore[arg-type]


def test_expressions_hold_for_columns() -> None:
    dims = Dims(T=np.array([5, 6]), H=8, S=np.array([8, 4]), Z=FIRST, O=LAST, V=9)
    each = [Dims(T=tokens, H=8, S=stream, Z=FIRST, O=LAST, V=9) for tokens, stream in ((5, 8), (6, 4))]
    for step in STEPS:
        for at, alone in enumerate(each):
            assert np.broadcast_to(dims.flops(step), 2)[at] == alone.flops(step)
            assert np.broadcast_to(dims.moved(step), 2)[at] == alone.moved(step)


def test_parts_divide_columns_of_what_is_reduced_forward_and_rows_of_it_backward() -> None:
    dims = Dims(T=6, H=8, Z=16, O=10)
    (second,), (first,) = steps_of("attn", Kind.SECOND), steps_of("attn", Kind.FIRST_GRAD)
    assert (dims.product(second, 2), dims.product(first, 2)) == ((6, 10, 4), (3, 16, 8))


def test_what_runs_again_is_what_ran_or_the_cheap_of_it() -> None:
    assert steps_of("attn", Kind.FIRST_AGAIN) == steps_of("attn", Kind.FIRST)
    assert steps_of("attn", Kind.FIRST_AGAIN, selective=True) == ()
    (activation,) = steps_of("mlp", Kind.FIRST_AGAIN, selective=True)
    assert activation.cheap and activation.product is None
    assert steps_of("mlp", Kind.FIRST, selective=True) == steps_of("mlp", Kind.FIRST)  # only what runs again
    assert steps_of("head", Kind.FIRST_AGAIN) == ()


def test_attention_attends_in_ops_of_its_own_where_it_is_shared() -> None:
    kinds = {
        shared: {kind for kind in Kind for step in steps_of("attn", kind, shared=shared) if step.attends}
        for shared in (False, True)
    }
    assert kinds[False] == {Kind.FIRST, Kind.FIRST_AGAIN, Kind.SECOND_GRAD}
    assert kinds[True] == {Kind.CORE, Kind.CORE_AGAIN, Kind.CORE_GRAD}


def test_a_parallel_block_has_both_branches_and_what_only_passes_on_has_none() -> None:
    assert branches_of("block") == branches_of("attn") + branches_of("mlp") == ("attn", "mlp")
    assert branches_of("enter") == branches_of("leave") == ()


def test_gradients_are_added_slice_by_slice_and_parts_fill_one_buffer_in_order() -> None:
    assert orders_of("attn", Kind.WEIGHT_GRAD) == orders_of("down", Kind.NORM_GRAD) == ("slice",)
    assert orders_of("mlp", Kind.SECOND) == orders_of("head", Kind.FIRST_GRAD) == ("part",)
    assert (orders_of("head", Kind.FIRST), orders_of("embed", Kind.WEIGHT_GRAD)) == (("look-up",), ("head", "slice"))
    assert orders_of("attn", Kind.FIRST) == orders_of("attn", Kind.SECOND_GRAD) == ()


PARTS: dict[Site, dict[str, int]] = {
    "embed": {"R": 1, "W": 1},
    "attn": {"N": 1, "F": 1, "R": 4, "D": 1, "C": 4, "W": 2, "J": 1},
    "mlp": {"N": 1, "F": 1, "R": 4, "D": 1, "C": 4, "W": 2, "J": 1},
    "block": {"N": 1, "F": 1, "R": 4, "D": 1, "C": 4, "W": 4, "J": 1},
    "down": {"N": 1, "J": 1},
    "head": {"N": 1, "F": 1, "L": 1, "C": 4, "W": 1, "J": 1},
    "leave": {"N": 1, "J": 1},
}
"""Of four column parts: what is summed comes in columns, its gradient in rows; weights are two a branch."""


@pytest.mark.parametrize("site", PARTS)
def test_parts_of_every_op_of_a_site(site: Site) -> None:
    """A sequence that is cut has its gradient scattered whole."""
    for flat in (False, True):
        want = {kind: 1 if flat and kind == "C" else parts for kind, parts in PARTS[site].items()}
        assert {kind: parts_of(site, Kind(kind), p2=4, flat=int(flat), ring=1) for kind in want} == want
        graph = SegmentGraph(num_layers=1, p2=4, sequence_parallel=flat, parallel_block=site == "block")
        assert {kind: graph.parts(site, Kind(kind)) for kind in want} == want
    assert {kind for kind in PARTS[site] if parts_of(site, Kind(kind), p2=1, flat=0, ring=1) > 1} <= {"W"}


@pytest.mark.parametrize("ring", [2, 5])
def test_parts_of_a_ring_are_its_blocks_and_one_rotation_fewer(ring: int) -> None:
    graph = SegmentGraph(num_layers=1, p2=4, attention=SharedAttention(2, ring))
    found = {kind: graph.parts("attn", kind) for kind in graph.kinds("attn", 0)}
    assert found == {
        **dict.fromkeys((Kind.CORE, Kind.CORE_GRAD), ring),
        **dict.fromkeys((Kind.ROTATE, Kind.ROTATE_AGAIN, Kind.ROTATE_GRAD), ring - 1),
        **dict.fromkeys((Kind.NORM, Kind.FIRST, Kind.SECOND_GRAD, Kind.HEADS_GRAD, Kind.PROJECTED_GRAD), 1),
        Kind.NORM_GRAD: 1, Kind.SECOND: 4, Kind.FIRST_GRAD: 4, Kind.WEIGHT_GRAD: 2,
    }  # fmt: skip


def test_parts_of_columns_are_those_of_each_strategy() -> None:
    p2, flat, ring = np.array([1, 2, 4, 4, 8]), np.array([0, 0, 0, 1, 1]), np.array([1, 2, 1, 4, 8])
    for site, kind in ((site, Kind(kind)) for site, kinds in PARTS.items() for kind in (*kinds, *"TKSGH")):
        found = np.broadcast_to(parts_of(site, kind, p2=p2, flat=flat, ring=ring), 5)
        alone = [
            parts_of(site, kind, p2=each, flat=cut, ring=long) for each, cut, long in zip(p2, flat, ring, strict=True)
        ]
        assert found.tolist() == alone


def test_sizes_of_what_is_sent_hold_for_columns() -> None:
    """Of an embedding, no more rows are looked up than there are tokens, or words."""
    names = [field.name for field in fields(SendSizes)]
    rows = [dict(zip(names, values, strict=True)) for values in (
        (10, 5, 64, 2, 4, 30, 4, 7, 8, 9), (30, 30, 64, 4, 2, 10, 2, 1, 2, 3), (10, 10, 8, 1, 1, 10, 4, 1, 1, 1),
    )]  # fmt: skip
    alone = [SendSizes(**row) for row in rows]
    together = SendSizes(**{name: np.array([row[name] for row in rows]) for name in names})
    assert [one.looked_up for one in alone] == [10 * 64 * 4, 10 * 64 * 2, 10 * 8]
    assert [one.column_block for one in alone] == [320, 480, 80]
    for whole in ("stream", "column_block", "row_block", "looked_up", "statistics"):
        assert getattr(together, whole).tolist() == [getattr(one, whole) for one in alone]
