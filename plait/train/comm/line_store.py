"""The launcher's key-value store as a torch Store: every call goes over the rank's control
connection."""

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
"""Stores of this process, kept alive: torch's C++ objects need the Python object but do not hold
it."""


class LineStore(Store):
    """Client of the launcher's store over ``control``. seconds: timeout of waits for a key. Raises
    DistStoreError when it ends.

    torch calls it from C++, in threads of its own, as any store.
    """

    def __init__(self, control: Control, seconds: float) -> None:
        super().__init__()
        _kept.append(self)
        self._control = control
        self.set_timeout(timedelta(seconds=seconds))

    timeout: timedelta  # torch's attribute, which has no type there

    def _ask(
        self, verb: StoreVerb, keys: Sequence[str], values: Sequence[Any] = (), *, amount: int = 0,
        limit: timedelta | None = None,
    ) -> StoreAnswer:  # fmt: skip
        seconds = (limit or self.timeout).total_seconds()
        answer = self._control.call_store(verb, keys, [_text(one) for one in values], amount=amount, seconds=seconds)
        if answer is None:
            raise dist.DistStoreError(f"wait timeout after {seconds * 1000:.0f}ms, keys: {', '.join(keys)}")
        if answer.error:
            raise dist.DistStoreError(f"{verb} {', '.join(keys)}: {answer.error}")
        return answer

    def set(self, key: str, value: Any) -> None:
        """Store a value."""
        self._control.call_store("set", [key], [_text(value)])

    def multi_set(self, keys: list[str], values: list[Any]) -> None:
        """Store several values."""
        self._control.call_store("set", keys, [_text(value) for value in values])

    def append(self, key: str, value: Any) -> None:
        """Append to a value."""
        self._control.call_store("append", [key], [_text(value)])

    def get(self, key: str) -> bytes:
        """Return the value of a key; wait until it exists."""
        return self.multi_get([key])[0]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Return the values of keys; wait until all exist."""
        return [base64.b64decode(value) for value in self._ask("wait", keys).values]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys exist."""
        self._ask("wait", keys, limit=timeout)

    def add(self, key: str, amount: int) -> int:
        """Add ``amount`` to a number (0 if the key is missing); return the sum."""
        return self._ask("add", [key], amount=amount).amount

    def check(self, keys: list[str]) -> bool:
        """Return True if all keys exist."""
        return bool(self._ask("check", keys).amount)

    def delete_key(self, key: str) -> bool:
        """Delete a key; return True if it existed."""
        return bool(self._ask("delete", [key]).amount)

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        """Set ``desired`` if the value is ``expected``; return the value after that."""
        return base64.b64decode(self._ask("compare_set", [key], [expected, desired]).values[0])

    def num_keys(self) -> int:
        """Return the number of keys."""
        return self._ask("num_keys", []).amount

    deleteKey, getNumKeys = delete_key, num_keys  # noqa: N815  (as C++ calls them)

    def has_extended_api(self) -> bool:
        """Return True: appending, and calls with several keys, are supported."""
        return True

    def clone(self) -> LineStore:
        """Return this store: threads may share a connection."""
        return self


def _text(value: Any) -> str:
    return base64.b64encode(value.encode() if isinstance(value, str) else bytes(value)).decode()
