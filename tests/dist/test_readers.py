"""Who reads which range of a checkpoint, and that all have it then."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from plait.core.reshard.layouts import Box
from plait.train.checkpoint import readers
from plait.train.checkpoint.ranges import Range
from plait.train.checkpoint.readers import pass_on, shares
from plait.train.comm.objects import gather
from tests.support.ranks import Ranks

WANTED = st.lists(st.sets(st.integers(0, 11), max_size=8), min_size=1, max_size=7)


@pytest.mark.unit
@given(WANTED)
def test_every_range_is_read_once_by_one_who_holds_it(wanted: list[set[int]]) -> None:
    by_rank = [[(f"t{part}", (0,), (part + 1,), 4) for part in sorted(parts)] for parts in wanted]
    found = shares(by_rank)
    read = [part for share in found for part in share.parts]
    assert sorted(read) == sorted({(f"t{part}", Box((0,), (part + 1,))) for parts in wanted for part in parts})
    for share in found:
        for key, _ in share.parts:
            assert sorted(share.ranks) == [rank for rank, parts in enumerate(wanted) if int(key[1:]) in parts]


@pytest.mark.unit
def test_replicas_share_out_the_reading() -> None:
    """Two pipeline stages of three replicas: each stage's ranges are read by one of its own."""
    stages = [[(f"s{stage}", (0,), (8,), 4)] for stage in (0, 0, 0, 1, 1, 1)]
    assert [share.ranks for share in shares(stages)] == [(0, 1, 2), (3, 4, 5)]
    alone = [[(f"r{rank}", (0,), (8,), 4)] for rank in range(4)]
    assert [share.ranks for share in shares(alone)] == [(0,), (1,), (2,), (3,)]


def exchange(rank: int, holders: list[list[int]], chunk: int) -> list[Any]:
    """Ranges of several types and shapes, read by one of each part's holders only; what this rank has
    then."""
    readers.CHUNK = chunk
    types, own = (torch.bfloat16, torch.float32, torch.float64), list[Range]()
    for number, ranks in enumerate(holders):
        if rank in ranks:
            box = Box((0, 0), (number % 3 + 1, 5))
            tensor = torch.full((9, 5), -1.0, dtype=types[number % 3])[: box.stop[0]]
            own.append(Range(f"part {number}", (9, 5), box, tensor, copy=False))
    found = shares(gather(readers.told(own)))
    for share in found:
        for one in own:
            if share.ranks[0] == rank and (one.key, one.box) in share.parts:
                one.tensor.copy_(torch.arange(one.tensor.numel()).view(one.tensor.shape) + int(one.key[5:]))
    pass_on(found, own, rank, dist.group.WORLD)
    return [(one.key, one.tensor.double().flatten().tolist()) for one in own]


def test_what_one_has_read_all_have(four: Ranks) -> None:
    holders = [[0, 1, 2, 3], [1, 3], [2], [0, 1, 2, 3], [3, 0], [1, 2, 3], [0, 1, 2]]
    for chunk in (1, 1 << 20):
        for rank, found in enumerate(four.run(exchange, holders, chunk)):
            wanted = [
                (f"part {number}", [float(at + number) for at in range((number % 3 + 1) * 5)])
                for number, ranks in enumerate(holders)
                if rank in ranks
            ]
            assert found == wanted
