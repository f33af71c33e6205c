"""Which step a record belongs to."""

from __future__ import annotations

import errno
import os
import time
from contextlib import suppress
from pathlib import Path
from unittest import mock

import torch

from plait.core.base.env import RankEnv
from plait.core.record.ring import UNSET, RecordKind, read_ring
from plait.core.record.rollup import PROCESSOR
from plait.core.runs.progress import Missing
from plait.core.step.traffic import UnitOp
from plait.train.machine.device import RankDevice
from plait.train.record.recorder import Recorder, open_recorder

PUBLISH, NEED = UnitOp("publish", ("attn", 0), True), UnitOp("need", ("attn", 0), True)


def test_what_is_done_for_the_next_step_comes_with_it_whenever_it_ends() -> None:
    recorder = Recorder(RankDevice(torch.device("cpu")))
    early, late = (
        recorder.enqueue(RecordKind.JOB, recorder.name_of(PUBLISH), step=recorder.current_step(later=True))
        for _ in range(2)
    )
    recorder.end(recorder.begin(RecordKind.WAIT, recorder.name_of(NEED)))
    recorder.start(early)
    recorder.end(early)
    assert [str(span.op) for span in recorder.take()] == ["need attn0"]
    recorder.start(late)
    recorder.end(late)
    assert [span.op for span in recorder.take()] == [PUBLISH, PUBLISH]
    assert recorder.take() == []


def test_what_starts_while_it_is_paused_belongs_to_no_step() -> None:
    recorder = Recorder(RankDevice(torch.device("cpu")))
    with recorder.paused():
        assert recorder.current_step() == recorder.current_step(later=True) == UNSET
        recorder.end(recorder.begin(RecordKind.WAIT, recorder.name_of(NEED)))
    assert recorder.take() == []
    recorder.recorded_job(recorder.name_of(PUBLISH), lambda: None, step=recorder.current_step(later=True))()
    recorder.forget()
    recorder.take()
    assert recorder.take() == []


def test_a_step_says_how_much_of_a_processor_it_had() -> None:
    recorder = Recorder(RankDevice(torch.device("cpu")))
    recorder.begin_step(0)
    time.sleep(0.02)
    until = time.thread_time() + 0.01
    while time.thread_time() < until:
        pass
    had = int(recorder.records().rolled_up(3)["sum_ns"][-1])
    assert 10_000_000 <= had < 20_000_000, "what others had meanwhile does not count"
    recorder.begin_step(1)
    rows = recorder.records().rolled_up(3)
    [row] = [at for at, kind in enumerate(rows["kind"].tolist()) if kind == PROCESSOR]
    assert [int(rows[name][row]) for name in ("step", "rank", "n")] == [1, 3, 1]
    assert int(rows["sum_ns"][row]) < had


def test_a_disk_without_room_costs_the_ring_not_the_run(tmp_path: Path) -> None:
    said: list[str] = []
    rank, device = RankEnv(), RankDevice(torch.device("cpu"))
    with mock.patch("os.posix_fallocate", side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))):
        recorder = open_recorder(tmp_path, rank, "feed", device, Missing("the ring", said.append))
    assert said == ["warning: the ring cannot be written (No space left on device); training goes on without"]
    recorder.end(recorder.begin(RecordKind.WAIT, recorder.name_of(NEED)))
    assert len(recorder.take()) == 1
    assert not list((tmp_path / "rings").glob("*.ring"))


def test_the_ring_of_a_run_says_what_the_recorder_was_told(tmp_path: Path) -> None:
    recorder = open_recorder(tmp_path, RankEnv(), "feed", RankDevice(torch.device("cpu")), Missing("the ring"))
    recorder.begin_step(41)
    number = recorder.begin(RecordKind.WAIT, recorder.name_of(NEED))
    ring = read_ring(tmp_path / "rings" / "rank-00000.ring")
    assert (ring.header.step, ring.header.plan) == (41, "feed")
    [waits] = ring.open()
    assert (waits.kind, waits.name.text, waits.step) == (RecordKind.WAIT, "need attn0", 41)
    recorder.end(number)
    with recorder.during(RecordKind.CHECKPOINT, "checkpoint", step=40), suppress(ValueError):
        raise ValueError
    with suppress(ValueError), recorder.during(RecordKind.CHECKPOINT, "checkpoint", step=40):
        raise ValueError
    ring = read_ring(tmp_path / "rings" / "rank-00000.ring")
    assert ring.open() == [] and [one.failed for one in ring.records()] == [False, False, True]
