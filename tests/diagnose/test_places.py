"""Where a rank stands, in words."""

from __future__ import annotations

import pytest

from plait.core.parallel.layout import Layout
from plait.diagnose.places import place_of
from plait.diagnose.recording import grid_of, unknown_grid


@pytest.mark.parametrize(
    ("rank", "words"), [(0, "rank 0 (stage 0, dp 0) on a"), (3, "rank 3 (stage 1, dp 1)"), (4, "rank 4")]
)
def test_the_coordinates_on_which_ranks_differ(rank: int, words: str) -> None:
    assert place_of(grid_of(Layout.of(pp=2, dp=2), ["a"]), rank) == words


def test_all_coordinates_and_none() -> None:
    assert place_of(grid_of(Layout.of(pp=2, dp=2, tp=2)), 7) == "rank 7 (stage 1, dp 1, tp 1)"
    assert place_of(grid_of(Layout.of(dp=1), ["h"]), 0) == "rank 0 on h"
    assert place_of(None, 5) == "rank 5"
    assert place_of(unknown_grid([3, 5], {5: "h"}), 5) == "rank 5 (dp 5) on h"
