"""Precisions in which a model is trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

Precision = Literal["fp32", "bf16-mixed", "fp64"]
ITEMSIZE: Mapping[Precision, int] = {"fp32": 4, "bf16-mixed": 2, "fp64": 8}
"""Bytes of a parameter or an activation."""
MASTER = 4
"""Bytes of a gradient, a master weight or a moment, unless the model itself computes in more."""


def master_size(itemsize: int) -> int:
    """Bytes of a number of a gradient, a master weight or a moment. itemsize: bytes of one of the model's."""
    return max(MASTER, itemsize)
