"""The launcher's store for the rendezvous of a run's ranks, accessible only over a rank's own
connection.

Without a connection to the launcher, no process reaches the store: on one machine, a connection is
a socket that a rank inherits; from other machines, it starts with the run's secret word
(``plait.launch.local.door``). No other port is opened.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import dataclass

from plait.core.runs.channel import StoreAnswer, StoreCall

Answer = Callable[[StoreAnswer], None]


@dataclass(frozen=True)
class _Wait:
    """A call to the store that is answered once all its keys are set. left: the keys that are not
    set yet. answer: sends the answer."""

    call: StoreCall
    left: set[str]
    answer: Answer


class RunStore:
    """Values by keys, with the semantics of ``torch.distributed.Store``."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._waits: dict[tuple[int, int], _Wait] = {}
        self._by_key: dict[str, list[tuple[int, int]]] = {}

    @property
    def waiting(self) -> set[int]:
        """The ranks that wait for keys that their peers have to set."""
        return {rank for rank, _ in self._waits}

    def take(self, rank: int, call: StoreCall, answer: Answer) -> None:
        """Execute a rank's call to the store; answer it now, or when its keys are set."""
        try:
            self._do(rank, call, answer)
        except ValueError as error:  # invalid base64, or the value to add to is no number
            answer(StoreAnswer(call.number, error=str(error)))

    def _do(self, rank: int, call: StoreCall, answer: Answer) -> None:
        match call.verb:
            case "set":
                for key, value in zip(call.keys, call.values, strict=True):
                    self._set(key, _bytes(value))
            case "append":
                (key,), (value,) = call.keys, call.values
                self._set(key, self._values.get(key, b"") + _bytes(value))
            case "wait":
                self._wait(rank, call, answer)
            case "forget":
                self._waits.pop((rank, call.number), None)
            case _:
                answer(self._answer(call))

    def _answer(self, call: StoreCall) -> StoreAnswer:
        match call.verb:
            case "add":
                (key,) = call.keys
                found = int(self._values.get(key, b"0")) + call.amount
                self._set(key, str(found).encode())
            case "check":
                found = int(all(key in self._values for key in call.keys))
            case "delete":
                found = sum(self._values.pop(key, None) is not None for key in call.keys)
            case "compare_set":
                (key,), (expected, desired) = call.keys, map(_bytes, call.values)
                now = self._values.get(key, b"")
                if now == expected:
                    self._set(key, now := desired)
                return StoreAnswer(call.number, (_text(now or expected),))
            case _:
                found = len(self._values)
        return StoreAnswer(call.number, amount=found)

    def _set(self, key: str, value: bytes) -> None:
        self._values[key] = value
        for name in self._by_key.pop(key, ()):
            if wait := self._waits.get(name):
                wait.left.discard(key)
                self._settle(name, wait)

    def _wait(self, rank: int, call: StoreCall, answer: Answer) -> None:
        name = (rank, call.number)
        wait = self._waits[name] = _Wait(call, {key for key in call.keys if key not in self._values}, answer)
        for key in wait.left:
            self._by_key.setdefault(key, []).append(name)
        self._settle(name, wait)

    def _settle(self, name: tuple[int, int], wait: _Wait) -> None:
        if not wait.left:
            del self._waits[name]
            values = tuple(_text(self._values.get(key, b"")) for key in wait.call.keys)
            wait.answer(StoreAnswer(wait.call.number, values))


def _bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def _text(value: bytes) -> str:
    return base64.b64encode(value).decode()
