"""Jobs that wait are predicted as those of a trace: by what was known when they came."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from plait.place.queue.features import features
from plait.place.queue.forecast import assess, names_of
from plait.place.queue.jct import BUCKET
from plait.place.queue.live import WaitingJob, predict_jct
from tests.support.workloads import heavy_tailed, trace_of


def test_a_waiting_job_is_predicted_as_the_last_of_a_trace(tmp_path: Path) -> None:
    trace = trace_of(heavy_tailed(900), tmp_path)
    model, _ = assess(trace)
    past = replace(trace.only(np.arange(899)), first=1_000_000.0)
    group = trace.categories["group"]
    waiting = WaitingJob(
        submit=1_000_000.0 + float(trace.submit[-1]), gpus=int(trace.gpus[-1]),
        known={"group": group.names[group.codes[-1]]},
    )  # fmt: skip
    known = features(replace(trace, first=1_000_000.0))
    own = replace(known, matrix=known.matrix[-1:])
    expected = float(model.predict(own, names_of(trace)).buckets[0]) * BUCKET
    assert predict_jct(model, past, [waiting]) == pytest.approx([expected])
    other = replace(waiting, submit=waiting.submit + 50, known={"group": "never seen"})
    both = predict_jct(model, past, [other, waiting])
    assert len(both) == 2 and both[1] == pytest.approx(expected), "in their own order, not that of submission"
    assert predict_jct(model, past, []) == []
