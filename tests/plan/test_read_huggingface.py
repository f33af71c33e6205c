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


MIXTRAL = {
    "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
    "intermediate_size": 14336, "num_local_experts": 8, "vocab_size": 32000,
}  # fmt: skip


@pytest.mark.parametrize(
    ("values", "preset"),
    [
        ({"model_type": "mixtral"} | MIXTRAL, "mixtral-8x7b"),
        ({"model_type": "gemma3", "text_config": {"num_hidden_layers": 48, "hidden_size": 3840,
          "num_attention_heads": 16, "num_key_value_heads": 8, "intermediate_size": 15360}}, "gemma3-12b"),
        ({"model_type": "mixtral"} | MIXTRAL | {"num_hidden_layers": 31}, ""),
        ({"model_type": "bloom"} | MIXTRAL, ""),
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
        with pytest.raises(JobError, match="Supported: gpt2, llama, mistral, qwen3, and shapes of presets"):
            told(tmp_path, "config.json", json.dumps(values))
