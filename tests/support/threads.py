"""Ranks that are threads of the test's own process: a world without sockets, for numbers that
several ranks compute together.

``threads(n)`` gives what ``tests.support.ranks.Ranks`` gives, quicker by seconds of imports.
Collectives and messages go through memory; a result is poison until it is waited for, so that
whoever reads it too early computes NaN. What torch.distributed and gloo do themselves is tried in
``tests/dist``.
"""

from __future__ import annotations

import threading
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from plait.core.step.segments import Collective
from plait.train.comm import lanes, wire, world
from plait.train.comm import tree as objects
from plait.train.comm.wire import Handle

PATIENCE = 30.0
"""Seconds after which a rank is said to wait in vain."""


class Stopped(Exception):
    """Another rank has failed, or never came."""


class World:
    """What all ranks share. Everything in it is changed under ``lock``."""

    def __init__(self, size: int) -> None:
        self.size, self.failed, self.lock = size, False, threading.Condition()
        self.given: dict[tuple[str, int], dict[int, Tensor]] = defaultdict(dict)
        self.futures: dict[tuple[str, int], list[Future[object]]] = defaultdict(list)
        self.letters: dict[tuple[object, ...], Tensor] = {}
        self.values: dict[str, bytes] = {}
        self.counted: Counter[object] = Counter()

    def number(self, *what: object) -> int:
        """How often that has been asked before."""
        with self.lock:
            self.counted[what] += 1
            return self.counted[what] - 1

    def put(self, into: dict[Any, Any], key: object, value: object) -> None:
        """Leave something for other ranks."""
        with self.lock:
            into[key] = value
            self.lock.notify_all()

    def until(self, ready: Callable[[], bool]) -> None:
        """Wait for other ranks."""
        with self.lock:
            if not self.lock.wait_for(lambda: ready() or self.failed, PATIENCE) or not ready():
                raise Stopped


@dataclass(frozen=True)
class Group:
    """As one of its ranks has it. rank: its place among ``ranks``."""

    name: str
    ranks: tuple[int, ...]
    rank: int


class SharedWire:
    """A collective's parts lie in memory until every rank has given its own."""

    def __init__(self, shared: World, group: Group) -> None:
        self.shared, self.group = shared, group
        self.size, self.rank = len(group.ranks), group.rank
        self._started = 0

    def start(self, kind: Collective, result: Tensor, source: Tensor) -> Handle:
        """Give this rank's part."""
        assert result.is_contiguous() and source.is_contiguous()
        key, self._started = (self.group.name, self._started), self._started + 1
        mine = source.detach().clone()
        in_place = kind == "all_gather" and result.untyped_storage().data_ptr() == source.untyped_storage().data_ptr()
        if result.is_floating_point() and not in_place:  # there the own part may be read all the time
            result.detach().fill_(float("nan"))
        future: Future[object] = Future()
        with self.shared.lock:
            self.shared.given[key][self.rank] = mine
            self.shared.futures[key].append(future)
            over = len(self.shared.given[key]) == self.size
            self.shared.lock.notify_all()
        for one in self.shared.futures[key] if over else ():
            one.set_result(None)
        return _Underway(self, key, kind, result.detach(), future)


class _Underway:
    def __init__(self, wire: SharedWire, key: tuple[str, int], kind: Collective, result: Tensor, future: Any) -> None:
        self.wire, self.key, self.result, self.future = wire, key, result, future
        self.kind: Collective = kind

    def wait(self) -> None:
        shared, size = self.wire.shared, self.wire.size
        given = shared.given[self.key]
        shared.until(lambda: len(given) == size)
        parts = [given[rank].reshape(-1) for rank in range(size)]
        self.result.view(-1).copy_(_result(self.kind, parts, self.wire.rank))

    def get_future(self) -> Future[object]:
        """Done when every rank has given its part."""
        return self.future

    def is_completed(self) -> bool:
        """Whether every rank has."""
        return self.future.done()


def _result(kind: Collective, parts: Sequence[Tensor], rank: int) -> Tensor:
    """What a rank gets of every rank's numbers, flat."""
    if kind == "all_gather":
        return torch.cat(list(parts))
    if kind == "rotate":
        return parts[rank - 1]
    if kind == "all_to_all":
        return torch.cat([part.view(len(parts), -1)[rank] for part in parts])
    total = torch.stack(list(parts)).sum(0, dtype=parts[0].dtype)
    return total if kind == "all_reduce" else total.view(len(parts), -1)[rank]


class _Letter:
    """A message under way."""

    def __init__(self, end: Callable[[], None]) -> None:
        self.end = end

    def wait(self) -> None:
        """Return when it is here."""
        self.end()


class Store:
    """As much of torch's as groups need."""

    def __init__(self, shared: World) -> None:
        self.shared = shared

    def set(self, key: str, value: str) -> None:
        """Leave a text."""
        self.shared.put(self.shared.values, key, value.encode())

    def get(self, key: str) -> bytes:
        """Wait for a text."""
        self.shared.until(lambda: key in self.shared.values)
        return self.shared.values[key]

    def append(self, key: str, value: str) -> None:
        """Add to a text."""
        with self.shared.lock:
            self.shared.put(self.shared.values, key, self.shared.values.get(key, b"") + value.encode())

    def add(self, key: str, more: int) -> int:
        """Add to a number."""
        with self.shared.lock:
            self.shared.counted[key] += more
            return self.shared.counted[key]


class Threads:
    """``size`` ranks; ``run(function, *args)`` calls ``function(rank, *args)`` on each and returns
    all results."""

    def __init__(self, size: int) -> None:
        self.size = size

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        shared = World(self.size)
        results: list[Any] = [None] * self.size
        failures: dict[int, str] = {}

        def serve(rank: int) -> None:
            try:
                results[rank] = function(rank, *args)
            except BaseException as error:  # the others wait for this one
                with shared.lock:
                    if not isinstance(error, Stopped) or not shared.failed:
                        failures[rank] = traceback.format_exc()
                    shared.failed = True
                    shared.lock.notify_all()

        with _patched(shared):
            ranks = [threading.Thread(target=serve, args=(rank,), name=f"rank-{rank}") for rank in range(self.size)]
            for rank, thread in enumerate(ranks):
                thread.rank = rank  # type: ignore[attr-defined]
                thread.start()
            for thread in ranks:
                thread.join()
        assert not failures, "\n".join(f"rank {rank}: {said}" for rank, said in failures.items())
        return results


@contextmanager
def _patched(shared: World) -> Iterator[None]:
    """torch.distributed as threads see it that are ranks, or were started by one; no other sees any
    world."""

    def rank() -> int | None:
        return getattr(threading.current_thread(), "rank", None)

    def me() -> int:
        found = rank()
        assert found is not None, "this thread is no rank's"
        return found

    start = threading.Thread.start

    def inherits(thread: threading.Thread) -> None:
        if (parent := rank()) is not None:
            thread.rank = parent  # type: ignore[attr-defined]
        start(thread)

    def name(ranks: Sequence[int]) -> str:
        return f"{tuple(ranks)} {shared.number('group', me(), tuple(ranks))}"

    def new_group(ranks: Sequence[int] | None = None, *_: object, **__: object) -> Group:
        ranks = tuple(range(shared.size) if ranks is None else ranks)
        return Group(name(ranks), ranks, ranks.index(me()))

    def connected(ranks: Sequence[int] | None = None) -> SharedWire:
        return SharedWire(shared, new_group(ranks))

    def post(sends: bool, tensor: Tensor, of: int | None, group: Group | None, tag: int, at: int | None) -> _Letter:
        other = of if of is not None else at if group is None else group.ranks[at or 0]
        box = (group.name if group else "world", *((me(), other) if sends else (other, me())), tag)
        key = (*box, shared.number("sent" if sends else "received", *box))
        if sends:
            shared.put(shared.letters, key, tensor.detach().clone())
            return _Letter(lambda: None)

        def arrive() -> None:
            shared.until(lambda: key in shared.letters)
            tensor.detach().copy_(shared.letters[key])

        return _Letter(arrive)

    def isend(tensor: Tensor, dst: Any = None, group: Any = None, tag: int = 0, group_dst: Any = None) -> _Letter:
        return post(True, tensor, dst, group, tag, group_dst)

    def irecv(tensor: Tensor, src: Any = None, group: Any = None, tag: int = 0, group_src: Any = None) -> _Letter:
        return post(False, tensor, src, group, tag, group_src)

    def all_reduce(tensor: Tensor, op: Any = None) -> None:
        assert op == dist.ReduceOp.MAX, "the only one that is used over all ranks"
        tensor.copy_(torch.tensor(objects.largest(tensor.tolist()), dtype=tensor.dtype))

    with (
        mock.patch.object(threading.Thread, "start", inherits),
        mock.patch.object(wire, "GlooWire", connected),
        mock.patch.object(lanes, "new_group", new_group),
        mock.patch.object(objects, "group_name", name),
        mock.patch.object(world, "new_group", new_group),
        mock.patch("torch.distributed.distributed_c10d._get_default_store", return_value=Store(shared)),
        mock.patch.multiple(
            dist,
            is_initialized=lambda: rank() is not None,
            get_rank=lambda group=None: group.rank if group else me(),
            get_world_size=lambda group=None: len(group.ranks) if group else shared.size,
            new_group=new_group,
            barrier=objects.barrier,
            all_reduce=all_reduce,
            destroy_process_group=lambda group=None: None,
            isend=isend,
            irecv=irecv,
            send=lambda *args, **named: isend(*args, **named).wait(),
            recv=lambda *args, **named: irecv(*args, **named).wait(),
        ),
    ):
        yield


def threads(size: int) -> Threads:
    """A world of so many."""
    return Threads(size)
