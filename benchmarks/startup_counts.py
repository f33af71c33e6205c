"""What a rank's start asks of the store and whom it connects to, counted."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch._C._distributed_c10d import Store

C10D: Any = dist.distributed_c10d
OURS = ("device/", "run", "job", "plait/first/")
OF_A_LANE = ("/first", "/odd", "/differ", "/said", "/any")


def whose(key: str) -> str:
    """Who uses a key of the store: Plait, or torch and gloo below it."""
    key = key.removeprefix("0/")  # of the world
    return "ours" if key.startswith(OURS) or key.endswith(OF_A_LANE) else "torch"


class CountedStore(Store):
    """A store that counts what is asked of it, in Python and from C++. presets: of keys that other ranks
    would have set."""

    def __init__(self, store: Store, presets: dict[str, bytes] | None = None) -> None:
        super().__init__()
        self.store, self.presets = store, presets or {}
        self.asked: Counter[tuple[str, str]] = Counter()

    def _count(self, what: str, key: str) -> None:
        self.asked[whose(key), what] += 1

    def set(self, key: str, value: Any) -> None:
        self._count("set", key)
        self.store.set(key, value)

    def get(self, key: str) -> bytes:
        self._count("get", key)
        found = next((value for tail, value in self.presets.items() if key.endswith(tail)), None)
        return self.store.get(key) if found is None else found

    def add(self, key: str, value: int) -> int:
        self._count("add", key)
        return self.store.add(key, value)

    def append(self, key: str, value: Any) -> None:
        self._count("append", key)
        self.store.append(key, value)

    def check(self, keys: list[str]) -> bool:
        self._count("check", keys[0])
        return self.store.check(keys)

    def wait(self, keys: list[str], *more: Any) -> None:
        self._count("wait", keys[0])
        if not any(keys[0].endswith(tail) for tail in self.presets):
            self.store.wait(keys, *more)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self._count("multi_get", keys[0])
        return self.store.multi_get(keys)

    def has_extended_api(self) -> bool:
        return self.store.has_extended_api()

    def set_timeout(self, timeout: Any) -> None:
        self.store.set_timeout(timeout)

    def figures(self) -> dict[str, Any]:
        """How often, by who asked and what."""
        who = {name: sum(n for (owner, _), n in self.asked.items() if owner == name) for name in ("ours", "torch")}
        return who | {"by": {f"{owner} {what}": n for (owner, what), n in sorted(self.asked.items())}}


@contextmanager
def counting_groups() -> Iterator[list[int]]:
    """Gets the size of every group of gloo's that this process opens inside the block."""
    sizes: list[int] = []
    gloo: Any = C10D.ProcessGroupGloo

    class Counted(gloo):
        def __init__(self, store: Store, rank: int, size: int, *more: Any, **named: Any) -> None:
            sizes.append(size)
            super().__init__(store, rank, size, *more, **named)

    with mock.patch.object(C10D, "ProcessGroupGloo", Counted), mock.patch.object(dist, "ProcessGroupGloo", Counted):
        yield sizes


def connections(store_port: int) -> dict[str, int]:
    """Established TCP connections of this process: to other ranks, and of the store."""
    own = set[str]()
    for name in os.listdir("/proc/self/fd"):
        try:
            own.add(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:  # closed since
            continue
    found: Counter[str] = Counter(ranks=0, store=0)
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            ports = {int(end.rpartition(":")[2], 16) for end in fields[1:3]}
            if fields[3] == "01" and f"socket:[{fields[9]}]" in own:
                found["store" if store_port in ports else "ranks"] += 1
    return dict(found)
