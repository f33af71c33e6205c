"""Precisions in which a model is trained, or planned.

``QUANTISED`` has those that are planned and not trained: the products of layers in 8 or 4 bit. What stays in
bf16 is the same in all recipes: attention's core, norms, embedding, head and loss, activations between ops
and what is sent of them; masters, gradients and moments stay in fp32. Sources: NVIDIA's Transformer Engine,
docs/features/low_precision_training (commit 0bd7f52, 2026): usages by rows and by columns, and what each
recipe keeps; Megatron-Bridge, training/mixed_precision.py (commit 0509780, 2025): which recipes keep and
gather parameters quantised; OCP Microscaling Formats v1.0 (2023-09) and NVIDIA, Pretraining with NVFP4
(arXiv 2509.25149): blocks and their scales.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

Precision = Literal["fp32", "bf16-mixed", "fp64", "fp8", "mxfp8", "nvfp4"]
ITEMSIZE: Mapping[Precision, int] = {"fp32": 4, "bf16-mixed": 2, "fp64": 8, "fp8": 2, "mxfp8": 2, "nvfp4": 2}
"""Bytes of a parameter or an activation, as it is where nothing multiplies matrices."""
MASTER = 4
"""Bytes of a gradient, a master weight or a moment, unless the model itself computes in more."""


class Quantised(NamedTuple):
    """How a layer's matrices are quantised.

    number: bytes of a number, with its part of its block's scale. apart: rows and columns are quantised
    apart, since blocks lie along what is summed; else one copy serves both where a device reads columns
    (``Device.reads_columns``). primary: recipes keep and gather parameters quantised, with no copy in bf16.
    """

    number: float
    apart: bool
    primary: bool

    def kept(self, *, reads_columns: bool) -> float:
        """Bytes of a number of a matrix, by rows and by columns."""
        return self.number * (1 if reads_columns and not self.apart else 2)


QUANTISED: Mapping[Precision, Quantised] = {
    "fp8": Quantised(1.0, apart=False, primary=True),  # a scale a tensor
    "mxfp8": Quantised(1 + 1 / 32, apart=True, primary=True),  # a byte for 32 numbers
    "nvfp4": Quantised(1 / 2 + 1 / 16, apart=True, primary=False),  # a byte for 16, and a scale a tensor
}
"""By precision. Of nvfp4, Megatron-Bridge refuses parameters that are kept quantised."""


def unquantised(precision: Precision) -> Precision:
    """Of what is never quantised.

    >>> unquantised("mxfp8"), unquantised("fp32")
    ('bf16-mixed', 'fp32')
    """
    return "bf16-mixed" if precision in QUANTISED else precision


def master_size(itemsize: int) -> int:
    """Bytes of a number of a gradient, a master weight or a moment. itemsize: bytes of one of the model's."""
    return max(MASTER, itemsize)


SmallType = Literal["master", "bf16"]
"""What gradients travel in and optimizers remember in: the type of master weights, or bf16."""


def size_in(kind: SmallType, itemsize: int) -> int:
    """Bytes of a number. itemsize: bytes of one of the model's.

    >>> size_in("bf16", 4), size_in("master", 2)
    (2, 4)
    """
    return 2 if kind == "bf16" else master_size(itemsize)
