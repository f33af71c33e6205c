"""A model of which only shapes are known, for what walks lists; Plait need not be able to run it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from plait.core.model import ModelSpec
from plait.plan.shapes import Shapes


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
    sizes: dict[str, Any] = {field.name: int(getattr(model, field.name)) for field in fields(Shapes)}
    gated, trained, tied = (bool(sizes.pop(name)) for name in ("gated", "learned_positions", "tied_embeddings"))
    family = "gpt" if trained or not gated else "llama"
    return LooseModel(family=family, gated_mlp=gated, trained_positions=trained, tied_embeddings=tied, **sizes)
