"""The table of steps: what follows from it agrees with the table of weights, for numbers and for
columns."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from plait.core.model.weights import Dimensions, count, matrices_of, widths
from plait.core.step.ops import STEPS, Dims, Kind, Path, SendSizes, orders_of, parts_of
from plait.core.step.segments import Site

LETTERS = Dimensions(H=8, Q=8, K=4, F=32, V=9, P=4, biased=0, gated=1, learned=0, tied=0, block=0)
FIRST, LAST = widths("attn", LETTERS)


@pytest.mark.parametrize("branch", ["attn", "mlp", "head"])
def test_a_matrix_is_multiplied_forward_for_its_input_and_for_its_own_gradient(branch: Path) -> None:
    first, last = widths(branch, LETTERS) if branch != "head" else (0, 0)  # type: ignore[arg-type]
    dims = Dims(T=5, H=8, Z=first, O=last, V=9)
    found = sum(dims.flops(step) for step in STEPS if step.branch == branch)
    assert found == 3 * 2 * 5 * count(matrices_of(branch), LETTERS)  # type: ignore[arg-type]


def test_expressions_hold_for_columns() -> None:
    known: dict[str, Any] = {"H": 8, "Z": FIRST, "O": LAST, "V": 9, "X": 3, "E": 4}
    known["latent"] = {"A": 5, "B": 6, "B+R": 7, "Q+R": 8, "2Q": 9}
    dims = Dims(T=np.array([5, 6]), S=np.array([8, 4]), **known)
    each = [Dims(T=tokens, S=stream, **known) for tokens, stream in ((5, 8), (6, 4))]
    for step in STEPS:
        for at, alone in enumerate(each):
            assert np.broadcast_to(dims.flops(step), 2)[at] == alone.flops(step)
            assert np.broadcast_to(dims.moved(step), 2)[at] == alone.moved(step)


def test_gradients_are_added_slice_by_slice_and_parts_fill_one_buffer_in_order() -> None:
    assert orders_of("attn", Kind.WGRAD) == orders_of("down", Kind.NORM_BACKWARD) == ("slice",)
    assert orders_of("mlp", Kind.ROW_FORWARD) == orders_of("head", Kind.COLUMN_DGRAD) == ("part",)
    assert (orders_of("head", Kind.COLUMN_FORWARD), orders_of("embed", Kind.WGRAD)) == (("look-up",), ("head", "slice"))
    assert orders_of("attn", Kind.COLUMN_FORWARD) == orders_of("attn", Kind.ROW_DGRAD) == ()


PARTS: dict[Site, dict[str, int]] = {
    "embed": {"R": 1, "W": 1},
    "attn": {"N": 1, "F": 1, "R": 4, "D": 1, "C": 4, "W": 2, "J": 1},
    "mlp": {"N": 1, "F": 1, "R": 4, "D": 1, "C": 4, "W": 2, "J": 1},
    "block": {"N": 1, "F": 1, "R": 4, "D": 1, "C": 4, "W": 4, "J": 1},
    "down": {"N": 1, "J": 1},
    "head": {"N": 1, "F": 1, "L": 1, "C": 4, "W": 1, "J": 1},
    "leave": {"N": 1, "J": 1},
}
"""Of four column parts: what is summed comes in columns, its gradient in rows; weights are two a
branch."""


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
    names = [field.name for field in fields(SendSizes) if field.name not in ("routed", "routes", "counts")]
    rows = [dict(zip(names, values, strict=True)) for values in (
        (10, 5, 64, 2, 4, 30, 4, 7, 8, 9), (30, 30, 64, 4, 2, 10, 2, 1, 2, 3), (10, 10, 8, 1, 1, 10, 4, 1, 1, 1),
    )]  # fmt: skip
    alone = [SendSizes(**row) for row in rows]
    together = SendSizes(**{name: np.array([row[name] for row in rows]) for name in names})
    assert [one.looked_up for one in alone] == [10 * 64 * 4, 10 * 64 * 2, 10 * 8]
    assert [one.column_block for one in alone] == [320, 480, 80]
    for whole in ("stream", "column_block", "row_block", "looked_up", "statistics"):
        assert getattr(together, whole).tolist() == [getattr(one, whole) for one in alone]
