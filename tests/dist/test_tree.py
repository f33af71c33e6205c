"""What goes over the tree is what torch's own collectives give."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from plait.train.comm.tree import Tree, TreeWire, barrier, largest
from plait.train.comm.wire import sum_over
from tests.support.ranks import Ranks

Pool = Callable[[int], Ranks]


def compared(rank: int, fan: int) -> list[bool]:
    tree, value = Tree(fan=fan), torch.arange(5.0) * (rank + 1)
    summed, wanted = value.clone(), value.clone()
    tree.reduce(summed)
    dist.all_reduce(wanted)
    over = sum_over(TreeWire(tree), value.clone())
    text = json.dumps({"rank": rank, "long": "x" * 1000 * rank}).encode()
    world = dist.get_world_size()
    return [
        torch.equal(summed, wanted),
        torch.equal(over, wanted),
        [one["rank"] for one in json.loads(b"[" + tree.gather(text) + b"]")] == list(range(world)),
        tree.broadcast(text if rank == 0 else b"") == json.dumps({"rank": 0, "long": ""}).encode(),
        largest([float(rank), -float(rank)]) == [world - 1.0, 0.0],
    ]


@pytest.mark.parametrize("fan", [1, 2, 8])
def test_sums_and_values_reach_every_rank(pool: Pool, fan: int) -> None:
    assert pool(4).run(compared, fan) == [[True] * 5] * 4


def same_bits(rank: int) -> list[float]:
    value = torch.tensor([0.1 * (rank + 1), 1e16 if rank == 2 else -0.3], dtype=torch.float64)
    Tree(fan=2).reduce(value)
    return value.tolist()


def test_every_rank_has_the_same_bits(pool: Pool) -> None:
    first, *others = pool(4).run(same_bits)
    assert all(one == first for one in others)


def late(rank: int) -> tuple[float, float]:
    """When a rank came to the meeting and when it left, on the clock that all of a machine's ranks
    share."""
    barrier()
    if rank == 3:
        time.sleep(0.3)
    came = time.monotonic()
    barrier()
    return came, time.monotonic()


def test_nobody_goes_on_before_the_last_has_come(pool: Pool) -> None:
    came, left = zip(*pool(4).run(late), strict=True)
    assert min(left) >= max(came)
