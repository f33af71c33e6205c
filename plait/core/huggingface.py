"""Hugging Face's ``config.json``, read as a ModelSpec: a file from anywhere, with anything in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

from plait.core.errors import JobError
from plait.core.files import contents, reason_of
from plait.core.model import ModelSpec, RopeScaling, shown

_GPT2 = {
    "num_layers": "n_layer", "hidden": "n_embd", "num_heads": "n_head", "vocab": "vocab_size",
    "max_sequence": "n_positions", "ffn_hidden": "n_inner", "tied_embeddings": "tie_word_embeddings",
    "norm_eps": "layer_norm_epsilon", "dropout": "resid_pdrop", "attention_dropout": "attn_pdrop",
}  # fmt: skip
_LLAMA = {
    "num_layers": "num_hidden_layers", "hidden": "hidden_size", "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads", "head_size": "head_dim", "ffn_hidden": "intermediate_size",
    "vocab": "vocab_size", "max_sequence": "max_position_embeddings", "tied_embeddings": "tie_word_embeddings",
    "norm_eps": "rms_norm_eps", "rope_theta": "rope_theta", "attention_dropout": "attention_dropout",
}  # fmt: skip
"""What Hugging Face calls our fields."""


def read_config(path: Path) -> ModelSpec:
    """The spec in a ``config.json`` (``gpt2`` or ``llama``), or in a folder with one. Raises JobError, with
    the file and its own key, for what is wrong or cannot be run."""
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(contents(file))
    except (OSError, ValueError, RecursionError) as error:
        raise JobError(f"cannot be read as a Hugging Face config: {reason_of(error)}", file=str(file)) from None
    if not isinstance(config, dict):
        raise JobError("is no table, so it is no Hugging Face config", file=str(file))
    values = cast("dict[str, Any]", config)
    kind = values.get("model_type")
    if not isinstance(kind, str) or kind not in _FROM_HUGGINGFACE:
        raise JobError(f"model_type {shown(kind)} is not supported", file=str(file),
                       key="model_type", fix=f"Supported: {', '.join(_FROM_HUGGINGFACE)}")  # fmt: skip
    read, names = _FROM_HUGGINGFACE[kind]
    try:
        return read(values)
    except KeyError as error:
        raise JobError("is missing", file=str(file), key=str(error).strip("'")) from None
    except JobError as error:
        key = names.get((error.key or "").removeprefix("model."), error.key)
        raise JobError(error.problem, file=str(file), key=key, fix=error.fix) from None


def _from_gpt2(config: dict[str, Any]) -> ModelSpec:
    activation = config.get("activation_function", "gelu_new")
    if activation not in ("gelu_new", "gelu_pytorch_tanh"):
        raise JobError(f"activation {shown(activation)} is not supported", key="activation_function",
                       fix="Supported: gelu_new")  # fmt: skip
    if config.get("resid_pdrop", 0.1) != config.get("embd_pdrop", 0.1):
        raise JobError("differs from embd_pdrop, and one probability serves both sites", key="resid_pdrop")
    habits = {"tied_embeddings": True, "norm_eps": 1e-5, "dropout": 0.1, "attention_dropout": 0.1, "ffn_hidden": 0}
    return ModelSpec(family="gpt", **_taken(config, _GPT2, habits))


def _from_llama(config: dict[str, Any]) -> ModelSpec:
    for key, only in (("attention_bias", False), ("mlp_bias", False), ("hidden_act", "silu")):
        if config.get(key, only) != only:
            raise JobError(f"{shown(config[key])} is not supported", key=key, fix=f"Supported: {only!r}")
    # Newer files hold everything rotary under rope_parameters; older ones split it over rope_theta and
    # rope_scaling.
    given: Any = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(given, dict):
        raise JobError(f"{shown(given)} is not a table", key="rope_scaling")
    rope = cast("dict[str, Any]", given)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise JobError(
            f"rope type {shown(kind)} is not supported", key="rope_scaling", fix="Supported: default, llama3"
        )
    scaling = None
    if kind == "llama3":
        scaling = RopeScaling(
            rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"], rope["original_max_position_embeddings"]
        )
    habits = {"tied_embeddings": False, "norm_eps": 1e-6, "rope_theta": 10000.0, "attention_dropout": 0.0}
    shapes = {"num_kv_heads": 0, "head_size": 0}
    theta = {"rope_theta": rope["rope_theta"]} if "rope_theta" in rope else {}
    return ModelSpec(family="llama", rope_scaling=scaling, **_taken(config | theta, _LLAMA, habits | shapes))


def _taken(config: dict[str, Any], names: dict[str, str], habits: dict[str, Any]) -> dict[str, Any]:
    """Our fields from theirs; what is null or left out is as habits have it. KeyError for what has none."""
    found: dict[str, Any] = {}
    for ours, theirs in names.items():
        value = config.get(theirs, habits[ours]) if ours in habits else config[theirs]
        found[ours] = habits[ours] if value is None and ours in habits else value
    return found


_FROM_HUGGINGFACE = {"gpt2": (_from_gpt2, _GPT2), "llama": (_from_llama, _LLAMA)}
