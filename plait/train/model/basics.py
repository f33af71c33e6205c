"""Modules that layers are made of, and the inputs of a slice's mathematics besides activations."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait.core.model.spec import ModelSpec
from plait.train.model.documents import Documents
from plait.train.model.dropout import DropoutKey, DropoutSite, Mask
from plait.train.model.formulas import RotaryTables
from plait.train.model.kernels import EAGER, Kernels, Scale

JoinGradient = tuple[Tensor, list[tuple[nn.Parameter, Tensor, Tensor | None]]]
"""Gradients of a join: of the term added to the residual stream; and (parameter, gradient, rows) of
each parameter, rows None for all rows."""


@dataclass(frozen=True)
class SliceContext:
    """Inputs of one slice's mathematics besides activations.

    samples: [B] global sample numbers. positions: [S_local] of the residual stream (a shard if
    sequence-parallel). rotary: rotary tables for the tokens whose queries and keys this rank
    computes, if the model has them. kernels: of the executor. documents: set if attention stops at
    document ends. own_positions: [S_local, B] of the residual stream, positions within documents;
    only with ``documents``. sequence_positions: [S] of the tokens of each sequence that this
    context-parallel rank has; None: all in order.
    """

    samples: Tensor
    positions: Tensor
    dropout: DropoutKey | None
    rotary: RotaryTables | None = None
    kernels: Kernels = EAGER
    documents: Documents | None = None
    own_positions: Tensor | None = None
    sequence_positions: Tensor | None = None

    def mask(self, probability: float, layer: int, site: DropoutSite) -> Mask | None:
        """Return the dropout mask of the residual stream at one site; None if nothing is
        dropped."""
        if self.dropout is None or not probability:
            return None
        return Mask(self.dropout, probability, layer, site, self.samples, self.positions)


class WeightModule(nn.Module):
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
        """Map [S, B, H] to [S, B, H]."""
        return EAGER.norm(h, self.scale)[0]

    @property
    def scale(self) -> Scale:
        """The norm's parameters as kernels expect them."""
        return Scale(self.weight, self.bias, self.spec.norm_eps)


class Down(WeightModule):
    """Halves the sequence: two neighbouring tokens become one at the position of the later, so that
    no token sees later ones."""

    def forward(self, h: Tensor) -> Tensor:
        """Map [S, B, H] to [S / 2, B, H]; output j is made of tokens 2j-1 and 2j."""
        earlier = torch.cat((torch.zeros_like(h[:1]), h[1:-1:2]))
        return F.linear(torch.cat((earlier, h[0::2]), dim=-1), self.weight, self.bias)


class Up(WeightModule):
    """Doubles the sequence: every token is the coarse token at or before its position, plus the
    skip connection."""

    def forward(self, h: Tensor, skip: Tensor) -> Tensor:
        """Map [S / 2, B, H] and the skip connection [S, B, H] to [S, B, H]."""
        return F.linear(h, self.weight, self.bias).repeat_interleave(2, dim=0) + skip
