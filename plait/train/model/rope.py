"""Rotary positions."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from plait.core.model.spec import ModelSpec


class Rope:
    """Rotary position tables (Su 2021, arXiv 2104.09864), half-split as in Hugging Face's Llama, computed
    once.

    Positions belong to tokens, so slices over the batch share the tables and never wait for each other.
    """

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self._cache: dict[tuple[int, torch.dtype, torch.device], tuple[Tensor, Tensor]] = {}

    def tables(self, sequence: int, like: Tensor, spread: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """cos and sin of positions 0 to ``sequence``, or of ``spread``, [S] or [S, B], in the dtype and on
        the device of ``like``: [S, 1, 1, D] or [S, B, 1, D]."""
        if spread is not None:
            shape = *spread.shape, *(1,) * (3 - spread.dim()), -1
            cos, sin = (table[spread].view(shape) for table in self.tables(self.spec.max_sequence, like))
            return cos, sin
        key = (sequence, like.dtype, like.device)
        if key not in self._cache:
            angles = torch.arange(sequence, dtype=torch.float64)[:, None] * self._frequencies()[None, :]
            both = torch.cat((angles, angles), dim=1)[:, None, None, :]
            self._cache[key] = both.cos().to(like), both.sin().to(like)
        return self._cache[key]

    def _frequencies(self) -> Tensor:
        spec, size = self.spec, self.spec.letters.D
        frequencies = spec.rope_theta ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
        if (scaling := spec.rope_scaling) is None:
            return frequencies
        wavelengths = 2 * math.pi / frequencies
        turns = scaling.original_max_positions / wavelengths
        blend = ((turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)).clamp(0, 1)
        return frequencies * (blend + (1 - blend) / scaling.factor)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (i, i + D/2) of the last dim of [S, B, N, D]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
