"""The unsharded answer: a plain single-process transformer in autograd, written without any of the
runtime's code.

It shares with the runtime only the initial values and the dropout masks, which are functions of
their keys.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from plait.core.model.spec import ModelSpec
from plait.core.parallel.strategy import Strategy
from plait.train.model.dropout import DropoutKey
from plait.train.model.pieces import initialise, pieces

TOGETHER = 4
"""Sequences of a micro-batch, where experts are balanced over one."""


class Reference:
    """Weights by logical name; ``loss`` builds one ordinary autograd graph."""

    def __init__(self, spec: ModelSpec, seed: int = 0, dtype: torch.dtype = torch.float64) -> None:
        self.spec = spec
        self.weights = {
            p.name: initialise(spec, p, seed).to(dtype).requires_grad_() for p in pieces(spec, Strategy(), 0)
        }
        self.auxiliary: Tensor | float = 0.0
        """Balancing losses of the last forward, which count in gradients and not in the loss."""

    def perturb(self, seed: int = 1) -> None:
        """Make biases and norms differ from their trivial initial values."""
        for i, (_name, weight) in enumerate(sorted(self.weights.items())):
            generator = torch.Generator().manual_seed(seed * 1000 + i)
            with torch.no_grad():
                weight.add_(torch.randn(weight.shape, generator=generator, dtype=torch.float64).to(weight) * 0.05)

    def logits(
        self,
        tokens: Tensor,
        dropout: DropoutKey | None = None,
        samples: Tensor | None = None,
        starts: Tensor | None = None,
    ) -> Tensor:
        """[B, S] -> [B, S, V]. starts: [B, S], where each token's document begins."""
        spec, w = self.spec, self.weights
        batch, sequence = tokens.shape
        samples = torch.arange(batch) if samples is None else samples
        positions = torch.arange(sequence)
        starts = torch.zeros_like(tokens) if starts is None else starts

        def drop(x: Tensor, layer: int, site: str) -> Tensor:
            if dropout is None or not spec.dropout:
                return x
            like = x.transpose(0, 1)
            here = positions[: x.shape[1]]
            return x * dropout.hidden(spec.dropout, layer, site, samples, here, like).transpose(0, 1)  # type: ignore[arg-type]

        self.auxiliary = 0.0
        h = w["embedding.weight"][tokens]
        if spec.learned_positions:
            h = h + w["positions.weight"][positions - starts]
        h = drop(h, 0, "embed")
        skips: list[Tensor] = []
        each = spec.num_layers // (2 * spec.levels + 1)
        for layer in range(spec.num_layers):
            at, part = f"layers.{layer}", layer // each
            if layer % each == 0 and 0 < part <= spec.levels:
                skips.append(h)
                h = self._down(part - 1, h)
            elif layer % each == 0 and part > spec.levels:
                h = self._up(len(skips) - 1, h, skips.pop())
            n = self._norm(f"{at}.attn.norm", h)
            attended = self._attention(f"{at}.attn", n, layer, dropout, samples, starts)
            if spec.parallel_block:
                h = h + drop(attended + self._mlp(f"{at}.mlp", n), layer, "mlp")
                continue
            h = h + drop(attended, layer, "attn")
            if f"{at}.moe.router.weight" in w:
                second = self._experts(f"{at}.moe", self._norm(f"{at}.moe.norm", h))
            else:
                second = self._mlp(f"{at}.mlp", self._norm(f"{at}.mlp.norm", h))
            h = h + drop(second, layer, "mlp")
        head = w["embedding.weight"] if spec.tied_embeddings else w["head.weight"]
        return self._norm("norm", h) @ head.T

    def loss(self, tokens: Tensor, targets: Tensor, weights: Tensor | None = None, **keys: object) -> Tensor:
        """Mean over targets that are not -100, weighted."""
        return mean_loss(self.logits(tokens, **keys), targets, weights)  # type: ignore[arg-type]

    def _down(self, level: int, h: Tensor) -> Tensor:
        """Every second token from the first, each with the one before it (zeros before the
        first)."""
        weight, bias = self.weights[f"down.{level}.weight"], self.weights[f"down.{level}.bias"]
        rows = []
        for at in range(0, h.shape[1], 2):
            before = h[:, at - 1] if at else torch.zeros_like(h[:, 0])
            rows.append(torch.cat((before, h[:, at]), dim=-1) @ weight.T + bias)
        return torch.stack(rows, dim=1)

    def _up(self, level: int, h: Tensor, skip: Tensor) -> Tensor:
        """Token t is the coarse token t // 2, and what stood at t before."""
        coarse = h @ self.weights[f"up.{level}.weight"].T + self.weights[f"up.{level}.bias"]
        return torch.stack([coarse[:, at // 2] + skip[:, at] for at in range(skip.shape[1])], dim=1)

    def _norm(self, at: str, h: Tensor) -> Tensor:
        weight, eps = self.weights[f"{at}.weight"], self.spec.norm_eps
        if self.spec.family == "llama":
            return h * (h.square().mean(-1, keepdim=True) + eps).rsqrt() * weight
        centred = h - h.mean(-1, keepdim=True)
        return centred * (centred.square().mean(-1, keepdim=True) + eps).rsqrt() * weight + self.weights[f"{at}.bias"]

    def _linear(self, name: str, x: Tensor) -> Tensor:
        y = x @ self.weights[f"{name}.weight"].T
        return y + self.weights[f"{name}.bias"] if f"{name}.bias" in self.weights else y

    def _attention(
        self, at: str, n: Tensor, layer: int, dropout: DropoutKey | None, samples: Tensor, starts: Tensor
    ) -> Tensor:
        spec, (b, s, _) = self.spec, n.shape
        q, k, v = (self._linear(f"{at}.{name}", n).view(b, s, -1, spec.head_size).transpose(1, 2) for name in "qkv")
        if spec.family == "llama":
            q, k = self._rotate(q, starts), self._rotate(k, starts)
        group = spec.num_heads // spec.num_kv_heads
        k, v = (t[:, :, None].expand(-1, -1, group, -1, -1).flatten(1, 2) for t in (k, v))
        scores = q @ k.transpose(2, 3) / math.sqrt(spec.head_size) + torch.full(
            (s, s), float("-inf"), dtype=n.dtype
        ).triu(1)
        if not spec.levels:
            scores = scores.masked_fill(starts[:, None, :, None] != starts[:, None, None], float("-inf"))
        weights = scores.softmax(-1)
        if dropout is not None and spec.attention_dropout:
            weights = weights * dropout.attention(
                spec.attention_dropout, layer, samples, torch.arange(spec.num_heads), weights
            )
        return self._linear(f"{at}.o", (weights @ v).transpose(1, 2).reshape(b, s, -1))

    def _rotate(self, x: Tensor, starts: Tensor) -> Tensor:
        """Rotary positions by complex multiplication of the pairs (i, i + D/2)."""
        size = self.spec.head_size
        frequencies = self.spec.rope_theta ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
        turns = torch.polar(
            torch.ones(1, dtype=torch.float64),
            (torch.arange(x.shape[2]) - starts)[:, None, :, None].double() * frequencies,
        )
        pairs = torch.complex(x[..., : size // 2].double(), x[..., size // 2 :].double()) * turns
        return torch.cat((pairs.real, pairs.imag), dim=-1).to(x.dtype)

    def _mlp(self, at: str, n: Tensor) -> Tensor:
        if self.spec.family == "llama":
            return self._linear(f"{at}.down", F.silu(self._linear(f"{at}.gate", n)) * self._linear(f"{at}.up", n))
        inner = self._linear(f"{at}.up", n)
        activated = 0.5 * inner * (1 + torch.tanh(math.sqrt(2 / math.pi) * (inner + 0.044715 * inner**3)))
        return self._linear(f"{at}.down", activated)

    def _experts(self, at: str, n: Tensor) -> Tensor:
        """Token by token. A full expert takes no further token of the same sequence."""
        settings = self.spec.experts
        assert settings is not None
        batch, sequence, _ = n.shape
        logits = n @ self.weights[f"{at}.router.weight"].T
        scores = logits.softmax(-1) if settings.score_function == "softmax" else logits.sigmoid()
        room = math.ceil(settings.capacity * settings.per_token * sequence / settings.count) or sequence
        rows, counts = list[Tensor](), torch.zeros(batch, settings.count, dtype=n.dtype)
        for b in range(batch):
            taken = [0] * settings.count
            for s in range(sequence):
                chosen = self._chosen(scores[b, s].tolist())
                weights = scores[b, s][chosen]
                if settings.norm_topk_prob:
                    weights = weights / weights.sum()
                row = self._mlp(f"{at}.shared", n[b, s]) if settings.shared else torch.zeros_like(n[b, s])
                if settings.shared_gate:
                    row = row * (self.weights[f"{at}.shared_gate.weight"][0] @ n[b, s]).sigmoid()
                for one, weight in zip(chosen, weights, strict=True):
                    counts[b, one] += 1
                    taken[one] += 1
                    if taken[one] <= room:
                        scaled = weight * settings.scaling_factor
                        row = row + scaled * self._mlp(f"{at}.experts.{one}", n[b, s])
                rows.append(row)
        share = counts / counts.sum(-1, keepdim=True)
        if settings.balance != "sequence":
            share = share.unflatten(0, (-1, TOGETHER)).mean(1).repeat_interleave(TOGETHER, 0)
        even = scores / scores.sum(-1, keepdim=True)
        balance = settings.count * (share[:, None] * even).sum(-1).mean()
        z = logits.exp().sum(-1).log().square().mean()
        self.auxiliary = self.auxiliary + settings.balance_loss * balance + settings.z_loss * z
        return torch.stack(rows).view(n.shape)

    def _chosen(self, scores: list[float]) -> list[int]:
        """The experts with the highest scores, of the best groups."""
        settings = self.spec.experts
        assert settings is not None
        size = settings.count // settings.groups
        groups = [list(range(first, first + size)) for first in range(0, settings.count, size)]
        best = 1 if settings.score_function == "softmax" else 2
        worth = [sum(sorted((scores[one] for one in group), reverse=True)[:best]) for group in groups]
        order = sorted(range(len(groups)), key=lambda at: -worth[at])[: settings.groups_per_token or None]
        open_to = sorted(one for at in order for one in groups[at])
        return sorted(open_to, key=lambda one: -scores[one])[: settings.per_token]


def mean_loss(logits: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor:
    """Mean of the token losses of [B, S, V], weighted, without those of targets that are -100."""
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="none")
    counts = (targets != -100).double().flatten()
    counts = counts if weights is None else counts * weights.flatten()
    return (losses * counts).sum() / counts.sum()
