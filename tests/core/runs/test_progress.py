"""How far ranks are, by what they say."""

from __future__ import annotations

from plait.core.runs.progress import Progress


def test_what_is_being_written_is_told_with_the_newest_step() -> None:
    one = Progress(2)
    for rank, step, writing in ((0, 5, 0), (1, 5, 0), (0, 5, 5), (1, 5, 5), (0, 6, 5), (1, 5, 0)):
        one.heard(rank, step, 1.0, writing)
    assert (one.step, one.writing) == (6, 5)
    one.heard(1, 6, 2.0, 0)
    assert one.writing == 0


def test_all_must_train_and_all_must_have_stepped() -> None:
    told: list[Progress] = []
    one = Progress(2, stepped=told.append)
    one.began = 0.0
    one.heard(0, -1, 1.0)
    assert (one.start, one.step, one.training) == (-1, -1, None)
    one.heard(0, 8, 2.0)
    assert one.training is None
    one.heard(0, 9, 3.0)  # rank 1's words come late
    one.heard(1, 8, 4.0)
    assert (one.training, one.first_step) == (4.0, None)
    one.heard(1, 9, 5.0)
    one.heard(1, 9, 6.0)
    one.heard(0, 10, 7.0)
    assert (one.first_step, one.start, one.step, one.steps) == (5.0, 8, 10, 2)
    assert told == [one]
    assert one.unnoticed(9.0) == 2.0


def test_a_process_that_died_was_there_a_look_before() -> None:
    one = Progress(1)
    one.began = 0.0
    one.heard(0, 0, 1.0)
    one.died(50.0)
    assert one.unnoticed(50.5) == 0.5
