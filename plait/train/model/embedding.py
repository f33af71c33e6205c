"""The beginning of the residual stream: word embeddings cut over the vocabulary, learned positions."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from plait.core.model.spec import ModelSpec
from plait.core.parallel.strategy import Strategy
from plait.train.model.basics import JoinGradient, SliceContext, WeightModule


class RowExchange(NamedTuple):
    """send: rows of this rank's shard, padded so that all ranks send equally many. arrival: where, among all
    rows sent by rank 0, 1, ..., each token's row arrives; shaped like the tokens."""

    send: Tensor
    arrival: Tensor


class Embedding(nn.Module):
    """Vocabulary-parallel word embedding, learned positions where the family has them, embedding dropout."""

    def __init__(self, spec: ModelSpec, strategy: Strategy, tp_rank: int) -> None:
        super().__init__()
        self.spec = spec
        self.num_shards = strategy.tp
        self.rows = strategy.padded_vocab(spec) // strategy.tp
        self.first = tp_rank * self.rows
        self.words = WeightModule()
        self.positions = WeightModule() if spec.learned_positions else None

    def local(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """(row in this rank's shard, whether the token is in it), both shaped like ``tokens``."""
        rows = tokens - self.first
        here = (rows >= 0) & (rows < self.rows)
        return rows.clamp(0, self.rows - 1), here

    def exchange(self, tokens: Tensor) -> RowExchange:
        """How the ranks exchange the rows that ``tokens`` (any shape, in host memory) name: every distinct
        row travels once.

        A rank owns a range of the vocabulary, so every rank knows without asking who sends which rows.
        """
        distinct, places = torch.unique(tokens, return_inverse=True)  # sorted, so each owner's rows lie side by side
        owners = distinct // self.rows
        counts = torch.bincount(owners, minlength=self.num_shards)
        most = int(counts.max())
        starts = counts.cumsum(0) - counts
        arrival = owners * most + torch.arange(len(distinct)) - starts[owners]
        mine = distinct[owners == self.first // self.rows] - self.first
        return RowExchange(torch.nn.functional.pad(mine, (0, most - len(mine))), arrival[places])

    def join(self, y: Tensor, context: SliceContext) -> Tensor:
        """The residual stream's beginning: word embeddings [S, B, H] plus positions."""
        if self.positions is not None:
            if context.own_places is None:
                y = y + self.positions.weight[context.positions][:, None, :]
            else:
                y = y + self.positions.weight[context.own_places]
        mask = context.mask(self.spec.dropout, 0, "embed")
        return y if mask is None else context.kernels.drop(y, mask)

    def join_gradient(self, gradient: Tensor, context: SliceContext) -> JoinGradient:
        """Gradient of ``y`` from that of the sum."""
        mask = context.mask(self.spec.dropout, 0, "embed")
        gradient = gradient if mask is None else context.kernels.drop(gradient, mask)
        if self.positions is None:
            return gradient, []
        if context.own_places is None:
            return gradient, [(self.positions.weight, gradient.sum(1), context.positions)]
        return gradient, [(self.positions.weight, gradient.flatten(0, 1), context.own_places.flatten())]
