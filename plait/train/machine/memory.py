"""What a rank's tensors take at most in a step, and what its process takes beside them.

A GPU's allocator counts (``machine.gpu``). On a CPU tensors are in the process's own memory, among
libraries, pages of files and what the C library keeps for later. So the tensors that are there between two
steps are counted, and what a step takes beyond is what the process grows by in it, once free memory was given
back.
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
"""Holds no tensor that stays."""
_EMPTY = CellType()
"""A variable of a function that has no value yet."""


class Taken(NamedTuple):
    """Bytes at most: of tensors in a step, and of the whole process so far. None where it is not known."""

    tensors: int | None
    process: int | None


class MemoryMeter:
    """Measures the step between ``begin`` and ``end``. One that is not the first: that also makes what
    stays."""

    def __init__(self) -> None:
        self._tensors: int | None = None
        self._started: int | None = None
        self._held = self._peak = 0

    def begin(self, *roots: object) -> None:
        """A step begins; nothing of another is under way. roots: objects that hold what stays from step to
        step."""
        self._peak = process.peak if (process := process_memory()) else 0
        self._held = held_by_tensors(*roots)
        known = give_back() and forget_peak()
        self._started = process.now if known and (process := process_memory()) else None

    def end(self) -> None:
        """It is over."""
        if self._started is not None and (process := process_memory()):
            self._tensors = self._held + max(0, process.peak - self._started)

    def taken(self) -> Taken:
        """By the step that was measured last, and so far. Whoever asks waits for nothing."""
        process = process_memory()
        return Taken(self._tensors, max(self._peak, process.peak) if process else None)


def held_by_tensors(*roots: object) -> int:
    """Bytes of the host's memory in tensors that objects hold, at any depth, each storage once.

    The objects are followed one by one: the collector's list of all objects also has tuples that another
    thread is still making, which no other may hold.
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
                with suppress(RuntimeError):  # what a compiler traced with has no memory
                    found[storage.data_ptr()] = storage.nbytes()
            continue
        left += _inside(one)
    return sum(found.values())


def _inside(one: object) -> list[Any]:
    """What an object holds: items, attributes, what a function has bound."""
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


def give_back() -> bool:
    """Have the C library return free memory to the system; whether it can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)
    return trim is not None
