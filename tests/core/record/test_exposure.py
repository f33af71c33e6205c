"""What is exposed and what is hidden: against sets of moments, and case by case."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.core.record.exposure import AXES, BEGINS, BUSY, NEITHER, UNDER_WAY, WAIT, Exposure, exposures, gaps

TP, CP, DP = (AXES.index(axis) for axis in ("tp", "cp", "dp"))


def found(*spans: tuple[int, int, int, float, float], by_axis: bool = True) -> Any:
    """[lanes, axes, (total, exposed)] of spans (lane, role, axis, start, end)."""
    lanes, roles, axes, starts, ends = (np.array(column) for column in zip(*spans, strict=True))
    return exposures(lanes, roles, axes if by_axis else None, starts, ends)


def one(*spans: tuple[int, float, float]) -> Exposure:
    """Exposure of a rank with one axis; spans: (role, start, end)."""
    return Exposure(*found(*((0, role, TP, start, end) for role, start, end in spans))[0, 0])


@pytest.mark.parametrize(
    ("spans", "total", "exposed"),
    [
        ([(UNDER_WAY, 1, 4), (WAIT, 0, 6)], 6, 6),  # until it begins, and until the rank is woken
        ([(UNDER_WAY, 0, 2), (BUSY, 0, 2), (WAIT, 1, 2)], 2, 0),  # computes after all, as of two streams one may
        ([(UNDER_WAY, 3, 2)], 0, 0),  # ends before it begins
        ([(UNDER_WAY, -9, 4), (BEGINS, 0, 1), (BUSY, 1, 3)], 4, 1),  # what lies before the step is of none
        ([(UNDER_WAY, -9, -1), (BEGINS, 0, 1)], 0, 0),
    ],
)
def test_one_axis(spans: list[tuple[int, float, float]], total: float, exposed: float) -> None:
    assert one(*spans) == (total, exposed)


def test_nothing_is_of_no_lane() -> None:
    nothing = np.array([], np.int64)
    assert exposures(nothing, nothing, None, nothing, nothing).shape == (0, 1, 2)


spans = st.lists(
    st.tuples(
        st.integers(0, 2), st.sampled_from([UNDER_WAY, WAIT, BUSY, NEITHER, BEGINS]), st.sampled_from([TP, CP, DP]),
        st.integers(0, 12), st.integers(0, 6),
    ).map(lambda row: (*row[:4], row[3] + row[4])),
    min_size=1, max_size=12,
)  # fmt: skip


@given(spans)
def test_it_is_what_sets_of_moments_say(rows: list[tuple[int, int, int, int, int]]) -> None:
    told = found(*rows)
    for lane in range(told.shape[0]):
        begin = min((start for of, role, _, start, _ in rows if (of, role) == (lane, BEGINS)), default=0)

        def moments(*roles: int, axis: int | None = None, lane: int = lane, begin: int = begin) -> set[int]:
            own = [r for r in rows if r[0] == lane and r[1] in roles and axis in (None, r[2])]
            found = {moment for *_, start, end in own for moment in range(start, end)}
            return {moment for moment in found if moment >= begin} if roles[0] in (UNDER_WAY, WAIT) else found

        busy, waits, taken = moments(BUSY, BEGINS), moments(WAIT), set[int]()
        for axis in range(told.shape[1]):
            moving, waited = moments(UNDER_WAY, axis=axis), moments(WAIT, axis=axis)
            still = (waited - busy | moving - busy - waits) - taken
            taken |= still
            assert told[lane, axis].tolist() == [len(moving | waited), len(still)]


@given(spans)
def test_gaps_are_what_moments_say(rows: list[tuple[int, int, int, int, int]]) -> None:
    lanes, _, _, starts, ends = (np.array(column) for column in zip(*rows, strict=True))
    count, seconds = gaps(lanes, starts, ends)
    for lane in range(len(count)):
        own = sorted((start, end) for of, *_, start, end in rows if of == lane)
        moments = {moment for start, end in own for moment in range(start, end)}
        first, last = (own[0][0], max(start for start, _ in own)) if own else (0, 0)
        idle = [moment for moment in range(first, last) if moment not in moments]
        assert seconds[lane] == len(idle)
        ends_so_far = [max(end for _, end in own[: n + 1]) for n in range(len(own))]
        assert count[lane] == sum(own[n + 1][0] > ends_so_far[n] for n in range(len(own) - 1))


@given(spans)
def test_axes_add_up_to_all_that_is_exposed(rows: list[tuple[int, int, int, int, int]]) -> None:
    together, apart = found(*rows, by_axis=False), found(*rows)
    assert together[:, 0, 1].tolist() == apart[:, :, 1].sum(axis=1).tolist()
    assert (together[:, 0, 0] >= apart[:, :, 0].max(axis=1)).all()
    assert (apart[:, :, 1] <= apart[:, :, 0]).all()


def test_times_in_ns_of_a_clock_stay_exact() -> None:
    now = 1_700_000_000_000_000_001
    assert one((UNDER_WAY, now, now + 10), (WAIT, now + 7, now + 11), (BUSY, now, now + 7)) == (11, 4)


def test_hidden_is_what_is_not_exposed() -> None:
    assert (Exposure(4.0, 1.0).hidden, Exposure(4.0, 1.0).fraction) == (3.0, 0.75)
    assert Exposure(0.0, 0.0).fraction is None and Exposure(1.0, 1.0 + 1e-12).fraction == 0.0
