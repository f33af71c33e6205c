"""What a plan predicts beside what was measured, in numbers."""

from __future__ import annotations

import pytest

from plait.core.parallel.layout import Layout
from plait.core.record.timeline import Span, SpanKind, Timeline
from plait.diagnose.predicted import LEAST, Overlap, Prediction, Row, against, kinds_of_measured_costs, table_of
from plait.diagnose.recording import Recording
from tests.support.recordings.made import recording_of, spans_of

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
    return against(recording, timeline, spans_of(*rows))


LAYOUT = Layout.of(pp=1, dp=1, tp=2)
SEEN = recording_of(
    spans_of(
        *step(0, 0, 50.0, 20.0, 10.0), *step(1, 0, 3.0, 2.0, 1.0), *step(2, 0, 5.0, 2.0, 1.0),
        *step(2, 1, 70.0, 2.0, 1.0),
        {"step": 1, "name": "unplanned", "end": 9.0}, {"step": 1, "kind": "optimizer", "name": "optimizer", "end": 9.0},
        {"step": 1, "kind": "comm", "name": "reduce mlp0", "axis": "dp", "end": 9.0},
    ),
    LAYOUT, seconds={0: 99.0, 1: 4.0, 2: 6.0, 3: 99.0},
)  # fmt: skip


def test_a_steady_step_of_the_ranks_that_are_predicted() -> None:
    found = prediction(SEEN, *step(1, 0, 2.0, 2.0, 0.5))
    assert found is not None
    assert found.rows == (
        Row("compute", "", "forward", 2.0, 4.0), Row("comm", "tp", "forward", 2.0, 2.0),
        Row("wait", "tp", "forward", 0.5, 1.0),
    )  # fmt: skip
    assert found.overlap == (Overlap("tp", 0.75, 0.5, 2.0, 1.0),)
    assert found.overlap[0].missed == 0.5
    assert (found.seconds, found.matched) == ((2.5, 5.0), 6 / 7)


def test_a_step_of_which_not_all_is_measured_has_no_length() -> None:
    reduction = {"kind": "comm", "name": "reduce mlp0", "axis": "dp", "start": 2.0, "end": 7.0}
    found = prediction(SEEN, *step(1, 0, 2.0, 2.0, 0.5), reduction)
    assert found is not None and found.seconds is None
    assert {row.axis for row in found.rows} == {"", "tp"}
    quiet = recording_of(SEEN.spans, LAYOUT)
    found = prediction(quiet, *step(1, 0, 2.0, 2.0, 0.5))
    assert found is not None and found.seconds is None


def test_more_is_hidden_than_planned() -> None:
    assert Overlap("tp", 0.5, 0.75, 2.0, 0.5).missed == 0.0
    assert Overlap("tp", 0.75, 0.5, 2.0, 1.0).missed == 0.5


def test_nothing_in_common() -> None:
    assert prediction(SEEN, op(1.0, name="other")) is None
    assert prediction(SEEN, op(1.0, rank=7)) is None
    first = recording_of(spans_of(*step(0, 0, 3.0, 2.0, 1.0)), LAYOUT, seconds={0: 4.0})
    assert prediction(first, *step(1, 0, 2.0, 2.0, 0.5)) is None, "a run's first step is like no other"
    assert against(SEEN, Timeline(()), spans_of(*step(1, 0, 2.0, 2.0, 0.5))) is None


@pytest.mark.parametrize(("predicted", "ratio"), [(LEAST, 2.0), (LEAST * 0.99, None)])
def test_next_to_nothing_has_no_ratio(predicted: float, ratio: float | None) -> None:
    assert Row("wait", "tp", "", predicted, 2 * LEAST).ratio == (ratio and pytest.approx(ratio))


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
    assert found is not None and found.overlap == (Overlap("tp", 1.0, 1.0, 1.0, 0.0),)


def test_overlap_is_of_axes_that_both_have() -> None:
    """On the other, what is planned is not measured, and what is measured was not planned."""
    alone = recording_of(spans_of(*step(1, 0, 3.0, 2.0, 1.0)), LAYOUT, seconds={1: 4.0})
    found = prediction(alone, *(row | {"axis": "dp"} if "axis" in row else row for row in step(1, 0, 2.0, 2.0, 0.5)))
    assert found is not None and found.overlap == ()
