"""Which step a span belongs to."""

from __future__ import annotations

import torch

from plait.core.sharding import UnitOp
from plait.train.machine.device import Device
from plait.train.record.recorder import Recorder

PUBLISH, NEED = UnitOp("publish", ("attn", 0), True), UnitOp("need", ("attn", 0), True)


def test_what_is_done_for_the_next_step_comes_with_it_whenever_it_ends() -> None:
    recorder = Recorder(Device(torch.device("cpu")))
    early, late = recorder.ticket(later=True), recorder.ticket(later=True)
    recorder.spent(recorder.ticket(), NEED, "wait", 0.0, 1.0)
    recorder.spent(early, PUBLISH, "comm", 1.0, 2.0)
    assert [str(span.op) for span in recorder.take()] == ["need attn0"]
    recorder.spent(late, PUBLISH, "comm", 2.0, 3.0)
    assert [span.start for span in recorder.take()] == [1.0, 2.0]
    assert recorder.take() == []


def test_what_starts_while_it_is_paused_belongs_to_no_step() -> None:
    recorder = Recorder(Device(torch.device("cpu")))
    with recorder.paused():
        ticket = recorder.ticket()
    recorder.spent(ticket, NEED, "wait", 0.0, 1.0)
    assert recorder.take() == []
    recorder.spent(recorder.ticket(later=True), PUBLISH, "comm", 1.0, 2.0)
    recorder.forget()
    recorder.take()
    assert recorder.take() == []
