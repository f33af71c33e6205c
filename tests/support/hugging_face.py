"""A Hugging Face folder without weights."""

from __future__ import annotations

import json
from pathlib import Path

LLAMA = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256, "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "hidden_act": "silu", "tie_word_embeddings": False,
    "architectures": ["LlamaForCausalLM"],
}  # fmt: skip
"""``config.json`` of Llama 3 8B, as far as it is read."""


def hugging_face(folder: Path) -> Path:
    """A folder as Hugging Face has it, without weights; the tokenizer is a small one."""
    from tokenizers import Tokenizer, models

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    Tokenizer(models.WordLevel({"a": 0, "</s>": 1}, unk_token="a")).save(str(folder / "tokenizer.json"))
    return folder
