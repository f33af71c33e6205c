"""A profile of one GPU. Skips where there is none."""

from __future__ import annotations

import time

import pytest
import torch

from plait.core.base.env import RankEnv
from plait.core.model.spec import ModelSpec
from plait.plan.calibrate.profiled import cluster_from_profile
from plait.train.machine.gpu import device_of
from plait.train.profile.measure import MeasureRequest, measure_profile

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
MODEL = ModelSpec(family="llama", num_layers=2, hidden=512, num_heads=8, ffn_hidden=1024, vocab=1000, max_sequence=512)


def test_a_profile_of_one_gpu() -> None:
    device = device_of(0)
    order = MeasureRequest(seconds=10, model=MODEL)
    found = measure_profile(order, RankEnv(), device, deadline=time.monotonic() + 10, cores=1, say=lambda what: None)
    assert (found.machine.kind, found.machine.backend) == ("cuda", "nccl")
    assert found.machine.memory > 1 << 30
    assert {one.precision for one in found.products} == {"bf16-mixed"}
    assert max(one.rate for one in found.products) > 1e12
    assert {one.site for one in found.modules} == {"embed", "norm", "attn", "mlp", "head"}
    cluster = cluster_from_profile(found)
    assert cluster.device.kind == "cuda"
    assert 0.3 < cluster.efficiency.matmul.value <= 1.5
