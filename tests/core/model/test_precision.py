"""What quantised matrices take, by recipe."""

from __future__ import annotations

import pytest

from plait.core.model.precision import ITEMSIZE, QUANTISED, Precision, unquantised


@pytest.mark.parametrize(
    ("precision", "number", "rows_and_columns", "shared"),
    [("fp8", 1.0, 2.0, 1.0), ("mxfp8", 33 / 32, 33 / 16, 33 / 16), ("nvfp4", 9 / 16, 9 / 8, 9 / 8)],
)
def test_blocks_bring_scales_and_are_cut_by_rows_and_by_columns(
    precision: Precision, number: float, rows_and_columns: float, shared: float
) -> None:
    """Of 32 numbers in a byte each and a scale in one; of 16 in half a byte. One scale a tensor
    takes nothing, and one copy serves both ways where a device reads columns."""
    recipe = QUANTISED[precision]
    assert recipe.number == number
    assert recipe.element_bytes(reads_columns=False) == rows_and_columns
    assert recipe.element_bytes(reads_columns=True) == shared


def test_what_no_recipe_quantises_stays_in_two_bytes() -> None:
    assert {ITEMSIZE[name] for name in QUANTISED} == {2}
    assert {unquantised(name) for name in QUANTISED} == {"bf16-mixed"}
    assert [unquantised(name) for name in ("fp32", "fp64", "bf16-mixed")] == ["fp32", "fp64", "bf16-mixed"]
