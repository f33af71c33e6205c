"""A model that Hugging Face's ``config.json`` describes: one that Plait trains, or a preset of its shapes.

Its type of numbers is the precision, unless the command line says one. What a preset stands for is told by
its shapes, experts among them. Its vocabulary may differ, and whether its head is its embedding.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, cast

from plait.core.base.env import specs_folder
from plait.core.base.errors import JobError
from plait.core.model.families import MODEL_TYPES
from plait.core.model.huggingface import number_type
from plait.core.model.precision import Precision
from plait.core.model.spec import ModelSpec
from plait.plan.told import Told

PRECISIONS: Mapping[str, Precision] = {"bfloat16": "bf16-mixed", "float32": "fp32", "float64": "fp64", "": "fp32"}
"""By the type of its numbers that a configuration says, in what the model is planned."""


def huggingface_told(path: Path, values: Mapping[str, Any], said: Collection[str] = ()) -> Told:
    """The model alone, as it is trained or the preset that has its shapes, and its precision. said: keys of
    the command line. Raises JobError for any other."""
    told = _shapes(path, values)
    if "train.precision" in said:
        return told
    names = [str(values[key]).removeprefix("torch.") for key in ("dtype", "torch_dtype") if values.get(key) is not None]
    if len(set(names)) > 1:
        raise told.refuse("dtype", f"'{names[0]}' differs from torch_dtype = '{names[1]}'", "Keep one of the two")
    if (kind := number_type(values)) not in PRECISIONS:
        problem = f"'{kind}' is no precision that Plait computes in"
        fix = "Add train.precision=bf16-mixed to the command (as large, and as fast), or fp32"
        raise told.refuse("dtype" if "dtype" in values else "torch_dtype", problem, fix)
    told.set("train.precision", PRECISIONS[kind])
    if kind:
        told.notes.append(f"The file has {kind}: it is planned in {PRECISIONS[kind]} (train.precision).")
    return told


def _shapes(path: Path, values: Mapping[str, Any]) -> Told:
    kind = str(values["model_type"])
    if kind in MODEL_TYPES:
        return Told("plait", str(path), {"model": {"huggingface": str(path)}})
    inner = values.get("text_config", values)
    said = cast("Mapping[str, Any]", inner) if isinstance(inner, Mapping) else {}
    files = sorted((specs_folder() / "models").glob(f"{re.split(r'[^a-z]', kind)[0] or 'none'}*.toml"))
    presets = {file.stem: ModelSpec.preset(file.stem, file.parent) for file in files}
    alike = {
        name: one
        for name, one in presets.items()
        if all(said.get(key) == getattr(one, ours) for key, ours in PUBLISHED_SHAPES.items())
    }
    fix = f"Supported: {', '.join(MODEL_TYPES)}, and shapes of presets. Describe it by keys of [model] in a job"
    if not alike:
        raise JobError(f"model_type '{kind}' is not supported", file=str(path), key="model_type", fix=fix)
    others = {name: [*_unlike(one, said, OTHER_SHAPES), *_unlike_experts(one, said)] for name, one in alike.items()}
    name = min(others, key=lambda name: len(others[name]))
    if others[name]:
        problem = (
            f"a {kind} is no {name}, though its layers are as many and as wide: it has {' and '.join(others[name])}"
        )
        raise JobError(problem, file=str(path), key=others[name][0].partition("=")[0], fix=fix)
    own = {ours: said[key] for key, ours in FREE_SHAPES.items() if _differs(presets[name], said, key, ours)}
    told = Told("plait", str(path), {"model": {"preset": name} | own})
    changed = "".join(f" with {key}={value}" for key, value in own.items())
    told.notes.append(f"A {kind} of these shapes is planned as the preset {name}{changed}; other keys are not read.")
    return told


PUBLISHED_SHAPES = {
    "num_hidden_layers": "num_layers", "hidden_size": "hidden", "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads", "intermediate_size": "ffn_hidden",
}  # fmt: skip
"""Keys by which a published model is told, and what a preset calls them ..."""
OTHER_SHAPES = {
    "head_dim": "head_size", "q_lora_rank": "q_lora_rank", "kv_lora_rank": "kv_lora_rank",
    "qk_rope_head_dim": "qk_rope_head_dim",
}  # fmt: skip
"""... others that are the preset's where they are said ..."""
FREE_SHAPES = {"vocab_size": "vocab", "tie_word_embeddings": "tied_embeddings"}
"""... and those in which a model may differ from a preset."""
EXPERTS = {
    "num_local_experts": "count", "num_experts": "count", "n_routed_experts": "count",
    "num_experts_per_tok": "per_token", "moe_intermediate_size": "ffn_hidden", "n_shared_experts": "shared",
    "shared_expert_intermediate_size": "shared_ffn_hidden", "first_k_dense_replace": "first_dense",
    "decoder_sparse_step": "every", "moe_layer_freq": "every",
}  # fmt: skip
"""Keys of experts, and what a preset calls them."""


def _differs(of: Any, said: Mapping[str, Any], key: str, ours: str) -> bool:
    """Whether a key is said, and not as the preset has it."""
    return said.get(key) is not None and said[key] != getattr(of, ours)


def _unlike(of: Any, said: Mapping[str, Any], names: Mapping[str, str]) -> list[str]:
    """Keys and values that are not the preset's; those that are left out are."""
    return [f"{key}={said[key]}" for key, ours in names.items() if _differs(of, said, key, ours)]


def _unlike_experts(preset: ModelSpec, said: Mapping[str, Any]) -> list[str]:
    """Likewise, of experts; a model has them if its configuration says how many."""
    counted = [f"{key}={said[key]}" for key, ours in EXPERTS.items() if ours == "count" and said.get(key)]
    if not preset.experts:
        return counted
    if not counted:
        return [f"{next(iter(EXPERTS))}=0"]
    dense = [f"mlp_only_layers={said['mlp_only_layers']}"] if said.get("mlp_only_layers") else []
    return _unlike(preset.experts, said, EXPERTS) + dense
