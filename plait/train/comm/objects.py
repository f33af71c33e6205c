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

from plait.train.comm.tree import Tree
from plait.train.comm.world import group_name


def gather(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """The value of every rank, by rank, on all of them. group: all ranks if not given; without a world, one.

    >>> gather({"rank": 0})
    [{'rank': 0}]
    """
    mine = _encoded(value)
    if not dist.is_initialized():
        return [json.loads(mine)]
    return json.loads(b"[" + Tree(group).gather(mine) + b"]")


def broadcast(value: Any, source: int = 0, group: dist.ProcessGroup | None = None) -> Any:
    """The value of rank ``source`` of the group, on all of its ranks; the others' is not looked at."""
    if not dist.is_initialized():
        return json.loads(_encoded(value))
    if source:  # the tree begins at rank 0
        return gather(value if dist.get_rank(group) == source else None, group)[source]
    return json.loads(Tree(group).broadcast(_encoded(value) if dist.get_rank(group) == 0 else b""))


def largest(values: Sequence[float]) -> list[float]:
    """Each value's maximum over all ranks, on all of them."""
    found = torch.tensor(values, dtype=torch.float64)
    if dist.is_initialized():
        Tree().reduce(found, lambda own, other: torch.maximum(own, other, out=own))
    return found.tolist()


def meet() -> None:
    """Wait until every rank has come here."""
    if dist.is_initialized():
        Tree().meet()


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


def _encoded(value: Any) -> bytes:
    return json.dumps(value).encode()
