"""Hugging Face's ``config.json`` as a model to plan for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from plait.core.base.errors import JobError
from tests.plan.told_files import told


def test_hugging_face_s_config_is_a_model(tmp_path: Path) -> None:
    from plait.api.planning import plan_job

    values = {
        "model_type": "llama", "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8,
        "intermediate_size": 1024, "vocab_size": 1024, "rms_norm_eps": 1e-5, "max_position_embeddings": 512,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(values))
    more = ["cluster.preset=h100", "cluster.ranks=8", "data.sequence_length=512", "train.global_batch_size=16"]
    found = plan_job(tmp_path / "config.json", [*more, "train.precision=bf16-mixed"]).answer()
    assert found.answer.model.hidden == 512 and found.answer.framework == "" and found.answer.ranks == 8


GEMMA = {
    "model_type": "gemma3_text", "num_hidden_layers": 48, "hidden_size": 3840, "num_attention_heads": 16,
    "num_key_value_heads": 8, "intermediate_size": 15360,
}  # fmt: skip
DEEPSEEK = {
    "model_type": "deepseek_v3", "num_hidden_layers": 61, "hidden_size": 7168, "num_attention_heads": 128,
    "num_key_value_heads": 128, "intermediate_size": 18432, "n_routed_experts": 256, "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048, "n_shared_experts": 1, "first_k_dense_replace": 3, "moe_layer_freq": 1,
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "vocab_size": 129280,
}  # fmt: skip


@pytest.mark.parametrize(
    ("values", "preset"),
    [
        (DEEPSEEK, "deepseek-v3"),
        ({"model_type": "gemma3", "text_config": {"num_hidden_layers": 48, "hidden_size": 3840,
          "num_attention_heads": 16, "num_key_value_heads": 8, "intermediate_size": 15360}}, "gemma3-12b"),
        (DEEPSEEK | {"num_hidden_layers": 60}, ""),
        (DEEPSEEK | {"model_type": "bloom"}, ""),
        ({"model_type": "_"}, ""),
    ],
)  # fmt: skip
def test_kinds_that_are_planned_alone_are_told_by_their_shapes(
    tmp_path: Path, values: dict[str, Any], preset: str
) -> None:
    if preset:
        one = told(tmp_path, "config.json", json.dumps(values))
        assert one.get("model") == {"preset": preset} and f"as the preset {preset}" in one.notes[0]
    else:
        with pytest.raises(JobError, match=r"Supported: gpt2, llama, .*, and shapes of presets"):
            told(tmp_path, "config.json", json.dumps(values))


@pytest.mark.parametrize(
    ("values", "model"),
    [
        (DEEPSEEK | {"vocab_size": 32002}, {"preset": "deepseek-v3", "vocab": 32002}),
        (GEMMA | {"tie_word_embeddings": False}, {"preset": "gemma3-12b", "tied_embeddings": False}),
        (GEMMA | {"tie_word_embeddings": True, "head_dim": 256}, {"preset": "gemma3-12b"}),
        (DEEPSEEK, {"preset": "deepseek-v3"}),
    ],
)
def test_a_preset_has_the_vocabulary_of_the_file(tmp_path: Path, values: dict[str, Any], model: dict[str, Any]) -> None:
    one = told(tmp_path, "config.json", json.dumps(values))
    assert one.get("model") == model
    assert all(f"{key}={value}" in one.notes[0] for key, value in model.items() if key != "preset")


@pytest.mark.parametrize(
    ("values", "says"),
    [
        (GEMMA | {"num_experts": 64, "num_experts_per_tok": 8},
         "num_experts: a gemma3_text is no gemma3-12b, .* it has num_experts=64"),
        (GEMMA | {"head_dim": 128}, "it has head_dim=128"),
        (DEEPSEEK | {"n_routed_experts": 16, "num_experts_per_tok": 4},
         "it has n_routed_experts=16 and num_experts_per_tok=4"),
        (DEEPSEEK | {"n_routed_experts": None}, "it has num_local_experts=0"),
        (DEEPSEEK | {"first_k_dense_replace": 1}, "it has first_k_dense_replace=1"),
        (DEEPSEEK | {"kv_lora_rank": 256}, "it has kv_lora_rank=256"),
        (DEEPSEEK | {"mlp_only_layers": [3]}, r"it has mlp_only_layers=\[3\]"),
    ],
)  # fmt: skip
def test_what_is_no_preset_is_refused_by_what_differs(tmp_path: Path, values: dict[str, Any], says: str) -> None:
    with pytest.raises(JobError, match=says):
        told(tmp_path, "config.json", json.dumps(values))


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"torch_dtype": 5}, "'5' is no precision"),
        ({"dtype": {"": "bfloat16"}}, "is no precision"),
        ({"dtype": "float32", "torch_dtype": "bfloat16"}, "'float32' differs from torch_dtype = 'bfloat16'"),
    ],
)
def test_types_of_numbers_that_are_none_are_refused(tmp_path: Path, values: dict[str, Any], says: str) -> None:
    with pytest.raises(JobError, match=says):
        told(tmp_path, "config.json", json.dumps({"model_type": "llama"} | values))
