"""The calls of a ring that tell where its rank is."""

from __future__ import annotations

import time
from collections import defaultdict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.core.record.ring import RecordKind, call_of, read_ring, signature_of
from plait.core.record.ring_writer import RingWriter, this_process
from plait.core.runs.evidence import KEPT, CallSequence, calls_of, ring_path, waited_since


def writer(folder: Path) -> RingWriter:
    (folder / "rings").mkdir(exist_ok=True)
    return RingWriter(ring_path(folder, 1), this_process(rank=1, world=4, capacity=128))


def test_a_ring_without_calls_has_none(tmp_path: Path) -> None:
    ring = writer(tmp_path)
    assert calls_of(read_ring(ring_path(tmp_path, 1))) == ()
    ring.begin(RecordKind.COMPUTE, ring.name("F0"), 0, 5)
    assert calls_of(read_ring(ring_path(tmp_path, 1))) == ()
    assert waited_since(()) == 0


@given(st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=60))
def test_what_is_open_and_the_last_of_every_channel(
    tmp_path_factory: pytest.TempPathFactory, began: list[tuple[int, bool]]
) -> None:
    folder = tmp_path_factory.mktemp("run")
    ring = writer(folder)
    group, lane = ring.group([0, 1], "tp"), ring.group([1, 2], "lane")
    kinds = [(RecordKind.COLLECTIVE, group, -1), (RecordKind.SEND, lane, 2), (RecordKind.RECEIVE, lane, 2)]
    wanted: dict[int, list[tuple[int, bool]]] = defaultdict(list)
    for place, (which, over) in enumerate(began):
        kind, number, peer = kinds[which]
        sequence = len(wanted[which])
        wanted[which].append((sequence, over))
        ring.begin(kind, ring.name("op"), 3, 10 + place, ended=11 + place if over else 0, group=number, size=64,
                   sequence=sequence, peer=peer, call=call_of("all_reduce", "float32"),
                   signature=signature_of("all_reduce", "float32", 16))  # fmt: skip
    found = calls_of(read_ring(ring_path(folder, 1)))
    assert [call.enqueued for call in found] == sorted(call.enqueued for call in found)
    ends = [(-1, -1), (1, 2), (2, 1)]
    for which, calls in wanted.items():
        over = [sequence for sequence, ended in calls if ended][-KEPT:]
        expected = sorted([sequence for sequence, ended in calls if not ended] + over)
        assert [c.sequence for c in found if (c.channel.source, c.channel.target) == ends[which]] == expected
    assert all(isinstance(call.channel, CallSequence) and call.step == 3 for call in found)


def test_a_wait_begins_when_the_call_before_is_over(tmp_path: Path) -> None:
    ring = writer(tmp_path)
    group, name, now = ring.group([0, 1], "tp"), ring.name("op"), time.monotonic_ns()
    ring.begin(RecordKind.COLLECTIVE, name, 0, now - 50, ended=now - 10, group=group, sequence=0)
    ring.begin(RecordKind.COLLECTIVE, name, 0, now - 40, group=group, sequence=1)
    assert waited_since(calls_of(read_ring(ring_path(tmp_path, 1)))) == now - 10


def test_of_several_channels_the_longest_wait_counts(tmp_path: Path) -> None:
    ring = writer(tmp_path)
    name, (one, other) = ring.name("op"), (ring.group([0, 1], label) for label in ("tp", "dp"))
    for group, sequence, began, ended in ((one, 0, 10, 50), (one, 1, 20, 0), (one, 2, 30, 0), (other, 0, 40, 0)):
        ring.begin(RecordKind.COLLECTIVE, name, 0, began, ended=ended, group=group, sequence=sequence,
                   call=call_of("all_reduce", "float32"))  # fmt: skip
    assert waited_since(calls_of(read_ring(ring_path(tmp_path, 1)))) == 40
    ring.begin(RecordKind.COLLECTIVE, name, 0, 5, group=ring.group([1, 3], "pp"), call=call_of("all_reduce", "float32"))
    assert waited_since(calls_of(read_ring(ring_path(tmp_path, 1)))) == 5


def test_a_channels_first_open_call_is_the_one_that_waits(tmp_path: Path) -> None:
    """In whatever order they were written."""
    ring = writer(tmp_path)
    group, name = ring.group([0, 1], "tp"), ring.name("op")
    for sequence, began in ((4, 30), (3, 40), (5, 20)):
        ring.begin(RecordKind.COLLECTIVE, name, 0, began, group=group, sequence=sequence,
                   call=call_of("all_reduce", "float32"))  # fmt: skip
    assert waited_since(calls_of(read_ring(ring_path(tmp_path, 1)))) == 40
