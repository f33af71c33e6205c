"""The ``config.json`` of a model, as transformers reads it; and which models it cannot describe."""

from __future__ import annotations

from typing import Any

import torch

from plait.core.base.errors import CheckpointError
from plait.core.model.spec import ModelSpec


def check_family(spec: ModelSpec) -> None:
    """Raise CheckpointError for a model that is neither a GPT-2 nor a Llama."""
    if spec.levels or spec.parallel_block:
        kind = "U-Transformer" if spec.levels else f"{spec.family} model with parallel blocks"
        raise CheckpointError(
            f"Hugging Face has no {kind}, so its weights come from and go to checkpoints of runs only"
        )


def huggingface_config(spec: ModelSpec, dtype: torch.dtype) -> dict[str, Any]:
    """The ``config.json`` of ``spec``, which ``ModelSpec.from_huggingface`` reads back. Raises
    CheckpointError where there is none."""
    common = {
        "vocab_size": spec.vocab,
        "tie_word_embeddings": spec.tied_embeddings,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "bos_token_id": None,
        "eos_token_id": None,
    }
    check_family(spec)
    if spec.family == "gpt":
        if spec.head_size * spec.num_heads != spec.hidden:
            problem = f"{spec.num_heads} heads of size {spec.head_size} with hidden = {spec.hidden}"
            raise CheckpointError(f"Hugging Face has no GPT-2 of {problem}: there the heads share out the hidden size")
        return {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            **common,
            "n_layer": spec.num_layers,
            "n_embd": spec.hidden,
            "n_head": spec.num_heads,
            "n_positions": spec.max_sequence,
            "n_inner": spec.ffn_hidden,
            "activation_function": "gelu_new",
            "layer_norm_epsilon": float(spec.norm_eps),
            "resid_pdrop": spec.dropout,
            "embd_pdrop": spec.dropout,
            "attn_pdrop": spec.attention_dropout,
        }
    if spec.hidden % spec.num_heads:
        problem = f"a hidden size ({spec.hidden}) that its {spec.num_heads} heads do not divide, whatever their size"
        raise CheckpointError(f"Hugging Face transformers loads no Llama with {problem}, so this model has no export")
    scaling = spec.rope_scaling
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **common,
        "num_hidden_layers": spec.num_layers,
        "hidden_size": spec.hidden,
        "intermediate_size": spec.ffn_hidden,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_size,
        "max_position_embeddings": spec.max_sequence,
        "rms_norm_eps": float(spec.norm_eps),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": spec.attention_dropout,
        "rope_theta": float(spec.rope_theta),
        "rope_scaling": None
        if scaling is None
        else {
            "rope_type": "llama3",
            "factor": float(scaling.factor),
            "low_freq_factor": float(scaling.low_freq_factor),
            "high_freq_factor": float(scaling.high_freq_factor),
            "original_max_position_embeddings": scaling.original_max_positions,
        },
    }
