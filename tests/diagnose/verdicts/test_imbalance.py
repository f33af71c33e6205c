"""Stages and micro-batches that are not equal, in numbers."""

from __future__ import annotations

import pytest

from plait.core.parallel.layout import Layout
from plait.diagnose.measured.recording import Recording
from plait.diagnose.verdicts.bottlenecks import batches_of, stages_of
from tests.support.recordings.made import recording_of, spans_of

Row = tuple[int, int, str, int, float]


def recording(dp: int, pp: int, rows: list[Row]) -> Recording:
    """(step, rank, direction, micro-batch, seconds) of computation, and a wait of 9 s beside
    each."""
    spans = spans_of(*(
        {"kind": kind, "step": step, "rank": rank, "direction": way, "slice": batch,
         "end": seconds if kind == "compute" else 9.0}
        for step, rank, way, batch, seconds in rows for kind in ("compute", "wait")
    ))  # fmt: skip
    return recording_of(spans, Layout.of(pp=pp, dp=dp))


def test_the_heaviest_stage_against_the_mean_of_the_others() -> None:
    seconds = [1.0, 2.0, 4.0, 5.0, 3.0, 3.0]
    rows = [
        (step, rank, "forward", 0, s * (10 if step == 0 else 1)) for step in range(3) for rank, s in enumerate(seconds)
    ]
    found = stages_of(recording(2, 3, rows))
    assert found is not None, "without the first step"
    assert (found.seconds, found.heaviest, found.ratio) == ((1.5, 4.5, 3.0), 1, 2.0)


def test_one_stage_and_stages_that_compute_nothing() -> None:
    assert stages_of(recording(2, 1, [(1, 0, "forward", 0, 1.0), (1, 1, "forward", 0, 1.0)])) is None
    found = stages_of(recording(1, 2, [(1, 0, "forward", 0, 1.0), (1, 1, "forward", 0, 0.0)]))
    assert found is not None and found.ratio == 1.0


def test_micro_batches_that_differ() -> None:
    """Each twice as long in backward; of three steps rank 1 is the slowest in two."""
    rows: list[Row] = []
    for step in range(4):
        for rank in range(2):
            times = 1.2 if rank == (step != 3) else 1.0
            for batch, length in enumerate((1.0, 2.0, 3.0) if step else (1.0, 9.0, 1.0)):
                rows += [
                    (step, rank, "forward", batch, length * times),
                    (step, rank, "backward", batch, 2 * length * times),
                ]
    found = batches_of(recording(2, 1, rows))
    assert found is not None
    assert found.spread == pytest.approx(0.5), "standard deviation 1 of 1, 2 and 3, whose mean is 2"
    assert found.alike == pytest.approx(1.0)
    assert found.turns == pytest.approx(1 / 3)
    assert found.longer == pytest.approx(1.2 / 1.1 - 1)


def test_forward_and_backward_of_which_one_is_long_when_the_other_is_short() -> None:
    rows: list[Row] = []
    for rank in range(2):
        for batch in range(3):
            rows += [(1, rank, "forward", batch, 1.0 + batch), (1, rank, "backward", batch, 3.0 - batch)]
    found = batches_of(recording(2, 1, rows))
    assert found is not None and found.alike == pytest.approx(-1.0)
    assert (found.turns, found.longer) == (0.0, 0.0)


def test_equal_micro_batches_tell_no_correlation() -> None:
    rows = [(1, rank, way, batch, 1.0) for rank in range(2) for way in ("forward", "backward") for batch in range(3)]
    found = batches_of(recording(2, 1, rows))
    assert found is not None and (found.spread, found.alike) == (0.0, 0.0)


def test_where_there_is_too_little_to_compare() -> None:
    rows = [(1, rank, way, 0, 1.0) for rank in range(2) for way in ("forward", "backward")]
    assert batches_of(recording(2, 1, rows)) is None, "two pairs"
    more = [(1, 0, way, batch, 1.0) for way in ("forward", "backward") for batch in range(4)]
    assert batches_of(recording(1, 1, more)) is None, "nobody beside"
    first = [(0, *row[1:]) for row in [*rows, *more]]
    assert batches_of(recording(2, 1, first)) is None, "only a run's first step"
    whole = [(1, rank, way, -1, 1.0 + rank) for rank in range(2) for way in ("forward", "backward")] * 2
    assert batches_of(recording(2, 1, whole)) is None, "ops of no micro-batch"


def test_three_pairs_tell_and_one_micro_batch_each_does_not_spread() -> None:
    ways = ("forward", "backward")
    rows = [(1, 0, way, batch, 1.0 + batch) for way in ways for batch in range(3)] + [(1, 1, "forward", -1, 9.0)]
    found = batches_of(recording(2, 1, rows))
    assert found is not None and (found.alike, found.spread) == (pytest.approx(1.0), pytest.approx(0.5))
    alone = [(1, rank, way, 0, 1.0 + rank) for rank in range(3) for way in ways]
    found = batches_of(recording(3, 1, alone))
    assert found is not None and (found.spread, found.longer) == (0.0, 0.5)
