"""The table of steps: what follows from it agrees with the table of weights, for numbers and for columns."""

from __future__ import annotations

import numpy as np
import pytest

from plait.core.model.weights import Letters, count, matrices_of, widths
from plait.core.step.ops import STEPS, Branch, Dims, Kind, branches_of, orders_of, steps_of

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
