"""Models small enough for tests. A test names only what it needs otherwise."""

from __future__ import annotations

from typing import Any

from plait.core.model.spec import ModelSpec

SMALL: dict[str, Any] = {"hidden": 16, "num_heads": 4, "vocab": 37, "max_sequence": 8}


def gpt(**changed: Any) -> ModelSpec:
    """Two layers."""
    return ModelSpec(**{"family": "gpt", "num_layers": 2, **SMALL, **changed})


def llama(**changed: Any) -> ModelSpec:
    """Two layers, two heads to a key/value head."""
    return ModelSpec(**{"family": "llama", "num_layers": 2, **SMALL, "num_kv_heads": 2, "ffn_hidden": 24, **changed})


def qwen3(**changed: Any) -> ModelSpec:
    """Two layers with norms of queries and keys, heads of another size than they share out."""
    return llama(**{"qk_norm": True, "head_size": 6, "norm_eps": 1e-6, "rope_theta": 1e6, **changed})


def mistral(**changed: Any) -> ModelSpec:
    """Two layers with a window of three tokens."""
    return llama(**{"window": 3, **changed})


def utransformer(**changed: Any) -> ModelSpec:
    """Five layers, the sequence halved twice."""
    return ModelSpec(**{"family": "utransformer", "num_layers": 5, "levels": 2, **SMALL, **changed})


def seven_billion() -> ModelSpec:
    """Llama 2's smallest, with room for the 256 k tokens of InternEvo's examples (arXiv
    2401.09149)."""
    return ModelSpec(
        family="llama", num_layers=32, hidden=4096, num_heads=32, ffn_hidden=11008, vocab=32000, max_sequence=262144
    )
