"""What each rank runs in ``test_profile``."""

from __future__ import annotations

import time
from typing import Any
from unittest import mock

from plait.core.base.env import RankEnv
from plait.core.model.spec import ModelSpec
from plait.train.profile import collectives, compute, measure
from plait.train.profile.measure import MeasureRequest, measure_profile
from tests.dist.equality import DEVICE

MODEL = ModelSpec(family="gpt", num_layers=4, hidden=64, num_heads=4, vocab=100, max_sequence=32)


def whole_profile(rank: int, world: int, per_node: int, seconds: float) -> tuple[dict[str, Any], list[str]]:
    """The profile as plain values, and what was said."""
    said: list[str] = []
    env = RankEnv(rank=rank, world_size=world, local_rank=rank % per_node, local_world_size=per_node)
    start = time.monotonic()
    with (
        mock.patch.object(compute, "TOKENS", {"cpu": (16, 64)}),
        mock.patch.object(compute, "CORES", {"cpu": ((2, 32, 16),)}),
        mock.patch.object(compute, "PASSES", {"cpu": (1 << 18,)}),
        mock.patch.object(collectives, "LARGEST", {"gloo": 1 << 20}),
    ):
        found = measure_profile(
            MeasureRequest(seconds=seconds, model=MODEL, batch=2),
            env,
            DEVICE,
            deadline=start + seconds,
            cores=2,
            say=said.append,
        )
    assert measure.SHARES["products"] < 1
    return found.to_dict(), said
