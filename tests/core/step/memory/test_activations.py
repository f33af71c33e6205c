"""What the walk of a micro-batch counts: bytes that are kept, the most of a forward and of a backward, what
is held, the most of weight gradients, and what gloo's reduce-scatters keep.

The numbers are those with which torch's allocator agreed (``tests/train/test_memory.py``). A change to what
is kept, or for how long, changes some of them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from plait.core.model.spec import ModelSpec
from plait.core.parallel.strategy import Strategy
from plait.core.step.memory.activations import Activations, WalkedBatch, activations
from plait.core.step.stages import Stage

GPT = ModelSpec(family="gpt", num_layers=9, hidden=32, num_heads=8, vocab=48, max_sequence=64, ffn_hidden=96)
LLAMA = ModelSpec(
    family="llama", num_layers=9, hidden=32, num_heads=8, num_kv_heads=4, vocab=48, max_sequence=64, ffn_hidden=96
)
DROPS, LDROPS = (replace(one, dropout=0.1, attention_dropout=0.1) for one in (GPT, LLAMA))
BLOCK = replace(GPT, parallel_block=True)
U = ModelSpec(family="utransformer", levels=1, num_layers=3, hidden=32, num_heads=8, vocab=48, max_sequence=64)
WHOLE, FIRST, INNER, LAST = Stage(0, 1, 0, 2), Stage(0, 3, 0, 2), Stage(1, 3, 2, 2), Stage(2, 3, 7, 2)

# Three sequences of 32 tokens, in bf16 on a GPU unless said.
WALKED: list[tuple[ModelSpec, Stage, str, tuple[int, ...]]] = [
    (GPT, WHOLE, "", (206592, 227136, 227328, 3072, 0, 0)),
    (GPT, INNER, "cpu fp32", (354816, 391680, 440832, 1536, 0, 0)),
    (LLAMA, WHOLE, "", (284544, 305088, 342528, 3072, 0, 0)),
    (LLAMA, INNER, "cpu fp32", (599040, 635904, 758784, 1536, 0, 0)),
    (BLOCK, WHOLE, "", (180480, 201024, 204288, 3072, 0, 0)),
    (BLOCK, INNER, "cpu fp32", (304128, 340992, 399360, 1536, 0, 0)),
    (DROPS, WHOLE, "", (206592, 681216, 804096, 3072, 0, 0)),
    (DROPS, INNER, "cpu fp32", (354816, 759552, 993024, 1536, 0, 0)),
    (LDROPS, WHOLE, "", (284544, 723072, 827520, 3072, 0, 0)),
    (LDROPS, INNER, "cpu fp32", (562176, 881280, 1090176, 1536, 0, 0)),
    (GPT, FIRST, "tp=2 p1=2 p2=2", (119808, 134144, 138240, 3072, 0, 0)),
    (GPT, LAST, "cpu fp32 tp=2 p1=2 p2=2 domino", (263424, 265600, 291584, 1536, 0, 0)),
    (LLAMA, WHOLE, "cpu", (425856, 446400, 471936, 3072, 0, 0)),
    (LLAMA, WHOLE, "cpu tp=2 p1=2 p2=2 domino", (307584, 317376, 343424, 3072, 0, 0)),
    (GPT, WHOLE, "cpu tp=2 sp", (135552, 146880, 149376, 3072, 0, 6144)),
    (GPT, INNER, "tp=2 sp p1=2 p2=2 domino", (116736, 130048, 141312, 1536, 0, 10240)),
    (GPT, FIRST, "tp=2 sp full", (15360, 43008, 71040, 3072, 0, 6144)),
    (GPT, LAST, "cpu fp32 tp=2 sp selective", (224640, 226752, 264192, 1536, 0, 12288)),
    (LLAMA, WHOLE, "cpu tp=2 sp", (245184, 256512, 268224, 3072, 0, 6144)),
    (LLAMA, INNER, "tp=2 sp p1=2 p2=2 domino", (155904, 169216, 189696, 1536, 0, 10240)),
    (LLAMA, FIRST, "tp=2 sp full", (15360, 61440, 107712, 3072, 0, 6144)),
    (LLAMA, LAST, "cpu fp32 tp=2 sp selective", (315840, 317952, 404736, 1536, 0, 12288)),
    (DROPS, WHOLE, "cpu tp=2 sp", (135552, 360576, 425088, 3072, 0, 6144)),
    (DROPS, INNER, "tp=2 sp p1=2 p2=2 domino", (116736, 263296, 338560, 1536, 0, 10240)),
    (DROPS, FIRST, "tp=2 sp full", (15360, 308736, 376704, 3072, 0, 6144)),
    (DROPS, LAST, "cpu fp32 tp=2 sp selective", (224640, 398976, 515712, 1536, 0, 12288)),
    (GPT, WHOLE, "cpu full", (49920, 70656, 114432, 3072, 0, 0)),
    (GPT, INNER, "selective", (118272, 142848, 186624, 1536, 0, 0)),
    (GPT, FIRST, "tp=2 async full layers=1", (73728, 92160, 98304, 3072, 0, 0)),
    (LLAMA, WHOLE, "cpu full", (74112, 107520, 212352, 3072, 0, 0)),
    (LLAMA, INNER, "selective", (161280, 204288, 284544, 1536, 0, 0)),
    (LLAMA, FIRST, "tp=2 async full layers=1", (92928, 111360, 135936, 3072, 0, 0)),
    (BLOCK, WHOLE, "cpu full", (37632, 67584, 132864, 3072, 0, 0)),
    (BLOCK, INNER, "selective", (105984, 130560, 177408, 1536, 0, 0)),
    (BLOCK, FIRST, "tp=2 async full layers=1", (54528, 72960, 80640, 3072, 0, 0)),
    (LDROPS, WHOLE, "cpu full", (74112, 605184, 734592, 3072, 0, 0)),
    (LDROPS, INNER, "selective", (161280, 671232, 782208, 1536, 0, 0)),
    (LDROPS, FIRST, "tp=2 async full layers=1", (92928, 316800, 381312, 3072, 0, 0)),
    (GPT, INNER, "tp=2 domino split", (118272, 136704, 143616, 112128, 118272, 0)),
    (GPT, LAST, "cpu fp32 full split", (94464, 136704, 475392, 376320, 376320, 0)),
    (GPT, WHOLE, "cpu fp64 step", (3072, 881664, 0, 0, 0, 0)),
    (LLAMA, INNER, "tp=2 domino split", (156672, 175104, 199680, 124416, 130560, 0)),
    (LLAMA, LAST, "cpu fp32 full split", (106368, 210432, 585600, 425472, 425472, 0)),
    (LLAMA, WHOLE, "cpu fp64 step", (3072, 1517568, 0, 0, 0, 0)),
    (BLOCK, INNER, "tp=2 domino split", (92160, 110592, 118272, 87552, 90624, 0)),
    (BLOCK, LAST, "cpu fp32 full split", (69888, 127488, 426240, 327168, 327168, 0)),
    (BLOCK, WHOLE, "cpu fp64 step", (3072, 798720, 0, 0, 0, 0)),
    (LLAMA, INNER, "cp=4 ring=1", (63744, 68352, 83712, 384, 0, 0)),
    (LLAMA, WHOLE, "cpu fp32 cp=4 ring=1 full", (26976, 52992, 96096, 768, 0, 0)),
    (LLAMA, INNER, "cp=4 ring=4", (63744, 68352, 83712, 384, 0, 0)),
    (LLAMA, WHOLE, "cpu bf16 cp=4 ring=4 full", (23136, 31488, 68448, 768, 0, 0)),
    (LLAMA, INNER, "cp=4 ring=2", (63744, 68352, 83712, 384, 0, 0)),
    (LLAMA, WHOLE, "cpu fp32 cp=4 ring=2 full", (34656, 60672, 103776, 768, 0, 0)),
    (LLAMA, INNER, "cp=2 ring=2", (127488, 136704, 167424, 768, 0, 0)),
    (LLAMA, WHOLE, "cpu fp32 cp=2 ring=2 full", (69312, 121344, 207552, 1536, 0, 0)),
    (LLAMA, INNER, "cp=8 ring=4", (31872, 34176, 53376, 192, 0, 0)),
    (LLAMA, WHOLE, "cpu bf16 cp=8 ring=4 full", (11568, 15744, 52656, 384, 0, 0)),
    (LLAMA, FIRST, "tp=2 cp=4 ring=2 sp p1=2 domino", (38592, 41920, 47888, 768, 0, 1536)),
    (LLAMA, LAST, "tp=2 cp=2 ring=1 selective split", (53952, 59616, 93120, 67584, 70656, 0)),
    (BLOCK, INNER, "cp=4 ring=1", (42240, 46848, 54528, 384, 0, 0)),
    (BLOCK, WHOLE, "cpu fp32 cp=4 ring=1 full", (17856, 46848, 69312, 768, 0, 0)),
    (BLOCK, INNER, "cp=4 ring=4", (42240, 51072, 69120, 384, 0, 0)),
    (BLOCK, WHOLE, "cpu bf16 cp=4 ring=4 full", (14016, 28032, 52416, 768, 0, 0)),
    (BLOCK, INNER, "cp=4 ring=2", (42240, 48000, 68352, 384, 0, 0)),
    (BLOCK, WHOLE, "cpu fp32 cp=4 ring=2 full", (25536, 50688, 88512, 768, 0, 0)),
    (BLOCK, INNER, "cp=2 ring=2", (84480, 96000, 136704, 768, 0, 0)),
    (BLOCK, WHOLE, "cpu fp32 cp=2 ring=2 full", (51072, 86016, 177024, 1536, 0, 0)),
    (BLOCK, INNER, "cp=8 ring=4", (21120, 25536, 34560, 192, 0, 0)),
    (BLOCK, WHOLE, "cpu bf16 cp=8 ring=4 full", (7008, 14016, 30816, 384, 0, 0)),
    (BLOCK, FIRST, "tp=2 cp=4 ring=2 sp p1=2 domino", (24768, 28096, 35264, 768, 0, 1536)),
    (BLOCK, LAST, "tp=2 cp=2 ring=1 selective split", (41856, 47520, 65664, 49152, 52224, 0)),
    (DROPS, INNER, "cp=4 ring=1", (48768, 171456, 205248, 384, 0, 0)),
    (DROPS, WHOLE, "cpu fp32 cp=4 ring=1 full", (24000, 148992, 210624, 768, 0, 0)),
    (DROPS, INNER, "cp=4 ring=4", (48768, 64128, 66240, 384, 0, 0)),
    (DROPS, WHOLE, "cpu bf16 cp=4 ring=4 full", (17088, 26880, 46272, 768, 0, 0)),
    (DROPS, INNER, "cp=4 ring=2", (48768, 64128, 65664, 384, 0, 0)),
    (DROPS, WHOLE, "cpu fp32 cp=4 ring=2 full", (31680, 44544, 76224, 768, 0, 0)),
    (DROPS, INNER, "cp=2 ring=2", (97536, 128256, 130944, 768, 0, 0)),
    (DROPS, WHOLE, "cpu fp32 cp=2 ring=2 full", (63360, 84480, 152448, 1536, 0, 0)),
    (DROPS, INNER, "cp=8 ring=4", (24384, 32064, 38976, 192, 0, 0)),
    (DROPS, WHOLE, "cpu bf16 cp=8 ring=4 full", (8544, 13440, 31968, 384, 0, 0)),
    (DROPS, FIRST, "tp=2 cp=4 ring=2 sp p1=2 domino", (31104, 38016, 43552, 768, 0, 1536)),
    (DROPS, LAST, "tp=2 cp=2 ring=1 selective split", (48000, 166656, 234624, 61440, 64512, 0)),
    (U, Stage(0, 1, 0, 3), "cpu fp32", (580608, 582720, 647424, 3072, 0, 0)),
    (U, Stage(0, 1, 0, 3), "tp=2 full", (66816, 79872, 111360, 3072, 0, 0)),
    (U, Stage(0, 3, 0, 1), "cpu fp32", (204288, 241152, 314880, 3072, 0, 0)),
    (U, Stage(0, 3, 0, 1), "tp=2 full", (15360, 46080, 77568, 3072, 0, 0)),
    (U, Stage(1, 3, 1, 1), "cpu fp32", (126720, 157440, 182016, 1536, 0, 0)),
    (U, Stage(1, 3, 1, 1), "tp=2 full", (19968, 41472, 51072, 1536, 0, 0)),
    (U, Stage(2, 3, 2, 1), "cpu fp32", (264960, 267072, 331776, 1536, 0, 0)),
    (U, Stage(2, 3, 2, 1), "tp=2 full", (40704, 53760, 85248, 1536, 0, 0)),
    (U, Stage(0, 2, 0, 2), "cpu fp32", (329472, 360192, 384768, 3072, 0, 0)),
    (U, Stage(0, 2, 0, 2), "tp=2 full", (33792, 55296, 80640, 3072, 0, 0)),
    (U, Stage(1, 2, 1, 2), "cpu fp32", (377856, 379968, 444672, 1536, 0, 0)),
    (U, Stage(1, 2, 1, 2), "tp=2 full", (52992, 66048, 97536, 1536, 0, 0)),
]  # fmt: skip


WAYS: dict[str, tuple[str, Any]] = {
    "cpu": ("gpu", False), "bf16": ("itemsize", 2), "fp32": ("itemsize", 4), "fp64": ("itemsize", 8),
    "sp": ("sequence_parallel", True), "domino": ("overlap", "domino"), "async": ("overlap", "async"),
    "full": ("recompute", "full"), "selective": ("recompute", "selective"), "split": ("phases", ("F", "I", "W")),
    "step": ("phases", ("step",)), "layers=1": ("recompute_layers", 1),
}  # fmt: skip
"""Words of the table, and what they ask for."""


def walked(model: ModelSpec, stage: Stage, asked: str) -> Activations:
    told: dict[str, Any] = {"overlap": "sync", "itemsize": 2, "gpu": True, "phases": ("F", "B")}
    for word in asked.split():
        name, value = WAYS[word] if word in WAYS else (word.partition("=")[0], int(word.partition("=")[2]))
        told[name] = value
    ways = {name: told.pop(name) for name in ("itemsize", "gpu", "phases")}
    return activations(model, Strategy(**told), stage, WalkedBatch(batch=3, sequence=32, **ways))


@pytest.mark.parametrize(("model", "stage", "asked", "told"), WALKED)
def test_bytes_of_a_micro_batch(model: ModelSpec, stage: Stage, asked: str, told: tuple[int, ...]) -> None:
    assert walked(model, stage, asked) == Activations(*told)


def test_a_layer_of_a_fused_gpt_keeps_what_its_backward_reads() -> None:
    """Of a token: the stream and what is normalised twice each, queries, keys and values, attention's output,
    both sides of the activation; statistics of two norms and a log-sum-exp of each head in fp32."""
    one, two = (walked(GPT, Stage(1, 3, 2, layers), "").kept for layers in (1, 2))
    assert two - one == 96 * (2 * (2 * 32 + 2 * 32 + 3 * 32 + 32 + 2 * 96) + 4 * (2 * 2 + 8))


def test_full_recomputation_keeps_what_sublayers_begin_with() -> None:
    one, two = (walked(GPT, Stage(1, 3, 2, layers), "full").kept for layers in (1, 2))
    assert two - one == 96 * 2 * 2 * 32


@pytest.mark.parametrize("model", [GPT, LLAMA, DROPS], ids=["gpt", "llama", "dropped"])
@pytest.mark.parametrize("cut", [{}, {"tp": 4, "sequence_parallel": True}, {"tp": 2, "p1": 3, "p2": 2}], ids=str)
def test_a_layer_of_one_stream_keeps_two_bytes_of_a_number(model: ModelSpec, cut: dict[str, Any]) -> None:
    """InternEvo's 2 b S H (arXiv 2401.09149, section 3), of sequence parallelism's ranks a share of it."""
    told = WalkedBatch(batch=3, sequence=32, itemsize=2, gpu=True)
    one, two = (
        activations(model, Strategy(recompute="layer", overlap="sync", **cut), Stage(1, 3, 2, layers), told).kept
        for layers in (1, 2)
    )
    assert two - one == 2 * 3 * 32 * 32 // (4 if "sequence_parallel" in cut else 1)


def test_the_papers_34_bytes_of_a_number_but_for_masks() -> None:
    """Without recomputation: 34 b S H with FlashAttention, 2 of them dropout masks (Korthikanti 2022,
    arXiv 2205.05198), which functions of keys make again; beside them statistics of norms and heads."""
    wide = ModelSpec(family="gpt", num_layers=9, hidden=1024, num_heads=8, vocab=48, max_sequence=64)
    told = WalkedBatch(batch=1, sequence=64, itemsize=2, gpu=True)
    one, two = (activations(wide, Strategy(overlap="sync"), Stage(1, 3, 2, layers), told).kept for layers in (1, 2))
    assert two - one == 64 * (32 * 1024 + 4 * (2 * 2 + 8))


def test_the_most_of_several_micro_batches() -> None:
    """All but one keep; that one is at its fullest moment."""
    found = Activations(10, 20, 30, 5, 40)
    assert (found.peak(), found.peak(3)) == (40, 60)
    assert Activations(10, 50, 30).peak(2) == 60
    assert Activations(10, 50, 70).peak(2) == 80
