"""What ops and collectives take, for the orders that benchmarks make of them."""

from __future__ import annotations

from collections.abc import Callable

from plait.core.step.orders.segment_costs import SegmentCosts
from plait.train.record.recorder import Recorder
from plait.train.tune.timing import RECORDED, median_costs, recorded


def typical_costs(run: Callable[[], object], recorder: Recorder, micro_batches: int = 1) -> SegmentCosts:
    """What ops and collectives of one micro-batch take when ``run`` is run alone, which records: medians of
    several runs, the mean over ranks, the same on every rank."""
    run()  # to warm up
    return median_costs(recorded(run, recorder, RECORDED), micro_batches)
