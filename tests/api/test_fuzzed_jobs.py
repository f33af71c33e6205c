"""Drawn jobs, right and wrong ones: each is planned, or refused in one paragraph. 1,000 of them
with ``-m contract``."""

import json
import math
import random
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from plait.api.planning import plan_job
from plait.core.base.codec.toml_text import to_toml
from plait.core.base.errors import PlaitError
from plait.core.job.spec import Job

SECTIONS = ("data", "train", "strategy", "cluster", "plan", "recipe", "place")
MODELS = ("gpt3-350m", "llama3-8b", "qwen3-0.6b", "mixtral-8x7b", "llama3-405b", "deepseek-v3", "llama2-7b",
          "gemma2-2b", "utransformer-small", "llama2-13b", "llama3-8b", "qwen3-4b", "bert")  # fmt: skip
NUMBERS = (
    1,
    1,
    2,
    2,
    4,
    4,
    8,
    8,
    16,
    32,
    64,
    0,
    3,
    7,
    100,
    1000,
    1023,
    4096,
    8192,
    1 << 20,
    (1 << 31) - 1,
    1 << 40,
    -1,
)
FRACTIONS = (0.0, 1e-9, 0.1, 0.5, 1.0, 3.5, 1e9, -0.1, math.inf, math.nan)
WORDS = ("", "auto", "all", "none", "1f1b", "interleaved", "zb-h1", "h100", "pp = 1", "tp <= 4", "memory < 60 GB",
         "a\n\nb", "../x", "7%", "1e12", "2T", "ring", "\N{SNOWMAN}")  # fmt: skip
FEW = 60


def drawn(chance: random.Random, kind: Any) -> Any:
    """A value that a key of this kind may have, or another."""
    if chance.random() < 0.02:
        return chance.choice([[], {}, "", -1, True, "x" * 5000])
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        return chance.choice(parts)
    if origin is typing.Annotated:
        return drawn(chance, parts[0])
    if origin in (typing.Union, types.UnionType):
        return drawn(chance, chance.choice(parts))
    if origin in (tuple, list):
        return [drawn(chance, parts[0]) for _ in range(chance.choice([0, 1, 2, 2, 4]))]
    if origin is dict:
        return {chance.choice(WORDS): drawn(chance, parts[1])}
    fields = getattr(kind, "model_fields", None)
    if fields:
        return {
            name: drawn(chance, fields[name].annotation) for name in chance.sample(list(fields), min(2, len(fields)))
        }
    values: Mapping[Any, Any] = {int: NUMBERS, float: FRACTIONS, bool: (True, False), str: WORDS}
    return chance.choice(values.get(kind, WORDS))


def job_of(number: int) -> dict[str, Any]:
    """A job that could be planned, with some keys drawn."""
    chance = random.Random(number)
    ranks = chance.choice([1, 2, 8, 12, 64, 1024])
    values: dict[str, Any] = {
        "model": {"preset": chance.choice(MODELS)},
        "data": {"sequence_length": chance.choice([128, 1024, 4096, 1000])},
        "train": {"global_batch_size": chance.choice([1, 8, 24, 256, 1023]), "precision": "bf16-mixed"},
        "cluster": {"preset": chance.choice(["h100", "a100-80", "gb200"]), "ranks": ranks},
        "plan": {"points": 500, "top": 2},
    }
    if chance.random() < 0.3:
        heads = chance.choice([1, 4, 6, 8, 32])
        values["model"] = {
            "family": chance.choice(["gpt", "llama", "utransformer"]), "hidden": heads * chance.choice([1, 64, 128]),
            "num_heads": heads, "num_layers": chance.choice([1, 3, 24, 126, 5000]), "vocab": chance.choice([3, 32000]),
        }  # fmt: skip
        if chance.random() < 0.5:
            values["model"][chance.choice(["ffn_hidden", "num_kv_heads", "num_heads", "hidden"])] = drawn(chance, int)
    for _ in range(chance.choice([0, 1, 1, 2, 3])):
        section = chance.choice(SECTIONS)
        kind: Any = Job.model_fields[section].annotation
        fields = kind.model_fields
        key = chance.choice(list(fields))
        values.setdefault(section, {})[key] = drawn(chance, fields[key].annotation)
    return values


def refusal(number: int, folder: Path) -> str:
    """Of a drawn job; empty for one that is planned, to numbers that can be. Raises what is no
    deliberate error."""
    values = job_of(number)
    file = folder / f"{number}.toml"
    try:
        file.write_text(to_toml(values))
        answer = plan_job(file).answer(explain=True)
    except PlaitError as error:
        return str(error)
    for one in answer.answer.candidates:
        assert 0 < one.low <= one.seconds <= one.high < math.inf
        assert one.mfu is None or 0 < one.mfu <= 1
        assert one.memory.safe
    json.dumps(answer.to_dict(), allow_nan=False)
    assert answer.text(100)
    return ""


@pytest.mark.parametrize(
    "number", [number if number < FEW else pytest.param(number, marks=pytest.mark.contract) for number in range(1000)]
)
def test_a_drawn_job_is_planned_or_refused_in_a_paragraph(number: int, tmp_path: Path) -> None:
    assert "\n" not in refusal(number, tmp_path)
