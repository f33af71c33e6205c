"""The launcher's store, as torch sees it from a rank: every call goes over the rank's line."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from plait.core.runs.channel import StoreAnswer, StoreVerb
from plait.train.machine.control import Control

_kept: list[Store] = []
"""Stores of this process: what torch makes of one holds its part in C++ alone, which needs this one."""


class LineStore(Store):
    """The store of the launcher that ``control`` listens to. seconds: in which a key must come that is waited
    for. Raises DistStoreError where it does not.

    torch calls it from C++, in threads of its own, as it does any store.
    """

    def __init__(self, control: Control, seconds: float) -> None:
        super().__init__()
        _kept.append(self)
        self._control = control
        self.set_timeout(timedelta(seconds=seconds))

    timeout: timedelta  # torch's own, which it has not typed

    def _ask(
        self, verb: StoreVerb, keys: Sequence[str], values: Sequence[Any] = (), *, amount: int = 0,
        limit: timedelta | None = None,
    ) -> StoreAnswer:  # fmt: skip
        seconds = (limit or self.timeout).total_seconds()
        answer = self._control.tell_store(verb, keys, [_text(one) for one in values], amount=amount, seconds=seconds)
        if answer is None:
            raise dist.DistStoreError(f"wait timeout after {seconds * 1000:.0f}ms, keys: {', '.join(keys)}")
        if answer.error:
            raise dist.DistStoreError(f"{verb} {', '.join(keys)}: {answer.error}")
        return answer

    def set(self, key: str, value: Any) -> None:
        """Store a value."""
        self._control.tell_store("set", [key], [_text(value)])

    def multi_set(self, keys: list[str], values: list[Any]) -> None:
        """Store several values."""
        self._control.tell_store("set", keys, [_text(value) for value in values])

    def append(self, key: str, value: Any) -> None:
        """Add to the end of a value."""
        self._control.tell_store("append", [key], [_text(value)])

    def get(self, key: str) -> bytes:
        """The value of a key, once it is there."""
        return self.multi_get([key])[0]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """The values of keys, once all are there."""
        return [base64.b64decode(value) for value in self._ask("wait", keys).values]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Return once all keys are there."""
        self._ask("wait", keys, limit=timeout)

    def add(self, key: str, amount: int) -> int:
        """Add to a number, 0 if there is none; what it is then."""
        return self._ask("add", [key], amount=amount).amount

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there."""
        return bool(self._ask("check", keys).amount)

    def delete_key(self, key: str) -> bool:
        """Forget a key; whether it was there."""
        return bool(self._ask("delete", [key]).amount)

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        """Store ``desired`` where ``expected`` is; what is there then."""
        return base64.b64decode(self._ask("compare_set", [key], [expected, desired]).values[0])

    def num_keys(self) -> int:
        """How many keys there are."""
        return self._ask("num_keys", []).amount

    deleteKey, getNumKeys = delete_key, num_keys  # noqa: N815  (as C++ calls them)

    def has_extended_api(self) -> bool:
        """Whether it has appending and calls of several keys."""
        return True

    def clone(self) -> LineStore:
        """Itself: a line is shared by threads."""
        return self


def _text(value: Any) -> str:
    return base64.b64encode(value.encode() if isinstance(value, str) else bytes(value)).decode()
