"""Measure the peak memory of a rank's tensors in a step, and of its process.

On a GPU the allocator counts (``machine.gpu``). On a CPU, tensors share the process's memory with
libraries, cached pages of files and free memory that the C library keeps. There, the tensors that
exist between two steps are counted. To them is added the growth of the process during a step,
measured after free memory was returned to the system.
"""

from __future__ import annotations

import ctypes
from collections import deque
from contextlib import suppress
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from plait.core.base.process import forget_peak, process_memory

_PLAIN = (str, bytes, int, float, complex, ModuleType, type, type(None))
"""Types whose objects hold no tensors to count."""
_EMPTY = CellType()
"""The closure cell of a variable without a value."""


class PeakMemory(NamedTuple):
    """Peak bytes: of tensors in a step, and of the whole process so far; None if unknown."""

    tensors: int | None
    process: int | None


class MemoryMeter:
    """A meter for the step between ``begin`` and ``end``. It must not be the first step, which also
    allocates memory that stays."""

    def __init__(self) -> None:
        self._tensors: int | None = None
        self._started: int | None = None
        self._held = self._peak = 0

    def begin(self, *roots: object) -> None:
        """Begin a step; no work of another may be under way. roots: objects that hold the tensors
        that persist between steps."""
        self._peak = process.peak if (process := process_memory()) else 0
        self._held = held_by_tensors(*roots)
        known = trim_memory() and forget_peak()
        self._started = process.now if known and (process := process_memory()) else None

    def end(self) -> None:
        """End the step."""
        if self._started is not None and (process := process_memory()):
            self._tensors = self._held + max(0, process.peak - self._started)

    def peaks(self) -> PeakMemory:
        """Return the peak of the last measured step, and of the process so far. Does not wait for
        the device."""
        process = process_memory()
        return PeakMemory(self._tensors, max(self._peak, process.peak) if process else None)


def held_by_tensors(*roots: object) -> int:
    """Return the bytes of host memory in tensors that the objects hold, at any depth; each storage
    counts once.

    The objects are followed one by one. The garbage collector's list of all objects would also
    contain tuples that another thread is still building, which must not be referenced.
    """
    found: dict[int, int] = {}
    seen, left = set[int](), list(roots)
    while left:
        one = left.pop()
        if id(one) in seen or isinstance(one, _PLAIN):
            continue
        seen.add(id(one))
        if isinstance(one, Tensor):
            left.append(one.grad)
            if one.layout == torch.strided and (storage := one.untyped_storage()).device.type == "cpu":
                with suppress(RuntimeError):  # tensors that a compiler traced with have no memory
                    found[storage.data_ptr()] = storage.nbytes()
            continue
        left += _inside(one)
    return sum(found.values())


def _inside(one: object) -> list[Any]:
    """Return the objects that an object holds: items, attributes, variables of a closure."""
    if isinstance(one, dict):
        return [*one.values()]
    if isinstance(one, list | tuple | set | frozenset | deque):
        return [*one]
    if isinstance(one, FunctionType):
        return [cell.cell_contents for cell in one.__closure__ or () if cell != _EMPTY]
    if isinstance(one, MethodType):
        return [one.__self__]
    slots = [name for kind in type(one).__mro__ for name in getattr(kind, "__slots__", ())]
    return [*getattr(one, "__dict__", {}).values(), *(getattr(one, name, None) for name in slots)]


def trim_memory() -> bool:
    """Have the C library return free memory to the system; return False if it cannot."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)
    return trim is not None
