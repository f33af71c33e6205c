"""A reference that shares nothing with Plait: transformers' models under torch.distributed.pipelining's own
schedules."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from plait.core.model import ModelSpec
from tests.dist import peer_pipeline
from tests.ranks import Ranks

MODELS = {
    "gpt": ModelSpec(
        family="gpt", num_layers=4, hidden=16, num_heads=4, vocab=37, max_sequence=8, tied_embeddings=False
    ),
    "llama": ModelSpec(
        family="llama",
        num_layers=4,
        hidden=16,
        num_heads=4,
        num_kv_heads=2,
        ffn_hidden=24,
        vocab=37,
        max_sequence=8,
        tied_embeddings=False,
    ),
}
TOLERANCE = {
    "gpt": 1e-10,
    "llama": 1e-6,
}  # transformers computes Llama's norms and rotations in fp32 whatever the dtype


@pytest.mark.parametrize("name", peer_pipeline.SCHEDULES)
@pytest.mark.parametrize("model", MODELS)
def test_pipelines_agree_with_torch(pool: Callable[[int], Ranks], model: str, name: str) -> None:
    for error, what in pool(2).run(peer_pipeline.worst_error, MODELS[model], name, 2):
        assert error < TOLERANCE[model], f"{what} is off by {error:.1e}"
