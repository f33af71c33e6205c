"""Which links are tried, and which of them are named."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from plait.train.comm.selfcheck import Link, rounds, slow_links


@given(st.integers(2, 200))
def test_every_neighbour_is_tried_and_nobody_twice_in_a_round(world: int) -> None:
    for one in rounds(world):
        ends = [end for link in one for end in link[1:3]]
        assert len(ends) == len(set(ends))
    tried = {link[1:3] for one in rounds(world) for link in one}
    assert {(rank, rank + 1) for rank in range(world - 1)} <= tried
    assert (0, world - 1) in tried


@given(st.lists(st.floats(1e-3, 1.5e-3), min_size=4, max_size=50), st.integers(0, 49))
def test_a_link_four_times_slower_than_its_like_is_named_alone(seconds: list[float], which: int) -> None:
    links = [Link("neighbours", rank, rank + 1, value) for rank, value in enumerate(seconds)]
    assert slow_links(links) == []
    broken = links[which % len(links)]
    links[links.index(broken)] = broken._replace(seconds=8e-3)
    assert [link[1:3] for link, _ in slow_links(links)] == [broken[1:3]]


def test_kinds_are_not_compared_and_two_links_are_too_few() -> None:
    near = [Link("neighbours", rank, rank + 1, 1e-3) for rank in range(4)]
    far = [Link("across", rank, rank + 2, 9e-3) for rank in range(3)]
    assert slow_links([*near, *far]) == []
    assert slow_links([Link("across", 0, 2, 1e-3), Link("across", 1, 3, 1.0)]) == []
