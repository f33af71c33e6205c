"""Who reads which part of a checkpoint, and how it comes to the others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plait.core.reshard.layouts import Box
from plait.train.checkpoint import ranges
from plait.train.checkpoint.ranges import Part, Range, ReadGroup, assign_readers, describe_wanted, distribute
from tests.support.threads import threads


def part(name: str, size: int) -> Part:
    return name, Box((0,), (size,))


def wants(*parts: tuple[str, int], size: int = 4) -> list[Any]:
    """As ``told`` says it."""
    return [(name, (0,), (count,), size) for name, count in parts]


WANTED = st.lists(st.sets(st.integers(0, 11), max_size=8), min_size=1, max_size=7)


@given(WANTED)
def test_every_range_is_read_once_by_one_who_holds_it(wanted: list[set[int]]) -> None:
    by_rank = [[(f"t{part}", (0,), (part + 1,), 4) for part in sorted(parts)] for parts in wanted]
    found = assign_readers(by_rank)
    read = [part for share in found for part in share.parts]
    assert sorted(read) == sorted({(f"t{part}", Box((0,), (part + 1,))) for parts in wanted for part in parts})
    for share in found:
        for key, _ in share.parts:
            assert sorted(share.ranks) == [rank for rank, parts in enumerate(wanted) if int(key[1:]) in parts]


def test_replicas_share_out_the_reading() -> None:
    """Two pipeline stages of three replicas: each stage's ranges are read by one of its own."""
    stages = [[(f"s{stage}", (0,), (8,), 4)] for stage in (0, 0, 0, 1, 1, 1)]
    assert [share.ranks for share in assign_readers(stages)] == [(0, 1, 2), (3, 4, 5)]
    alone = [[(f"r{rank}", (0,), (8,), 4)] for rank in range(4)]
    assert [share.ranks for share in assign_readers(alone)] == [(0,), (1,), (2,), (3,)]


def test_each_part_is_read_once_by_who_has_read_the_least() -> None:
    found = assign_readers([
        wants(("a", 8), ("b", 4), ("c", 2)),
        wants(("a", 8), ("d", 4)),
        wants(("a", 8), ("b", 4), ("d", 4), ("e", 1)),
    ])  # fmt: skip
    assert found == [
        ReadGroup((0, 1, 2), (part("a", 8),)),
        ReadGroup((2, 0), (part("b", 4),)),  # the first has read eight
        ReadGroup((0,), (part("c", 2),)),
        ReadGroup((1, 2), (part("d", 4),)),
        ReadGroup((2,), (part("e", 1),)),
    ]


def test_parts_of_the_same_ranks_go_together_and_bytes_count() -> None:
    both = [wants(("a", 1), ("b", 2)) + wants(("c", 1), size=16)] * 2
    assert assign_readers([*both, wants(("z", 1))]) == [
        ReadGroup((0, 1), (part("a", 1), part("b", 2), part("c", 1))), ReadGroup((2,), (part("z", 1),)),
    ]  # fmt: skip
    wide = wants(("a", 2), size=8) + wants(("b", 3), size=4)
    assert assign_readers([wide, wants(("a", 2), size=8), wants(("b", 3))]) == [
        ReadGroup((0, 1), (part("a", 2),)), ReadGroup((2, 0), (part("b", 3),)),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("most", "sizes"), [(16, [[1, 2], [5], [1, 3]]), (64, [[1, 2, 5, 1, 3]]), (1, [[1], [2], [5], [1], [3]])]
)
def test_neighbours_are_sent_together_up_to_a_size(
    monkeypatch: pytest.MonkeyPatch, most: int, sizes: list[list[int]]
) -> None:
    monkeypatch.setattr(ranges, "CHUNK", most)
    chunks = ranges._chunks([torch.zeros(count) for count in (1, 2, 5, 1, 3)])
    assert [[len(one) for one in chunk] for chunk in chunks] == sizes


@pytest.mark.parametrize("world", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("most", [8, 1 << 20])
def test_what_one_has_read_comes_to_all(monkeypatch: pytest.MonkeyPatch, world: int, most: int) -> None:
    """Also to a second tensor of the same range, and of types of other sizes."""
    monkeypatch.setattr(ranges, "CHUNK", most)
    names = {"a": (torch.float32, 3), "b": (torch.bfloat16, 1), "c": (torch.float64, 2)}

    def run(rank: int) -> list[list[float]]:
        ranges = list[Range]()
        for name, (dtype, count) in (*names.items(), ("a", names["a"])):
            ranges.append(Range(name, (count,), Box((0,), (count,)), torch.zeros(count, dtype=dtype), copy=False))
        found = assign_readers([describe_wanted(ranges)] * world)
        for one in ranges[:3] if rank == found[0].ranks[0] else ():
            one.tensor.fill_({"a": 1.5, "b": 2.5, "c": 3.5}[one.key])
        distribute(found, ranges, rank, None)
        return [one.tensor.tolist() for one in ranges]

    assert threads(world).run(run) == [[[1.5] * 3, [2.5], [3.5] * 2, [1.5] * 3]] * world
