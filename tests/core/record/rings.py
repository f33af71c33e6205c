"""A ring, and records to fill it with."""

from __future__ import annotations

from pathlib import Path

from plait.core.record.ring import OpPlace, RecordKind, Ring
from plait.core.record.ring_writer import RingWriter, this_process

ATTENTION = OpPlace("attn", 3, 0, True)


def writer(path: Path, *, capacity: int = 16, rank: int = 0) -> RingWriter:
    return RingWriter(path, this_process(rank=rank, world=4, plan="feed", capacity=capacity))


def fill(ring: RingWriter, numbers: range) -> None:
    name = ring.name("attn3.F0", ATTENTION)
    for i in numbers:
        ring.begin(RecordKind.COMPUTE, name, i, 10 * i, 10 * i + 1, 10 * i + 2)


def steps(ring: Ring) -> list[int]:
    return ring.table["step"].tolist()
