"""Models of which only shapes are known."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plait.core.model.experts import Experts
from plait.core.step.columns.shapes import LooseModel, Shapes, model_of
from tests.plan.layers import GPT, LLAMA, MIXTRAL


def test_a_model_is_taken_as_it_is() -> None:
    assert model_of(LLAMA) == LLAMA


@pytest.mark.parametrize("model", [GPT, LLAMA])
def test_shapes_say_all_of_a_dense_model(model: object) -> None:
    found = model_of(Shapes.of(model))  # type: ignore[arg-type]
    assert isinstance(found, LooseModel)
    assert Shapes.of(found) == Shapes.of(model)  # type: ignore[arg-type]
    assert found.experts is None
    assert found.num_parameters == model.num_parameters  # type: ignore[attr-defined]


@pytest.mark.parametrize(("gated", "learned", "family"), [(1, 0, "llama"), (1, 1, "gpt"), (0, 0, "gpt"), (0, 1, "gpt")])
def test_a_family_is_the_nearest(gated: int, learned: int, family: str) -> None:
    found = model_of(replace(Shapes.of(LLAMA), gated=gated, learned_positions=learned, tied_embeddings=1))
    assert (found.family, found.gated, found.learned_positions) == (family, bool(gated), bool(learned))
    assert found.tied_embeddings is True
    assert model_of(replace(Shapes.of(LLAMA), attention_dropout=0.25)).attention_dropout == 0.25


def test_experts_are_in_the_last_layers_as_far_as_shapes_tell() -> None:
    assert MIXTRAL.experts
    some = replace(MIXTRAL, experts=replace(MIXTRAL.experts, first_dense=8, capacity=0.75, shared=2))
    shapes = Shapes.of(some)
    found = model_of(shapes)
    assert found.experts == Experts(
        count=8, per_token=2, ffn_hidden=14336, shared=1, shared_ffn_hidden=2 * 14336, capacity=0.75, first_dense=8,
    )  # fmt: skip
    again = Shapes.of(found)
    assert again == shapes
    none = model_of(Shapes.of(MIXTRAL)).experts
    assert none and (none.shared, none.shared_ffn_hidden, none.first_dense, none.capacity) == (0, 0, 0, 0.0)
    dropping = model_of(replace(shapes, routed=0.25)).experts
    assert dropping and (dropping.per_token, dropping.capacity) == (1, 0.25)
