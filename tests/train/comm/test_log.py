"""What communication leaves in a rank's ring."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.futures import Future

from plait.core.record.records import Records
from plait.core.record.ring import Record, RecordKind, Ring, signature_of
from plait.core.step.segments import Collective, Kind, SegmentOp
from plait.train.comm.flight import WATCHED, LoggedWire
from plait.train.machine.device import AsyncWork, Mark, RankDevice
from plait.train.record.recorder import Recorder

FORWARD = SegmentOp("mlp", 0, Kind.COLUMN_FORWARD, 0)
CPU = torch.device("cpu")


class Sent:
    """A collective that ends when the test says so."""

    def __init__(self) -> None:
        self.future: Future[object] = Future()

    def wait(self) -> object:
        return self.future.wait()

    def get_future(self) -> Future[object]:
        return self.future

    def is_completed(self) -> bool:
        return self.future.done()


class Wire:
    """Keeps what was started."""

    size, rank = 2, 0

    def __init__(self) -> None:
        self.sent: list[Sent] = []
        self.refuses = False

    def start(self, kind: Collective, result: Tensor, source: Tensor) -> Sent:
        if self.refuses:
            raise RuntimeError("connection closed by peer")
        self.sent.append(Sent())
        return self.sent[-1]


class Late(RankDevice):
    """Marks are numbers until they are read; as a GPU's, which are reached later than they are
    made."""

    timed_by_host = False

    def __init__(self) -> None:
        super().__init__(CPU)
        self.marks = 0
        self.waited = 0

    def mark(self) -> Mark:
        self.marks += 1
        return self.marks

    def nanoseconds(self, mark: Mark) -> int:
        assert isinstance(mark, int)
        return 1000 * mark

    def mark_when_done(self, work: AsyncWork, callback: Callable[[Mark, bool], object]) -> None:
        self.marks += 1
        callback(self.marks + 100, False)

    def synchronize(self) -> None:
        self.waited += 1


def opened(recorder: Recorder) -> tuple[Wire, LoggedWire]:
    wire = Wire()
    return wire, recorder.over(wire, (4, 2), "tp")


def written(recorder: Recorder) -> list[Record]:
    """Everything in the ring, as a reader would have it."""
    import numpy as np

    ring = recorder.ring
    table = ring.rows(np.arange(1, ring.begin(RecordKind.STEP, 0, 0, 1)))
    found = Ring(ring.header, table, ring.names, ring.groups).records()
    return [record for record in found if record.kind is not RecordKind.STEP]


def test_a_collective_says_with_whom_what_and_which_one_it_is() -> None:
    recorder = Recorder(RankDevice(CPU))
    wire, logged = opened(recorder)
    source, result = torch.zeros(6), torch.zeros(12)
    first = logged.start("all_gather", result, source)
    second = logged.named(FORWARD).start("all_reduce", result, result)
    begun, named = written(recorder)
    assert begun.group and (begun.group.ranks, begun.group.ordinal, begun.group.label) == ((2, 4), 0, "tp")
    assert (begun.sequence, named.sequence) == (0, 1)
    assert (begun.verb, begun.dtype, begun.bytes, begun.name.text) == ("all_gather", "float32", 48, "tp")
    assert begun.signature == signature_of("all_gather", "float32", 6, 12) != named.signature
    assert named.name.text == "mlp0.F0" and named.name.place is not None
    assert begun.open and begun.started == begun.enqueued
    assert named.open and named.started == 0, "the group is busy with the first one"
    for sent in wire.sent:
        sent.future.set_result([])
    second.wait()
    first.wait()
    begun, named = written(recorder)
    assert not begun.open and not named.open and not begun.failed


def test_a_collective_that_waits_its_turn_starts_when_the_one_before_ends() -> None:
    recorder = Recorder(RankDevice(CPU))
    wire, logged = opened(recorder)
    flights = [logged.named(FORWARD).start("all_reduce", torch.zeros(4), torch.zeros(4)) for _ in range(3)]
    for sent in wire.sent:
        sent.future.set_result([])  # nobody waits yet: the thread that ends it says so
    done = written(recorder)
    assert len(done) == 3 and all(record.ended for record in done)
    assert [done[i + 1].started for i in range(2)] == [done[i].ended for i in range(2)]
    for flight in flights:
        flight.wait()
    assert written(recorder) == done, "whoever waits later changes nothing"


def test_an_end_that_nobody_watches_lies_between_two_looks() -> None:
    recorder = Recorder(RankDevice(CPU))
    wire, logged = opened(recorder)
    named = logged.named(FORWARD)
    first = named.start("all_reduce", torch.zeros(4), torch.zeros(4))  # watched, as it is the first
    assert recorder.ring.flying == []
    wire.sent[0].future.set_result([])
    first.wait()
    assert named.pace.taken > 0
    recorder.step = 1
    for taken, expected in ((1, "looked"), (10**12, "now"), (None, "likely")):
        flight: Any = named.start("all_reduce", torch.zeros(4), torch.zeros(4))
        assert recorder.ring.flying == [flight]
        recorder.look()
        looked = flight.looked
        wire.sent[-1].future.set_result([])
        if taken is None:  # as long as the last time, and so on the way between the two looks
            taken = looked + 1 - flight.enqueued
        named.pace.taken = taken
        assert written(recorder)[-1].open
        before = time.monotonic_ns()
        if expected == "now":
            flight.wait()
        else:
            recorder.look()
        ended = written(recorder)[-1].ended
        assert {"looked": ended == looked, "now": ended >= before, "likely": ended == looked + 1}[expected]
        assert recorder.ring.flying == []
        flight.wait()
        assert written(recorder)[-1].ended == ended, "whoever waits later changes nothing"


def test_who_waits_sees_the_end_and_every_sixteenth_step_all_ends() -> None:
    recorder = Recorder(RankDevice(CPU))
    wire, logged = opened(recorder)
    named = logged.named(FORWARD)
    named.pace.taken, recorder.step = 5, 3
    flight = named.start("all_reduce", torch.zeros(4), torch.zeros(4))
    threading.Timer(0.05, lambda: wire.sent[0].future.set_result([])).start()
    flight.wait()
    [waited] = written(recorder)
    assert waited.ended - waited.enqueued > 40_000_000 and recorder.ring.flying == []
    recorder.step = WATCHED
    named.start("all_reduce", torch.zeros(4), torch.zeros(4))
    wire.sent[1].future.set_result([])
    assert not written(recorder)[1].open


@pytest.mark.parametrize("watched", [True, False])
def test_one_that_fails_says_so(watched: bool) -> None:
    recorder = Recorder(RankDevice(CPU))
    wire, logged = opened(recorder)
    flight = (logged.named(FORWARD) if watched else logged).start("all_reduce", torch.zeros(4), torch.zeros(4))
    wire.sent[0].future.set_exception(RuntimeError("connection closed by peer"))
    if not watched:
        assert written(recorder)[0].open
    with pytest.raises(RuntimeError, match="closed by peer"):
        flight.wait()
    [failed] = written(recorder)
    assert failed.failed and failed.ended >= failed.enqueued
    wire.refuses = True
    with pytest.raises(RuntimeError, match="closed by peer"):
        logged.start("all_reduce", torch.zeros(4), torch.zeros(4))
    assert [record.failed for record in written(recorder)] == [True, True]
    assert recorder.take() == [], "what failed is no span"


def test_what_a_thread_does_for_another_is_named_after_it() -> None:
    recorder = Recorder(RankDevice(CPU))
    _, logged = opened(recorder)

    def start() -> None:
        logged.start("all_reduce", torch.zeros(4), torch.zeros(4))

    recorder.recorded_job(recorder.ring.name("gather attn0"), start, step=7)()
    start()
    _, inner, outer = written(recorder)
    assert (inner.step, inner.name.text) == (7, "gather attn0 tp") and (outer.step, outer.name.text) == (0, "tp")


def test_messages_are_numbered_by_peer_and_direction() -> None:
    recorder = Recorder(RankDevice(CPU))
    messages = recorder.messages([0, 1, 2], "lane 0-1")
    posted = [(1, True), (1, True), (2, True), (1, False), (1, True)]
    numbers = [messages.post(peer, sends=sends, size=8) for peer, sends in posted]
    messages.settled(numbers[0])
    moved: list[str] = []
    messages.move(64, lambda: moved.append("now"))()
    *found, job = written(recorder)
    assert [record.sequence for record in found] == [0, 1, 0, 0, 2]
    assert [record.kind for record in found[2:4]] == [RecordKind.SEND, RecordKind.RECEIVE]
    assert [record.open for record in found] == [False, True, True, True, True]
    assert (job.kind, job.bytes, job.open, moved) == (RecordKind.JOB, 64, False, ["now"])

    def fails() -> None:
        raise RuntimeError("connection closed by peer")

    with pytest.raises(RuntimeError, match="closed by peer"):
        messages.move(64, fails)()
    assert written(recorder)[-1].failed


def test_times_of_a_device_are_filled_in_after_the_step_without_stopping_it() -> None:
    device = Late()
    recorder = Recorder(device)
    wire, logged = opened(recorder)
    number = recorder.begin(RecordKind.COMPUTE, recorder.name_of(FORWARD))
    recorder.end(number)
    flights = [logged.named(FORWARD).start("all_reduce", torch.zeros(4), torch.zeros(4)) for _ in range(2)]
    before = written(recorder)
    assert len(before) == 3 and all(record.enqueued and record.open for record in before)
    for sent in wire.sent:
        sent.future.set_result([])
    for flight in flights:
        flight.wait()
    records = recorder.records()
    found = {(row["kind"], row["started"], row["ended"]) for row in records.table if row["kind"] != RecordKind.STEP}
    assert found == {
        (RecordKind.COMPUTE, 1000, 2000),
        (RecordKind.COLLECTIVE, 3000, 104_000),
        (RecordKind.COLLECTIVE, 104_000, 106_000),  # a group serves one at a time
    }
    assert device.waited == 0


def test_bytes_are_what_a_ring_sends() -> None:
    recorder = Recorder(RankDevice(CPU))
    wire, logged = opened(recorder)
    named = logged.named(FORWARD)
    for kind in ("all_reduce", "all_gather", "rotate"):
        flight = named.start(kind, torch.zeros(8), torch.zeros(4) if kind == "all_gather" else torch.zeros(8))
        wire.sent[-1].future.set_result([])
        flight.wait()
    records: Records = recorder.records()
    assert records.spans(0)["bytes"].tolist() == [32, 16, 32]


def test_what_the_device_is_still_busy_with_waits_for_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A publication that goes on beyond its step's end does not make the host wait."""
    device = Late()
    recorder, last = Recorder(device), [1]
    monkeypatch.setattr(device, "reached", lambda mark: mark <= last[0])
    read = device.nanoseconds

    def reached(mark: Mark) -> int:
        assert device.reached(mark), "the host waits"
        return read(mark)

    monkeypatch.setattr(device, "nanoseconds", reached)
    number = recorder.enqueue(RecordKind.JOB, recorder.ring.name("publish"))
    recorder.start(number)
    recorder.end(number)
    assert RecordKind.JOB not in recorder.records().table["kind"]
    last[0] = 2
    [found] = [row for row in recorder.records().table if row["kind"] == RecordKind.JOB]
    assert (found["started"], found["ended"]) == (1000, 2000)


def test_messages_of_a_device_are_timed_by_its_marks() -> None:
    device = Late()
    recorder = Recorder(device)
    messages = recorder.messages([0, 1], "lane 0-1")
    number = messages.post(1, sends=True, size=8)
    assert written(recorder)[0].open
    messages.settled(number)
    assert written(recorder)[0].open, "the device has not said when"
    recorder.resolve()
    assert (written(recorder)[0].started, written(recorder)[0].ended) == (1000, 2000)


def test_a_look_sees_what_a_device_has_reached_in_the_midst_of_a_step() -> None:
    """Else a step that takes long would look like a collective that hangs; two looks, one timeline
    of the group."""
    recorder = Recorder(Late())
    _, logged = opened(recorder)
    tensor = torch.zeros(4)
    for at, over in ((0, True), (1, True)):
        flight = logged.named(FORWARD).start("all_reduce", tensor, tensor)
        recorder.look()
        assert [record.open for record in written(recorder)] == [not over] * (at + 1), flight
    first, second = written(recorder)
    assert second.started >= first.ended > first.started
