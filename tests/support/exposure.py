"""Exposed communication of spans that tests have one by one."""

from __future__ import annotations

from collections.abc import Iterable

from plait.core.record.exposure import Exposure
from plait.core.record.timeline import Span, Timeline
from plait.diagnose.measured.compare import table_of
from plait.diagnose.measured.recording import exposed, sum_exposure


def exposure_of(spans: Iterable[Span]) -> Exposure:
    """Communication of all axes as one; ranks and steps added up."""
    return sum_exposure(exposed(table_of(Timeline(tuple(spans)))))
