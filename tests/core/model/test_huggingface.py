"""Every key of a Hugging Face config is read, refused by name, or counted as one that changes
nothing."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from plait.core.base.errors import JobError
from plait.core.base.ignored_input import IgnoredInput
from plait.core.model.huggingface import LARGEST, PASSED_OVER, read_config
from plait.core.model.spec import ModelSpec

GPT2: dict[str, Any] = {
    "model_type": "gpt2", "n_layer": 2, "n_embd": 16, "n_head": 4, "n_positions": 16, "vocab_size": 53,
}  # fmt: skip
LLAMA: dict[str, Any] = {
    "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "vocab_size": 53,
    "intermediate_size": 24, "max_position_embeddings": 32,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip


KIND = LLAMA | {"num_key_value_heads": 2, "num_hidden_layers": 4}
MIXTRAL = KIND | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
QWEN3_MOE = KIND | {
    "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8,
    "norm_topk_prob": True,
}  # fmt: skip
QWEN2_MOE = QWEN3_MOE | {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 8}
QWEN2 = KIND | {"model_type": "qwen2"}


def read(folder: Path, values: dict[str, Any], over: IgnoredInput | None = None) -> ModelSpec:
    (folder / "config.json").write_text(json.dumps(values))
    return read_config(folder, over)


def refused(folder: Path, values: dict[str, Any]) -> JobError:
    with pytest.raises(JobError) as caught:
        read(folder, values)
    assert caught.value.file == str(folder / "config.json")
    assert caught.value.fix, caught.value
    return caught.value


@pytest.mark.parametrize(
    ("base", "change", "key"),
    [
        (GPT2, {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        (GPT2, {"scale_attn_weights": False}, "scale_attn_weights"),
        (GPT2, {"reorder_and_upcast_attn": True}, "reorder_and_upcast_attn"),
        (GPT2, {"add_cross_attention": True}, "add_cross_attention"),
        (GPT2, {"activation_function": "gelu"}, "activation_function"),
        (GPT2, {"embd_pdrop": 0.2}, "resid_pdrop"),
        (GPT2, {"hidden_size": 32}, "hidden_size"),
        (GPT2, {"n_inner": 0}, "n_inner"),
        (GPT2, {"pruned_heads": {"0": [1]}}, "pruned_heads"),
        (GPT2, {"tie_word_embeddings": None}, "tie_word_embeddings"),
        (GPT2, {"architectures": ["GPT2ForSequenceClassification"]}, "architectures"),
        (GPT2, {"rope_theta": 1e4}, "rope_theta"),
        (LLAMA, {"mlp_bias": True}, "mlp_bias"),
        (LLAMA, {"attention_bias": 0}, "attention_bias"),
        (LLAMA, {"is_encoder_decoder": True}, "is_encoder_decoder"),
        (LLAMA, {"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        (LLAMA, {"per_layer_config": {"0": {"hidden_act": "relu"}}}, "per_layer_config"),
        (LLAMA, {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (LLAMA, {"sliding_window": 4096}, "sliding_window"),
        (LLAMA, {"head_dim": 0}, "head_dim"),
        (LLAMA, {"num_key_value_heads": 0}, "num_key_value_heads"),
        (LLAMA, {"rms_norm_eps": None}, "rms_norm_eps"),
        (LLAMA, {"original_max_position_embeddings": 8}, "original_max_position_embeddings"),
        (LLAMA, {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling"),
        (LLAMA, {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_scaling"),
        (LLAMA, {"hidden_act": "relu"}, "hidden_act"),
        (LLAMA, {"rope_scaling": {**LLAMA3, "type": "default"}}, "rope_scaling"),
        (LLAMA, {"rope_scaling": {"rope_type": "default", "factor": 2.0}}, "rope_scaling.factor"),
        (LLAMA, {"rope_parameters": {**LLAMA3, "attention_factor": 2.0}}, "rope_parameters.attention_factor"),
        (LLAMA, {"rope_parameters": {"partial_rotary_factor": 0.5}}, "rope_parameters.partial_rotary_factor"),
        (LLAMA, {"rope_parameters": LLAMA3, "rope_scaling": {**LLAMA3, "factor": 2.0}}, "rope_scaling"),
        (LLAMA, {"rope_theta": 5e5, "rope_parameters": {"rope_theta": 1e4}}, "rope_parameters.rope_theta"),
        (LLAMA, {"rope_scaling": {**LLAMA3, "factor": -1.0}}, "rope_scaling.factor"),
        (LLAMA, {"rope_parameters": {**LLAMA3, "factor": None}}, "rope_parameters.factor"),
        (LLAMA, {"full_attention": {}}, "full_attention"),
        (MIXTRAL, {"output_router_logits": True}, "output_router_logits"),
        (MIXTRAL, {"router_jitter_noise": 0.1}, "router_jitter_noise"),
        (MIXTRAL, {"num_experts": 3}, "num_experts"),
        (MIXTRAL, {"norm_topk_prob": False}, "norm_topk_prob"),
        (MIXTRAL, {"mlp_only_layers": [0]}, "mlp_only_layers"),
        (MIXTRAL, {"shared_expert_intermediate_size": 8}, "shared_expert_intermediate_size"),
        (QWEN3_MOE, {"decoder_sparse_step": 2}, "decoder_sparse_step"),
        (QWEN3_MOE, {"decoder_sparse_step": 0}, "decoder_sparse_step"),
        (QWEN3_MOE, {"decoder_sparse_step": 5}, "decoder_sparse_step"),
        (QWEN3_MOE, {"mlp_only_layers": [1]}, "mlp_only_layers"),
        (QWEN3_MOE, {"mlp_only_layers": [0, 1, 2, 3]}, "mlp_only_layers"),
        (QWEN3_MOE, {"mlp_only_layers": 1}, "mlp_only_layers"),
        (QWEN3_MOE, {"num_local_experts": 3}, "num_local_experts"),
        (QWEN3_MOE, {"attention_bias": True}, "attention_bias"),
        (QWEN3_MOE, {"use_sliding_window": True}, "use_sliding_window"),
        (QWEN3_MOE, {"output_router_logits": True}, "output_router_logits"),
        (QWEN2_MOE, {"use_sliding_window": True}, "use_sliding_window"),
        (QWEN2_MOE, {"attention_bias": False}, "attention_bias"),
        (QWEN2_MOE, {"router_jitter_noise": 0.1}, "router_jitter_noise"),
        (QWEN2, {"attention_bias": True}, "attention_bias"),
        (QWEN2, {"qkv_bias": False}, "qkv_bias"),
        (QWEN2, {"use_mrope": True}, "use_mrope"),
        (QWEN2, {"use_sliding_window": 1}, "use_sliding_window"),
        (QWEN2, {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_scaling"),
    ],
)  # fmt: skip
def test_what_would_change_the_numbers_is_refused_by_its_name(
    tmp_path: Path, base: dict[str, Any], change: dict[str, Any], key: str
) -> None:
    assert read(tmp_path, base)
    error = refused(tmp_path, base | change)
    assert error.key == key
    assert read(tmp_path, advised(base | change, error)), "the advice works"


def advised(values: dict[str, Any], error: JobError) -> dict[str, Any]:
    """The config with what the error says changed."""
    fix, key = error.fix or "", error.key or ""
    top, _, inner = key.partition(".")
    table = dict(values[top]) if inner else dict(values)
    name = inner or top
    if supported := re.match(r"Supported: ([^,]*)", fix):
        word = supported[1]
        value = json.loads(word) if word in ("true", "false", "0.0", "1.0", "{}") else word
        table[name] = [value] if name == "architectures" else value
        if word == "without it":
            del table[name]
        if name.startswith("rope_"):
            table[name] = {"rope_type": word}
    elif fix == "Make the two equal":
        table["resid_pdrop"] = table["embd_pdrop"]
    elif "needs it" in fix or "Allowed: a number" in fix:
        table[name] = 2.0
    else:
        assert re.match("Keep one|Take it out|Leave it out|Known here", fix), fix
        del table[name]
    return {**values, top: table} if inner else table


@pytest.mark.parametrize(
    ("base", "change", "key"),
    [
        (MIXTRAL, {"sliding_window": 0}, "sliding_window"),
        (MIXTRAL, {"num_key_value_heads": None}, "num_key_value_heads"),
        (QWEN2_MOE, {"num_key_value_heads": None}, "num_key_value_heads"),
        (QWEN3_MOE, {"layer_types": ["sliding_attention"] * 4}, "layer_types"),
        (QWEN2_MOE, {"layer_types": ["sliding_attention"] * 4}, "layer_types"),
        (QWEN2, {"layer_types": ["sliding_attention"] * 4}, "layer_types"),
        (MIXTRAL, {"num_local_experts": 0}, "num_local_experts"),
        (MIXTRAL, {"num_experts_per_tok": 5}, "num_experts_per_tok"),
        (QWEN3_MOE, {"num_experts": 0}, "num_experts"),
        (QWEN3_MOE, {"num_experts": None}, "num_experts"),
        (QWEN3_MOE, {"moe_intermediate_size": 0}, "moe_intermediate_size"),
        (QWEN3_MOE, {"norm_topk_prob": 1}, "norm_topk_prob"),
        (QWEN2_MOE, {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size"),
        (QWEN2_MOE, {"qkv_bias": None}, "qkv_bias"),
        (QWEN2_MOE, {"qkv_bias": 1}, "qkv_bias"),
        (QWEN2_MOE, {"num_experts_per_tok": 0}, "num_experts_per_tok"),
        (QWEN2, {"model_type": "olmoe"}, "model_type"),
    ],
)
def test_what_newer_types_cannot_have(tmp_path: Path, base: dict[str, Any], change: dict[str, Any], key: str) -> None:
    assert refused(tmp_path, base | change).key == key


@pytest.mark.parametrize(
    ("base", "change"),
    [
        (MIXTRAL, {"router_aux_loss_coef": 0.02, "num_experts": 4}),
        (QWEN3_MOE, {"num_local_experts": 4, "max_window_layers": 48, "mlp_only_layers": [9]}),
        (QWEN2, {"sliding_window": None, "use_sliding_window": True, "max_window_layers": 0}),
        (QWEN2_MOE, {"qkv_bias": True, "sliding_window": 0}),
        (GPT2, {"scale_attn_by_inverse_layer_idx": False, "scale_attn_weights": True, "pruned_heads": {}}),
        (GPT2, {"hidden_size": 16, "num_hidden_layers": 2, "max_position_embeddings": 16, "n_inner": None}),
        (GPT2, {"architectures": ["GPT2LMHeadModel"], "sliding_window": None}),
        (LLAMA, {"hidden_act": "swish", "num_key_value_heads": None, "head_dim": None, "rope_scaling": None}),
        (LLAMA, {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "rope_theta": 10000.0}),
        (LLAMA, {"partial_rotary_factor": 1.0, "rope_interleaved": False}),
    ],
)
def test_what_means_the_same_reads_the_same(tmp_path: Path, base: dict[str, Any], change: dict[str, Any]) -> None:
    assert read(tmp_path, base | change) == read(tmp_path, base)


def test_what_changes_nothing_is_counted(tmp_path: Path) -> None:
    over = IgnoredInput()
    read(tmp_path, GPT2 | {"use_cache": True, "top_k": 50, "n_ctx": 16}, over)
    assert over.lines() == [f"passed over 3 {PASSED_OVER} (the first: use_cache)"]


def named(folder: Path, values: dict[str, Any], over: IgnoredInput) -> str:
    """The key for which the values are refused; empty if they are not."""
    try:
        read(folder, values, over)
    except JobError as error:
        return (error.key or "no key").split(".")[0]
    return ""


@pytest.mark.parametrize("kind", ["gpt2", "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe"])
def test_no_attribute_of_transformers_configs_is_unknown(tmp_path: Path, kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    made = transformers.AutoConfig.for_model(kind)
    known = made.to_dict() | {one.name: getattr(made, one.name) for one in fields(made)}
    known |= transformers.GenerationConfig._get_default_generation_params()
    values = json.loads(json.dumps(known, default=str)) | {"model_type": kind}
    assert read(tmp_path, values)
    for key in sorted(set(values) - {"model_type"}):  # and each by itself is read, refused by name, or counted
        over = IgnoredInput()
        changed = values | {key: "something else"}
        if names := named(tmp_path, changed, over):
            assert names in (key, "resid_pdrop", "num_local_experts")
        else:
            passed = IgnoredInput()
            read(tmp_path, {name: value for name, value in values.items() if name != key}, passed)
            assert over.counts[PASSED_OVER] == passed.counts[PASSED_OVER] + 1, f"{key} was dropped without a word"


def test_what_a_config_leaves_out_is_as_its_makers_have_it(tmp_path: Path) -> None:
    """The defaults of transformers' classes."""
    gpt, llama = read(tmp_path, GPT2), read(tmp_path, LLAMA)
    assert (gpt.norm_eps, gpt.dropout, gpt.attention_dropout, gpt.tied_embeddings) == (1e-5, 0.1, 0.1, True)
    assert (gpt.ffn_hidden, gpt.num_kv_heads, gpt.family) == (64, 4, "gpt")
    assert (llama.norm_eps, llama.dropout, llama.attention_dropout, llama.tied_embeddings) == (1e-6, 0.0, 0.0, False)
    assert (llama.rope_theta, llama.rope_scaling, llama.num_kv_heads, llama.head_size) == (10000.0, None, 4, 4)
    assert read(tmp_path, GPT2 | {"resid_pdrop": 0.1}) == read(tmp_path, GPT2 | {"embd_pdrop": 0.1}) == gpt


def test_a_config_of_megabytes_is_refused_unread(tmp_path: Path) -> None:
    file, text = tmp_path / "config.json", json.dumps(GPT2)
    file.write_text(text + " " * (LARGEST - len(text)))
    assert read_config(file) == read(tmp_path, GPT2)
    file.write_text(text + " " * (LARGEST + 1 - len(text)))
    with pytest.raises(JobError, match=f"it has {LARGEST + 1} bytes; at most {LARGEST} are read"):
        read_config(file)
