"""The collector stands still, and runs again as before."""

from __future__ import annotations

import gc

import pytest

from plait.core.base.uncollected import uncollected


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
