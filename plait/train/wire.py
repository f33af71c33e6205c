"""Collectives of one group behind one small contract, so that they can be plugged, delayed, recorded or left out.

A wire starts a collective and returns a handle; whoever needs the result waits on the handle. Between the two
nobody may read, write or free the buffers. One total order per group on every rank (the segment list's): gloo gives
wrong sums without a word, and NCCL hangs, when ranks disagree.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from plait.core.segments import Collective


class Handle(Protocol):
    """A collective in flight."""

    def wait(self) -> object:
        """Return when the result may be used by work submitted from now on (the host itself may run ahead on a GPU)."""
        ...


class Wire(Protocol):
    """What the executor needs of a group of ranks. ``source`` and ``result`` are one buffer for an all-reduce."""

    size: int
    rank: int

    def start(self, kind: Collective, result: Tensor, source: Tensor) -> Any:
        """Start a sum all-reduce of ``result``, an all-gather along dim 0 or a sum reduce-scatter along dim 0."""
        ...


class _Done:
    def wait(self) -> None:
        """Nothing is in flight."""


class NullWire:
    """No network at all: the shapes of the collectives without their values. Speed of light for measurements, and tp = 1."""

    def __init__(self, size: int = 1, rank: int = 0) -> None:
        self.size, self.rank = size, rank

    def start(self, kind: Collective, result: Tensor, source: Tensor) -> _Done:
        """Fill ``result`` from this rank's own data."""
        if kind == "all_gather":
            result.view(self.size, *source.shape).copy_(source.expand(self.size, *source.shape))
        elif kind == "reduce_scatter":
            result.copy_(source.view(self.size, *result.shape)[self.rank])
        return _Done()


class GroupWire:
    """A torch.distributed process group: gloo, NCCL or RCCL."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)

    def start(self, kind: Collective, result: Tensor, source: Tensor) -> Any:
        """Start the collective asynchronously."""
        if kind == "all_reduce":
            return dist.all_reduce(result, group=self.group, async_op=True)
        call = dist.all_gather_single if kind == "all_gather" else dist.reduce_scatter_single
        return call(result, source, group=self.group, async_op=True)


def open_group(backend: str, ranks: list[int] | None = None) -> dist.ProcessGroup:
    """A process group for slices' collectives.

    gloo gets a single worker thread: collectives then use the link one after the other, in the order in which they start, and
    the first one is there as early as can be; with gloo's default of two they would halve each other's bandwidth.
    """
    options = None
    if backend == "gloo":
        options = dist.ProcessGroupGloo._Options()  # noqa: SLF001  (the only way to reach the thread count)
        options._devices = [dist.ProcessGroupGloo.create_default_device(lazy_init=False)]  # noqa: SLF001
        options._threads = 1  # noqa: SLF001
    group = dist.new_group(ranks, backend=backend, pg_options=options)
    assert isinstance(group, dist.ProcessGroup)
    return group


def wire_bytes(kind: Collective, result: Tensor, source: Tensor, size: int) -> int:
    """Bytes each rank sends for a bandwidth-optimal (ring) collective over ``size`` ranks."""
    whole = max(result.numel(), source.numel()) * source.element_size()
    return whole * (size - 1) // size * (2 if kind == "all_reduce" else 1)


def sum_over(wire: Wire, value: Tensor) -> Tensor:
    """``value`` summed over the group, blocking; for the few small reductions outside the segment list."""
    if wire.size > 1 and not isinstance(wire, NullWire):
        wire.start("all_reduce", value, value).wait()
    return value


def empty_like_gathered(source: Tensor, size: int) -> Tensor:
    """An uninitialised buffer for the all-gather of ``source`` along dim 0."""
    return torch.empty((source.shape[0] * size, *source.shape[1:]), dtype=source.dtype, device=source.device)
