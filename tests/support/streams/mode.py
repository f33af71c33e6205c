"""Every call of torch's as accesses to memory, by the operators' own schemas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.streams.order import Order, key_of

WAITING = {"aten._local_scalar_dense", "aten.equal", "aten.is_nonzero", "aten.nonzero", "aten._unique2"}
"""Operators whose result the host reads, or whose result's size it needs."""
READING = {"tolist", "numpy", "cpu"}
"""Methods that bring a tensor to the host past the operators."""


class Operators(TorchDispatchMode):
    """Tells an order of every operator that the thread calls.

    Tensors in host memory are nobody's stream's: those that were said to be (``Host``), and what is
    made of them alone.
    """

    def __init__(self, order: Order, host: Host) -> None:
        super().__init__()
        self.order, self.host = order, host

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and importing the compiler takes seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func.namespace != "c10d":  # those that matter tell the order themselves
            self._called(func, args, kwargs, result)
        return result

    def _called(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> None:
        name, waits, names, written = _about(func)
        reads: list[Tensor] = []
        writes: list[Tensor] = []
        for at, value in enumerate(args):
            _collect(value, writes if at in written else reads)
        for key, value in kwargs.items():
            _collect(value, writes if names[key] in written else reads)
        made: list[Tensor] = []
        _collect(result, made)
        inputs = {key_of(tensor) for tensor in (*reads, *writes)}
        fresh = [tensor for tensor in made if key_of(tensor) not in inputs]
        if not fresh and not writes and not waits:
            return  # another view
        if inputs and all(key in self.host.keys for key in inputs):
            for tensor in fresh:
                self.host.add(tensor)
            return
        for tensor in fresh:
            self.order.allocated(tensor)
        here = [tensor for tensor in reads if not self.host.has(tensor)]
        self.order.submit(name, here, [*writes, *fresh])
        if waits:
            self.order.learn(self.order.event(), name)


@cache
def _about(func: Any) -> tuple[str, bool, dict[str, int], frozenset[int]]:
    """An operator's name, whether the host waits for it, and by number its arguments, and those it
    writes."""
    name, arguments = str(func).removesuffix(".default"), func._schema.arguments
    written = {at for at, each in enumerate(arguments) if each.alias_info is not None and each.alias_info.is_write}
    names = {each.name: at for at, each in enumerate(arguments)}
    return name, ".".join(name.split(".")[:2]) in WAITING, names, frozenset(written)


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
        self.keys: dict[int, Any] = {}

    def add(self, tensor: Tensor) -> None:
        """This one does. It is kept, so that its place in memory stays its own."""
        self.keys[key_of(tensor)] = tensor.untyped_storage()

    def has(self, tensor: Tensor) -> bool:
        """Whether it does."""
        return key_of(tensor) in self.keys


def _collect(value: Any, found: list[Tensor]) -> None:
    if isinstance(value, Tensor):
        found.append(value)
    elif isinstance(value, (list, tuple)):
        for one in value:
            _collect(one, found)
