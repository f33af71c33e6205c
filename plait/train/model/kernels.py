"""What lies between matrix products, as functions: norms, activations, rotary positions, dropout, the way
into the residual stream, the loss's local part.

``EAGER`` is torch, op by op. ``plait.train.model.compiled`` has the same compiled. An executor is made with
one of the two (``Strategy.compile``) and calls nothing else.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from plait.train.model.dropout import Mask
from plait.train.model.rope import rotate


class Kernels(Protocol):
    """All of them. The first four are differentiable; the others are called where autograd is off."""

    def norm(self, h: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        """LayerNorm, or RMSNorm where there is no bias, over the last dim."""
        ...

    def activate(self, z: Tensor, *, gated: bool) -> Tensor:
        """GELU (tanh form, as GPT-2), or SwiGLU of [..., 2 F], whose gate comes first."""
        ...

    def rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rotary positions of [S, B, N, D]; the tables are [S, 1, 1, D]."""
        ...

    def weights(self, products: Tensor, root: float, mask: Mask) -> Tensor:
        """Causal softmax of products / root, [B, N, S, S], with dropout by (sample, head)."""
        ...

    def join(self, h: Tensor, y: Tensor, bias: Tensor | None, mask: Mask | None) -> Tensor:
        """h + dropout(y + bias), [S, B, H]; ``y`` comes as [parts, S, B, H / parts]."""
        ...

    def drop(self, x: Tensor, mask: Mask) -> Tensor:
        """Dropout of [S, B, H], which is also the gradient's."""
        ...

    def local_loss(self, logits: Tensor, rows: Tensor, here: Tensor, beyond: int) -> tuple[Tensor, Tensor]:
        """Of a share of the logits, [M, V / tp], consumed: exponentials against each row's maximum, in its
        place; and maximum, sum of exponentials and target's logit, [1, 3, M].

        rows: [M], the target's column. here: whether it lies in this share. beyond: columns from here on are
        padding.
        """
        ...

    def finish_loss(
        self, exponentials: Tensor, own: Tensor, gathered: Tensor, valid: Tensor, rows: Tensor, here: Tensor,
        scale: float,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """The sum of token losses, fp64, 0-d, and scale times its gradient in the place of ``exponentials``.

        own, gathered: what ``local_loss`` found here, [3, M], and on all ranks, [tp, 3, M]. valid: [M],
        whether a target counts.
        """
        ...


class Eager:
    """As torch runs them."""

    def norm(self, h: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        shape = weight.shape
        return F.rms_norm(h, shape, weight, eps) if bias is None else F.layer_norm(h, shape, weight, bias, eps)

    def activate(self, z: Tensor, *, gated: bool) -> Tensor:
        if not gated:
            return F.gelu(z, approximate="tanh")
        gate, up = z.chunk(2, dim=-1)
        return F.silu(gate) * up

    def rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return rotate(q, cos, sin), rotate(k, cos, sin)

    def weights(self, products: Tensor, root: float, mask: Mask) -> Tensor:
        scores, s = products / root, products.shape[-1]
        scores = scores.masked_fill(torch.ones(s, s, dtype=torch.bool, device=scores.device).triu(1), float("-inf"))
        dropped = mask.attention(scores)
        return scores.softmax(dim=-1) * dropped

    def join(self, h: Tensor, y: Tensor, bias: Tensor | None, mask: Mask | None) -> Tensor:
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

    def drop(self, x: Tensor, mask: Mask) -> Tensor:
        return x * mask.hidden(x)

    def local_loss(self, logits: Tensor, rows: Tensor, here: Tensor, beyond: int) -> tuple[Tensor, Tensor]:
        logits[:, beyond:] = float("-inf")
        maximum = logits.amax(dim=1).clamp_min(torch.finfo(logits.dtype).min)  # a share may be all padding
        target = logits.gather(1, rows[:, None])[:, 0].where(here, logits.new_zeros(()))
        exponentials = logits.sub_(maximum[:, None]).exp_()
        return exponentials, torch.stack((maximum, exponentials.sum(dim=1), target))[None]

    def finish_loss(
        self, exponentials: Tensor, own: Tensor, gathered: Tensor, valid: Tensor, rows: Tensor, here: Tensor,
        scale: float,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        total, maximum, normaliser = summed_losses(gathered, valid)
        weight = valid.to(exponentials.dtype) * scale
        exponentials *= ((own[0] - maximum).exp() / normaliser * weight)[:, None]
        exponentials.scatter_add_(1, rows[:, None], -(here * weight)[:, None])
        return total, exponentials


EAGER = Eager()


def summed_losses(gathered: Tensor, valid: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of the statistics of all ranks, [tp, 3, M]: the sum of token losses, fp64, 0-d; each token's maximum
    and sum of exponentials, [M]."""
    maxima, sums, targets = gathered.unbind(dim=1)  # [tp, M] each
    maximum = maxima.amax(dim=0)
    normaliser = (sums * (maxima - maximum).exp()).sum(dim=0)
    losses = (normaliser.log() + maximum - targets.sum(dim=0)) * valid
    return losses.double().sum(), maximum, normaliser
