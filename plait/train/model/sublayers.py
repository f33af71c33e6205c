"""GPT and Llama as plain modules: parameters and the mathematics between collectives, without
communication or scheduling.

Activations are [S, B, H] (sequence first), so that a sequence shard is a contiguous range of rows.
A sublayer is::

    h' = join(h, y)      residual stream plus the previous sublayer's reduced output (bias, dropout)
    n  = norm(h')
    z  = n @ column^T + bias        this rank's heads, or its share of the feed-forward features
    o  = core(z)                    attention, or activation
    y  = o @ row^T                  partial sums over ranks, to be reduced

The executor calls the linears, because their input and weight gradients are scheduled separately.
Autograd differentiates ``norm`` and ``core``; ``join_gradient``, which needs no activations,
differentiates ``join``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from plait.core.model.spec import ModelSpec
from plait.core.parallel.strategy import Strategy
from plait.train.model.basics import JoinGradient, Norm, SliceContext, WeightModule
from plait.train.model.dropout import DropoutSite, Mask
from plait.train.model.dropped_attention import attend
from plait.train.model.formulas import RotaryTables
from plait.train.model.kernels import EAGER, Scale, Summands, gradients_of
from plait.train.model.sequence import ALONE, RingStep, SequenceGroup, attend_causal, attend_documents


class Sublayer(nn.Module):
    """Attention or MLP: norm, a column-parallel weight, a core, a row-parallel weight."""

    def __init__(self, spec: ModelSpec, layer: int) -> None:
        super().__init__()
        self.spec, self.layer = spec, layer
        self.norm = Norm(spec)
        self.column = WeightModule()
        self.row = WeightModule()

    site: DropoutSite
    cheap = False
    """True if the core costs little to run again."""

    @property
    def branches(self) -> list[Sublayer]:
        """The parallel paths between norm and join."""
        return [self]

    def join(self, h: Tensor, y: Tensor, context: SliceContext) -> Tensor:
        """Return the residual stream after this sublayer, [S, B, H]. y: [parts, S, B, H / parts],
        reduced."""
        return context.kernels.join(self.summands(h, y, context))

    def summands(self, h: Tensor, y: Tensor, context: SliceContext) -> Summands:
        """Return the terms that ``join`` adds up."""
        return Summands(h, y, self.row.bias, context.mask(self.spec.dropout, self.layer, self.site))

    def join_gradient(self, gradient: Tensor, context: SliceContext) -> JoinGradient:
        """Return the gradients of ``y`` and of the bias from the gradient of the sum."""
        mask = context.mask(self.spec.dropout, self.layer, self.site)
        gradient = gradient if mask is None else context.kernels.drop(gradient, mask)
        return gradient, [(self.row.bias, gradient.sum((0, 1)), None)] if self.row.bias is not None else []

    @property
    def inner(self) -> list[nn.Parameter]:
        """Parameters of the core between the two weights, such as norms of heads; empty by
        default."""
        return []

    def core(self, z: Tensor, context: SliceContext) -> Tensor:
        """Map [S, B, first weight's rows] to [S, B, second weight's columns]."""
        raise NotImplementedError


class Attention(Sublayer):
    """Causal self-attention over this rank's heads; grouped-query if there are fewer key/value
    heads."""

    site = "attn"

    def __init__(
        self,
        spec: ModelSpec,
        layer: int,
        strategy: Strategy,
        tp_rank: int,
        sequence: SequenceGroup = ALONE,
    ) -> None:
        super().__init__(spec, layer)
        self.sequence = sequence
        self.num_heads = spec.num_heads // strategy.tp
        self.num_kv_heads = max(1, spec.num_kv_heads // strategy.tp)
        self.first_head = tp_rank * self.num_heads
        self.q_norm, self.k_norm = (WeightModule() if spec.qk_norm else None for _ in range(2))

    @property
    def inner(self) -> list[nn.Parameter]:
        """The weights of the norms of queries and of keys, if the model has these norms."""
        return [norm.weight for norm in (self.q_norm, self.k_norm) if norm is not None]

    def core(self, z: Tensor, context: SliceContext) -> Tensor:
        """Apply rotary positions and attention, and concatenate heads; only if no other rank has
        tokens of the same sequences."""
        q, k, v = (t.permute(1, 2, 0, 3) for t in self.rotated_qkv(z, context))
        o = self.attend(q, k, v, context).permute(2, 0, 1, 3)
        return o.reshape(*z.shape[:2], -1)

    def rotated_qkv(self, z: Tensor, context: SliceContext) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values, [S, B, N, D], normalised and rotated by their
        positions."""
        q, k, v = self._heads(z)
        if self.inner:
            q, k = (self._normed(x, weight) for x, weight in zip((q, k), self.inner, strict=True))
        if context.rotary is not None:
            q, k = self._rotated(context.rotary, q, k, context)
        return q, k, v

    @staticmethod
    def _rotated(
        turns: RotaryTables, q: Tensor, k: Tensor, context: SliceContext, *, back: bool = False
    ) -> Sequence[Tensor]:
        """Return queries and keys rotated by their positions. back: rotate by the inverse.

        Tables of documents differ by sequence and would be one more compiled variant, so they use
        eager kernels.
        """
        cos, sin = turns
        kernels = context.kernels if context.documents is None else EAGER
        return kernels.rotate(q, k, cos, -sin if back else sin)

    def _heads(self, z: Tensor) -> Sequence[Tensor]:
        """Split the first weight's output into queries, keys and values."""
        heads = [self.num_heads, self.num_kv_heads, self.num_kv_heads]
        return z.view(*z.shape[:2], -1, self.spec.head_size).split(heads, dim=2)

    def _normed(self, x: Tensor, weight: nn.Parameter) -> Tensor:
        """Divide every head by its root mean square; op by op, so that autograd can differentiate
        it."""
        return EAGER.norm(x, Scale(weight, None, self.spec.norm_eps))[0]

    def _normed_back(self, gradient: Tensor, x: Tensor, weight: nn.Parameter) -> Sequence[Tensor]:
        """Return the gradients of ``x`` and ``weight`` of a norm of heads, from the gradient of its
        result."""
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            result = self._normed(x, weight)
        return gradients_of(result, [x, weight], gradient)

    def rotated_qkv_grad(
        self, q: Tensor, k: Tensor, v: Tensor, z: Tensor | None, context: SliceContext
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """Return the gradients of z, [S, B, first weight's rows], and of ``inner``, from the
        gradients of the results of ``rotated_qkv``. z: only needed if ``inner`` is not empty."""
        if context.rotary is not None:
            q, k = self._rotated(context.rotary, q, k, context, back=True)
        found = list[Tensor]()
        if z is not None:
            before = zip((q, k), self._heads(z), self.inner, strict=False)
            (q, of_q), (k, of_k) = (self._normed_back(*each) for each in before)
            found = [of_q, of_k]
        return torch.cat((q, k, v), dim=2).flatten(2), found

    def ring_step(self, number: int, context: SliceContext) -> RingStep:
        """Return the ring step at which the block of keys has moved ``number`` ranks along the
        ring."""
        ring, window = self.sequence.ring, self.spec.window_at(self.layer)
        return RingStep((ring.rank - number) % ring.size, ring.rank, ring.size, window, context.documents)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, context: SliceContext) -> Tensor:
        """Return causal attention of [B, N, S, D], differentiable by autograd."""
        dropout, window, documents = context.dropout, self.spec.window_at(self.layer), context.documents
        if dropout is None or not self.spec.attention_dropout:
            if documents is None:
                return attend_causal(q, k, v, window)
            return attend_documents(q, k, v, documents, window)
        first = self.first_head + self.sequence.ulysses.rank * q.shape[1]
        heads = torch.arange(first, first + q.shape[1], device=q.device)
        mask = Mask(dropout, self.spec.attention_dropout, self.layer, "core", context.samples, heads)
        if documents is None:
            return attend(q, k, v, mask, context.kernels)
        return attend(q, k, v, mask, EAGER, documents.starts)  # compiled kernels take no first keys


class Mlp(Sublayer):
    """GELU or SwiGLU over this rank's features."""

    site = "mlp"
    cheap = True

    def core(self, z: Tensor, context: SliceContext) -> Tensor:
        """Apply the activation; with a gate, the gate's rows come first."""
        return context.kernels.activate(z, gated=self.spec.gated)


class ParallelBlock:
    """Attention and MLP in parallel, y = attention(norm(h)) + mlp(norm(h)): one norm, one bias, one
    gather and one reduction (Wang 2021; MegaScale, arXiv 2402.15627, section 3.1)."""

    def __init__(self, attention: Attention, mlp: Mlp) -> None:
        self.branches: list[Sublayer] = [attention, mlp]
        self.norm = attention.norm
        self.join, self.summands, self.join_gradient = mlp.join, mlp.summands, mlp.join_gradient
