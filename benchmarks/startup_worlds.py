"""One rank of worlds that no machine here can start, with stand-ins for what would wait for the others; for
``startup.py``."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch.distributed as dist
from startup_counts import CountedStore, counting_groups
from torch._C._distributed_c10d import HashStore

from plait.core.base.env import RankEnv
from plait.core.model.spec import ModelSpec
from plait.core.parallel.layout import ContextSplit, Layout
from plait.core.parallel.sharding import Sharding
from plait.core.step.schedules import Shape, generate
from plait.core.step.stages import tie_of
from plait.train.comm import world as meeting
from plait.train.comm.tree import differing_ranks, node_of
from plait.train.comm.wire import NullWire
from plait.train.engine import groups


def plan_for(world: int) -> Any:
    """What opening groups asks of a plan: dp x tp 4 x pp 4, sharded over pairs, with tied embeddings."""
    model = ModelSpec(family="gpt", num_layers=8, hidden=64, num_heads=8, vocab=512, max_sequence=64)
    of = {
        "layout": Layout.of(pp=4, dp=world // 16, tp=4),
        "shardings": [Sharding(params=2, grads=2, optim=2)] * 4,
        "schedule": generate("1f1b", Shape(ranks=4, micro_batches=8)),
    }
    workload = SimpleNamespace(optimizer="adamw")
    return SimpleNamespace(
        **of,
        model=model,
        workload=workload,
        sequence_cut=ContextSplit(),
        tie=lambda rank: tie_of(rank, model=model, **of),
    )


def of_a_world(world: int) -> dict[str, Any]:
    """What a rank's start takes: of each the most of several ranks."""
    plan = plan_for(world)
    ranks = sorted({0, 1, world // 2 + 3, world - 1})
    rows = {str(rank): _of_a_rank(plan, world, rank) for rank in ranks}
    most = {what: max(row[what] for row in rows.values()) for what in next(iter(rows.values())) if what != "store_by"}
    return {"world": world, **most, "by_rank": rows}


def _of_a_rank(plan: Any, world: int, rank: int) -> dict[str, Any]:
    """By the code that a run goes through, up to its first step. Groups of gloo's that connect when they are
    needed wait for nobody: they are torch's own, in full size; the others are counted."""
    store = CountedStore(HashStore(), {"without any": b"0", "first/corpus": b"done", "/first": b"plan", "/any": b"0"})
    store.store.add("device/asked", world - 1)  # the last to ask does most
    spoken: set[tuple[str, int]] = set()
    wires: list[int] = []
    me = RankEnv(rank=rank, world_size=world, local_rank=rank % 8, local_world_size=8)
    node = node_of(rank, world)

    def over_the_tree(group: str) -> None:
        """The ranks with which it speaks; gloo asks the store for each once."""
        peers = ([] if node.parent is None else [node.parent]) + [*node.children]
        for peer in peers:
            if (group, peer) not in spoken:
                spoken.add((group, peer))
                store.asked["torch", "wait"] += 1
                store.asked["torch", "get"] += 1

    def open_wire(_: str, ranks: Sequence[int], *, urgent: bool = False) -> NullWire:
        """A collective backend's group: NCCL asks the store once for its identity."""
        if len(ranks) > 1:
            wires.append(len(ranks))
            store.asked["torch", "get"] += 1
        return NullWire(len(ranks))

    tree = SimpleNamespace(barrier=lambda: over_the_tree("world"))
    start, before = time.perf_counter(), _resident()
    with (
        counting_groups() as opened,
        mock.patch.object(meeting, "Tree", return_value=tree),
        mock.patch.object(groups, "open_wire", open_wire),
        mock.patch.object(groups, "_connected", lambda wire, _: wire),
        mock.patch.dict(os.environ),
    ):
        meeting.each_has_own_gpu(store, world, f"gpu {rank}")
        meeting.join_world(me, store, "gloo", 60.0)
        seconds, size = time.perf_counter() - start, _resident() - before
        try:
            if rank:  # rank 0 prepares it instead
                meeting.run_on_rank_zero(lambda: None, "corpus")
            groups.open_groups(plan, rank, SimpleNamespace(backend="nccl"))  # type: ignore[arg-type]
            pp_rank = plan.layout.pp_rank_of(rank)
            for a, b in ((pp_rank - 1, pp_rank), (pp_rank, pp_rank + 1)):
                if a >= 0 and b < len(plan.layout.meshes):
                    ranks = [each for at in (a, b) for each in plan.layout.meshes[at].ranks]
                    for _ in range(2):  # up and down
                        open_wire("nccl", ranks)
                    differing_ranks("plan", ranks)
            meeting.new_group()  # for checkpoints
            over_the_tree("checkpoints")
        finally:
            dist.destroy_process_group()
    asked = store.figures()
    return {
        "groups": len(opened) + len(wires), "gloo_groups": len(opened), "store_ours": asked["ours"],
        "store_torch": asked["torch"], "store_by": asked["by"], "connections": len(spoken),
        "join_seconds": seconds, "join_mib": size >> 20,
        "mesh_store": sum(2 * each + 1 for each in opened), "mesh_connections": sum(each - 1 for each in opened),
    }  # fmt: skip


def _resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
