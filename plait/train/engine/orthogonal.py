"""The nearest orthogonal matrix, roughly: Newton-Schulz iterations, as torch.optim.Muon has them, in any
precision."""

from __future__ import annotations

import torch
from torch import Tensor

from plait.core.job.settings import MuonSection


def orthogonalise(matrix: Tensor, muon: MuonSection) -> Tensor:
    """Of ``matrix`` = U S V^T [A, B] about U V^T, its singular values between 0.5 and 1.5; in its own dtype.

    Operation for operation what torch.optim.Muon does in bf16 (torch 2.13, torch/optim/_muon.py), so that
    both give the same bits."""
    a, b, c = muon.ns_coefficients
    wide = matrix.T if matrix.size(0) > matrix.size(1) else matrix
    wide = wide / wide.norm().clamp(min=muon.eps)
    for _ in range(muon.ns_steps):
        gram = wide @ wide.T
        update = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        wide = torch.addmm(wide, update, wide, beta=a)
    return wide.T if matrix.size(0) > matrix.size(1) else wide


def adjusted(rate: float, shape: tuple[int, ...], muon: MuonSection) -> float:
    """The learning rate of a matrix [A, B]."""
    rows, columns = shape
    if muon.adjust_lr == "original":
        return rate * max(1.0, rows / columns) ** 0.5
    return rate * 0.2 * max(rows, columns) ** 0.5
