"""Predicted beside measured."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.core.base.errors import DataError
from plait.core.record.timeline import Hidden, Span, SpanKind, Timeline, hidden
from plait.diagnose.compare import Row, Unmatched, compare, hidden_by_lane, hidden_in
from plait.diagnose.predicted import table_of


def span(kind: SpanKind, start: float, end: float, name: str = "attn0.R0", *, step: int = 1, rank: int = 0) -> Span:
    return Span(step, rank, kind, name, 0, name[:4], 0, 0, "forward", start, end)


def test_rows_are_a_ranks_mean_step_of_what_both_have() -> None:
    predicted = Timeline((
        span("compute", 0, 2), span("comm", 2, 5), span("wait", 4, 5), span("compute", 5, 6, "mlp0.F0"),
        span("compute", 0, 2, rank=1), span("compute", 0, 9, step=7),
    ))  # fmt: skip
    measured = Timeline((
        span("compute", 10, 13), span("comm", 13, 17), span("wait", 14, 17), span("comm", 17, 19, "gath 0"),
        span("compute", 0, 3, rank=1), span("compute", 0, 99, step=8),
    ))  # fmt: skip
    found = compare(table_of(predicted), table_of(measured))
    assert (found.steps, found.ranks) == ((1,), (0, 1))
    assert found.rows == (
        Row("compute", "attn", "forward", 2.0, 3.0),
        Row("comm", "attn", "forward", 1.5, 2.0),
        Row("wait", "attn", "forward", 0.5, 1.5),
    )
    assert [row.ratio for row in found.rows] == [1.5, 2 / 1.5, 3.0]
    assert found.never_seen == (Unmatched("compute", "mlp0", "forward", 0.5, 0.5, "mlp0.F0"),)
    assert found.not_planned == (Unmatched("comm", "gath", "forward", 0.5, 1.0, "gath 0"),)
    assert (found.predicted, found.measured) == (Hidden(1.5, 0.5), Hidden(3.0, 1.5))


def test_waiting_beyond_communication_is_told_apart() -> None:
    late = Timeline((span("comm", 0, 2), span("wait", 1, 6), span("comm", 7, 8, "gath 0"), span("comm", 0, 1, rank=1)))
    found = compare(table_of(late), table_of(late))
    assert found.measured == Hidden(2.0, 0.5, 2.0)
    assert found.measured == hidden_in(hidden_by_lane(table_of(late)), 2)


@given(st.lists(st.tuples(st.sampled_from(["comm", "wait"]), st.integers(0, 50), st.integers(0, 20)), max_size=12))
def test_columns_say_what_spans_say(found: list[tuple[SpanKind, int, int]]) -> None:
    spans = [span(kind, start, start + taken, f"attn{i}.R0") for i, (kind, start, taken) in enumerate(found)]
    told = hidden_in(hidden_by_lane(table_of(Timeline((*spans, span("compute", 0, 1))))))
    assert told == pytest.approx(hidden(spans))


def test_nothing_predicted_has_no_ratio() -> None:
    found = compare(*(table_of(Timeline((span("wait", 1, end),))) for end in (1, 2)))
    assert found.rows[0].ratio is None


def test_timelines_without_a_common_step_are_refused() -> None:
    with pytest.raises(DataError, match="no step of any rank in common"):
        compare(*(table_of(Timeline((span("wait", 1, 2, step=step),))) for step in (1, 2)))


def test_of_kinds_without_costs_only_which_spans_there_are_is_compared() -> None:
    predicted = Timeline((
        span("compute", 0, 2), span("comm", 2, 5), span("comm", 5, 6, "gath 0"), span("compute", 6, 7, "mlp0.F0"),
    ))  # fmt: skip
    measured = Timeline((span("compute", 0, 3), span("comm", 3, 7)))
    for timed, rows, seconds, hides in (
        (None, {"compute": 2.0, "comm": 3.0}, {"gath": 1.0, "mlp0": 1.0}, True),
        (("compute",), {"compute": 2.0, "comm": None}, {"gath": None, "mlp0": 1.0}, False),
        (("comm",), {"compute": None, "comm": 3.0}, {"gath": 1.0, "mlp0": None}, True),
        ((), {"compute": None, "comm": None}, {"gath": None, "mlp0": None}, False),
    ):
        found = compare(table_of(predicted), table_of(measured), timed=timed)
        assert {row.kind: row.predicted for row in found.rows} == rows
        assert {row.kind: row.measured for row in found.rows} == {"compute": 3.0, "comm": 4.0}
        assert {one.site: one.seconds for one in found.never_seen} == seconds
        assert (found.predicted is not None) == hides and found.measured.total == 4.0
