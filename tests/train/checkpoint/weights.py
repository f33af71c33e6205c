"""Folders of weights of small models, whole or as a test wants them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from plait.core.base.errors import CheckpointError
from plait.core.model.families import PREFIX
from plait.core.model.spec import ModelSpec
from plait.train.checkpoint.weight_files import check_weights, shapes

SHAPE: dict[str, Any] = {"num_layers": 2, "hidden": 8, "num_heads": 2, "vocab": 11, "max_sequence": 8}


LLAMA = ModelSpec(family="llama", ffn_hidden=12, num_kv_heads=1, **SHAPE)


TIED = ModelSpec(family="llama", ffn_hidden=12, num_kv_heads=1, tied_embeddings=True, **SHAPE)


GPT = ModelSpec(family="gpt", **SHAPE)


Q = "model.layers.0.self_attn.q_proj.weight"


EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def numbers(spec: ModelSpec, seed: int = 0) -> dict[str, np.ndarray]:
    """Whole weights of the model, named as in a file."""
    random = np.random.default_rng(seed)
    return {
        name if name == HEAD else PREFIX[spec.family] + name: random.standard_normal(shape).astype("<f4")
        for name, shape in shapes(spec).items()
    }


def write(file: Path, tensors: dict[str, np.ndarray], codes: dict[str, str] | None = None) -> None:
    """A safetensors file. codes: dtypes to be said of tensors, in place of F32."""
    header, end = dict[str, Any](), 0
    for name, value in tensors.items():
        code = (codes or {}).get(name, "F32")
        header[name] = {"dtype": code, "shape": list(value.shape), "data_offsets": [end, end + value.nbytes]}
        end += value.nbytes
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(value.tobytes() for value in tensors.values()))


def write_shards(folder: Path, tensors: dict[str, np.ndarray], count: int = 3) -> dict[str, str]:
    """Shards and their index; which tensor is where."""
    names, where = list(tensors), dict[str, str]()
    for number in range(count):
        file = f"model-{number + 1:05d}-of-{count:05d}.safetensors"
        part = names[number::count]
        write(folder / file, {name: tensors[name] for name in part})
        where |= dict.fromkeys(part, file)
    write_index(folder, where)
    return where


def write_index(folder: Path, where: dict[str, Any]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))


def refused(folder: Path, spec: ModelSpec = LLAMA) -> str:
    with pytest.raises(CheckpointError) as caught:
        check_weights(folder, spec)
    return str(caught.value)
