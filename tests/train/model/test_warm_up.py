"""What is compiled before it is needed: of every stage what its own steps call."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from plait.core.model.spec import ModelSpec
from plait.core.parallel.strategy import Strategy
from plait.train.model.warm_up import Slice, WarmUp

GPT = ModelSpec(family="gpt", num_layers=4, hidden=16, num_heads=4, vocab=37, max_sequence=8)
LLAMA = replace(GPT, family="llama", ffn_hidden=24)
U = replace(GPT, family="utransformer", num_layers=5, levels=2)


def called(spec: ModelSpec, *, head: bool, dropout: bool = False) -> set[str]:
    """The kernels of a stage with the head or without."""
    stage = WarmUp(
        spec=spec,
        dtype=torch.float32,
        device=torch.device("cpu"),
        vocab=37 if head else 0,
        beyond=None,
        dropout=dropout,
    )
    return {name for name, _ in stage.examples(Slice(strategy=Strategy(), sequence=8, samples=2))}


STAGES = {
    "middle": (GPT, False, True),
    "last": (GPT, True, False),
    "last of levels": (U, True, True),
    "middle of levels": (U, False, True),
}


@pytest.mark.parametrize(("spec", "head", "joins"), list(STAGES.values()), ids=list(STAGES))
def test_what_leaves_a_stage_or_changes_its_length_is_joined_without_a_norm(
    spec: ModelSpec, head: bool, joins: bool
) -> None:
    found = called(spec, head=head)
    assert ("join" in found) == joins
    assert ("local_loss" in found) == head


def test_a_family_has_its_own() -> None:
    assert {"layer_norm", "gelu"} <= called(GPT, head=False)
    assert {"rms_norm", "swiglu", "rotate", "rotate_back"} <= called(LLAMA, head=False)
    assert not {"rotate", "drop", "weights"} & called(GPT, head=False)
    assert {"drop", "rows"} <= called(replace(GPT, dropout=0.1), head=False, dropout=True)
    assert {"weights", "weights_gradient"} <= called(replace(GPT, attention_dropout=0.1), head=False, dropout=True)
