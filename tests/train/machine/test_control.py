"""What a rank says of itself."""

from __future__ import annotations

from plait.train.machine.control import Control


def test_what_is_done_for_the_first_time_is_told() -> None:
    control = Control()
    said = [
        ("resuming", True), ("step 1", True), ("step 2", False), ("step 3", False),
        ("evaluating after step 3", True), ("step 4", True), ("step 5", False), ("evaluating after step 5", False),
        ("step 6", False), ("saving after step 6", True), ("step 7", True), ("step 8", False),
        ("saving after step 8", False), ("step 9", False),
    ]  # fmt: skip
    for what, first in said:
        control.doing(what)
        assert (what, control.first) == (what, first)


def test_what_is_said_twice_is_still_the_first() -> None:
    control = Control()
    control.doing("measuring")
    control.doing("measuring")
    assert control.first
