"""The collector stands still, and runs again as before."""

from __future__ import annotations

import gc

import pytest

from plait.core.base.process import MANY_OBJECTS, uncollected


@pytest.mark.parametrize("ran", [True, False])
def test_the_collector_is_afterwards_as_it_was(ran: bool) -> None:
    before = gc.isenabled()
    try:
        (gc.enable if ran else gc.disable)()
        with uncollected():
            assert not gc.isenabled()
        assert gc.isenabled() == ran
    finally:
        (gc.enable if before else gc.disable)()


def test_what_it_decorates_is_a_function_as_before() -> None:
    @uncollected()
    def alone() -> bool:
        return gc.isenabled()

    assert [alone(), alone()] == [False, False]


def test_much_that_was_made_is_not_gone_through_at_once() -> None:
    collected = list[str]()

    def note(phase: str, _: dict[str, int]) -> None:
        collected.append(phase)

    gc.callbacks.append(note)
    try:
        with uncollected():
            made = [[number] for number in range(2 * MANY_OBJECTS)]
        more = [[number] for number in range(100)]
    finally:
        gc.callbacks.remove(note)
    assert len(made) == 2 * MANY_OBJECTS and len(more) == 100 and not collected
    assert any(each is made[-1] for each in gc.get_objects(generation=2))
