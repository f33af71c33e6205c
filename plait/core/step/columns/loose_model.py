"""A model of which only shapes are known, for what walks lists; Plait need not be able to run it."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

from plait.core.model.experts import Experts
from plait.core.model.spec import ModelSpec
from plait.core.step.columns.shapes import EXPERTS, Shapes


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
        if field.name not in (*EXPERTS, "normed_within", "window", "windowed")
    } | {"attention_dropout": float(model.attention_dropout)}
    gated, trained, tied = (bool(sizes.pop(name)) for name in ("gated", "learned_positions", "tied_embeddings"))
    family = "gpt" if trained or not gated else "llama"
    experts = _experts(model, sizes["num_layers"]) if model.has_experts else None
    return LooseModel(
        family=family, gated_mlp=gated, trained_positions=trained, tied_embeddings=tied, experts=experts, **sizes
    )


def _experts(model: Shapes, num_layers: int) -> Experts:
    """Layers without experts are put first: how many there are is all that shapes tell."""
    count, share, width = int(model.experts), float(model.expert_share), int(model.shared_ffn)
    per_token = max(1, math.ceil(float(model.routed)))
    return Experts(
        count=count, per_token=per_token, ffn_hidden=int(model.expert_ffn), shared=int(width > 0),
        shared_ffn_hidden=width, capacity=float(model.routed) / per_token,
        first_dense=num_layers - round(share * num_layers),
    )  # fmt: skip
