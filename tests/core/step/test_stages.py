"""Which layers a stage holds, and what crosses from one to another."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.core.base.errors import JobError
from plait.core.model.spec import ModelSpec
from plait.core.step.stages import Crossing, crossing_bytes, crossings, split_layers


def u(levels: int, each: int) -> ModelSpec:
    layers = (2 * levels + 1) * each
    return ModelSpec(
        family="utransformer", num_layers=layers, levels=levels, hidden=8, num_heads=1, vocab=9, max_sequence=64
    )


@given(st.integers(1, 40), st.data())
def test_stages_cover_every_layer_once(layers: int, data: st.DataObject) -> None:
    stages = split_layers(layers, data.draw(st.integers(1, layers)))
    assert [layer for stage in stages for layer in stage.layers] == list(range(layers))
    assert [stage.embeds for stage in stages] == [True] + [False] * (len(stages) - 1)
    assert [stage.heads for stage in stages] == [False] * (len(stages) - 1) + [True]


def test_a_chain_hands_on_the_residual_stream_alone() -> None:
    spec = ModelSpec(family="gpt", num_layers=6, hidden=8, num_heads=1, vocab=9, max_sequence=8)
    assert crossings(spec, split_layers(6, 3)) == {(0, 1): (Crossing("h", 0),), (1, 2): (Crossing("h", 0),)}


def test_skips_cross_wherever_their_ends_lie_apart() -> None:
    assert crossings(u(2, 1), split_layers(5, 2, (3, 2))) == {
        (0, 1): (Crossing("h", 2), Crossing("skip0", 0), Crossing("skip1", 1))
    }
    assert crossings(u(2, 1), split_layers(5, 5)) == {
        (0, 1): (Crossing("h", 0),),
        (1, 2): (Crossing("h", 1),),
        (1, 4): (Crossing("skip0", 0),),
        (2, 3): (Crossing("h", 2), Crossing("skip1", 1)),
        (3, 4): (Crossing("h", 1),),
    }


@given(st.integers(1, 3), st.integers(1, 3), st.data())
def test_a_skip_never_leads_back(levels: int, each: int, data: st.DataObject) -> None:
    spec = u(levels, each)
    found = crossings(spec, split_layers(spec.num_layers, data.draw(st.integers(1, spec.num_layers))))
    assert all(a < b for a, b in found)
    assert all(level <= levels for tensors in found.values() for _, level in tensors)


@pytest.mark.parametrize(("layers", "stages", "given_", "says"), [
    (3, 4, (), "cannot fill 4 stages"),
    (4, 2, (4, 0), "leaves a stage without a layer"),
    (4, 2, (3, 2), "is not a division of 4 layers over 2 stages"),
    (4, 2, (4,), "Give 2 numbers whose sum is 4"),
])  # fmt: skip
def test_what_does_not_divide_is_refused(layers: int, stages: int, given_: tuple[int, ...], says: str) -> None:
    with pytest.raises(JobError, match=says):
        split_layers(layers, stages, given_)


def test_bytes_of_what_crosses_are_of_numbers_and_columns() -> None:
    assert crossing_bytes(32, 3, 64, cut=4, itemsize=2) == 32 // 4 * 3 * 64 * 2
    assert crossing_bytes(32, 3, 64, cut=4, itemsize=2, levels=(0, 1, 1)) == 2 * 32 // 4 * 3 * 64 * 2
    assert crossing_bytes(32, 3, 64, cut=4, itemsize=2, levels=()) == 0
    told = crossing_bytes(32, np.array([1, 3]), 64, cut=np.array([1, 4]), itemsize=2)
    assert told.tolist() == [32 * 64 * 2, 8 * 3 * 64 * 2]
