"""What layers are made of, and what the mathematics of one slice depends on besides activations."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from plait.core.model.spec import ModelSpec
from plait.train.model.documents import Documents
from plait.train.model.dropout import DropoutKey, DropoutSite, Mask
from plait.train.model.kernels import EAGER, Kernels, Scale
from plait.train.model.rope import Turns

JoinGradient = tuple[Tensor, list[tuple[nn.Parameter, Tensor, Tensor | None]]]
"""Gradients of a join: of the term that it adds to the residual stream; of each parameter, with the rows that
the gradient is for (None: all)."""


@dataclass(frozen=True)
class SliceContext:
    """What the mathematics of one slice depends on besides activations.

    samples: [B] global sample numbers. positions: [S_local] of the residual stream (a shard when
    sequence-parallel). turns: rotary tables of the tokens that attention gets from this rank, if the model
    has them. kernels: of an executor. documents: if attention stops at their ends. own_places: [S_local, B]
    of the residual stream, positions within documents; with ``documents`` only.
    """

    samples: Tensor
    positions: Tensor
    dropout: DropoutKey | None
    turns: Turns | None = None
    kernels: Kernels = EAGER
    documents: Documents | None = None
    own_places: Tensor | None = None

    def mask(self, probability: float, layer: int, site: DropoutSite) -> Mask | None:
        """The dropout of the residual stream at one place; None where nothing is dropped."""
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
        """[S, B, H] -> [S, B, H]."""
        return EAGER.norm(h, self.scale)[0]

    @property
    def scale(self) -> Scale:
        """As kernels take it."""
        return Scale(self.weight, self.bias, self.spec.norm_eps)
