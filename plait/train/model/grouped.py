"""Products of rows with the matrices of their experts.

Rows lie expert by expert. torch's grouped product computes them at once, in bf16 and fp32; in other
types, and where a row's stride is not a multiple of 16 bytes, there is one product an expert.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

GROUPED: Any = getattr(F, "grouped_mm", None)
"""torch's grouped product; None before 2.10."""
ALIGNED = 16
"""Bytes of which a row's stride must be a multiple."""


@dataclass(frozen=True)
class RowGroups:
    """Rows of each expert. sizes: their numbers, on the host. ends: the ends of the groups, on the
    device, int32."""

    sizes: list[int]
    ends: Tensor

    @staticmethod
    def of(sizes: list[int], device: torch.device) -> RowGroups:
        """Return the groups of these sizes."""
        return RowGroups(sizes, torch.tensor(sizes, dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device))


def _fits(*operands: Tensor) -> bool:
    """Return True if torch's grouped product takes these operands."""
    return GROUPED is not None and all(
        one.dtype in (torch.bfloat16, torch.float32)
        and one.numel() > 0
        and 1 in one.stride()[-2:]
        and max(one.stride()[-2:]) * one.element_size() % ALIGNED == 0
        for one in operands
    )


def product(rows: Tensor, weights: Tensor, groups: RowGroups) -> Tensor:
    """Return every row times its expert's matrix, [M, out]. rows: [M, in]; weights: [experts, in,
    out], possibly transposed views."""
    if _fits(rows, weights):
        return GROUPED(rows, weights, offs=groups.ends)
    result = rows.new_empty((rows.shape[0], weights.shape[2]))
    for part, into, weight in zip(rows.split(groups.sizes), result.split(groups.sizes), weights, strict=True):
        torch.mm(part, weight, out=into)
    return result


def add_weight_gradient(into: Tensor, gradient: Tensor, rows: Tensor, groups: RowGroups) -> None:
    """Add every expert's gradient^T rows to ``into``, [experts, out, in]. gradient: [M, out]; rows:
    [M, in]."""
    if _fits(gradient, rows):
        into.add_(GROUPED(gradient.t(), rows, offs=groups.ends))
        return
    parts = zip(into, gradient.split(groups.sizes), rows.split(groups.sizes), strict=True)
    for total, left, right in parts:
        if left.dtype == total.dtype:
            total.addmm_(left.t(), right)
        else:
            total.add_(left.t() @ right)
