"""What a config may say, Plait computes as transformers does: logits in fp64, of every setting."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from plait.core.model.spec import ModelSpec
from plait.core.parallel.strategy import Strategy
from plait.train.checkpoint import huggingface
from plait.train.model.transformer import Transformer
from plait.train.sample import next_logits

GPT2: dict[str, Any] = {"vocab_size": 53, "n_positions": 16, "n_embd": 16, "n_layer": 3, "n_head": 4}
LLAMA: dict[str, Any] = {
    "vocab_size": 53, "max_position_embeddings": 64, "hidden_size": 16, "intermediate_size": 24,
    "num_hidden_layers": 3, "num_attention_heads": 4,
}  # fmt: skip
LLAMA3 = {
    "type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("gpt2", GPT2, {}),
    ("gpt2", GPT2, {"activation_function": "gelu_pytorch_tanh", "layer_norm_epsilon": 1e-3}),
    ("gpt2", GPT2, {"n_inner": 40, "tie_word_embeddings": False, "resid_pdrop": 0.3, "embd_pdrop": 0.3}),
    ("gpt2", GPT2, {"use_cache": False, "summary_type": "last", "pad_token_id": 3, "n_ctx": 8}),
    ("llama", LLAMA, {}),
    ("llama", LLAMA, {"num_key_value_heads": 2, "head_dim": 6, "rms_norm_eps": 1e-3}),
    ("llama", LLAMA, {"tie_word_embeddings": True, "hidden_act": "swish", "pretraining_tp": 2}),
    ("llama", LLAMA, {"rope_theta": 100.0, "rope_scaling": LLAMA3, "num_key_value_heads": 1}),
    ("qwen3", LLAMA, {"num_key_value_heads": 2, "head_dim": 6}),
    (
        "qwen3",
        LLAMA,
        {"num_key_value_heads": 4, "sliding_window": 4, "use_sliding_window": False, "tie_word_embeddings": True},
    ),
    (
        "qwen3",
        LLAMA,
        {"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 1, "num_key_value_heads": 2},
    ),
    (
        "qwen3",
        LLAMA,
        {
            "sliding_window": 4,
            "use_sliding_window": True,
            "num_key_value_heads": 2,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    ("mistral", LLAMA, {"sliding_window": 4, "num_key_value_heads": 2}),
    ("mistral", LLAMA, {"sliding_window": None, "rope_theta": 1e6, "num_key_value_heads": 4}),
    ("llama", LLAMA, {"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}, "pad_token_id": 3}),
]


@pytest.mark.parametrize(("kind", "base", "change"), CASES, ids=str)
def test_logits_of_every_setting_that_is_read(
    tmp_path: Path, kind: str, base: dict[str, Any], change: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    values = {"model_type": kind, **base, **change}
    (tmp_path / "config.json").write_text(json.dumps(values))
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_config(config).double().eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn(parameter.shape, dtype=torch.float64) * 0.1)
    theirs.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(values))
    ours = Transformer(ModelSpec.from_huggingface(tmp_path), Strategy(), dtype=torch.float64, seed=9)
    huggingface.load(ours.eval(), tmp_path)
    tokens = torch.randint(0, 53, (12,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = theirs(tokens[None]).logits[0, -1]
    exact = 1e-12 if kind == "gpt2" else 1e-5  # transformers keeps rotary angles in fp32, whatever the model's dtype
    torch.testing.assert_close(next_logits(ours, tokens.tolist())[:53], expected, atol=exact, rtol=exact)
