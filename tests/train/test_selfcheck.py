"""Which links are tried, and which of them are named."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plait.core.base.env import RankEnv
from plait.train.comm import selfcheck
from plait.train.comm.selfcheck import REPEATS, Link, check_links, links_of, slow_links
from plait.train.machine.device import RankDevice
from tests.support.threads import threads


@given(st.integers(2, 200))
def test_every_neighbour_is_tried_and_nobody_twice_in_a_round(world: int) -> None:
    for one in links_of(world):
        ends = [end for link in one for end in link[1:3]]
        assert len(ends) == len(set(ends))
    tried = {link[1:3] for one in links_of(world) for link in one}
    assert {(rank, rank + 1) for rank in range(world - 1)} <= tried
    assert (0, world - 1) in tried


@given(st.lists(st.floats(1e9, 1.5e9), min_size=4, max_size=50), st.integers(0, 49))
def test_a_link_four_times_slower_than_its_like_is_named_alone(rates: list[float], which: int) -> None:
    links = [Link("neighbours", rank, rank + 1, value) for rank, value in enumerate(rates)]
    assert slow_links(links) == []
    broken = links[which % len(links)]
    links[links.index(broken)] = broken._replace(rate=2e8)
    assert [link[1:3] for link, _ in slow_links(links)] == [broken[1:3]]


def test_kinds_are_not_compared_and_two_links_are_too_few() -> None:
    near = [Link("neighbours", rank, rank + 1, 1e9) for rank in range(4)]
    far = [Link("across", rank, rank + 2, 1e8) for rank in range(3)]
    assert slow_links([*near, *far]) == []
    assert slow_links([Link("across", 0, 2, 1e9), Link("across", 1, 3, 1.0)]) == []


class Clocks:
    """A clock for each rank: what it times takes as long as ``seconds`` says of the rank and of how
    many it has timed before."""

    def __init__(self, seconds: Callable[[int, int], float]) -> None:
        self.seconds, self.of = seconds, threading.local()

    def perf_counter(self) -> float:
        rank = int(threading.current_thread().name.removeprefix("rank-"))
        calls = self.of.calls = getattr(self.of, "calls", -1) + 1
        now = getattr(self.of, "now", 0.0)
        self.of.now = now + (self.seconds(rank, calls // 2) if calls % 2 else 1.0)
        return self.of.now


def said(monkeypatch: pytest.MonkeyPatch, world: int, per_host: int, seconds: Callable[[int, int], float]) -> list[str]:
    """What all of so many ranks say of their links."""
    monkeypatch.setattr(selfcheck, "time", Clocks(seconds))
    monkeypatch.setattr(selfcheck, "SIZE", 1_000_000)
    device = RankDevice(torch.device("cpu"))
    first, *others = threads(world).run(
        lambda rank: check_links(RankEnv(rank=rank, world_size=world, local_world_size=per_host), device)
    )
    assert all(other == first for other in others)
    return first


OF_RANK_3 = 3 * REPEATS
"""It times its link to rank 2, to 4 and to 7."""


@pytest.mark.parametrize(
    ("slow", "named"),
    [
        (lambda number: number % OF_RANK_3 // REPEATS == 1, True),
        (lambda number: number // REPEATS == 1, False),  # at the first try only
        (lambda number: number % REPEATS, False),  # held up in all but one message
    ],
)
def test_a_link_that_stays_slow_is_named(
    monkeypatch: pytest.MonkeyPatch, slow: Callable[[int], bool], named: bool
) -> None:
    found = said(monkeypatch, 8, 1, lambda rank, number: 0.02 if rank == 3 and slow(number) else 0.002)
    assert len(found) == named
    for one in found:
        assert one.startswith("the link between rank 3 on ") and " and rank 4 on " in one
        assert one.endswith(" is slow: 100 MB/s; the median of such links (neighbours) is 1,000 MB/s")


def test_links_inside_of_a_machine_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of eight ranks on two hosts 3 and 4 are neighbours, and so are 0 and 7; 0 to 3 are across
    from the others."""
    tried: list[tuple[int, int]] = []
    assert said(monkeypatch, 8, 4, lambda rank, number: tried.append((rank, number)) or 0.002) == []
    counts = {rank: sum(one == rank for one, _ in tried) // REPEATS for rank in range(8)}
    assert counts == {0: 2, 1: 1, 2: 1, 3: 2, 4: 2, 5: 1, 6: 1, 7: 2}
