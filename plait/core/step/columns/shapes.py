"""Shapes: what time and memory need to know of a model, as numbers or as columns of many models.

``Shapes.of`` takes a ``ModelSpec``. Models that Plait does not run (grouped-query heads without a gate, say)
and columns of several models, which a calibration needs, have shapes all the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from plait.core.model.experts import Experts
from plait.core.model.spec import ModelSpec
from plait.core.model.weights import Letters, count, matrices_of

Number = Any
"""A number, or a column (float) of as many as there are points."""


@dataclass(frozen=True, kw_only=True)
class Shapes:
    """Of a decoder-only transformer; gated, learned_positions, tied_embeddings: 0 or 1. attention_dropout:
    with any, attention is no fused kernel. normed_within: numbers of a token that norms of heads normalise.
    window: keys that a query sees in the part of the layers that is windowed. parallel_block: 0 or 1.

    experts: routed experts of a layer, 0 for a dense model; routed: of them, how many a token goes to,
    without those that drop it; expert_ffn: width of one; shared_ffn: of all shared ones; expert_share: of the
    layers, the part that has experts. q_lora_rank, kv_lora_rank, qk_rope_head_dim: of latent attention, 0 of
    any other; dropless: whether an expert takes as many tokens as come (0 or 1).
    """

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
    attention_dropout: Number = 0
    normed_within: Number = 0
    q_lora_rank: Number = 0
    kv_lora_rank: Number = 0
    qk_rope_head_dim: Number = 0
    window: Number = 0
    windowed: Number = 0
    parallel_block: Number = 0
    experts: Number = 0
    routed: Number = 0
    expert_ffn: Number = 0
    shared_ffn: Number = 0
    expert_share: Number = 0
    dropless: Number = 0

    @staticmethod
    def of(model: ModelSpec | Shapes) -> Shapes:
        """Of a model; shapes are taken as they are."""
        if isinstance(model, Shapes):
            return model
        plain = {field.name: getattr(model, field.name) for field in fields(Shapes) if field.name not in EXPERTS}
        told = model.experts
        if told is None:
            return Shapes(**plain)
        share = model.num_expert_layers / model.num_layers
        known = (told.count, told.load, told.ffn_hidden, told.shared_width, share, int(not told.capacity))
        routed = dict(zip(EXPERTS, known, strict=True))
        return Shapes(**plain, **routed)

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
    def core_size(self) -> Number:
        """Mean of a query's and a value's width in a head: latent queries have a rotated part beside."""
        return self.head_size + np.asarray(self.qk_rope_head_dim) / 2

    @property
    def is_latent(self) -> bool:
        """Whether any model's attention is."""
        return bool(np.any(np.asarray(self.kv_lora_rank) > 0))

    def kv_ranks(self, tp: Number) -> Number:
        """Of tensor-parallel ranks, those that divide keys and values: of more, several have the same."""
        return np.minimum(tp, self.num_kv_heads)

    @property
    def has_experts(self) -> bool:
        """Whether any model has."""
        return bool(np.any(np.asarray(self.experts) > 0))

    @property
    def whole_ffn(self) -> Number:
        """Width of the MLP that every token goes to, on the mean of all layers."""
        return self.ffn_hidden * (1 - self.expert_share) + self.shared_ffn * self.expert_share

    @property
    def letters(self) -> Letters:
        """For the rows of ``core.model.weights``; F is of the MLP that every token goes to."""
        return Letters(
            H=self.hidden, Q=self.query, K=self.kv, F=self.whole_ffn, V=self.vocab, P=self.max_sequence, biased=0,
            gated=self.gated, learned=self.learned_positions, tied=self.tied_embeddings,
            block=self.parallel_block, D=self.head_size,
            A=self.q_lora_rank, B=self.kv_lora_rank, R=self.qk_rope_head_dim,
            latent=1 * (np.asarray(self.kv_lora_rank) > 0),
        )  # fmt: skip

    @property
    def layer_weights(self) -> Number:
        """Parameters of one layer's matrices, routed experts left out; on the mean of all layers."""
        router = self.expert_share * self.experts * self.hidden
        return count(matrices_of("attn", "mlp"), self.letters) + router

    @property
    def mlp_weights(self) -> Number:
        """Of these, those of the MLP."""
        return count(matrices_of("mlp"), self.letters)

    @property
    def mlp_share(self) -> Number:
        """Of a layer's parameters, the MLP's."""
        return self.mlp_weights / self.layer_weights

    @property
    def expert_weights(self) -> Number:
        """Parameters of one layer's routed experts, on the mean of all layers."""
        one = count(matrices_of("mlp"), replace(self.letters, F=self.expert_ffn))
        return self.expert_share * self.experts * one

    @property
    def words(self) -> Number:
        """Parameters of the embedding, and of the head."""
        return self.vocab * self.hidden


EXPERTS = ("experts", "routed", "expert_ffn", "shared_ffn", "expert_share", "dropless")
"""Fields that a dense model leaves at 0."""


@dataclass(frozen=True, kw_only=True)
class LooseModel(ModelSpec):
    """Shapes that may contradict each other; whether the MLP is gated and positions are trained is said, not
    the family's."""

    gated_mlp: bool = False
    trained_positions: bool = False

    def __post_init__(self) -> None:
        """Nothing is checked: nothing is run."""

    @property
    def gated(self) -> bool:
        """As said."""
        return self.gated_mlp

    @property
    def learned_positions(self) -> bool:
        """As said."""
        return self.trained_positions


def model_of(model: ModelSpec | Shapes) -> ModelSpec:
    """A model is taken as it is; shapes must be numbers, not columns."""
    if isinstance(model, ModelSpec):
        return model
    sizes: dict[str, Any] = {
        field.name: int(getattr(model, field.name))
        for field in fields(Shapes)
        if field.name not in (*EXPERTS, "normed_within", "window", "windowed", "parallel_block")
    } | {"attention_dropout": float(model.attention_dropout)}
    gated, trained, tied = (bool(sizes.pop(name)) for name in ("gated", "learned_positions", "tied_embeddings"))
    family = "gpt" if trained or not gated else "llama"
    experts = _experts(model, sizes["num_layers"]) if model.has_experts else None
    return LooseModel(
        family=family,
        gated_mlp=gated,
        trained_positions=trained,
        tied_embeddings=tied,
        experts=experts,
        parallel_block=bool(model.parallel_block),
        **sizes,
    )


def _experts(model: Shapes, num_layers: int) -> Experts:
    """Layers without experts are put first: how many there are is all that shapes tell."""
    count, share, width = int(model.experts), float(model.expert_share), int(model.shared_ffn)
    per_token = max(1, math.ceil(float(model.routed)))
    return Experts(
        count=count, per_token=per_token, ffn_hidden=int(model.expert_ffn), shared=int(width > 0),
        shared_ffn_hidden=width, capacity=0.0 if model.dropless else float(model.routed) / per_token,
        first_dense=num_layers - round(share * num_layers),
    )  # fmt: skip
