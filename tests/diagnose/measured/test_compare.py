"""Predicted beside measured."""

from __future__ import annotations

import pytest

from plait.core.base.errors import DataError
from plait.core.parallel.layout import Layout
from plait.core.record.exposure import Exposure
from plait.core.record.timeline import Span, SpanKind, Timeline
from plait.diagnose.measured.compare import (
    LEAST,
    AxisOverlap,
    ComparedRow,
    Prediction,
    Unmatched,
    compare,
    compare_with_plan,
    kinds_of_measured_costs,
    table_of,
)
from plait.diagnose.measured.recording import Recording
from tests.support.recordings.made import recording_of, spans_of


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
        ComparedRow("compute", "attn", "forward", 2.0, 3.0),
        ComparedRow("comm", "attn", "forward", 1.5, 2.0),
        ComparedRow("wait", "attn", "forward", 0.5, 1.5),
    )
    assert [row.ratio for row in found.rows] == [1.5, 2 / 1.5, 3.0]
    assert found.not_measured == (Unmatched("compute", "mlp0", "forward", 0.5, 0.5, "mlp0.F0"),)
    assert found.not_planned == (Unmatched("comm", "gath", "forward", 0.5, 1.0, "gath 0"),)
    assert (found.predicted, found.measured) == (Exposure(1.5, 1.5), Exposure(3.0, 3.0)), "nothing ran beside"


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
        assert {one.site: one.seconds for one in found.not_measured} == seconds
        assert (found.predicted is not None) == hides and found.measured.total == 4.0


# ---- a recording beside one steady step ----

TP = {"kind": "comm", "name": "mlp0.R0", "axis": "tp", "lane": "tp"}
WAIT = {"kind": "wait", "name": "mlp0.R0", "axis": "tp"}


def op(end: float, **more: object) -> dict[str, object]:
    """Computation from 0 on."""
    return {"end": end, **more}


def step(number: int, rank: int, compute: float, comm: float, waits: float) -> list[dict[str, object]]:
    """Computation, and beside its end communication that outlasts it by ``waits``."""
    at, until = {"step": number, "rank": rank}, compute + waits
    return [
        op(compute, **at), {**TP, **at, "start": until - comm, "end": until},
        {**WAIT, **at, "start": compute, "end": until},
    ]  # fmt: skip


def prediction(recording: Recording, *rows: dict[str, object]) -> Prediction | None:
    timeline = Timeline((Span(1, 0, "compute", "mlp0.F0", 0, "mlp", 0, 0, "forward", 0.0, 1.0),))
    return compare_with_plan(recording, timeline, spans_of(*rows))


LAYOUT = Layout.of(pp=1, dp=1, tp=2)
SEEN = recording_of(
    spans_of(
        *step(0, 0, 50.0, 20.0, 10.0), *step(1, 0, 3.0, 2.0, 1.0), *step(2, 0, 5.0, 2.0, 1.0),
        *step(2, 1, 70.0, 2.0, 1.0),
        *({"step": 1, "start": 20.0, "end": 29.0, **more} for more in (
            {"name": "unplanned"}, {"kind": "optimizer", "name": "optimizer"},
            {"kind": "comm", "name": "reduce mlp0", "axis": "dp"},
        )),
    ),
    LAYOUT, seconds={0: 99.0, 1: 4.0, 2: 6.0, 3: 99.0},
)  # fmt: skip


def test_a_steady_step_of_the_ranks_that_are_predicted() -> None:
    found = prediction(SEEN, *step(1, 0, 2.0, 2.0, 0.5))
    assert found is not None
    assert found.rows == (
        ComparedRow("compute", "", "forward", 2.0, 4.0), ComparedRow("comm", "tp", "forward", 2.0, 2.0),
        ComparedRow("exposed", "tp", "", 0.5, 1.0),
    )  # fmt: skip
    assert found.overlap == (AxisOverlap("tp", 0.75, 0.5, 2.0, 1.0, 0.5),)
    assert found.overlap[0].missed == 0.5
    assert (found.seconds, found.matched) == (2.5, 6 / 7)
    assert (found.steps, found.first, found.last) == (2, 1, 2)


def test_a_step_of_which_not_all_is_measured_has_no_length() -> None:
    reduction = {"kind": "comm", "name": "reduce mlp0", "axis": "dp", "start": 2.0, "end": 7.0}
    found = prediction(SEEN, *step(1, 0, 2.0, 2.0, 0.5), reduction)
    assert found is not None and found.seconds is None
    assert {row.where for row in found.rows} == {"", "tp"}


def test_more_is_hidden_than_planned() -> None:
    assert AxisOverlap("tp", 0.5, 0.75, 2.0, 0.5).missed == 0.0
    assert AxisOverlap("tp", 0.75, 0.5, 2.0, 1.0).missed == 0.5


def test_nothing_in_common() -> None:
    assert prediction(SEEN, op(1.0, name="other")) is None
    assert prediction(SEEN, op(1.0, rank=7)) is None
    both = recording_of(spans_of(*step(0, 0, 3.0, 2.0, 1.0), *step(1, 0, 4.0, 2.0, 1.0)), LAYOUT, seconds={0: 4.0})
    found = prediction(both, *step(1, 0, 2.0, 2.0, 0.5))
    assert found is not None and (found.steps, found.first) == (1, 1), "a run's first step is like no other"
    assert compare_with_plan(SEEN, Timeline(()), spans_of(*step(1, 0, 2.0, 2.0, 0.5))) is None


@pytest.mark.parametrize(("predicted", "ratio"), [(LEAST, 2.0), (LEAST * 0.99, None)])
def test_next_to_nothing_has_no_ratio(predicted: float, ratio: float | None) -> None:
    assert ComparedRow("wait", "tp", "", predicted, 2 * LEAST).ratio == (ratio and pytest.approx(ratio))


@pytest.mark.parametrize(
    ("spans", "kinds"),
    [
        ([("compute", "mlp0.F0"), ("comm", "mlp0.R0")], ("compute", "comm", "wait")),
        ([("compute", "mlp0.F0"), ("comm", "mlp0.R0"), ("comm", "reduce mlp0")], ("compute",)),
        ([("compute", "mlp0.F0"), ("wait", "settle mlp0")], ("compute",)),
        ([("compute", "mlp0.F0")], ("compute", "comm", "wait")),
    ],
)
def test_kinds_whose_costs_were_measured(spans: list[tuple[SpanKind, str]], kinds: tuple[str, ...]) -> None:
    table = table_of(Timeline(tuple(Span(1, 0, kind, name, 0, "mlp", 0, 0, "", 0.0, 1.0) for kind, name in spans)))
    assert kinds_of_measured_costs(table) == kinds


def test_communication_that_nobody_waits_for_is_hidden() -> None:
    rows = [op(3.0), {**TP, "start": 0.5, "end": 1.5}]
    found = prediction(recording_of(spans_of(*rows), LAYOUT, seconds={1: 3.0}), *rows)
    assert found is not None and found.overlap == (AxisOverlap("tp", 1.0, 1.0, 1.0, 0.0),)


def test_overlap_is_of_axes_that_both_have() -> None:
    """On the other, what is planned is not measured, and what is measured was not planned."""
    alone = recording_of(spans_of(*step(1, 0, 3.0, 2.0, 1.0)), LAYOUT, seconds={1: 4.0})
    found = prediction(alone, *(row | {"axis": "dp"} if "axis" in row else row for row in step(1, 0, 2.0, 2.0, 0.5)))
    assert found is not None and found.overlap == ()
