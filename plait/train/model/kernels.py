"""Functions between matrix products: norms, activations, rotary positions, dropout, the addition to
the residual stream, the local part of the loss.

``EAGER`` runs torch, op by op. ``plait.train.model.compiled`` has the same functions compiled. An
executor is made with one of the two (``Strategy.compile``) and calls nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import _engine_run_backward

from plait.train.model import formulas
from plait.train.model.dropout import Mask

Statistics = tuple[Tensor, ...]
"""Tensors that a norm keeps for its gradient, in addition to those that autograd keeps."""


class Scale(NamedTuple):
    """A norm's parameters. bias: None for RMSNorm."""

    weight: Tensor
    bias: Tensor | None
    eps: float


class Summands(NamedTuple):
    """The terms of h + dropout(y + bias), [S, B, H]; ``y`` is [parts, S, B, H / parts]."""

    h: Tensor
    y: Tensor
    bias: Tensor | None
    mask: Mask | None


class Scores(NamedTuple):
    """Attention scores of some queries before the softmax.

    products: of queries and keys, [M, queries, keys], by (sample, head); overwritten. root: divisor
    of the products. queries: their positions; keys are the sequence's first. heads: [M], the
    dropout hashes of ``Mask.heads``. first: [M, queries], the first key that each query sees; None:
    the sequence's first.
    """

    products: Tensor
    root: float
    queries: Tensor
    heads: Tensor
    mask: Mask
    first: Tensor | None = None


class Kernels(Protocol):
    """Interface of the kernels. ``activate`` and ``rotate`` are differentiable."""

    fuses: bool
    """True if ``join_norm`` is to be called where a norm follows a join."""

    def norm(self, h: Tensor, scale: Scale) -> tuple[Tensor, Statistics]:
        """Return the norm of [S, B, H] and its statistics; differentiable if there are no
        statistics."""
        ...

    def norm_gradient(
        self, n: Tensor, h: Tensor, scale: Scale, statistics: Statistics, gradient: Tensor, past: Tensor | None
    ) -> list[Tensor]:
        """Return the gradients of h (plus ``past``) and of the parameters, from the gradient of
        ``n``."""
        ...

    def join(self, sum_: Summands) -> Tensor:
        """Return h + dropout(y + bias), [S, B, H]; called with autograd off, as ``join_norm``
        is."""
        ...

    def join_norm(self, sum_: Summands, scale: Scale) -> tuple[Tensor, Tensor, Statistics]:
        """Return (h + dropout(y + bias), its norm, the norm's statistics); called with autograd
        off."""
        ...

    def activate(self, z: Tensor, *, gated: bool) -> Tensor:
        """Return GELU (tanh form, as in GPT-2), or SwiGLU of [..., 2 F], whose gate comes first."""
        ...

    def rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries and keys, [S, B, N, D], rotated by tables [S, 1, 1, D]."""
        ...

    def weights(self, scores: Scores) -> tuple[Tensor, Tensor]:
        """Return the causal softmax with dropout, shaped as the products, and the log-sum-exp of
        every query."""
        ...

    def weights_gradient(self, scores: Scores, lse: Tensor, gradient: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
        """Return the same weights again, and the gradient of the products from the gradient of the
        weights, which is overwritten.

        own: [M, queries], of every query the dot product of its output and the output's gradient.
        """
        ...

    def drop(self, x: Tensor, mask: Mask) -> Tensor:
        """Apply dropout to [S, B, H]; the same function serves for the gradient."""
        ...

    def local_loss(self, logits: Tensor, rows: Tensor, here: Tensor, beyond: int) -> tuple[Tensor, Tensor]:
        """Return exponentials of a share of the logits and the loss's statistics.

        logits: [M, V / tp], overwritten by the exponentials against each row's maximum. The
        statistics are maximum, sum of exponentials and target's logit, [1, 3, M]. rows: [M], the
        target's column. here: whether it lies in this share. beyond: columns from here on are
        padding.
        """
        ...


class Eager:
    """The kernels as torch ops."""

    fuses = False

    def norm(self, h: Tensor, scale: Scale) -> tuple[Tensor, Statistics]:
        weight, bias, eps = scale
        if bias is None:
            return F.rms_norm(h, weight.shape, weight, eps), ()
        return F.layer_norm(h, weight.shape, weight, bias, eps), ()

    def norm_gradient(
        self, n: Tensor, h: Tensor, scale: Scale, statistics: Statistics, gradient: Tensor, past: Tensor | None
    ) -> list[Tensor]:
        parameters = [scale.weight] if scale.bias is None else [scale.weight, scale.bias]
        found = list(gradients_of(n, [h, *parameters], gradient))
        if past is not None:
            found[0] += past
        return found

    def activate(self, z: Tensor, *, gated: bool) -> Tensor:
        return formulas.swiglu(z) if gated else F.gelu(z, approximate="tanh")

    def rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return formulas.rotate(q, k, cos, sin)

    def weights(self, scores: Scores) -> tuple[Tensor, Tensor]:
        found = _masked_scores(scores)
        maximum = found.amax(dim=-1, keepdim=True)
        total = found.sub_(maximum).exp_().sum(dim=-1, keepdim=True)
        found.div_(total).mul_(scores.mask.weights(scores.heads, scores.queries, found))
        return found.to(scores.products.dtype), (total.log_().add_(maximum)).squeeze(-1)

    def weights_gradient(self, scores: Scores, lse: Tensor, gradient: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
        found, dtype = _masked_scores(scores).sub_(lse[..., None]).exp_(), gradient.dtype
        kept = scores.mask.weights(scores.heads, scores.queries, found)
        dropped = (found * kept).to(dtype)
        through = gradient.to(found.dtype).mul_(kept).sub_(own[..., None]).mul_(found).div_(scores.root)
        return dropped, through.to(dtype)

    def join(self, sum_: Summands) -> Tensor:
        h, y, bias, mask = sum_
        # Column parts are read where the collectives left them: the sum writes the contiguous result, so
        # there is no concatenation.
        parts, width = y.shape[0], y.shape[3]
        y = y.permute(1, 2, 0, 3) if parts > 1 else y.view(*h.shape)
        h = h.view(*h.shape[:2], parts, width) if parts > 1 else h
        if bias is not None:
            y = y + (bias.view(parts, width) if parts > 1 else bias)
        if mask is not None:
            y = y * mask.hidden(h.view(*h.shape[:2], -1)).view(y.shape)
        return (h + y).view(*h.shape[:2], -1)

    def join_norm(self, sum_: Summands, scale: Scale) -> tuple[Tensor, Tensor, Statistics]:
        h = self.join(sum_)
        return h, *self.norm(h, scale)

    def drop(self, x: Tensor, mask: Mask) -> Tensor:
        return x * mask.hidden(x)

    def local_loss(self, logits: Tensor, rows: Tensor, here: Tensor, beyond: int) -> tuple[Tensor, Tensor]:
        logits[:, beyond:] = float("-inf")
        maximum = logits.amax(dim=1).clamp_min(torch.finfo(logits.dtype).min)  # a share may be all padding
        target = logits.gather(1, rows[:, None])[:, 0].where(here, logits.new_zeros(()))
        exponentials = logits.sub_(maximum[:, None]).exp_()
        return exponentials, torch.stack((maximum, exponentials.sum(dim=1), target))[None]


EAGER = Eager()


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which sums are computed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _masked_scores(scores: Scores) -> Tensor:
    """Return products / root in the products' memory, -inf where a query does not see a key."""
    keys = torch.arange(scores.products.shape[-1], device=scores.products.device)
    hidden = keys[None, :] > scores.queries[:, None]
    if scores.first is not None:
        hidden = hidden | (keys < scores.first[..., None])
    return scores.products.to(wide(scores.products.dtype)).div_(scores.root).masked_fill_(hidden, float("-inf"))


def gradients_of(result: Tensor, inputs: Sequence[Tensor], gradient: Tensor) -> Sequence[Tensor]:
    """Return the gradients of ``inputs`` from the gradient of ``result``. It does what
    ``torch.autograd.grad`` does, but calls the engine directly, which checks shapes itself.

    ``grad`` imports sympy to compare two shapes that may be symbols, 0.6 s of processor time in
    every rank's first step.
    """
    return _engine_run_backward((result,), (gradient,), False, False, tuple(inputs), False, accumulate_grad=False)
