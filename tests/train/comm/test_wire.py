"""What every wire asks of its buffers."""

from __future__ import annotations

import pytest
import torch

from plait.train.comm.wire import GroupWire


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter", "rotate"])
def test_a_strided_buffer_is_refused_before_it_travels(kind: str) -> None:
    wire, whole = GroupWire.__new__(GroupWire), torch.zeros(4, 4)
    with pytest.raises(ValueError, match=r"the source of an .* has shape \(4, 2\) and strides \(4, 1\)"):
        wire.start(kind, whole, whole[:, :2])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="the result"):
        wire.start(kind, whole[:, :2], whole)  # type: ignore[arg-type]
