"""What a rank's start asks of the store and whom it connects to, counted; for worlds that no machine here can
start, one rank of which is made with stand-ins for what would wait for the others."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Store

from plait.core.env import RankEnv
from plait.core.layout import Layout, SequenceCut
from plait.core.model import ModelSpec
from plait.core.schedules import Shape, generate
from plait.core.sharding import Sharding
from plait.core.tied import tie_of
from plait.train.comm import world as meeting
from plait.train.comm.objects import odd_ones
from plait.train.comm.tree import node_of
from plait.train.comm.wire import NullWire
from plait.train.engine import groups

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


def plan_for(world: int) -> Any:
    """What opening groups asks of a plan: dp x tp 4 x pp 4, sharded over pairs, with tied embeddings."""
    model = ModelSpec(family="gpt", num_layers=8, hidden=64, num_heads=8, vocab=512, max_sequence=64)
    of = {
        "layout": Layout.of(pp=4, dp=world // 16, tp=4),
        "shardings": [Sharding(params=2, grads=2, optim=2)] * 4,
        "schedule": generate("1f1b", Shape(ranks=4, micro_batches=8)),
    }
    return SimpleNamespace(**of, sequence_cut=SequenceCut(), tie=lambda rank: tie_of(rank, model=model, **of))


def of_a_world(world: int) -> dict[str, Any]:
    """What one rank's start takes, the most of several ranks."""
    plan = plan_for(world)
    rows = [_of_a_rank(plan, world, rank) for rank in sorted({0, 1, world // 2 + 3, world - 1})]
    return max(rows, key=lambda row: (row["store"]["torch"] + row["store"]["ours"], row["connections"]))


def _of_a_rank(plan: Any, world: int, rank: int) -> dict[str, Any]:
    """By the code that a run goes through, up to its first step. Groups of gloo's that connect when they are
    needed wait for nobody: they are torch's own, in full size; the others are counted."""
    store = CountedStore(HashStore(), {"without any": b"0", "first/corpus": b"done", "/first": b"plan", "/any": b"0"})
    store.store.add("device/asked", world - 1)  # the last to ask does most
    spoken: set[tuple[str, int]] = set()
    wires: dict[str, int] = {}
    me = RankEnv(rank=rank, world_size=world, local_rank=rank % 8, local_world_size=8)
    node = node_of(rank, world)

    def over_the_tree(group: str) -> None:
        """The ranks with which it speaks; gloo asks the store for each once."""
        peers = ([] if node.parent is None else [node.parent]) + [*node.children]
        for peer in peers:
            if (group, peer) not in spoken:
                spoken.add((group, peer))
                store.asked["torch", "get"] += 1

    def open_wire(_: str, ranks: Sequence[int], *, urgent: bool = False) -> NullWire:
        """A collective backend's group: NCCL asks the store once for its identity."""
        if len(ranks) > 1:
            wires[f"{len(wires)}: {len(ranks)} ranks"] = len(ranks)
            store.asked["torch", "get"] += 1
        return NullWire(len(ranks))

    tree = SimpleNamespace(meet=lambda: over_the_tree("world"))
    start, before = time.perf_counter(), _resident()
    with (
        counting_groups() as opened,
        mock.patch.object(meeting, "Tree", return_value=tree),
        mock.patch.object(groups, "open_wire", open_wire),
        mock.patch.object(groups, "_connected", lambda wire, _: wire),
        mock.patch.dict(os.environ),
    ):
        meeting.all_have_one(store, world, f"gpu {rank}")
        meeting.join_world(me, store, "gloo", 60.0)
        seconds, size = time.perf_counter() - start, _resident() - before
        try:
            if rank:  # rank 0 prepares it instead
                meeting.first_does(lambda: None, "corpus")
            groups.open_groups(plan, rank, SimpleNamespace(backend="nccl"))  # type: ignore[arg-type]
            place = plan.layout.place_of(rank)
            for a, b in ((place - 1, place), (place, place + 1)):
                if a >= 0 and b < len(plan.layout.meshes):
                    ranks = [each for at in (a, b) for each in plan.layout.meshes[at].ranks]
                    for _ in range(2):  # up and down
                        open_wire("nccl", ranks)
                    odd_ones("plan", ranks)
            meeting.new_group()  # for checkpoints
            over_the_tree("checkpoints")
        finally:
            dist.destroy_process_group()
    return {
        "world": world, "rank": rank, "groups": len(opened) + len(wires), "gloo_groups": len(opened),
        "store": store.figures(), "connections": len(spoken), "device_groups": wires,
        "join_seconds": seconds, "join_mib": size >> 20,
        "full_mesh": {"store": sum(each + 1 for each in opened), "connections": sum(each - 1 for each in opened)},
    }  # fmt: skip


def _resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
