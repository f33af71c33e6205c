"""Vocabulary-parallel cross-entropy with one small collective.

Each rank reduces its share of the logits to three numbers a token: their maximum, the sum of exponentials
against it, and the target's logit if it lies in the share. One all-gather of these replaces the two or three
reductions that are usual (maximum, target, sum), and the exponentials are computed once and become the
gradient in place.
"""

from __future__ import annotations

import torch
from torch import Tensor

from plait.train.model.embedding import Embedding
from plait.train.model.kernels import Kernels

IGNORED = -100


def beyond(embedding: Embedding, vocab: int) -> int:
    """The first column of a share of the logits that is padding of the vocabulary."""
    return min(max(vocab - embedding.first, 0), embedding.rows)


class VocabularyLoss:
    """Cross-entropy of one slice. logits: [M, V / tp], consumed. targets: [M] int64, ``IGNORED`` counts
    nothing."""

    def __init__(
        self, logits: Tensor, targets: Tensor, embedding: Embedding, vocab: int, size: int, kernels: Kernels
    ) -> None:
        self._dtype = logits.dtype
        logits = logits if logits.dtype == torch.float64 else logits.float()
        self._valid = targets != IGNORED
        rows, here = embedding.local(targets)
        self._rows, self._here = rows, here & self._valid
        found = kernels.local_loss(logits, rows, self._here, beyond(embedding, vocab))
        self._exponentials: Tensor | None = found[0]
        self.statistics = found[1]  # [1, 3, M]
        self.gathered = self.statistics if size == 1 else self.statistics.new_empty((size, *self.statistics.shape[1:]))

    def finish(
        self, scale: float | Tensor, weights: Tensor | None = None, *, gradient: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Combine the gathered statistics: scale * weighted sum of token losses, and the logits' gradient,
        [M, V / tp], where it is wanted; where not, ``losses`` has each token's own, [M], 0 of those that are
        ignored. weights: [M]; None: all 1."""
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
