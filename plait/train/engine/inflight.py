"""What lives while a micro-batch is on its way through a stage."""

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
    """tokens, targets: [B, S] int64, in host memory; target -100 is ignored. samples: [B] global sample
    numbers, the dropout keys.

    scale: what each token's loss is multiplied by (``scale_of`` the weights of the whole step's targets).
    step: for the dropout keys. positions: [S] of the tokens in their sequences, in host memory, if they are
    not all of them.

    weights: [B, S] of the targets' losses, in host memory, if they are not all 1. starts: [B, tokens of the
    whole sequence] int64, in host memory, if attention is to stop at document ends and positions are to begin
    anew: for each token the position of its document's first.
    """

    tokens: Tensor
    targets: Tensor
    samples: Tensor
    scale: float
    step: int
    positions: Tensor | None = None
    weights: Tensor | None = None
    starts: Tensor | None = None

    def of(self, rows: slice) -> MicroBatch:
        """Some of its sequences."""
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
    """What makes a mean of a sum of losses with such weights; 0 where they are 0 in sum, and there is no
    mean."""
    return 1.0 / weights if weights else 0.0


def has_mean(batches: Sequence[MicroBatch]) -> bool:
    """Whether what is computed on these has a mean loss: their sum is 0 also where nothing counts."""
    return any(batch.scale for batch in batches)


@dataclass
class BoundaryTensors:
    """What crosses the ends of a stage with a micro-batch of ``size`` sequences, by name, each [S_local, B,
    H].

    Names: ``h`` is the residual stream, ``skip0`` the skip connection of level 0. entering: from other
    stages; leaving: for other stages; returning: the gradients of ``leaving``; gradient: of ``entering``.
    """

    size: int
    entering: dict[str, Tensor] = field(default_factory=dict)
    leaving: dict[str, Tensor] = field(default_factory=dict)
    returning: dict[str, Tensor] = field(default_factory=dict)
    gradient: dict[str, Tensor] = field(default_factory=dict)

    def leave(self, name: str, samples: slice, h: Tensor) -> None:
        """Put a slice's tensor into what another stage gets."""
        if name not in self.leaving:
            self.leaving[name] = h.new_empty((h.shape[0], self.size, h.shape[2]))
        self.leaving[name][:, samples] = h.detach()

    def return_gradient(self, name: str, samples: slice, gradient: Tensor) -> None:
        """Put a slice's gradient into what the stage gets that its tensor came from."""
        if name not in self.gradient:
            self.gradient[name] = torch.empty_like(self.entering[name])
        self.gradient[name][:, samples] = gradient


@dataclass
class InFlight:
    """A micro-batch between its forward and the end of its backward."""

    crossing: BoundaryTensors
    segments: dict[Key, Segment] = field(default_factory=dict)
