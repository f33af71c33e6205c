"""What layers are made of, and what the mathematics of one slice depends on besides activations."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from plait.core.model import ModelSpec
from plait.train.model.dropout import DropoutKey

JoinGradient = tuple[Tensor, list[tuple[nn.Parameter, Tensor, Tensor | None]]]
"""Gradients of a join: of what was added to the residual stream; of parameters, of some rows of them or
(None) of all."""


@dataclass(frozen=True)
class SliceContext:
    """What the mathematics of one slice depends on besides activations.

    samples: [B] global sample numbers. positions: [S_local] of the residual stream (a shard when
    sequence-parallel). spread: [S] of the tokens that attention gets from this rank, if they are not 0, 1,
    ...
    """

    samples: Tensor
    positions: Tensor
    dropout: DropoutKey | None
    spread: Tensor | None = None


class Weight(nn.Module):
    """A weight and perhaps a bias, filled in by ``Transformer``."""

    def __init__(self) -> None:
        super().__init__()
        self.weight: nn.Parameter
        self.bias: nn.Parameter | None = None


class Norm(nn.Module):
    """LayerNorm (gpt) or RMSNorm (llama)."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec
        self.weight: nn.Parameter
        self.bias: nn.Parameter | None = None

    def forward(self, h: Tensor) -> Tensor:
        """[S, B, H] -> [S, B, H]."""
        if self.spec.has_bias:
            return F.layer_norm(h, (self.spec.hidden,), self.weight, self.bias, self.spec.norm_eps)
        return F.rms_norm(h, (self.spec.hidden,), self.weight, self.spec.norm_eps)
