"""Shapes: what time and memory need to know of a model, as numbers or as columns of many models.

``Shapes.of`` takes a ``ModelSpec``. Models that Plait does not run (grouped-query heads without a gate, say)
and columns of several models, which a calibration needs, have shapes all the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from plait.core.model import ModelSpec

Number = Any
"""A number, or a column (float) of as many as there are points."""


@dataclass(frozen=True, kw_only=True)
class Shapes:
    """Of a decoder-only transformer; gated, learned_positions, tied_embeddings: 0 or 1."""

    num_layers: Number
    hidden: Number
    num_heads: Number
    num_kv_heads: Number
    head_size: Number
    ffn_hidden: Number
    vocab: Number
    gated: Number
    tied_embeddings: Number
    learned_positions: Number = 0
    max_sequence: Number = 0

    @staticmethod
    def of(model: ModelSpec | Shapes) -> Shapes:
        """Of a model; shapes are taken as they are."""
        if isinstance(model, Shapes):
            return model
        return Shapes(**{field.name: getattr(model, field.name) for field in fields(Shapes)})

    @staticmethod
    def stack(models: Sequence[Shapes]) -> Shapes:
        """Columns of several models."""
        columns = {field.name: [getattr(model, field.name) for model in models] for field in fields(Shapes)}
        return Shapes(**{name: np.array(values, dtype=np.float64) for name, values in columns.items()})

    @property
    def query(self) -> Number:
        """Width of all queries."""
        return self.num_heads * self.head_size

    @property
    def kv(self) -> Number:
        """Width of all keys, and of all values."""
        return self.num_kv_heads * self.head_size

    @property
    def layer_weights(self) -> Number:
        """Parameters of one layer's matrices."""
        return self.hidden * (2 * self.query + 2 * self.kv + (2 + self.gated) * self.ffn_hidden)

    @property
    def words(self) -> Number:
        """Parameters of the embedding, and of the head."""
        return self.vocab * self.hidden
