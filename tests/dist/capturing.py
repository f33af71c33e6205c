"""What each rank runs in ``test_graphs``: the cases of this folder, on a device that captures."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any
from unittest import mock

from plait.train.model.dropout import DropoutKey
from tests.dist import equality, pipelining
from tests.dist.equality import Answer, Case
from tests.support.capturing import CapturingDevice


def observed(rank: int, case: Case, want: Answer) -> tuple[tuple[float, str], int, int]:
    """A case's error there, how much was captured, and how often any of it replayed."""
    device = CapturingDevice()
    with ExitStack() as stack:
        for module in (equality, pipelining):
            stack.enter_context(mock.patch.object(module, "DEVICE", device))
        return equality.error(rank, case, want), device.captured, device.replayed


def with_keys_of_the_capture(rank: int, case: Case, want: Answer) -> tuple[tuple[float, str], int, int]:
    """The same if masks' keys were numbers of the code."""

    def site(self: DropoutKey, layer: int, site: Any) -> Any:
        return DropoutKey(self.seed, self.step).sites(layer + 1)[layer, ["embed", "attn", "mlp", "core"].index(site)]

    with mock.patch.object(DropoutKey, "site", site):
        return observed(rank, case, want)
