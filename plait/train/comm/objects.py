"""Plain values between ranks, as JSON: what one rank reads of another is data, never code.

torch's own ``all_gather_object`` and ``broadcast_object_list`` unpickle what arrives, and unpickling runs
whatever the sender likes. Values are what JSON has: None, booleans, numbers, texts, lists, and dicts with
texts as keys. A tuple arrives as a list. Floats arrive exactly.

Every rank of ``group`` calls the same function at the same point. The group's own timeout bounds the wait.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from plait.train.comm.world import group_name


def gather(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """The value of every rank, by rank, on all of them. group: all ranks if not given; without a world, one.

    >>> gather({"rank": 0})
    [{'rank': 0}]
    """
    mine = _encoded(value)
    if not dist.is_initialized():
        return [_decoded(mine)]
    world, device = dist.get_world_size(group), _device(group)
    sizes = [torch.empty(1, dtype=torch.int64, device=device) for _ in range(world)]
    dist.all_gather(sizes, torch.tensor([mine.numel()], device=device), group=group)
    lengths = [int(size.item()) for size in sizes]
    padded = torch.zeros(max(lengths), dtype=torch.uint8, device=device)
    padded[: mine.numel()] = mine
    parts = [torch.empty_like(padded) for _ in range(world)]
    dist.all_gather(parts, padded, group=group)
    return [_decoded(part[:length]) for part, length in zip(parts, lengths, strict=True)]


def broadcast(value: Any, source: int = 0, group: dist.ProcessGroup | None = None) -> Any:
    """The value of rank ``source`` of the group, on all of its ranks; the others' is not looked at."""
    if not dist.is_initialized():
        return _decoded(_encoded(value))
    sends, device = dist.get_rank(group) == source, _device(group)
    mine = _encoded(value) if sends else torch.empty(0, dtype=torch.uint8)
    size = torch.tensor([mine.numel()], device=device)
    dist.broadcast(size, group=group, group_src=source)
    content = mine.to(device) if sends else torch.empty(int(size.item()), dtype=torch.uint8, device=device)
    dist.broadcast(content, group=group, group_src=source)
    return _decoded(content)


def odd_ones(value: str, ranks: Sequence[int]) -> list[int]:
    """Which of some ranks have another value than the first of them; the same on all of these, which call it
    together.

    Through the store, by a number of its operations that does not grow with the ranks while they agree:
    groups of an accelerator's take no values of the host's, and one of the host's for so little is a
    connection between any two.
    """
    name, me = group_name(ranks), dist.get_rank()
    store: Any = dist.distributed_c10d._get_default_store()
    if me == ranks[0]:
        store.set(f"{name}/first", value)
    elif store.get(f"{name}/first").decode() != value:
        store.append(f"{name}/odd", f" {me}")
        store.add(f"{name}/differ", 1)
    if store.add(f"{name}/said", 1) == len(ranks):
        store.set(f"{name}/any", str(store.add(f"{name}/differ", 0)))
    if store.get(f"{name}/any") == b"0":
        return []
    return sorted(map(int, store.get(f"{name}/odd").decode().split()))


def _device(group: dist.ProcessGroup | None) -> torch.device:
    """Where the group's tensors live: in host memory wherever one of its backends takes them."""
    return torch.device(dist.distributed_c10d._get_object_coll_device(group))


def _encoded(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _decoded(content: Tensor) -> Any:
    return json.loads(content.cpu().numpy().tobytes())
