"""What other frameworks keep: logits, and how they share out layers. Golden columns (varied) pin
the rest."""

from __future__ import annotations

import numpy as np
import pytest

from plait.core.step.memory.memory_options import PLAIT
from plait.core.step.stages import split_layers
from plait.formats.base.kept_memory import FrameworkMemory


@pytest.mark.parametrize(("itemsize", "each"), [(2, 6), (4, 4), (8, 8)])
def test_logits_are_kept_as_computed_and_in_fp32_if_that_is_wider(itemsize: int, each: int) -> None:
    assert PLAIT.logits(itemsize) == each
    assert FrameworkMemory(logit_bytes=10.0).logits(itemsize) == 10.0
    shared = FrameworkMemory(logit_bytes=4.0, shared_logit_bytes=20.0)
    assert shared.logits(itemsize, np.array([1, 2, 8])).tolist() == [4.0, 20.0, 20.0]


@pytest.mark.parametrize(
    ("layers", "stages", "sizes"), [(22, 4, [5, 6, 6, 5]), (6, 4, [1, 2, 2, 1]), (7, 3, [2, 3, 2]), (7, 1, [7])]
)
def test_ends_may_count_as_layers(layers: int, stages: int, sizes: list[int]) -> None:
    ends = FrameworkMemory(ends_count=True)
    found = ends.stages(layers, stages)
    assert [stage.num_layers for stage in found] == sizes
    assert [stage.first_layer for stage in found] == [sum(sizes[:at]) for at in range(stages)]
    assert [(stage.index, stage.num_stages) for stage in found] == [(at, stages) for at in range(stages)]
    assert ends.most_stages(layers) == layers + 2
    assert PLAIT.stages(layers, stages) == split_layers(layers, stages)
    assert PLAIT.most_stages(layers) == layers
