"""What each rank runs in ``test_graphs``, on a device that captures work and replays it."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from plait.train.model.dropout import DropoutKey
from tests.dist import compiling, equality, pipelining
from tests.support.capturing import CapturingDevice

WHOLE = pipelining.WHOLE_SEQUENCE


@contextmanager
def capturing() -> Generator[CapturingDevice]:
    """The modules of the suite meanwhile compute on such a device."""
    device = CapturingDevice()
    with mock.patch.object(equality, "DEVICE", device), mock.patch.object(pipelining, "DEVICE", device):
        yield device


def observed(rank: int, function: str, *args: Any) -> tuple[list[Any], int, int]:
    """What a function of ``equality``, ``pipelining`` or ``compiling`` finds there, how much was captured,
    and how often any of it replayed."""
    module, name = function.split(".")
    of = {"equality": equality, "pipelining": pipelining, "compiling": compiling}[module]
    with capturing() as device:
        found = getattr(of, name)(rank, *args)
    return found, device.captured, device.replayed


def with_keys_of_the_capture(rank: int, *args: Any) -> tuple[list[Any], int, int]:
    """The same of ``equality.worst_error``, if masks' keys were numbers of the code."""

    def site(self: DropoutKey, layer: int, site: Any) -> Any:
        return DropoutKey(self.seed, self.step).sites(layer + 1)[layer, ["embed", "attn", "mlp", "core"].index(site)]

    with mock.patch.object(DropoutKey, "site", site):
        return observed(rank, "equality.worst_error", *args)
