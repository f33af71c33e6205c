"""Costs from which orders are made: one disturbed step does not show in them."""

from __future__ import annotations

import pytest
import torch

from plait.core.ring import Kind
from plait.core.segments import SegmentOp
from plait.train.machine.device import Device, Fork, Mark
from plait.train.machine.gpu import open_device
from plait.train.record.recorder import Recorder
from plait.train.tune import timing
from plait.train.tune.timing import RECORDED, recorded, typical_costs


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


class Queued(Device):
    """Does what is submitted when it is waited for; the way there and back takes 10 ms."""

    timed_by_host = False

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.now, self.pending, self.waited = 0.0, 0, 0

    def product(self, a: torch.Tensor, b: torch.Tensor) -> None:
        self.pending += 1

    def synchronize(self) -> None:
        self.now += 0.01 + 0.001 * self.pending
        self.pending, self.waited = 0, self.waited + 1


def test_the_rate_of_a_gpu_is_that_of_products_and_not_of_the_way_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Queued()
    monkeypatch.setattr(timing.torch, "mm", device.product)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: device.now)
    rate = timing.matrix_rate(device, torch.float32, size=64, seconds=0.0)
    assert rate == pytest.approx(2 * 64**3 / 0.0015)  # waiting after each, a product would take 11 ms
    assert device.waited == 3


class Behind(Device):
    """Runs nothing before it is waited for, then everything, a second each."""

    timed_by_host = False

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.made, self.over, self.base = 0, 0, 0

    def mark(self) -> Mark:
        self.made += 1
        return self.made

    def reached(self, mark: Mark | Fork) -> bool:
        assert isinstance(mark, int)
        return mark <= self.over

    def nanoseconds(self, mark: Mark) -> int:
        assert isinstance(mark, int)
        return mark * 10**9

    def anchor(self, *, anew: bool = False) -> None:
        self.base = self.over if anew else 0

    def synchronize(self) -> None:
        self.over = self.made


def test_what_is_measured_is_whole_however_far_a_device_is_behind() -> None:
    recorder = Recorder(device := Behind())
    name = recorder.name_of(SegmentOp("mlp", 0, "F", 0))

    def run() -> None:
        assert device.base == device.made, "it is measured from the device's opening"
        recorder.end(recorder.begin(Kind.COMPUTE, name))

    device.base = device.made = 1
    run()
    steps = recorded(run, recorder, 3)
    assert [[span.end - span.start for span in step] for step in steps] == [[1.0]] * 3
