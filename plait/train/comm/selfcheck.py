"""Test the links between machines before the first step: neighbours first, then across the fabric.

MegaScale (arXiv 2402.15627) checks hosts from the inside out before a run: loopback, links of a
host, neighbours under one switch. This is the small part that costs less than a second. Each rank
passes a message to and fro with its neighbours, then with the rank half the world away. Links of
one kind should be alike; a link far slower than the median of its kind is named.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from plait.core.base.cluster_env import this_host
from plait.core.base.env import RankEnv
from plait.core.topology.links import kind_of, rounds, slower
from plait.train.comm.tree import barrier, gather
from plait.train.machine.device import STAGED, RankDevice

SIZE = 1 << 20
"""Bytes of a message."""
REPEATS = 4
"""Round trips per link; the fastest counts, because others were disturbed."""
SLOW = 1 / 3
"""A link is named if its rate is less than this share of the median of its kind."""
TIMES = 3
"""Passes in which a link must be slow to be named; the first pass without a slow link ends the
test."""


class Link(NamedTuple):
    """Two ranks, and the bytes per second from one to the other. kind: ``neighbours`` or
    ``across``."""

    kind: str
    first: int
    second: int
    rate: float = 0.0


def links_of(world: int) -> list[list[Link]]:
    """Return rounds of links to test at the same time, no rank twice in a round: between
    neighbours, then across the fabric. There an odd rank is left out, because the start waits for
    this test.

    >>> [[link[1:3] for link in one] for one in links_of(5)]
    [[(0, 1), (2, 3)], [(1, 2), (3, 4)], [(0, 4)], [(0, 2), (1, 3)]]
    """
    half = world // 2
    across = [[(rank, rank + half) for rank in range(half)]] if world > 3 else []
    return [[Link(kind_of(*ends, world), *ends) for ends in one] for one in (*rounds(world, (1,)), *across)]


def slow_links(links: Sequence[Link]) -> list[tuple[Link, float]]:
    """Return links far slower than others of their kind, each with the median rate of the kind."""
    found: list[tuple[Link, float]] = []
    for kind in dict.fromkeys(link.kind for link in links):
        found += slower({link: link.rate for link in links if link.kind == kind}, SLOW).items()
    return found


def check_links(rank: RankEnv, device: RankDevice) -> list[str]:
    """Return a sentence for each slow link between machines; equal on every rank, which all call
    this. Links inside a machine are skipped. A link must be slow in each of ``TIMES`` passes,
    because a machine that was busy for a moment is no slow link."""
    slow: dict[tuple[int, int], str] = {}
    for attempt in range(TIMES):
        # Ranks that share a GPU send through the host's memory.
        links, hosts = _tried(rank, torch.device("cpu") if device.backend == STAGED else device.torch_device)
        now = {(link.first, link.second): _message(link, usual, hosts) for link, usual in slow_links(links)}
        slow = {ends: said for ends, said in now.items() if attempt == 0 or ends in slow}
        if not slow:
            break
    return list(slow.values())


def _tried(rank: RankEnv, device: torch.device) -> tuple[list[Link], list[str]]:
    """Return all links between machines, measured, and the ranks' hosts."""
    mine: list[Link] = []
    message = torch.zeros(SIZE, dtype=torch.uint8, device=device)
    for one in links_of(rank.world_size):
        barrier()
        for link in one:
            if rank.rank in link[1:3] and link.first // rank.local_world_size != link.second // rank.local_world_size:
                seconds = min(_to_and_fro(message, rank.rank, link) for _ in range(REPEATS))
                mine += [link._replace(rate=SIZE / seconds)] if rank.rank == link.first else []
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


def _message(link: Link, usual: float, hosts: Sequence[str]) -> str:
    ends = " and ".join(f"rank {rank} on {hosts[rank]}" for rank in link[1:3])
    rates = [f"{rate / 1e6:,.0f} MB/s" for rate in (link.rate, usual)]
    return f"the link between {ends} is slow: {rates[0]}; the median of such links ({link.kind}) is {rates[1]}"
