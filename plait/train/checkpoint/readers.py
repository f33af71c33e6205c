"""Who reads what of a checkpoint: of the ranks that hold the same ranges, one reads them and passes them on.

A job of many data-parallel replicas would otherwise read the same bytes once for each replica, from the one
place that all share. Passing on is a tree: after each turn twice as many ranks have the bytes, over the
network between the hosts, which grows with the job (MegaScale, arXiv 2402.15627, 4.4: one worker reads and
broadcasts).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from plait.core.reshard.layouts import Box
from plait.train.checkpoint.ranges import Range

CHUNK = 64 << 20
"""Bytes that are passed on at once, at most, unless a tensor is larger."""

Part = tuple[str, Box]
"""A range: of which tensor, and which of it."""


class ReadGroup(NamedTuple):
    """ranks: who holds the ``parts``, the reader first."""

    ranks: tuple[int, ...]
    parts: tuple[Part, ...]


def told(ranges: Sequence[Range]) -> list[Any]:
    """What a rank wants to have, as plain values."""
    found = {(one.key, one.box): one.tensor.element_size() for one in ranges}
    return [(key, *box, size) for (key, box), size in found.items()]


def shares(by_rank: Sequence[Sequence[Any]]) -> list[ReadGroup]:
    """Every range once, those with the same holders together; the reader is the holder with the fewest bytes
    so far. The same on all ranks.

    by_rank: what ``told`` gave on each.
    """
    holders: dict[Part, list[int]] = defaultdict(list)
    sizes: dict[Part, int] = {}
    for rank, wanted in enumerate(by_rank):
        for key, start, stop, size in wanted:
            part = key, Box(tuple(start), tuple(stop))
            holders[part].append(rank)
            sizes[part] = part[1].elements * size
    together: dict[tuple[int, ...], list[Part]] = defaultdict(list)
    for part, ranks in holders.items():
        together[tuple(ranks)].append(part)
    read = [0] * len(by_rank)
    found: list[ReadGroup] = []
    for ranks, parts in together.items():
        reader = min(ranks, key=lambda rank: (read[rank], rank))
        read[reader] += sum(sizes[part] for part in parts)
        found.append(ReadGroup((reader, *(rank for rank in ranks if rank != reader)), tuple(parts)))
    return found


def pass_on(found: Sequence[ReadGroup], ranges: Sequence[Range], me: int, group: dist.ProcessGroup | None) -> None:
    """Fill ``ranges``, of which each share's reader has read its parts. Called by all ranks of ``group`` with
    the same shares."""
    own: dict[Part, list[Tensor]] = defaultdict(list)
    for one in ranges:
        own[one.key, one.box].append(one.tensor)
    for share in found:
        if me not in share.ranks:
            continue
        for chunk in _chunks([own[part][0] for part in share.parts] if len(share.ranks) > 1 else []):
            _spread(chunk, share.ranks, me, group)
        for part in share.parts:
            for copy in own[part][1:]:
                copy.copy_(own[part][0])


def _chunks(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Neighbours that are sent together."""
    chunk: list[Tensor] = []
    filled = 0
    for tensor in tensors:
        if chunk and filled + tensor.nbytes > CHUNK:
            yield chunk
            chunk, filled = [], 0
        chunk.append(tensor)
        filled += tensor.nbytes
    if chunk:
        yield chunk


def _spread(tensors: Sequence[Tensor], ranks: Sequence[int], me: int, group: dist.ProcessGroup | None) -> None:
    """From the first of ``ranks`` to all others, in as many turns as their number has binary digits."""
    place, step = ranks.index(me), 1
    buffer = torch.empty(sum(tensor.nbytes for tensor in tensors), dtype=torch.uint8)
    views = list(zip(tensors, buffer.split([tensor.nbytes for tensor in tensors]), strict=True))
    if place == 0:
        for tensor, view in views:
            view.copy_(tensor.reshape(-1).view(torch.uint8))
    while step < len(ranks):
        if place < step and place + step < len(ranks):
            dist.send(buffer, group=group, group_dst=ranks[place + step])
        elif step <= place < 2 * step:
            dist.recv(buffer, group=group, group_src=ranks[place - step])
        step *= 2
    if place:
        for tensor, view in views:
            tensor.copy_(view.clone().view(tensor.dtype).view(tensor.shape))  # a view needs its type's alignment
