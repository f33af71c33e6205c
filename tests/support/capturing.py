"""A device that captures work and replays it, without a GPU.

What a real device does with captured work, and may surprise: nothing runs before the replay, so
whoever reads a result in between reads nothing; a replay reads and writes the memory of the
capture; numbers of the host are what they were then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from plait.train.machine.device import RankDevice


class CapturingDevice(RankDevice):
    """captured: how many graphs, so far; replayed: how often any; released: how often it gave
    memory back."""

    captures = True

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.captured = self.replayed = self.released = 0

    def pool(self) -> object:
        return object()

    def release_cached(self) -> None:
        self.released += 1

    def capture(self, work: Callable[[], object], pool: object) -> Recording:
        recording = Recording(self)
        with recording:
            work()
        recording.take_back()
        self.captured += 1
        return recording


class Recording(TorchDispatchMode):
    """Operators with their arguments and results, in order."""

    def __init__(self, device: CapturingDevice) -> None:
        super().__init__()
        self.device, self.calls = device, list[tuple[Any, Any, Any, list[Tensor]]]()
        self._made: dict[int, Tensor] = {}
        self._before: list[tuple[Tensor, Tensor]] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = {tensor.untyped_storage()._cdata for tensor in _tensors((args, kwargs))}
        for tensor in _written(func, args, kwargs):
            if tensor.untyped_storage()._cdata not in self._made:
                # Nothing but this: a collective may be writing to the rest of the memory.
                self._before.append((tensor.detach(), tensor.detach().clone()))
        result = func(*args, **kwargs)
        fresh = [tensor for tensor in _tensors(result) if tensor.untyped_storage()._cdata not in given]
        self._made |= {tensor.untyped_storage()._cdata: tensor for tensor in fresh}
        self.calls.append((func, args, kwargs, fresh))
        return result

    def take_back(self) -> None:
        """As if nothing had run."""
        while self._before:  # the first time something was written comes last
            tensor, before = self._before.pop()
            tensor.data.copy_(before)
        for tensor in self._made.values():
            tensor.data.fill_(float("nan") if tensor.is_floating_point() else 0)

    @torch.no_grad()
    def replay(self) -> None:
        """Run it all."""
        self.device.replayed += 1
        for func, args, kwargs, fresh in self.calls:
            result = func(*args, **kwargs)
            given = {tensor.untyped_storage()._cdata for tensor in _tensors((args, kwargs))}
            made = [tensor for tensor in _tensors(result) if tensor.untyped_storage()._cdata not in given]
            for old, new in zip(fresh, made, strict=True):
                old.data.copy_(new)  # autograd, which saved it, is not told


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """Arguments that an operator writes, by its schema."""
    for at, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from _tensors(args[at] if at < len(args) else kwargs.get(argument.name))


def _tensors(values: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor))
