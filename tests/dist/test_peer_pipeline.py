"""A reference that shares nothing with Plait: transformers' models under torch.distributed.pipelining's own
schedules."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.dist import peer_pipeline
from tests.support.models import gpt, llama
from tests.support.ranks import Ranks

MODELS = {"gpt": gpt(num_layers=4, tied_embeddings=False), "llama": llama(num_layers=4, tied_embeddings=False)}
TOLERANCE = {
    "gpt": 1e-10,
    "llama": 1e-6,
}  # transformers computes Llama's norms and rotations in fp32 whatever the dtype


@pytest.mark.parametrize("name", peer_pipeline.SCHEDULES)
@pytest.mark.parametrize("model", MODELS)
def test_pipelines_agree_with_torch(pool: Callable[[int], Ranks], model: str, name: str) -> None:
    for error, what in pool(2).run(peer_pipeline.worst_error, MODELS[model], name, 2):
        assert error < TOLERANCE[model], f"{what} is off by {error:.1e}"
