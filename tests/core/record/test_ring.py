"""What is written into a ring is what others read, also beside them."""

from __future__ import annotations

import os
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.core.base.errors import DataError
from plait.core.base.process import process_state
from plait.core.record import ring as ring_format
from plait.core.record.ring import HEADER, RECORD, RecordKind, Ring, call_of, read_ring, signature_of
from plait.core.record.ring_writer import this_process
from plait.core.step.segments import Collective
from tests.core.record.rings import ATTENTION, fill, steps, writer


def test_a_record_says_what_was_done_with_whom_and_how_far_it_is(tmp_path: Path) -> None:
    ring = writer(tmp_path / "rank-00000.ring")
    group = ring.group([2, 0], "tp")
    again = ring.group([0, 2], "dp")
    sent = signature_of("all_reduce", "bfloat16", 4096)
    number = ring.begin(
        RecordKind.COLLECTIVE, ring.name("attn3.F0", ATTENTION), 7, 100, size=8192, group=again, sequence=3,
        call=call_of("all_reduce", "bfloat16"), signature=sent,
    )  # fmt: skip
    message = ring.begin(RecordKind.SEND, ring.name("h"), 7, 110, peer=2, group=group)
    [first, second] = read_ring(tmp_path / "rank-00000.ring").open()
    assert (first.name.text, first.name.place, first.step, first.bytes) == ("attn3.F0", ATTENTION, 7, 8192)
    assert (first.verb, first.dtype, first.signature, first.sequence) == ("all_reduce", "bfloat16", sent, 3)
    assert first.group and (first.group.ranks, first.group.ordinal, first.group.label) == ((0, 2), 1, "dp")
    assert second.group and (second.group.ordinal, second.peer, second.name.place) == (0, 2, None)
    ring.start(number, 120)
    ring.end(number, 130)
    ring.end(message, 140, failed=True)
    assert read_ring(tmp_path / "rank-00000.ring").table["number"].tolist() == [number, message] == [1, 2]
    first, second = read_ring(tmp_path / "rank-00000.ring").records()
    assert (first.enqueued, first.started, first.ended, first.failed) == (100, 120, 130, False)
    assert (second.ended, second.failed, second.open) == (140, True, False)


def test_the_header_says_who_writes_and_at_which_step_it_is(tmp_path: Path) -> None:
    path = tmp_path / "rank-00003.ring"
    ring = writer(path, rank=3)
    ring.step(5, 99)
    header = read_ring(path).header
    assert (header.rank, header.world, header.plan, header.pid) == (3, 4, "feed", os.getpid())
    assert (header.step, header.stepped, header.closed) == (5, 99, 0)
    assert abs(time.time_ns() - time.monotonic_ns() - (header.wall - header.monotonic)) < 1e9
    ring.close()
    assert read_ring(path).header.closed > header.monotonic


@given(st.integers(0, 70), st.sampled_from([1, 2, 16, 32]))
@settings(max_examples=40, deadline=None)
def test_the_last_records_stay(tmp_path_factory: pytest.TempPathFactory, total: int, capacity: int) -> None:
    path = tmp_path_factory.mktemp("rings") / "rank-00000.ring"
    fill(writer(path, capacity=capacity), range(total))
    assert steps(read_ring(path)) == list(range(max(0, total - capacity), total))


def test_an_end_that_comes_after_the_ring_has_gone_round_changes_no_other_record(tmp_path: Path) -> None:
    path = tmp_path / "rank-00000.ring"
    ring = writer(path)
    number = ring.begin(RecordKind.COLLECTIVE, 0, 0, 1)
    fill(ring, range(1, 17))
    ring.end(number, 12345)
    assert steps(read_ring(path)) == list(range(1, 17))
    assert 12345 not in read_ring(path).table["ended"]


def renumbered(path: Path, by: int) -> None:
    """The same records as if so many had come before: in other places, and of the number the last
    32 bits."""
    data, size = path.read_bytes(), RECORD.size
    capacity = (len(data) - HEADER) // size
    places = [b"".join([data[HEADER + at * size :][:size]]) for at in range(capacity)]
    moved = bytearray(data)
    for at, record in enumerate(places):
        if opened := int.from_bytes(record[:4], "little"):
            word = ((opened + by) % (1 << 32)).to_bytes(4, "little")
            place = HEADER + (at + by) % capacity * size
            moved[place : place + size] = word + record[4:-4] + word
    path.write_bytes(moved)


@pytest.mark.parametrize("by", [0, 16, (1 << 32) - 16, (1 << 32) - 5, (1 << 32) - 1, (1 << 31) - 5])
def test_numbers_of_more_than_32_bits_go_round(tmp_path: Path, by: int) -> None:
    path = tmp_path / "rank-00000.ring"
    fill(writer(path), range(16))
    renumbered(path, by)
    found = read_ring(path)
    assert (steps(found), found.torn) == (list(range(16)), 0)
    first = found.table["number"][0]
    assert found.table["number"].tolist() == list(range(first, first + 16))
    assert first % 16 == (1 + by) % 16


def test_a_ring_that_is_replaced_stays_whole_for_who_reads_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "rank-00000.ring"
    old = writer(path)
    fill(old, range(3))
    with open(path, "rb") as reading:
        fill(writer(path), range(100, 105))
        fill(old, range(3, 6))
        assert reading.read()[:8] == ring_format.MAGIC
    assert steps(read_ring(path)) == list(range(100, 105))


def test_threads_write_side_by_side(tmp_path: Path) -> None:
    path = tmp_path / "rank-00000.ring"
    ring = writer(path, capacity=4096)

    def write(thread: int) -> None:
        for i in range(500):
            name = ring.name(f"{thread}.{i % 50}")
            ring.end(ring.begin(RecordKind.COMPUTE, name, thread * 1000 + i, i), i + 1)

    threads = [threading.Thread(target=write, args=(t,)) for t in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = read_ring(path)
    assert sorted(steps(found)) == [t * 1000 + i for t in range(4) for i in range(500)] and not found.torn
    assert all(r.name.text == f"{r.step // 1000}.{r.step % 1000 % 50}" and r.ended for r in found.records())


WRITES = """
import sys
from pathlib import Path
from plait.core.record.ring import RecordKind
from plait.core.record.ring_writer import RingWriter, this_process
from plait.core.step.segments import Collective
ring = RingWriter(Path(sys.argv[1]), this_process(rank=0, world=1, capacity=256))
print("ready", flush=True)
i = 0
while True:
    number = ring.begin(RecordKind.COLLECTIVE, ring.name(f"op{i % 1000}"), i, i + 1, size=i, sequence=i & 0xFFFFFFFF)
    ring.start(number, i + 2)
    ring.end(number, i + 3)
    i += 1
"""


@contextmanager
def writing(path: Path) -> Generator[subprocess.Popen[bytes]]:
    """A process that writes a ring as fast as it can."""
    with subprocess.Popen([sys.executable, "-c", WRITES, str(path)], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout and process.stdout.readline() == b"ready\n"
            yield process
        finally:
            process.kill()


def consistent(ring: Ring) -> None:
    """Every record holds what one call wrote, and at most the newest of them is not over."""
    found = ring.records()
    assert found and not ring.problems
    for record in found:
        i = record.step
        assert (record.enqueued, record.bytes, record.sequence, record.name.text) == (i + 1, i, i, f"op{i % 1000}")
        assert record.number == i + 1 and record.started in (0, i + 2) and record.ended in (0, i + 3)
    assert [record.step for record in found if record.open] in ([], [found[-1].step])


@pytest.mark.system
@pytest.mark.parametrize("seed", range(2))
def test_a_writer_that_is_killed_leaves_a_ring_that_can_be_read(tmp_path: Path, seed: int) -> None:
    path = tmp_path / "rank-00000.ring"
    with writing(path) as process:
        time.sleep(random.Random(seed).uniform(0.001, 0.1))
        while len(read_ring(path).table) == 0:
            pass
    ring = read_ring(path)
    assert ring.torn <= 1 and ring.header.pid == process.pid and not ring.header.closed
    consistent(ring)


@pytest.mark.system
def test_readers_beside_a_writer_see_whole_records(tmp_path: Path) -> None:
    path = tmp_path / "rank-00000.ring"
    with writing(path):
        until = time.monotonic() + 0.5
        torn = list[int]()
        while time.monotonic() < until or len(torn) < 8:
            ring = read_ring(path)
            consistent_beside(ring)
            torn.append(ring.torn)
        assert statistics.median(torn) <= 1  # a reader that is interrupted may meet the writer twice


def consistent_beside(ring: Ring) -> None:
    """As ``consistent``; a slow reader may have seen several records before they were over."""
    for record in ring.records():
        i = record.step
        assert (record.enqueued, record.bytes, record.name.text) == (i + 1, i, f"op{i % 1000}")


def test_a_record_has_64_bytes() -> None:
    assert RECORD.size == 64
    assert (call_of("all_gather", "made_up") >> 4, len(ring_format.VERBS) <= 16, len(ring_format.DTYPES) <= 16) == (
        0, True, True,
    )  # fmt: skip
    assert set(get_args(Collective)) <= set(ring_format.VERBS)


def test_a_ring_is_a_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "rank-00000.ring")
    with pytest.raises(DataError, match="cannot be read as a ring: it is not a regular file"):
        read_ring(tmp_path / "rank-00000.ring")


def test_another_plan_of_a_rank_stands_in_its_ring(tmp_path: Path) -> None:
    path = tmp_path / "rank-00000.ring"
    ring = writer(path)
    ring.obeys("a" * 64 + "b")
    assert read_ring(path).header.plan == "a" * 64
    ring.obeys("beef")
    assert (read_ring(path).header.plan, ring.header.plan) == ("beef", "beef")


def test_a_writer_that_is_closed_holds_no_file(tmp_path: Path) -> None:
    path = tmp_path / "rank-00000.ring"
    ring = writer(path)

    def held() -> set[str]:
        links = [Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd")]
        return {os.readlink(link) for link in links if link.is_symlink()}

    names = str(path.with_suffix(".names"))
    assert names in held()
    ring.close()
    assert names not in held()
    before = path.with_suffix(".names").read_bytes()
    ring.name("later")  # goes nowhere
    ring.close()
    assert path.with_suffix(".names").read_bytes() == before


def test_a_writer_tells_its_own_records_that_are_still_there(tmp_path: Path) -> None:
    ring = writer(tmp_path / "rank-00000.ring")
    fill(ring, range(18))
    found = ring.rows(np.arange(1, 19))
    assert found["number"].tolist() == list(range(3, 19))  # the first two were overwritten
    assert found["step"].tolist() == list(range(2, 18))
    assert ring.rows(np.arange(5, 8))["step"].tolist() == [4, 5, 6]


def test_a_writer_is_told_from_another_process_with_its_number() -> None:
    state = process_state(os.getpid())
    assert state is not None
    header = this_process(rank=1, world=2, local_rank=1, attempt=3, plan="feed", capacity=32)
    assert (header.pid, header.process_started) == (os.getpid(), state.started)
    assert (header.rank, header.world, header.local_rank, header.attempt, header.plan) == (1, 2, 1, 3, "feed")
    assert header.capacity == 32
    assert (this_process(rank=0, world=1).local_rank, this_process(rank=0, world=1).attempt) == (0, 0)
