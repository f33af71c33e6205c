"""Layers and what their operations take: what tests of the closed form of a layer are made of."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from plait.core.base.env import specs_folder
from plait.core.cluster.hardware import Cluster
from plait.core.model.spec import ModelSpec
from plait.core.step.columns.points import OVERLAPS, StrategyTable
from plait.core.step.columns.shapes import Options, Shapes
from plait.core.step.seconds.layer_time import Layer
from tests.plan.machines import cluster

A100 = cluster(host_layer=1e-4, host_collective=3e-5, slow_computation=1.3, slow_communication=1.2)
GPT = ModelSpec.preset("gpt3-13b", specs_folder() / "models")
LLAMA = ModelSpec.preset("llama3-8b", specs_folder() / "models")
MIXTRAL = ModelSpec.preset("mixtral-8x7b", specs_folder() / "models")
SEQUENCE = 4096
SYNC, ASYNC, DOMINO, NONE, FIXED = ({"overlap": at} for at in range(len(OVERLAPS)))
FLAT = {"sequence_parallel": 1}
BF16: Any = "bf16-mixed"


def layer(
    model: ModelSpec | Shapes = LLAMA, options: Options | None = None, precision: Any = BF16, on: Cluster = A100, /,
    **row: int,
) -> Layer:  # fmt: skip
    return Layer(Shapes.of(model), StrategyTable.of([row]), on, SEQUENCE, precision, options or Options())


def same(found: Any, expected: Any) -> None:
    assert float(np.asarray(found)[0]) == pytest.approx(float(np.asarray(expected).reshape(-1)[0]), rel=1e-12)
