"""The links between machines, tried before the first step: neighbours first, then across the fabric.

MegaScale (arXiv 2402.15627) checks hosts from the inside out before a run: loopback, the links of
a host, neighbours under one switch. Here it is the small part of it that costs less than a second: each rank
passes a message to and fro with its neighbours, then with the rank half the world away. Links of one kind
should be alike; one that is far slower than the median of its kind is named.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from plait.core.base.cluster_env import this_host
from plait.core.base.env import RankEnv
from plait.train.comm.objects import gather, meet
from plait.train.machine.device import STAGED, RankDevice

SIZE = 1 << 20
"""Bytes of a message."""
REPEATS = 4
"""The fastest counts: others have been held up."""
SLOW = 1 / 3
"""A link with less than this share of the median rate of its kind is named."""
TIMES = 3
"""Passes in which a link must be slow to be named; one is enough where none is."""
LEAST = 3
"""Links of a kind that a median needs."""


class Link(NamedTuple):
    """Two ranks, and the seconds of a message from one to the other. kind: ``neighbours`` or ``across``."""

    kind: str
    first: int
    second: int
    seconds: float = 0.0


def rounds(world: int) -> list[list[Link]]:
    """Links to try at the same time: no rank twice in a round.

    >>> [[link[1:3] for link in one] for one in rounds(4)]
    [[(0, 1), (2, 3)], [(1, 2)], [(0, 3)], [(0, 2), (1, 3)]]
    """
    even, odd = ([Link("neighbours", rank, rank + 1) for rank in range(start, world - 1, 2)] for start in (0, 1))
    wrap = [Link("neighbours", 0, world - 1)] if world > 2 else []
    across = [Link("across", rank, rank + world // 2) for rank in range(world // 2)] if world > 3 else []
    return [one for one in (even, odd, wrap, across) if one]


def slow_links(links: Sequence[Link], share: float = SLOW) -> list[tuple[Link, float]]:
    """Links far slower than the others of their kind, each with the median seconds of these."""
    found: list[tuple[Link, float]] = []
    for kind in dict.fromkeys(link.kind for link in links):
        alike = [link for link in links if link.kind == kind]
        usual = statistics.median(link.seconds for link in alike)
        if len(alike) >= LEAST:
            found += [(link, usual) for link in alike if link.seconds > usual / share]
    return found


def check_links(rank: RankEnv, device: RankDevice) -> list[str]:
    """What is wrong with the links between machines, a sentence each; the same on every rank, which all call
    it. Links inside of a machine are left out. What is slow must be so each of ``TIMES`` times: a machine
    that was busy for a moment is no slow link."""
    slow: dict[tuple[int, int], str] = {}
    for attempt in range(TIMES):
        # Ranks that share a GPU send through the host's memory.
        links, hosts = _tried(rank, torch.device("cpu") if device.backend == STAGED else device.torch_device)
        now = {(link.first, link.second): _said(link, usual, hosts) for link, usual in slow_links(links)}
        slow = {ends: said for ends, said in now.items() if attempt == 0 or ends in slow}
        if not slow:
            break
    return list(slow.values())


def _tried(rank: RankEnv, device: torch.device) -> tuple[list[Link], list[str]]:
    """All links between machines, and the ranks' hosts."""
    mine: list[Link] = []
    message = torch.zeros(SIZE, dtype=torch.uint8, device=device)
    for one in rounds(rank.world_size):
        meet()
        for link in one:
            if rank.rank in link[1:3] and link.first // rank.local_world_size != link.second // rank.local_world_size:
                seconds = min(_to_and_fro(message, rank.rank, link) for _ in range(REPEATS))
                mine += [link._replace(seconds=seconds)] if rank.rank == link.first else []
    told = gather([this_host(), mine])
    hosts = [host for host, _ in told]
    return [Link(*link) for _, found in told for link in found], hosts


def _to_and_fro(message: torch.Tensor, me: int, link: Link) -> float:
    began = time.perf_counter()
    if me == link.first:
        dist.send(message, link.second)
        dist.recv(message, link.second)
    else:
        dist.recv(message, link.first)
        dist.send(message, link.first)
    if message.is_cuda:
        message[0].item()  # the host waits for the device
    return (time.perf_counter() - began) / 2


def _said(link: Link, usual: float, hosts: Sequence[str]) -> str:
    ends = " and ".join(f"rank {rank} on {hosts[rank]}" for rank in link[1:3])
    rates = [f"{SIZE / seconds / 1e6:,.0f} MB/s" for seconds in (link.seconds, usual)]
    return f"the link between {ends} passes {rates[0]}, and the median of such links ({link.kind}) {rates[1]}"
