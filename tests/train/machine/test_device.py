from __future__ import annotations

from plait.core.env import expand_segments
from plait.train.machine.device import open_device


def test_segments_expand_unless_the_user_has_set_the_allocator_up() -> None:
    alone: dict[str, str] = {}
    expand_segments(alone)
    assert alone == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    for key in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        chosen = {key: "max_split_size_mb:64"}
        expand_segments(chosen)
        assert chosen == {key: "max_split_size_mb:64"}


def test_without_a_gpu_ranks_use_the_cpu(monkeypatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert open_device("auto", 0).torch_device.type == "cpu"
