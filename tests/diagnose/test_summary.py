"""A run in few numbers, from spans of the last steps, a sample of others, and sums of all."""

from __future__ import annotations

import polars as pl
import pytest

from plait.core.timeline import Span, SpanKind, Timeline
from plait.diagnose.predicted import table_of
from plait.diagnose.recording import ROLLUP
from plait.diagnose.summary import Slow, What, summarise
from plait.diagnose.tables import ROLLUP_COLUMNS


def step(number: int, waits: float) -> list[Span]:
    """Communication of 2 s on rank 0 and one of 1 s beside it, waited for so long."""
    rows: tuple[tuple[SpanKind, float, float], ...] = (("comm", 0, 2), ("comm", 1, 2), ("wait", 2 - waits, 2))
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


def test_the_last_steps_the_sample_and_all() -> None:
    spans = table_of(Timeline(tuple(span for n in range(90, 100) for span in step(n, 1.0))))
    sampled = table_of(Timeline(tuple(span for n in (0, 50) for span in step(n, 0.0))))
    found = summarise(spans, sampled, rollup(range(100), slow=40))
    assert (found.spans, found.sampled, found.lanes, len(found.steps)) == (30, 6, 10, 100)
    assert (found.hidden.total, found.hidden.exposed) == (20.0, 10.0), "what overlaps counts once"
    assert found.whats == (
        What("comm", "attn", "forward", 3.0, 3.0),
        What("wait", "attn", "forward", 1.0, 0.5),
        What("checkpoint", "checkpoint", "", None, 0.25),
    )
    assert [(one.first, one.last) for one in found.trend] == [(0, 90), (50, 50)] or found.trend[0].first == 0
    assert found.trend[0].hidden.fraction == pytest.approx(1 - 1 / 6, abs=0.2)
    assert found.trend[-1].hidden.fraction == 0.5
    assert found.slowest == (Slow(40, 9.0, 2.25),)


def test_without_roll_ups_and_without_spans() -> None:
    spans = table_of(Timeline(tuple(step(0, 1.0))))
    nothing = rollup(range(0), slow=0)
    found = summarise(spans, spans.clear(), nothing)
    assert [what.of_all for what in found.whats] == [None, None] and found.slowest == ()
    found = summarise(spans.clear(), spans.clear(), rollup(range(3), slow=9))
    assert (found.spans, found.hidden.fraction, len(found.steps)) == (0, None, 3)
    assert {what.seconds for what in found.whats} == {None}
