"""Plain values between all ranks of a job."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


def gathered(value: Any) -> list[Any]:
    """Every rank's value, in the order of ranks."""
    if not dist.is_initialized():
        return [value]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found
