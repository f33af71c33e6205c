"""Rotary positions."""

from __future__ import annotations

import math
from typing import TypeAlias

import torch
from torch import Tensor

from plait.core.model.spec import ModelSpec

Turns: TypeAlias = tuple[Tensor, Tensor]
"""cos and sin of the angles by which queries and keys are turned: [S, 1, 1, D], or [S, B, 1, D] where
sequences differ."""


class Rope:
    """Rotary position tables (Su 2021, arXiv 2104.09864), half-split as in Hugging Face's Llama, computed
    once.

    A micro-batch takes its tables when it comes in, on the stream of the thread: slices on streams of a pool
    read them, and a table that one of those streams made would not be there for the others.
    """

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> None:
        self.spec, self.dtype, self.device = spec, dtype, device
        self._cache: dict[int, Turns] = {}

    def first(self, sequence: int) -> Turns:
        """Of positions 0 to ``sequence``, [S, 1, 1, D]."""
        if sequence not in self._cache:
            angles = torch.arange(sequence, dtype=torch.float64)[:, None] * self._frequencies()[None, :]
            both = torch.cat((angles, angles), dim=1)[:, None, None, :]
            self._cache[sequence] = both.cos().to(self.device, self.dtype), both.sin().to(self.device, self.dtype)
        return self._cache[sequence]

    def at(self, places: Tensor) -> Turns:
        """Of positions [S] or [S, B]: [S, 1, 1, D] or [S, B, 1, D]."""
        shape = *places.shape, *(1,) * (3 - places.dim()), -1
        cos, sin = (table[places].view(shape) for table in self.first(self.spec.max_sequence))
        return cos, sin

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
