"""Every call of torch's as accesses to memory, by the operators' own schemas."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.streams.order import Order, key_of

WAITING = {"aten._local_scalar_dense", "aten.equal", "aten.is_nonzero", "aten.nonzero", "aten._unique2"}
"""Operators whose result the host reads, or whose result's size it needs."""
READING = {"tolist", "numpy", "cpu"}
"""Methods that bring a tensor to the host past the operators."""


class Operators(TorchDispatchMode):
    """Tells an order of every operator that the thread calls.

    Tensors in host memory are nobody's stream's: those that were said to be (``Host``), and what is made of
    them alone.
    """

    def __init__(self, order: Order, host: Host) -> None:
        super().__init__()
        self.order, self.host = order, host

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func.namespace != "c10d":  # those that matter tell the order themselves
            self._called(func, args, kwargs, result)
        return result

    def _called(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> None:
        reads: list[Tensor] = []
        writes: list[Tensor] = []
        for argument, value in _bound(func._schema, args, kwargs):
            alias = argument.alias_info
            (writes if alias is not None and alias.is_write else reads).extend(_tensors(value))
        inputs = {key_of(tensor) for tensor in (*reads, *writes)}
        fresh = [tensor for tensor in _tensors(result) if key_of(tensor) not in inputs]
        name = str(func).removesuffix(".default")
        if inputs and all(self.host.has(tensor) for tensor in (*reads, *writes)):
            for tensor in fresh:
                self.host.add(tensor)
            return
        waits = name.split(".")[0] + "." + name.split(".")[1] in WAITING
        if not fresh and not writes and not waits:
            return  # another view
        for tensor in fresh:
            self.order.allocated(tensor)
        here = [tensor for tensor in reads if not self.host.has(tensor)]
        self.order.submit(name, here, [*writes, *fresh])
        if waits:
            self.order.learn(self.order.event(), name)


class Methods(TorchFunctionMode):
    """Tells an order of what the host reads past the operators."""

    def __init__(self, order: Order, host: Host) -> None:
        super().__init__()
        self.order, self.host = order, host

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in READING and args and isinstance(args[0], Tensor) and not self.host.has(args[0]):
            self.order.submit(f"Tensor.{name}", [args[0]])
            self.order.learn(self.order.event(), f"Tensor.{name}")
        return func(*args, **(kwargs or {}))


class Host:
    """Which tensors lie in the host's memory."""

    def __init__(self) -> None:
        self._keys: dict[int, Any] = {}

    def add(self, tensor: Tensor) -> None:
        """This one does. It is kept, so that its place in memory stays its own."""
        self._keys[key_of(tensor)] = tensor.untyped_storage()

    def has(self, tensor: Tensor) -> bool:
        """Whether it does."""
        return key_of(tensor) in self._keys


def _bound(schema: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    """An operator's arguments with their values."""
    for number, argument in enumerate(schema.arguments):
        if number < len(args):
            yield argument, args[number]
        elif argument.name in kwargs:
            yield argument, kwargs[argument.name]


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value] if value.layout is torch.strided else []
    if isinstance(value, (list, tuple)):
        return [tensor for one in value for tensor in _tensors(one)]
    return []
