"""Overhead: what a device's memory holds besides tensors, and what of it may not be planned for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from plait.core.base.codec.data import Section
from plait.core.cluster.efficiency import Constant

_FITTED = "fitted to published measurements (docs/adr/0014)"


def _fitted(value: float, error: float) -> Constant:
    return Constant(value=value, source=_FITTED, date="2026-11", error=error)


class Overhead(Section):
    """Of every rank's device. A cluster file gives what was measured there; the defaults are for CUDA devices
    with NCCL."""

    context: Constant = _fitted(1.0e9, 0.5)
    """Bytes of the driver's context, kernels and libraries' workspaces."""
    communicator: Constant = _fitted(2.0e8, 0.5)
    """Bytes of the buffers of one group of ranks that a rank belongs to."""
    slack: Constant = _fitted(0.1, 0.5)
    """What the allocator holds and nobody uses, as a share of what a step makes and frees."""
    stuck: Constant = _fitted(0.03, 0.7)
    """The same where memory runs short: what it cannot give back, in pieces as it is."""
    reserve: Constant = _fitted(0.015, 0.5)
    """Share of a device's memory that its driver does not give."""


def _process(value: float, source: str) -> Constant:
    return Constant(value=value, source=source, date="2026-11", error=0.5)


ON_CPU: Mapping[str, Constant] = {
    "context": _process(3e8, "a Python process that has imported torch, order of magnitude"),
    "communicator": _process(1e6, "sockets of a gloo group, order of magnitude"),
    "slack": _process(0.05, "glibc's allocator, order of magnitude"),
    "stuck": _process(0.05, "glibc's allocator, order of magnitude"),
    "reserve": _process(0.0, "memory of a machine is all there"),
}
"""Of ranks without a device of their own."""


def overhead_values(told: Any, *, cpu: bool) -> Any:
    """What a cluster's file says of overhead, with what it leaves out on a CPU."""
    return {**ON_CPU, **cast("dict[str, Any]", told)} if cpu and isinstance(told, dict) else told
