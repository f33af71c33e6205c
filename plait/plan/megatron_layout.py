"""Stages of a pipeline as Megatron-LM writes them (``--pipeline-model-parallel-layout``), both ways: E the
embedding, t a layer, L the loss, | between stages, (...)*n repeated."""

from __future__ import annotations

import re
from itertools import groupby

LONGEST = 100_000
"""Letters of a layout with all repetitions written out."""


def layout(sizes: list[int]) -> str:
    """Stages as Megatron-LM writes them: E the embedding, t a layer, L the loss.

    >>> layout([3, 4, 4, 2])
    'Et*3|(t*4|)*2t*2L'
    >>> layout([0, 1, 1, 0])
    'E|(t*1|)*2L'
    """
    first, *middle, last = sizes
    runs = [(size, len(list(same))) for size, same in groupby(middle)]
    inner = "".join(f"({_layers(size)}|)*{times}" for size, times in runs)
    return f"E{_layers(first)}|{inner}{_layers(last)}L"


def _layers(size: int) -> str:
    return f"t*{size}" if size else ""


def stages_of(text: str) -> list[int] | None:
    """Layers of each stage of a layout; None for what is none.

    >>> stages_of("Et*3|(t*4|)*2t*2L"), stages_of("E|(t|)*2L"), stages_of("Et||L")
    ([3, 4, 4, 2], [0, 1, 1, 0], [1, 0, 0])
    """
    plain = text.strip("'\"").replace(" ", "").replace(",", "")
    for _ in range(20):
        opened = re.sub(r"\(([^()]*)\)\*(\d+)", lambda m: m[1] * min(int(m[2]), 2000), plain)
        opened = re.sub(r"([EtmL])\*(\d+)", lambda m: m[1] * min(int(m[2]), 2000), opened)
        if opened == plain or len(opened) > LONGEST:
            break
        plain = opened
    if not re.fullmatch(r"[EtmL|]+", plain):
        return None
    return [stage.count("t") for stage in plain.split("|")]
