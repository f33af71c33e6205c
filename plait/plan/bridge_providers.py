"""Defaults of Megatron-Bridge's classes of models: what a recipe leaves out, as its class has it
(``megatron/bridge/models``, 2025). Of other classes the sizes that are left out are asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_LLAMA = {
    "normalization": "RMSNorm", "gated_linear_unit": True, "position_embedding_type": "rope", "add_bias_linear": False,
    "seq_length": 4096, "attention_dropout": 0.0, "hidden_dropout": 0.0, "share_embeddings_and_output_weights": False,
}  # fmt: skip
_LLAMA3 = _LLAMA | {"num_query_groups": 8, "layernorm_epsilon": 1e-5}
_LONG = _LLAMA3 | {"rotary_base": 500_000, "seq_length": 131_072}


def _sizes(layers: int, hidden: int, heads: int, groups: int, ffn: int) -> dict[str, int]:
    return {"num_layers": layers, "hidden_size": hidden, "num_attention_heads": heads, "num_query_groups": groups,
            "ffn_hidden_size": ffn}  # fmt: skip


_7B, _13B, _70B = _sizes(32, 4096, 32, 32, 11008), _sizes(40, 5120, 40, 40, 13824), _sizes(80, 8192, 64, 8, 28672)
_8B, _405B = _sizes(32, 4096, 32, 8, 14336), _sizes(126, 16384, 128, 8, 53248)
_SHORT = {"rotary_base": 500_000, "seq_length": 8192}
_CODE = {"rotary_base": 1_000_000, "seq_length": 16_384}
_SMALL = _LONG | {"share_embeddings_and_output_weights": True}
PROVIDERS: Mapping[str, Mapping[str, Any]] = {
    "GPTModelProvider": {}, "LlamaModelProvider": _LLAMA, "Llama2ModelProvider7B": _LLAMA | _7B,
    "Llama2ModelProvider13B": _LLAMA | _13B, "Llama2ModelProvider70B": _LLAMA | _70B,
    "Llama3ModelProvider": _LLAMA3, "Llama31ModelProvider": _LLAMA3,
    "Llama3ModelProvider8B": _LLAMA3 | _SHORT | _8B, "Llama3ModelProvider70B": _LLAMA3 | _SHORT | _70B,
    "Llama31ModelProvider8B": _LONG | _8B, "Llama31ModelProvider70B": _LONG | _70B,
    "Llama31ModelProvider405B": _LONG | _405B,
    "Llama32ModelProvider1B": _SMALL | _sizes(16, 2048, 32, 8, 8192),
    "Llama32ModelProvider3B": _SMALL | _sizes(28, 3072, 24, 8, 8192),
    "CodeLlamaModelProvider7B": _LLAMA | _7B | _CODE, "CodeLlamaModelProvider13B": _LLAMA | _13B | _CODE,
    "CodeLlamaModelProvider34B": _LLAMA | _sizes(48, 8192, 64, 8, 22016) | _CODE,
    "CodeLlamaModelProvider70B": _LLAMA | _70B,
}  # fmt: skip
"""Fields by class; Megatron-LM's own defaults hold of what none says."""
SIZES = ("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "ffn_hidden_size",
         "gated_linear_unit", "position_embedding_type", "share_embeddings_and_output_weights", "add_bias_linear",
         "hidden_dropout")  # fmt: skip
"""Fields that a class may have otherwise than Megatron-LM, and that change a model's size."""
