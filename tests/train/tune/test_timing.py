"""Costs from which orders are made: one disturbed step does not show in them."""

from __future__ import annotations

import pytest

from plait.core.ring import Kind
from plait.core.segments import SegmentOp
from plait.train.machine.device import open_device
from plait.train.record.recorder import Recorder
from plait.train.tune.timing import RECORDED, typical_costs


class Steps:
    """An executor that records two layers of one op each; every step takes as long as it is told."""

    def __init__(self, recorder: Recorder, seconds: list[float]) -> None:
        self.recorder, self.seconds = recorder, iter(seconds)

    def run(self) -> None:
        taken = next(self.seconds)
        for layer in range(2):
            name = self.recorder.name_of(SegmentOp("mlp", layer, "F", 0))
            self.recorder.ring.begin(Kind.COMPUTE, name, self.recorder.step, 1, 1, 1 + round(taken * 1e9))


@pytest.mark.parametrize("disturbed", range(RECORDED))
def test_a_disturbed_step_does_not_count(disturbed: int) -> None:
    steps = [0.02] * RECORDED
    steps[disturbed] = 0.5
    recorder = Recorder(open_device("cpu", 0))
    plain = Steps(recorder, [3.0, *steps])  # the first one only warms up
    costs = typical_costs(plain.run, recorder)
    assert costs.compute == pytest.approx({"mlp.F": 0.02})
    assert costs.collective == {}
