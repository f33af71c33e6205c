"""Problems for tests."""

from __future__ import annotations

from hypothesis import strategies as st

from plait.place.solve.problem import Problem


@st.composite
def problems(draw: st.DrawFn, rows: int = 4, columns: int = 3, pods: int = 4) -> Problem:
    """Small ones that have room."""
    height, width, count = draw(st.integers(1, rows)), draw(st.integers(1, columns)), draw(st.integers(1, pods))
    free = draw(st.lists(st.integers(0, height * width), min_size=count, max_size=count))
    free[0] += max(0, height * width - sum(free))
    alpha = draw(st.sampled_from([0.0, 0.1, 0.3, 0.5, 0.7, 1.0]))
    return Problem.plain(height, width, free, alpha=alpha)
