"""Both ends of the residual stream: word embeddings split over the vocabulary, learned positions,
and the vocabulary-parallel cross-entropy.

Each rank reduces its share of the logits to three numbers per token: maximum, sum of exponentials
against the maximum, and the target's logit if it lies in the share. One all-gather of these
replaces the usual two or three reductions (maximum, target, sum). The exponentials are computed
once and become the gradient in place.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from plait.core.model.spec import ModelSpec
from plait.core.parallel.strategy import Strategy
from plait.train.model.basics import JoinGradient, SliceContext, WeightModule
from plait.train.model.kernels import Kernels


class RowExchange(NamedTuple):
    """An exchange of embedding rows. send: rows of this rank's shard, padded so that all ranks send
    equally many. arrival: each token's index in the rows sent by rank 0, 1, ..., shaped like the
    tokens."""

    send: Tensor
    arrival: Tensor


class Embedding(nn.Module):
    """Vocabulary-parallel word embedding, learned positions if the family has them, embedding
    dropout."""

    def __init__(self, spec: ModelSpec, strategy: Strategy, tp_rank: int) -> None:
        super().__init__()
        self.spec = spec
        self.num_shards = strategy.tp
        self.rows = strategy.padded_vocab(spec) // strategy.tp
        self.first = tp_rank * self.rows
        self.words = WeightModule()
        self.positions = WeightModule() if spec.learned_positions else None

    def local(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return (row in this rank's shard, whether the token is in it), both shaped like
        ``tokens``."""
        rows = tokens - self.first
        here = (rows >= 0) & (rows < self.rows)
        return rows.clamp(0, self.rows - 1), here

    def exchange(self, tokens: Tensor) -> RowExchange:
        """Return the exchange of the rows that ``tokens`` (any shape, in host memory) name; every
        distinct row is sent once.

        A rank owns a range of the vocabulary, so every rank knows without communication who sends
        which rows.
        """
        distinct, indices = torch.unique(tokens, return_inverse=True)  # sorted, so each owner's rows are contiguous
        owners = distinct // self.rows
        counts = torch.bincount(owners, minlength=self.num_shards)
        most = int(counts.max())
        starts = counts.cumsum(0) - counts
        arrival = owners * most + torch.arange(len(distinct)) - starts[owners]
        mine = distinct[owners == self.first // self.rows] - self.first
        return RowExchange(torch.nn.functional.pad(mine, (0, most - len(mine))), arrival[indices])

    def join(self, y: Tensor, context: SliceContext) -> Tensor:
        """Return the first residual stream: word embeddings [S, B, H] plus positions."""
        if self.positions is not None:
            if context.own_positions is None:
                y = y + self.positions.weight[context.positions][:, None, :]
            else:
                y = y + self.positions.weight[context.own_positions]
        mask = context.mask(self.spec.dropout, 0, "embed")
        return y if mask is None else context.kernels.drop(y, mask)

    def join_gradient(self, gradient: Tensor, context: SliceContext) -> JoinGradient:
        """Return the gradients of ``y`` and of the positions from the gradient of the sum."""
        mask = context.mask(self.spec.dropout, 0, "embed")
        gradient = gradient if mask is None else context.kernels.drop(gradient, mask)
        if self.positions is None:
            return gradient, []
        if context.own_positions is None:
            return gradient, [(self.positions.weight, gradient.sum(1), context.positions)]
        return gradient, [(self.positions.weight, gradient.flatten(0, 1), context.own_positions.flatten())]


IGNORED = -100


def padding_start(embedding: Embedding, vocab: int) -> int:
    """Return the first column of a share of the logits that is vocabulary padding."""
    return min(max(vocab - embedding.first, 0), embedding.rows)


class VocabularyLoss:
    """Cross-entropy of one slice. logits: [M, V / tp], overwritten. targets: [M] int64; ``IGNORED``
    targets have no loss."""

    def __init__(
        self, logits: Tensor, targets: Tensor, embedding: Embedding, vocab: int, size: int, kernels: Kernels
    ) -> None:
        self._dtype = logits.dtype
        logits = logits if logits.dtype == torch.float64 else logits.float()
        self._valid = targets != IGNORED
        rows, here = embedding.local(targets)
        self._rows, self._here = rows, here & self._valid
        found = kernels.local_loss(logits, rows, self._here, padding_start(embedding, vocab))
        self._exponentials: Tensor | None = found[0]
        self.statistics = found[1]  # [1, 3, M]
        self.gathered = self.statistics if size == 1 else self.statistics.new_empty((size, *self.statistics.shape[1:]))

    def finish(
        self, scale: float | Tensor, weights: Tensor | None = None, *, gradient: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Combine the gathered statistics. Return scale * weighted sum of token losses, and the
        logits' gradient, [M, V / tp], if ``gradient``. Otherwise set ``losses``: each token's loss,
        [M], 0 for ignored tokens. weights: [M]; None: all 1."""
        maxima, sums, targets = self.gathered.unbind(dim=1)  # [tp, M] each
        maximum = maxima.amax(dim=0)
        normaliser = (sums * (maxima - maximum).exp()).sum(dim=0)
        losses = (normaliser.log() + maximum - targets.sum(dim=0)) * self._valid
        unweighted = losses
        losses = losses.double() if weights is None else losses.double() * weights
        total = losses.sum() * scale
        exponentials, self._exponentials = self._exponentials, None
        if not gradient:
            self.losses = unweighted
            return total, None
        assert exponentials is not None
        counts = self._valid if weights is None else self._valid * weights
        weight = counts.to(exponentials.dtype) * scale
        exponentials *= ((self.statistics[0, 0] - maximum).exp() / normaliser * weight)[:, None]
        exponentials.scatter_add_(1, self._rows[:, None], -(self._here * weight)[:, None])
        return total, exponentials.to(self._dtype)
