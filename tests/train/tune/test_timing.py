"""Costs from which orders are made: one disturbed step does not show in them."""

from __future__ import annotations

import math
import threading

import pytest
import torch
from typical import typical_costs

from plait.core.record.ring import RecordKind
from plait.core.record.timeline import OpSpan
from plait.core.step.orders.segment_costs import SegmentCosts
from plait.core.step.segments import Kind, SegmentOp
from plait.core.step.traffic import UnitOp
from plait.train.machine.device import Fork, Mark, RankDevice
from plait.train.machine.gpu import device_of
from plait.train.record.recorder import Recorder
from plait.train.tune import timing
from plait.train.tune.timing import (
    RECORDED,
    mean_over_ranks,
    measured_costs,
    median_costs,
    recorded,
    time_interleaved,
)
from tests.support.threads import threads

FIRST, SECOND = SegmentOp("attn", 0, Kind.COLUMN_FORWARD, 0), SegmentOp("attn", 1, Kind.COLUMN_FORWARD, 0)
CORE, NETWORK = SegmentOp("attn", 0, Kind.ATTENTION_CORE, 0), SegmentOp("mlp", 0, Kind.COLUMN_FORWARD, 1)
UNIT = UnitOp("gather", ("attn", 0), True)


class Steps:
    """An executor that records two layers of one op each; every step takes as long as it is
    told."""

    def __init__(self, recorder: Recorder, seconds: list[float]) -> None:
        self.recorder, self.seconds = recorder, iter(seconds)

    def run(self) -> None:
        taken = next(self.seconds)
        for layer in range(2):
            name = self.recorder.name_of(SegmentOp("mlp", layer, Kind.COLUMN_FORWARD, 0))
            self.recorder.ring.begin(RecordKind.COMPUTE, name, self.recorder.step, 1, 1, 1 + round(taken * 1e9))


@pytest.mark.parametrize("disturbed", range(RECORDED))
def test_a_disturbed_step_does_not_count(disturbed: int) -> None:
    steps = [0.02] * RECORDED
    steps[disturbed] = 0.5
    recorder = Recorder(device_of(None))
    plain = Steps(recorder, [3.0, *steps])  # the first one only warms up
    costs = typical_costs(plain.run, recorder)
    assert costs.compute == pytest.approx({"mlp.F": 0.02})
    assert costs.collective == {}


@pytest.mark.parametrize(
    ("spans", "micro_batches", "compute", "collective"),
    [
        ([], 1, {}, {}),
        ([OpSpan(FIRST, "compute", 2.0, 5.0)], 1, {"attn.F": 3.0}, {}),
        ([OpSpan(FIRST, "compute", 2.0, 5.0)], 2, {"attn.F": 1.5}, {}),
        # slices of a layer add up, layers are like each other
        ([OpSpan(FIRST, "compute", 0, 1), OpSpan(FIRST._replace(slice=1), "compute", 1, 4)], 1, {"attn.F": 4.0}, {}),
        ([OpSpan(FIRST, "compute", 0, 1), OpSpan(SECOND, "compute", 1, 4)], 1, {"attn.F": 2.0}, {}),
        # what is computed, and what travels; what is waited for is neither
        ([OpSpan(FIRST, "comm", 1, 2), OpSpan(FIRST, "wait", 0, 9)], 1, {}, {"attn.F": 1.0}),
        ([OpSpan(FIRST, "compute", 0, 1), OpSpan(FIRST, "comm", 1, 3)], 1, {"attn.F": 1.0}, {"attn.F": 2.0}),
        # what follows an op of a unit counts, whatever comes first
        ([OpSpan(UNIT, "comm", 0, 9), OpSpan(CORE, "compute", 1, 3), OpSpan(UNIT, "compute", 0, 9),
          OpSpan(NETWORK, "compute", 3, 3.5)], 1, {"attn.K": 2.0, "mlp.F": 0.5}, {}),
    ],
)  # fmt: skip
def test_costs_are_those_of_a_layer_and_a_micro_batch(
    spans: list[OpSpan], micro_batches: int, compute: dict[str, float], collective: dict[str, float]
) -> None:
    assert measured_costs(spans, micro_batches) == SegmentCosts(compute, collective)


def test_a_layer_that_only_waits_is_a_layer() -> None:
    """What it takes part in is one kind of op in all of its layers."""
    spans = [OpSpan(FIRST, "compute", 0.0, 4.0), OpSpan(SECOND, "wait", 4.0, 5.0)]
    assert measured_costs(spans).compute == {"attn.F": 2.0}


def test_the_median_of_steps_counts() -> None:
    steps = [[OpSpan(FIRST, "compute", 1.0, 1.0 + taken), OpSpan(FIRST, "comm", 0.0, taken)] for taken in (6, 2, 4)]
    assert median_costs(steps) == SegmentCosts({"attn.F": 4.0}, {"attn.F": 4.0})
    assert median_costs(steps, 4) == SegmentCosts({"attn.F": 1.0}, {"attn.F": 1.0})


def test_the_mean_over_those_ranks_counts_that_have_an_op() -> None:
    own = [
        SegmentCosts({"attn.F": 1.0, "embed.F": 8.0}, {"attn.F": 0.5}),
        SegmentCosts({"attn.F": 4.0, "head.F": 6.0}, {"attn.F": 1.5, "head.F": 2.0}),
    ]
    wanted = SegmentCosts({"attn.F": 2.5, "embed.F": 8.0, "head.F": 6.0}, {"attn.F": 1.0, "head.F": 2.0})
    assert threads(2).run(lambda rank: mean_over_ranks(own[rank])) == [wanted] * 2


class Clocks(threading.local):
    """Each rank's own clock."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.mark.parametrize(("rounds", "seconds"), [(1, [3.0, 8.0]), (3, [5.0, 8.0])])
def test_rounds_are_interleaved_after_one_to_warm_up_and_the_slowest_rank_counts(
    rounds: int, seconds: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    clocks = Clocks()
    monkeypatch.setattr(timing, "time", clocks)
    takes = {0: {"a": (100, 3, 7, 4), "b": (100, 1, 1, 1)}, 1: {"a": (100, 2, 2, 5), "b": (0, 8, 9, 2)}}

    def work(rank: int) -> tuple[list[float], str]:
        done = ""

        def run(which: str) -> None:
            nonlocal done
            clocks.now += takes[rank][which][done.count(which)]
            done += which

        found = time_interleaved([lambda: run("a"), lambda: run("b")], device_of(None), rounds=rounds)
        return found, done

    assert threads(2).run(work) == [(seconds, "ab" * (rounds + 1))] * 2


@pytest.mark.parametrize(("by_host", "size", "queued"), [(True, 768, 1), (False, 8192, 20)])
def test_products_are_as_large_as_a_device_needs_and_as_many_at_a_time(
    by_host: bool, size: int, queued: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, made = Queued(), list[tuple[int, ...]]()
    device.timed_by_host = by_host

    def drawn(*size: int, device: object) -> torch.Tensor:
        made.append(size)
        return torch.zeros(1)

    monkeypatch.setattr(timing.torch, "randn", drawn)
    monkeypatch.setattr(timing.torch, "mm", device.product)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: device.now)
    taken = (0.01 + 0.001 * queued) / queued
    assert timing.matrix_rate(device, torch.bfloat16) == pytest.approx(2 * size**3 / taken)
    assert made == [(size, size)] * 2
    assert device.waited == max(3, math.ceil(0.1 / (taken * queued)))


class Queued(RankDevice):
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


class Behind(RankDevice):
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
    name = recorder.name_of(SegmentOp("mlp", 0, Kind.COLUMN_FORWARD, 0))

    def run() -> None:
        assert device.base == device.made, "it is measured from the device's opening"
        recorder.end(recorder.begin(RecordKind.COMPUTE, name))

    device.base = device.made = 1
    run()
    steps = recorded(run, recorder, 3)
    assert [[span.end - span.start for span in step] for step in steps] == [[1.0]] * 3
