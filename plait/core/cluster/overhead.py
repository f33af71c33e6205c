"""Overhead: what a device's memory holds besides tensors, and what of it may not be planned for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from plait.core.base.codec.data import Section
from plait.core.cluster.efficiency import Constant

_FITTED = "fitted to published measurements (docs/adr/0014)"


def _fitted(value: float, error: float) -> Constant:
    return Constant(value=value, source=_FITTED, date="2026-11", error=error)


_LEFT_OUT = "fitted to published memory, sources left out in turn (docs/adr/0014)"


def _doubt(value: float, error: float) -> Constant:
    return Constant(value=value, source=_LEFT_OUT, date="2026-11", error=error)


class Doubt(Section):
    """How far predicted memory may be off, by what it is: one standard deviation, as a share of it. Kinds err
    apart from each other."""

    lasting: Constant = _doubt(0.02, 0.1)
    """Of tensors that last from step to step: parameters, gradients, optimizer states."""
    moving: Constant = _doubt(0.09, 0.3)
    """Of what a step makes and frees, with what the allocator wastes of it."""
    beside: Constant = _doubt(1.6, 0.3)
    """Of what a device holds besides tensors: context, libraries' and groups' buffers."""


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
    doubt: Doubt = Doubt()
    """How far all this, and predicted tensors, may be off."""


def _process(value: float, source: str) -> Constant:
    return Constant(value=value, source=source, date="2026-11", error=0.5)


ON_CPU: Mapping[str, Constant | Doubt] = {
    "context": _process(3e8, "a Python process that has imported torch, order of magnitude"),
    "communicator": _process(1e6, "sockets of a gloo group, order of magnitude"),
    "slack": _process(0.18, "specs/jobs/quickstart.toml: 8 of 44 MiB less where glibc maps each block on its own"),
    "stuck": _process(0.18, "the same"),
    "reserve": _process(0.0, "memory of a machine is all there"),
    "doubt": Doubt(
        lasting=_process(0.01, "allocator's peaks of 24 shapes (tests/dist/test_estimate.py): at most 1.3 % off"),
        moving=_process(0.05, "the same, with what glibc keeps"),
        beside=_process(0.5, "the errors of context and communicator"),
    ),
}
"""Of ranks without a device of their own."""


def overhead_values(told: Any, *, cpu: bool) -> Any:
    """What a cluster's file says of overhead, with what it leaves out on a CPU."""
    return {**ON_CPU, **cast("dict[str, Any]", told)} if cpu and isinstance(told, dict) else told
