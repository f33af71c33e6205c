"""Who follows a ring while it is written sees every record once, as it is when it is taken."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.core.base.errors import DataError
from plait.core.record.ring import RECORD, UNSET, RecordKind
from plait.core.record.ring_follower import RingFollower
from plait.core.record.ring_writer import RingWriter, this_process


def ring(path: Path, capacity: int = 64, rank: int = 0) -> RingWriter:
    return RingWriter(path / "rank-00000.ring", this_process(rank=rank, world=1, capacity=capacity))


def follow(path: Path) -> RingFollower:
    return RingFollower(path / "rank-00000.ring")


def step(writer: RingWriter, number: int, at: int, count: int = 3) -> list[int]:
    """A step of some records, the last of which says that it is over."""
    name = writer.name("op")
    numbers = [writer.begin(RecordKind.COMPUTE, name, number, at + i, at + i, at + i + 1) for i in range(count)]
    return [*numbers, writer.begin(RecordKind.STEP, writer.name("step"), number, at, at, at + count)]


def test_steps_come_once_and_whole(tmp_path: Path) -> None:
    writer = ring(tmp_path)
    step(writer, 0, 100)
    follower = follow(tmp_path)
    assert follower.advance() == 4
    assert follower.steps == [0]
    step(writer, 1, 200)
    assert (follower.advance(), follower.steps) == (4, [0, 1])
    taken = follower.take(0, 0)
    assert taken["started"].tolist() == [100, 101, 102, 100]
    assert (follower.advance(), follower.steps) == (0, [1])
    assert {name.text for name in follower.names.values()} == {"op", "step"}


def test_what_ends_later_is_taken_as_it_ended(tmp_path: Path) -> None:
    writer = ring(tmp_path)
    late = writer.begin(RecordKind.JOB, writer.name("gather"), 0, 90, 90)
    never = writer.begin(RecordKind.JOB, writer.name("gather"), 0, 91, 91)
    step(writer, 0, 100)
    follower = follow(tmp_path)
    follower.advance()
    writer.end(late, 150)
    step(writer, 1, 200)
    follower.advance()
    assert follower.take(0, 0)["ended"].tolist() == [150, 101, 102, 103, 103]
    writer.end(never, 300)
    follower.advance()
    assert 0 not in follower.rows["step"], "a step that was taken does not come again"


@pytest.mark.parametrize("behind", [0, 3, 40])
def test_who_is_overtaken_says_what_was_lost(tmp_path: Path, behind: int) -> None:
    writer = ring(tmp_path)
    follower = follow(tmp_path)
    for number in range(behind):
        step(writer, number, 100 * number)
        follower.advance()
        follower.take(0, number)
    for number in range(behind, behind + 100):
        step(writer, number, 100 * number)
    follower.advance()
    assert 300 <= follower.lost <= 400
    assert follower.steps[-1] == behind + 99
    assert len(follower.rows) == 400 - follower.lost


def test_what_was_only_timed_is_forgotten(tmp_path: Path) -> None:
    writer = ring(tmp_path)
    step(writer, 0, 100)
    writer.begin(RecordKind.STEP, writer.name("forget"), UNSET, 150, 150, 150)
    step(writer, 0, 200)
    follower = follow(tmp_path)
    follower.advance()
    assert follower.rows["started"].tolist() == [200, 201, 202, 200]


def test_a_ring_of_a_new_start_has_the_name_of_the_old(tmp_path: Path) -> None:
    writer = ring(tmp_path)
    step(writer, 0, 100)
    follower = follow(tmp_path)
    assert not follower.replaced
    ring(tmp_path)
    assert follower.replaced
    assert follower.advance() == 4, "what the old one has is still there"


def test_files_that_are_no_rings(tmp_path: Path) -> None:
    path = tmp_path / "rank-00000.ring"
    with pytest.raises(DataError, match="No such file"):
        follow(tmp_path)
    path.write_bytes(b"nothing")
    with pytest.raises(DataError, match="not a ring file"):
        follow(tmp_path)
    held = [link.readlink() for name in os.listdir("/proc/self/fd")
            if (link := Path("/proc/self/fd") / name).is_symlink()]  # fmt: skip
    assert path not in held
    ring(tmp_path)
    path.write_bytes(path.read_bytes()[:-64])
    with pytest.raises(DataError, match="cut off"):
        follow(tmp_path)


def test_a_ring_that_shrinks_under_its_reader(tmp_path: Path) -> None:
    writer = ring(tmp_path)
    follower = follow(tmp_path)
    step(writer, 0, 100)
    with open(tmp_path / "rank-00000.ring", "rb+") as file:
        file.truncate(4096 + 2 * RECORD.size)
    assert follower.advance() == 2
    with open(tmp_path / "rank-00000.ring", "rb+") as file:
        file.truncate(100)
    with pytest.raises(DataError):
        follower.advance()


@given(st.lists(st.tuples(st.integers(1, 9), st.booleans()), min_size=1, max_size=40))
@settings(max_examples=60, deadline=None)
def test_followed_in_any_rhythm_every_record_comes_once(
    tmp_path_factory: pytest.TempPathFactory, rhythm: list[tuple[int, bool]]
) -> None:
    folder = tmp_path_factory.mktemp("ring")
    writer, seen = ring(folder, capacity=256), list[int]()
    follower = follow(folder)
    last = -1
    for number, (count, look) in enumerate(rhythm):
        step(writer, number, 100 * number + 1, count)
        last = number
        if look:
            follower.advance()
            seen += follower.take(0, number)["number"].tolist()
    follower.advance()
    seen += follower.take(0, last)["number"].tolist()
    assert seen == list(range(1, sum(count + 1 for count, _ in rhythm) + 1)) if not follower.lost else True


def test_a_file_that_cannot_be_read_any_more_is_named(tmp_path: Path) -> None:
    ring(tmp_path)
    follower = follow(tmp_path)
    follower.close()
    with pytest.raises(DataError, match=r"rank-00000\.ring cannot be read: Bad file descriptor"):
        follower.advance()


def test_what_is_open_anywhere_in_a_ring_is_looked_at_again(tmp_path: Path) -> None:
    writer = ring(tmp_path)
    step(writer, 0, 100)
    late = [writer.begin(RecordKind.JOB, writer.name("gather"), 1, 150 + i, 150 + i) for i in range(3)]
    step(writer, 1, 200)
    follower = follow(tmp_path)
    assert follower.advance() == 11
    writer.end(late[1], 400)
    assert follower.advance() == 0
    assert follower.rows["number"].tolist() == list(range(1, 12))
    assert follower.rows["ended"][follower.rows["started"] == 151].tolist() == [400]
    writer.end(late[0], 500)
    writer.end(late[2], 600)
    follower.advance()
    assert follower.rows["number"].tolist() == list(range(1, 12))
    assert follower.take(0, 1)["ended"].tolist()[4:7] == [500, 400, 600]


@pytest.mark.parametrize("written", [0, RECORD.size - 4])
def test_a_record_that_is_half_written_is_not_taken(tmp_path: Path, written: int) -> None:
    """Neither when it is new nor when it is looked at again."""
    writer = ring(tmp_path)
    step(writer, 0, 100)
    number = writer.begin(RecordKind.COMPUTE, writer.name("op"), 0, 107, 107, 108)
    missing = slice(4096 + (number - 1) * RECORD.size + written, 4096 + number * RECORD.size)
    whole, writer._map[missing] = writer._map[missing], bytes(RECORD.size - written)
    follower = follow(tmp_path)
    follower.advance()
    assert follower.rows["number"].tolist() == [1, 2, 3, 4]
    step(writer, 0, 200)
    for _ in range(2):
        follower.advance()
        assert follower.rows["number"].tolist() == [1, 2, 3, 4, 6, 7, 8, 9]
    writer._map[missing] = whole
    follower.advance()
    assert follower.rows["number"].tolist() == list(range(1, 10))


def test_no_more_is_kept_than_is_asked_for(tmp_path: Path) -> None:
    writer = ring(tmp_path)
    step(writer, 0, 100)
    follower = follow(tmp_path)
    follower.advance()
    follower.keep(2)
    assert follower.rows["number"].tolist() == [3, 4]


def test_what_has_not_ended_is_not_taken_and_not_kept(tmp_path: Path) -> None:
    writer = ring(tmp_path)
    step(writer, 0, 100)
    writer.begin(RecordKind.JOB, writer.name("gather"), 1, 150, 150)
    step(writer, 1, 200)
    step(writer, 2, 300)
    follower = follow(tmp_path)
    follower.advance()
    assert follower.steps == [0, 1, 2]
    assert follower.take(1, 1)["started"].tolist() == [200, 201, 202, 200]
    assert follower.rows["step"].tolist() == [2] * 4
