"""Counter-based dropout: a mask element depends on what it masks, never on when or where it is
computed.

The key is (seed, step, layer, site, sample, position[, head]) and the element's index. So the mask
is the same at every tensor-parallel degree, slicing, order, sequence sharding or recomputation.
Elements are hashed with 32-bit integer mixing (the ``lowbias32`` finaliser of C. Wellons, public
domain) in int64 arithmetic, on any device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

DropoutSite = Literal["embed", "attn", "mlp", "core"]
_SITES: dict[str, int] = {"embed": 1, "attn": 2, "mlp": 3, "core": 4}
_MASK = 0xFFFFFFFF
_SPREAD = 0x9E3779B1 - (1 << 32)
"""2^32 over the golden ratio, modulo 2^32. It is negative to fit into 32 bits: code compiled for a
GPU multiplies indices in 32 bits, and Triton refuses a larger number there."""


def fold(key: Tensor | int, value: Tensor | int) -> Tensor | int:
    """Return ``key`` with one more component mixed in; works on tensors (elementwise) and on plain
    integers."""
    return _mix(key ^ ((value * _SPREAD) & _MASK))


def _mix(x: Tensor | int) -> Tensor | int:
    """Apply a bijection of 32-bit integers in which each output bit depends on all input bits. A
    tensor is overwritten: in-place operations take at most 16 bytes a number
    (``core.model.dropout``)."""
    x ^= x >> 16
    x *= 0x7FEB352D
    x &= _MASK
    x ^= x >> 15
    x *= 0x846CA68B
    x &= _MASK
    x ^= x >> 16
    return x


@dataclass(frozen=True)
class DropoutKey:
    """The part of the key that all masks of one step of one run share. table: ``sites`` on a
    device, for captured code, in which the step cannot be a constant."""

    seed: int
    step: int
    table: Tensor | None = None

    def site(self, layer: int, site: DropoutSite) -> Tensor | int:
        """Return the 32-bit key that all masks of one site in the model share in this step."""
        if self.table is not None:
            return self.table[layer, _SITES[site] - 1]
        return fold(fold(self._of_step(), layer), _SITES[site])

    def sites(self, layers: int) -> Tensor:
        """Return ``site`` of all sites of ``layers`` layers, [layers, 4] int64, in host memory."""
        rows = fold(self._of_step(), torch.arange(layers)[:, None])
        found = fold(rows, torch.tensor(list(_SITES.values())))
        assert isinstance(found, Tensor)
        return found

    def _of_step(self) -> Tensor | int:
        key = _mix(self.seed & _MASK)
        for part in (self.seed >> 32, self.step):
            key = fold(key, part & _MASK)
        return key

    def hidden(
        self, probability: float, layer: int, site: DropoutSite, samples: Tensor, positions: Tensor, like: Tensor
    ) -> Tensor:
        """Return the multiplier [S, B, H] for hidden states shaped as ``like``; samples [B] and
        positions [S] are global indices (int64)."""
        rows = fold(fold(self.site(layer, site), samples[None, :]), positions[:, None])
        assert isinstance(rows, Tensor)
        return _keep(probability, fold(rows[:, :, None], torch.arange(like.shape[-1], device=samples.device)), like)

    def attention(self, probability: float, layer: int, samples: Tensor, heads: Tensor, like: Tensor) -> Tensor:
        """Return the multiplier [B, N, S, S] for attention weights shaped as ``like``; heads [N]
        are global head indices."""
        positions = torch.arange(like.shape[-1], device=samples.device)
        return _keep(probability, of_weights(self.heads(layer, samples, heads), positions, positions), like)

    def heads(self, layer: int, samples: Tensor, heads: Tensor) -> Tensor:
        """Return the key that all attention weights of a sample's head share, [B, N]."""
        found = fold(fold(self.site(layer, "core"), samples[:, None]), heads[None, :])
        assert isinstance(found, Tensor)
        return found


@dataclass(frozen=True)
class Mask:
    """The dropout mask of one site in the model. samples: [B] global sample numbers.
    positions_or_heads: [S] positions of a residual stream, or [N] global heads."""

    dropout: DropoutKey
    probability: float
    layer: int
    site: DropoutSite
    samples: Tensor
    positions_or_heads: Tensor

    def hidden(self, like: Tensor) -> Tensor:
        """Return the factor of hidden states [S, B, H] shaped as ``like``: 0 where dropped, else 1
        / (1 - probability)."""
        return self.dropout.hidden(self.probability, self.layer, self.site, self.samples, self.positions_or_heads, like)

    @property
    def heads(self) -> Tensor:
        """The key that all attention weights of a sample's head share, [B, N]."""
        return self.dropout.heads(self.layer, self.samples, self.positions_or_heads)

    def weights(self, heads: Tensor, queries: Tensor, like: Tensor) -> Tensor:
        """Return the multiplier of attention weights [M, queries, keys]. heads: [M] of ``heads``.
        queries: their positions; keys are the sequence's first."""
        keys = torch.arange(like.shape[-1], device=like.device)
        return _keep(self.probability, of_weights(heads, queries, keys), like)


def of_weights(heads: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """Return the hashes of attention weights [..., queries, keys] from the keys of their heads."""
    rows = fold(heads[..., None], queries)
    assert isinstance(rows, Tensor)
    found = fold(rows[..., None], keys)
    assert isinstance(found, Tensor)
    return found


def _keep(probability: float, bits: Tensor | int, like: Tensor) -> Tensor:
    """Return 1 / (1 - probability) for elements that the hashed bits keep, else 0."""
    assert isinstance(bits, Tensor)
    return (bits >= int(probability * 2**32)).to(like.dtype).mul_(1.0 / (1.0 - probability))
