"""What the walk of a micro-batch counts: bytes that are kept, the most of a forward and of a
backward, what is held, the most of weight gradients, and what gloo's reduce-scatters keep.

The numbers are those with which torch's allocator agreed (``tests/train/test_memory.py``). A change
to what is kept, or for how long, changes some of them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from plait.core.model.spec import ModelSpec
from plait.core.parallel.strategy import Strategy
from plait.core.step.memory.activations import Activations, TracedBatch, activations
from plait.core.step.stages import Stage

GPT = ModelSpec(family="gpt", num_layers=9, hidden=32, num_heads=8, vocab=48, max_sequence=64, ffn_hidden=96)
LLAMA = ModelSpec(
    family="llama", num_layers=9, hidden=32, num_heads=8, num_kv_heads=4, vocab=48, max_sequence=64, ffn_hidden=96
)
DROPS, LDROPS = (replace(one, dropout=0.1, attention_dropout=0.1) for one in (GPT, LLAMA))

# Three sequences of 32 tokens, in bf16 on a GPU unless said.


@pytest.mark.parametrize("model", [GPT, LLAMA, DROPS], ids=["gpt", "llama", "dropped"])
@pytest.mark.parametrize("cut", [{}, {"tp": 4, "sequence_parallel": True}, {"tp": 2, "p1": 3, "p2": 2}], ids=str)
def test_a_layer_of_one_stream_keeps_two_bytes_of_a_number(model: ModelSpec, cut: dict[str, Any]) -> None:
    """InternEvo's 2 b S H (arXiv 2401.09149, section 3), of sequence parallelism's ranks a share of
    it."""
    told = TracedBatch(batch=3, sequence=32, itemsize=2, gpu=True)
    one, two = (
        activations(model, Strategy(recompute="layer", overlap="sync", **cut), Stage(1, 3, 2, layers), told).kept
        for layers in (1, 2)
    )
    assert two - one == 2 * 3 * 32 * 32 // (4 if "sequence_parallel" in cut else 1)


def test_the_papers_34_bytes_of_a_number_but_for_masks() -> None:
    """Without recomputation: 34 b S H with FlashAttention, 2 of them dropout masks (Korthikanti
    2022, arXiv 2205.05198), which functions of keys make again; beside them statistics of norms and
    heads."""
    wide = ModelSpec(family="gpt", num_layers=9, hidden=1024, num_heads=8, vocab=48, max_sequence=64)
    told = TracedBatch(batch=1, sequence=64, itemsize=2, gpu=True)
    one, two = (activations(wide, Strategy(overlap="sync"), Stage(1, 3, 2, layers), told).kept for layers in (1, 2))
    assert two - one == 64 * (32 * 1024 + 4 * (2 * 2 + 8))


def test_the_most_of_several_micro_batches() -> None:
    """All but one keep; that one is at its fullest moment."""
    found = Activations(10, 20, 30, 5, 40)
    assert (found.peak(), found.peak(3)) == (40, 60)
    assert Activations(10, 50, 30).peak(2) == 60
    assert Activations(10, 50, 70).peak(2) == 80
