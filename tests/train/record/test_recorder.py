"""Which step a record belongs to."""

from __future__ import annotations

import torch

from plait.core.ring import NOBODY, Kind
from plait.core.sharding import UnitOp
from plait.train.machine.device import Device
from plait.train.record.recorder import Recorder

PUBLISH, NEED = UnitOp("publish", ("attn", 0), True), UnitOp("need", ("attn", 0), True)


def test_what_is_done_for_the_next_step_comes_with_it_whenever_it_ends() -> None:
    recorder = Recorder(Device(torch.device("cpu")))
    early, late = (
        recorder.enqueue(Kind.JOB, recorder.name_of(PUBLISH), step=recorder.ticket(later=True)) for _ in range(2)
    )
    recorder.end(recorder.begin(Kind.WAIT, recorder.name_of(NEED)))
    recorder.start(early)
    recorder.end(early)
    assert [str(span.op) for span in recorder.take()] == ["need attn0"]
    recorder.start(late)
    recorder.end(late)
    assert [span.op for span in recorder.take()] == [PUBLISH, PUBLISH]
    assert recorder.take() == []


def test_what_starts_while_it_is_paused_belongs_to_no_step() -> None:
    recorder = Recorder(Device(torch.device("cpu")))
    with recorder.paused():
        assert recorder.ticket() == recorder.ticket(later=True) == NOBODY
        recorder.end(recorder.begin(Kind.WAIT, recorder.name_of(NEED)))
    assert recorder.take() == []
    recorder.end(recorder.begin(Kind.JOB, recorder.name_of(PUBLISH), step=recorder.ticket(later=True)))
    recorder.forget()
    recorder.take()
    assert recorder.take() == []
