"""How far ranks are, by what they say."""

from __future__ import annotations

from plait.launch.progress import Progress


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
