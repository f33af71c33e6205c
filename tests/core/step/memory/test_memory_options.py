"""What frameworks keep in memory: logits, and how they share out layers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from plait.core.step.memory.memory_options import PLAIT, MemoryOptions
from plait.core.step.seconds.options import Options
from plait.core.step.stages import split_layers


@pytest.mark.parametrize(("itemsize", "each"), [(2, 6), (4, 4), (8, 8)])
def test_logits_are_kept_as_computed_and_in_fp32_if_that_is_wider(itemsize: int, each: int) -> None:
    assert PLAIT.bytes_of_logit(itemsize) == each
    assert replace(PLAIT, logit_bytes=10.0).bytes_of_logit(itemsize) == 10.0
    shared = replace(PLAIT, logit_bytes=4.0, shared_logit_bytes=20.0)
    assert shared.bytes_of_logit(itemsize, np.array([1, 2, 8])).tolist() == [4.0, 20.0, 20.0]


@pytest.mark.parametrize(
    ("layers", "stages", "sizes"), [(22, 4, [5, 6, 6, 5]), (6, 4, [1, 2, 2, 1]), (7, 3, [2, 3, 2]), (7, 1, [7])]
)
def test_ends_may_count_as_layers(layers: int, stages: int, sizes: list[int]) -> None:
    ends = MemoryOptions(ends_count=True)
    found = ends.stages(layers, stages)
    assert [stage.num_layers for stage in found] == sizes
    assert [stage.first_layer for stage in found] == [sum(sizes[:at]) for at in range(stages)]
    assert [(stage.index, stage.num_stages) for stage in found] == [(at, stages) for at in range(stages)]
    assert ends.most_stages(layers) == layers + 2
    assert PLAIT.stages(layers, stages) == split_layers(layers, stages)
    assert PLAIT.most_stages(layers) == layers


@pytest.mark.parametrize("whole", [False, True])
def test_options_of_time_say_what_is_kept(whole: bool) -> None:
    told = MemoryOptions.of(Options(fused_attention=False, recompute_collectives=whole, gradient_bytes=2.0))
    assert (told.fused_attention, told.whole_layers, told.gradient_bytes) == (False, whole, 2.0)
    assert replace(told, fused_attention=True, gradient_bytes=4.0, recompute_collectives=False) == replace(
        PLAIT, whole_layers=whole
    )
    assert MemoryOptions.of(PLAIT) is PLAIT
