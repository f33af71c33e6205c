"""A run in few numbers, from spans of the last steps, a sample of others, and sums of all."""

from __future__ import annotations

import polars as pl
import pytest

from plait.core.record.timeline import Span, SpanKind, Timeline
from plait.diagnose.measured.compare import table_of
from plait.diagnose.measured.reading import recorded
from plait.diagnose.measured.recording import ROLLUP
from plait.diagnose.measured.tables import ROLLUP_COLUMNS
from plait.diagnose.series import SlowStep, TimelineSummary, summarise


def step(number: int, waits: float) -> list[Span]:
    """Communication of 2 s on rank 0 and one of 1 s beside it, waited for so long after
    computation."""
    rows: tuple[tuple[SpanKind, float, float], ...] = (
        ("comm", 0, 2), ("comm", 1, 2), ("wait", 2 - waits, 2), ("compute", 0, 2 - waits),
    )  # fmt: skip
    return [
        Span(number, 0, kind, f"attn{i}.F0", 0, "attn", 0, 0, "forward", 10 * number + start, 10 * number + end)
        for i, (kind, start, end) in enumerate(rows)
    ]


def rollup(steps: range, slow: int) -> pl.DataFrame:
    rows = [
        (n, 0, kind, site, way, 1, seconds)
        for n in steps
        for kind, site, way, seconds in (
            ("comm", "attn", "forward", 3.0), ("wait", "attn", "forward", 0.5), ("checkpoint", "", "", 0.25),
            ("step", "", "", 9.0 if n == slow else 4.0), ("collective", "tp", "", 3.0),
        )
    ]  # fmt: skip
    schema = {name: ROLLUP.get(name, pl.Float64) for name in ROLLUP_COLUMNS}
    return pl.DataFrame(rows, schema=schema, orient="row")


def summary(spans: pl.DataFrame, sampled: pl.DataFrame, rollups: pl.DataFrame) -> TimelineSummary:
    both = [table.with_columns(sampled=pl.lit(drawn)) for table, drawn in ((spans, False), (sampled, True))]
    return summarise(recorded(pl.concat(both), rollups, None))


def test_the_last_steps_the_sample_and_all() -> None:
    spans = table_of(Timeline(tuple(span for n in range(90, 100) for span in step(n, 1.0))))
    sampled = table_of(Timeline(tuple(span for n in (0, 50) for span in step(n, 0.0))))
    found = summary(spans, sampled, rollup(range(100), slow=40))
    assert (found.spans, found.sampled, found.last, found.every) == (
        40, 8, tuple(range(90, 100)), tuple(range(1, 100)),
    )  # fmt: skip
    assert (found.hidden.total, found.hidden.exposed, found.waited) == (2.0, 1.0, 1.0), "what overlaps counts once"
    assert found.hidden_of_all is None, "sums of an earlier version do not tell it"
    assert [(what[:4], what.all_steps) for what in found.whats] == [
        (("comm", "attn", "forward", 3.0), pytest.approx(3.0)),
        (("compute", "attn", "forward", 1.0), pytest.approx((10 + 2) / 99)),
        (("wait", "attn", "forward", 1.0), pytest.approx((10 + 88 * 0.5) / 99)),
        (("checkpoint", "checkpoint", "", None), pytest.approx(88 * 0.25 / 99)),
    ]
    assert [(one.first, one.last) for one in found.trend] == [(0, 90), (50, 50)] or found.trend[0].first == 0
    assert found.trend[0].hidden.fraction == pytest.approx(1 - 1 / 6, abs=0.2)
    assert found.trend[-1].hidden.fraction == 0.5
    assert found.slowest == (SlowStep(40, 9.0, 2.25),)


def test_without_roll_ups_and_without_spans() -> None:
    spans = table_of(Timeline(tuple(step(1, 1.0))))
    nothing = rollup(range(0), slow=0)
    found = summary(spans, spans.clear(), nothing)
    assert {(what.seconds, what.all_steps) for what in found.whats} == {(3.0, 3.0), (1.0, 1.0)} and found.slowest == ()
    found = summary(spans.clear(), spans.clear(), rollup(range(3), slow=9))
    assert (found.spans, found.hidden.fraction, found.last, found.every) == (0, None, (), (1, 2))
    assert {what.seconds for what in found.whats} == {None}


def slowest(*seconds: float) -> tuple[SlowStep, ...]:
    """Of a run with such steps after the first."""
    rows = [(n, 0, "step", "", "", 1, one) for n, one in enumerate((99.0, *seconds))]
    schema = {name: ROLLUP.get(name, pl.Float64) for name in ROLLUP_COLUMNS}
    nothing = table_of(Timeline(())).clear()
    return summary(nothing, nothing, pl.DataFrame(rows, schema=schema, orient="row")).slowest


def test_steps_that_took_a_quarter_longer_than_the_median_are_named() -> None:
    assert slowest(4.0, 4.0, 4.0, 5.0, 5.5, 4.0, 8.0, 6.0, 7.0) == (SlowStep(7, 8.0, 1.6), SlowStep(9, 7.0, 1.4))
    most = slowest(*[4.0] * 20, 5.0, 5.1, 5.2, 5.3, 5.4)
    assert most == (SlowStep(25, 5.4, 1.35), SlowStep(24, 5.3, 1.325), SlowStep(23, 5.2, 1.3))
    assert slowest(4.0, 4.0, 4.0, 5.0) == ()
    assert slowest(0.0, 0.0, 5.0) == (), "of nothing nothing is a quarter longer"


@pytest.mark.parametrize(
    ("steps", "groups"),
    [
        (1, [(0, 0)]), (5, [(n, n) for n in range(5)]), (6, [(0, 1), (2, 3), (4, 5)]),
        (11, [(0, 2), (3, 5), (6, 8), (9, 10)]), (25, [(5 * n, 5 * n + 4) for n in range(5)]),
    ],
)  # fmt: skip
def test_the_trend_is_of_up_to_five_groups(steps: int, groups: list[tuple[int, int]]) -> None:
    spans = table_of(Timeline(tuple(span for n in range(steps) for span in step(n, 1.0))))
    found = summary(spans, spans.clear(), rollup(range(0), slow=0))
    assert [(one.first, one.last) for one in found.trend] == groups
    assert {one.hidden.fraction for one in found.trend} == {0.5}
    assert found.trend[0].hidden.total == 2.0 * (groups[0][1] + 1)


def test_spans_of_communication_alone_do_not_tell_what_is_hidden() -> None:
    rows = [Span(0, 0, kind, "x", n, "attn", 0, 0, "forward", 0.0, 1.0) for n, kind in enumerate(("comm", "transfer"))]  # type: ignore[arg-type]
    spans = table_of(Timeline(tuple(rows)))
    found = summary(spans, spans.clear(), rollup(range(0), slow=0))
    assert found.hidden.total == 0.0 and found.trend[0].hidden.total > 0
    more = Span(0, 0, "compute", "y", 0, "attn", 0, 0, "forward", 0.0, 1.0)
    assert summary(table_of(Timeline((*rows, more))), spans.clear(), rollup(range(0), slow=0)).hidden.total == 1.0


def test_sums_without_a_place_are_called_as_spans_call_them() -> None:
    nothing = table_of(Timeline(())).clear()
    found = summary(nothing, nothing, rollup(range(4), slow=9))
    assert [(one.kind, one.site, one.all_steps) for one in found.whats] == [
        ("comm", "attn", 3.0), ("wait", "attn", 0.5), ("checkpoint", "checkpoint", 0.25),
    ]  # fmt: skip
