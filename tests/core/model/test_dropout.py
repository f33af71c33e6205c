"""The blocks in which attention with dropout is computed, and what they take."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.core.model.dropout import LEAST, MOST, ON_CPU, ON_GPU, Blocks

blocks = st.builds(Blocks, st.integers(1, 40), st.integers(1, 8), st.integers(1, 5000), st.booleans())


@given(blocks)
def test_blocks_cover_rows_and_queries_once(found: Blocks) -> None:
    every = list(found)
    rows = sorted({block.rows for block in every})
    queries = sorted({block.queries for block in every})
    assert len(every) == len(rows) * len(queries)
    for ranges, whole in ((rows, found.rows), (queries, found.sequence)):
        assert [stop for _, stop in ranges] == [*(start for start, _ in ranges[1:]), whole]
        assert ranges[0][0] == 0
    assert every == sorted(every)


@given(blocks)
def test_weights_are_those_of_the_largest_block(found: Blocks) -> None:
    """Of a block's queries the last sees all keys up to itself, and the others as many are kept."""
    sizes = [(stop - start) * found.group * (last - first) * last for (start, stop), (first, last) in found]
    assert found.weights == max(sizes)


@pytest.mark.parametrize(
    ("one", "queries", "rows"),
    [
        (Blocks(64, 1, 8, gpu=False), 8, 64),  # all at once
        (Blocks(64, 1, 512, gpu=False), 256, 1),
        (Blocks(64, 1, 1024, gpu=False), 128, 1),
        (Blocks(64, 2, 1024, gpu=False), 64, 1),
        (Blocks(64, 1, 1 << 16, gpu=False), LEAST, 1),
        (Blocks(64, 1, 1024, gpu=True), MOST, 16),
        (Blocks(4, 1, 1024, gpu=True), MOST, 4),
        (Blocks(64, 1, 1 << 20, gpu=True), LEAST, 1),
    ],
)
def test_a_block_holds_about_as_many_weights_as_the_device_likes(one: Blocks, queries: int, rows: int) -> None:
    assert (one.queries, one.rows_at_once) == (queries, rows)
    if queries > LEAST:
        assert one.weights <= (ON_GPU if one.gpu else ON_CPU)
