"""Memory of experts: states that are shared out, and routed tokens that are kept."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from plait.core.base.env import specs_folder
from plait.core.model.experts import Experts
from plait.core.model.spec import ModelSpec
from plait.core.step.columns.points import RECOMPUTES, Points
from plait.core.step.columns.shapes import Shapes
from plait.core.step.memory.closed_memory import MemoryColumns, step_memory
from plait.core.step.memory.experts_memory import activated, resident

MIXTRAL = ModelSpec.preset("mixtral-8x7b", specs_folder() / "models")
LLAMA = ModelSpec.preset("llama3-8b", specs_folder() / "models")
ROW = {"dp": 16, "micro": 1, "num_micro": 8, "optim": 16}
EXPERTS = 32 * 8 * 3 * 4096 * 14336
"""Numbers of Mixtral's experts."""


def memory(model: ModelSpec | Shapes, *rows: dict[str, int], **more: Any) -> MemoryColumns:
    return step_memory(model, Points.of(rows), sequence=4096, **more)


def test_models_without_experts_are_as_they_are() -> None:
    assert activated(LLAMA) == LLAMA
    assert resident(LLAMA) == LLAMA


def test_parameters_are_all_of_the_model() -> None:
    found = memory(MIXTRAL, ROW)
    assert found.parameters[0] == pytest.approx(2 * MIXTRAL.num_parameters, rel=1e-4)
    assert found.gradients[0] == pytest.approx(4 * MIXTRAL.num_parameters, rel=1e-4)
    assert found.optimizer[0] == pytest.approx(12 * MIXTRAL.num_parameters / 16, rel=1e-4)


def test_ranks_that_share_experts_have_a_part_of_these_only() -> None:
    whole, eighth = memory(MIXTRAL, ROW, ROW | {"ep": 8}).parameters
    assert whole - eighth == 2 * EXPERTS * 7 / 8
    one = memory(MIXTRAL, ROW, ROW | {"ep": 8}).optimizer
    assert one[0] == pytest.approx(one[1], rel=1e-6)  # of each number one owner, however it is shared out


def test_experts_are_sharded_over_those_that_have_the_same() -> None:
    rows = [ROW | {"ep": 8, "params": params, "grads": params} for params in (1, 8, 16)]
    found = memory(MIXTRAL, *rows).parameters
    dense = MIXTRAL.num_parameters - EXPERTS
    for at, (params, own) in enumerate(((1, 1), (8, 1), (16, 2))):
        assert found[at] == pytest.approx(2 * (dense / params + EXPERTS / 8 / own), rel=1e-3)


def test_one_expert_for_all_tokens_keeps_what_an_mlp_keeps_and_its_rows() -> None:
    one = replace(LLAMA, experts=Experts(count=1, per_token=1))
    found, dense = memory(one, ROW), memory(LLAMA, ROW)
    assert found.parameters[0] == pytest.approx(dense.parameters[0], rel=1e-4)
    rows = 32 * 4096 * (4096 * 2 * 2 + 8)  # inputs and outputs in bf16, scores in fp32
    assert found.activations[0] - dense.activations[0] == pytest.approx(rows, rel=0.1)


def test_recomputation_keeps_no_routed_rows() -> None:
    row = ROW | {"ep": 8, "recompute": RECOMPUTES.index("full")}
    more = replace(MIXTRAL, experts=replace(MIXTRAL.experts, per_token=4))  # type: ignore[type-var]
    full = [memory(model, row).activations[0] for model in (MIXTRAL, more)]
    none = [memory(model, ROW | {"ep": 8}).activations[0] for model in (MIXTRAL, more)]
    assert full[0] < none[0] / 3
    assert (full[1] - full[0]) * 10 < none[1] - none[0]  # one layer's at a time


def test_stages_hold_the_experts_of_their_layers() -> None:
    some = replace(MIXTRAL, experts=replace(MIXTRAL.experts, first_dense=16))  # type: ignore[type-var]
    found = memory(some, ROW | {"pp": 2, "dp": 8, "optim": 8})
    assert found.place[0] == 1  # the first 16 layers have none
    assert found.parameters[0] > 2 * EXPERTS / 2


def test_shapes_are_as_good_as_the_model() -> None:
    said, shapes = memory(MIXTRAL, ROW | {"ep": 4}), memory(Shapes.of(MIXTRAL), ROW | {"ep": 4})
    assert shapes.total[0] == pytest.approx(said.total[0], rel=1e-3)
