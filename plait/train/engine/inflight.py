"""State of a micro-batch while it is in flight in a stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from plait.core.step.segments import Site
from plait.train.engine.segment import Segment

Key = tuple[Site, int, int]
"""(site, layer, slice) of a segment."""


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch. tokens, targets: [B, S] int64, in host memory; target -100 is ignored.
    samples: [B] global sample numbers, the dropout keys.

    scale: factor of each token's loss (``scale_of`` the total weight of the whole step's targets).
    step: for the dropout keys. positions: [S] of the tokens in their sequences, in host memory;
    None if the rank has all of them.

    weights: [B, S] of the targets' losses, in host memory; None if all are 1. starts: [B, tokens of
    the whole sequence] int64, in host memory: for each token the position of its document's first.
    If set, attention stops at document ends and positions begin anew. token_share: the part of the
    step's tokens that one token is.
    """

    tokens: Tensor
    targets: Tensor
    samples: Tensor
    scale: float
    step: int
    positions: Tensor | None = None
    weights: Tensor | None = None
    starts: Tensor | None = None
    token_share: float = 0.0

    def of(self, rows: slice) -> MicroBatch:
        """Return the micro-batch of some of its sequences."""
        weights, starts = (t if t is None else t[rows] for t in (self.weights, self.starts))
        return replace(
            self,
            tokens=self.tokens[rows],
            targets=self.targets[rows],
            samples=self.samples[rows],
            weights=weights,
            starts=starts,
        )


def scale_of(weights: float) -> float:
    """Return the factor that turns a sum of losses into a mean; 0 if ``weights``, the sum of the
    targets' weights, is 0."""
    return 1.0 / weights if weights else 0.0


def has_mean(batches: Sequence[MicroBatch]) -> bool:
    """Return True if any target has weight, so that the batches have a mean loss; without a mean
    their loss sum is 0 as well."""
    return any(batch.scale for batch in batches)


@dataclass
class BoundaryTensors:
    """Tensors that cross the boundaries of a stage with a micro-batch of ``size`` sequences, by
    name, each [S_local, B, H].

    Names: ``h`` is the residual stream, ``skip0`` the skip connection of level 0. entering:
    received from other stages. leaving: to be sent to other stages. returning: the gradients of
    ``leaving``; gradient: of ``entering``.
    """

    size: int
    entering: dict[str, Tensor] = field(default_factory=dict)
    leaving: dict[str, Tensor] = field(default_factory=dict)
    returning: dict[str, Tensor] = field(default_factory=dict)
    gradient: dict[str, Tensor] = field(default_factory=dict)

    def leave(self, name: str, samples: slice, h: Tensor) -> None:
        """Copy a slice's tensor into ``leaving``."""
        if name not in self.leaving:
            self.leaving[name] = h.new_empty((h.shape[0], self.size, h.shape[2]))
        self.leaving[name][:, samples] = h.detach()

    def return_gradient(self, name: str, samples: slice, gradient: Tensor) -> None:
        """Copy a slice's gradient into ``gradient``, to be sent to the stage that sent its
        tensor."""
        if name not in self.gradient:
            self.gradient[name] = torch.empty_like(self.entering[name])
        self.gradient[name][:, samples] = gradient


@dataclass
class InFlight:
    """A micro-batch between the start of its forward and the end of its backward pass."""

    crossing: BoundaryTensors
    segments: dict[Key, Segment] = field(default_factory=dict)
