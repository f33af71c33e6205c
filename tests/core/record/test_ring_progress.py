"""How a rank gets on by itself, by rings with times that are made up."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.core.record.ring import UNSET, RecordKind, read_ring
from plait.core.record.ring_progress import INDEPENDENT_KINDS, OWN_END_KINDS, WORK_KINDS, RingProgress, progress_of
from plait.core.record.ring_writer import RingWriter, this_process
from plait.core.runs.evidence import ring_path

S = 10**9
Thing = tuple[RecordKind, int, int]
"""kind, when it began, when it ended (0: it has not)."""


def of(folder: Path, things: list[Thing], now: int, *, steps: dict[int, int] | None = None) -> RingProgress:
    """What a ring with these records tells. steps: of STEP records, by their place."""
    (folder / "rings").mkdir(exist_ok=True)
    ring = RingWriter(ring_path(folder, 0), this_process(rank=0, world=2, capacity=256))
    name = ring.name("x")
    for place, (kind, began, ended) in enumerate(things):
        ring.begin(kind, name, (steps or {}).get(place, 0), began, began, ended)
    return progress_of(read_ring(ring_path(folder, 0)), now)


def test_inside_a_piece_of_work(tmp_path: Path) -> None:
    done: Thing = (RecordKind.COMPUTE, 1 * S, 2 * S)
    assert of(tmp_path, [done, (RecordKind.COMPUTE, 2 * S, 0)], 9 * S) == RingProgress(2 * S, 0.0, inside=True)
    assert not of(tmp_path, [done, (RecordKind.WAIT, 2 * S, 0)], 9 * S).inside
    assert not of(
        tmp_path, [(RecordKind.COMPUTE, 2 * S, 0), (RecordKind.DATA, 3 * S, 4 * S)], 9 * S
    ).inside  # of a failure
    assert of(tmp_path, [(RecordKind.COLLECTIVE, 2 * S, 0)], 9 * S) == RingProgress(2 * S, 0.0, inside=False)


def test_the_longest_leaves_out_the_first_step_and_what_it_waited(tmp_path: Path) -> None:
    things: list[Thing] = [
        (RecordKind.COMPUTE, 1 * S, 31 * S),  # 30 s, in the first step
        (RecordKind.STEP, 1 * S, 31 * S),
        (RecordKind.COMPUTE, 32 * S, 35 * S),  # 3 s
        (RecordKind.WAIT, 35 * S, 55 * S),  # 20 s, of others
        (RecordKind.COLLECTIVE, 55 * S, 75 * S),
        (RecordKind.STEP, 31 * S, 76 * S),  # 21 s after the collective was begun, which it waited for
        (RecordKind.CHECKPOINT, 76 * S, 99 * S),
    ]
    assert of(tmp_path, things, 100 * S) == RingProgress(99 * S, 3.0, inside=False)


def test_what_belongs_to_no_step_ends_none(tmp_path: Path) -> None:
    """Steps that only measure."""
    things: list[Thing] = [(RecordKind.STEP, 1 * S, 2 * S), (RecordKind.COMPUTE, 2 * S, 9 * S)]
    assert of(tmp_path, things, 10 * S, steps={0: UNSET}).longest == 0.0
    assert of(tmp_path, things, 10 * S).longest == 7.0


KINDS = st.sampled_from(
    [
        RecordKind.COMPUTE,
        RecordKind.WAIT,
        RecordKind.DATA,
        RecordKind.COLLECTIVE,
        RecordKind.SEND,
        RecordKind.CHECKPOINT,
        RecordKind.STEP,
    ]
)
TIMES = st.integers(1, 200)


@given(st.lists(st.tuples(KINDS, TIMES, TIMES, st.booleans()), max_size=40), TIMES)
def test_as_counted_one_by_one(
    tmp_path_factory: pytest.TempPathFactory, drawn: list[tuple[RecordKind, int, int, bool]], now: int
) -> None:
    things: list[Thing] = [
        (kind, a * S, (a + b) * S if over or kind == RecordKind.STEP else 0) for kind, a, b, over in drawn
    ]
    found = of(tmp_path_factory.mktemp("run"), things, now * S)
    moments = [(began, kind in INDEPENDENT_KINDS) for kind, began, _ in things]
    moments += [(ended, True) for kind, _, ended in things if ended and kind in OWN_END_KINDS]
    known = sorted((at, not alone) for at, alone in moments if at <= now * S)
    assert found.at == max((at for at, _ in known), default=0)
    first = next((ended for kind, _, ended in things if kind == RecordKind.STEP), None)
    if first is None or first > now * S:
        assert found.longest == 0.0
    else:
        gaps = [b - a for (a, waits), (b, _) in pairwise(known) if a >= first and not waits]
        assert found.longest == max(gaps, default=0) / S
    own = [thing for thing in things if thing[0] in OWN_END_KINDS][-1:]
    assert found.inside == any(kind in WORK_KINDS and not ended for kind, _, ended in own)


def test_work_that_has_not_begun_is_not_what_a_rank_is_inside(tmp_path: Path) -> None:
    path = tmp_path / "rank-00000.ring"
    ring = RingWriter(path, this_process(rank=0, world=2, capacity=16))
    ring.begin(RecordKind.COMPUTE, ring.name("F0"), 0, 5, 0)
    assert not progress_of(read_ring(path), 100).inside
    ring.begin(RecordKind.COMPUTE, ring.name("F0"), 0, 6, 6)
    assert progress_of(read_ring(path), 100).inside


def test_a_step_that_begins_is_a_sign_of_life(tmp_path: Path) -> None:
    path = tmp_path / "rank-00000.ring"
    ring = RingWriter(path, this_process(rank=0, world=2, capacity=16))
    ring.begin(RecordKind.COMPUTE, ring.name("F0"), 0, 5, 5, 6)
    ring.step(3, 50)
    assert progress_of(read_ring(path), 100).at == 50
    assert progress_of(read_ring(path), 49).at == 6  # later than now: damage
