"""Precisions in which a model is trained, or planned.

``QUANTISED`` has the precisions that can be planned and not trained: matrix products of layers in 8
or 4 bit. All recipes keep the same parts in bf16: attention's core, norms, embedding, head and
loss, activations between ops and communication of activations; master weights, gradients and
moments stay in fp32. Sources: NVIDIA's Transformer Engine, docs/features/low_precision_training
(commit 0bd7f52, 2026): usages by rows and by columns, and tensors that each recipe keeps;
Megatron-Bridge, training/mixed_precision.py (commit 0509780, 2025): recipes that keep and gather
parameters quantised; OCP Microscaling Formats v1.0 (2023-09) and NVIDIA, Pretraining with NVFP4
(arXiv 2509.25149): blocks and their scales.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

Precision = Literal["fp32", "bf16-mixed", "fp64", "fp8", "mxfp8", "nvfp4"]
ITEMSIZE: Mapping[Precision, int] = {"fp32": 4, "bf16-mixed": 2, "fp64": 8, "fp8": 2, "mxfp8": 2, "nvfp4": 2}
"""Bytes of an element of parameters and activations, outside of matrix products."""
MASTER = 4
"""Bytes of an element of gradients, master weights and moments, unless the model itself has a wider
type."""


class Quantised(NamedTuple):
    """Quantisation of a layer's matrices.

    number: bytes of an element, with its part of its block's scale. apart: rows and columns are
    quantised separately, since blocks lie along the summed dimension; otherwise one copy serves
    both if a device reads columns (``Device.reads_columns``). primary: recipes keep and gather
    parameters quantised, without a copy in bf16.
    """

    number: float
    apart: bool
    primary: bool

    def element_bytes(self, *, reads_columns: bool) -> float:
        """Return the bytes of a matrix element, for reading by rows and by columns."""
        return self.number * (1 if reads_columns and not self.apart else 2)


QUANTISED: Mapping[Precision, Quantised] = {
    "fp8": Quantised(1.0, apart=False, primary=True),  # one scale for each tensor
    "mxfp8": Quantised(1 + 1 / 32, apart=True, primary=True),  # a scale byte for 32 elements
    "nvfp4": Quantised(1 / 2 + 1 / 16, apart=True, primary=False),  # a byte for 16 elements, one scale a tensor
}
"""Quantisation, by precision. For nvfp4, Megatron-Bridge refuses parameters that are kept
quantised."""


def unquantised(precision: Precision) -> Precision:
    """Return the precision of parts that are never quantised.

    >>> unquantised("mxfp8"), unquantised("fp32")
    ('bf16-mixed', 'fp32')
    """
    return "bf16-mixed" if precision in QUANTISED else precision


def master_size(itemsize: int) -> int:
    """Return the bytes of an element of a gradient, a master weight or a moment. itemsize: bytes of
    an element of the model."""
    return max(MASTER, itemsize)


SmallType = Literal["master", "bf16"]
"""Type of gradients in communication and of optimizer states: the type of master weights, or
bf16."""


def size_in(kind: SmallType, itemsize: int) -> int:
    """Return the bytes of an element of type ``kind``. itemsize: bytes of an element of the model.

    >>> size_in("bf16", 4), size_in("master", 2)
    (2, 4)
    """
    return 2 if kind == "bf16" else master_size(itemsize)
