"""A ring's writer, in C and in Python: the same bytes, collectives in line against a model of them;
in C also misuse, and that nothing is kept."""

from __future__ import annotations

import gc
import mmap
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.core.record import ring_writer
from plait.core.record.ring import RecordKind
from plait.core.record.ring_writer import Flight, Line, Pace, RingWriter, Writer, this_process
from tests.support.plain_ring import plain_writer

PLAIN: Any = plain_writer()
NATIVE = pytest.mark.skipif(not ring_writer.NATIVE, reason="the writer in C is not built")
both = pytest.mark.parametrize(
    "made", [pytest.param(ring_writer, id="C", marks=NATIVE), pytest.param(PLAIN, id="Python")]
)
EVENTS = st.lists(st.tuples(st.sampled_from(["depart", "land", "fail", "over", "look", "wait"]), st.integers(0, 5)))


class Work:
    """A collective that is over when the test says so."""

    def __init__(self) -> None:
        self.over, self.error = False, ""

    def wait(self) -> None:
        if self.error:
            raise RuntimeError(self.error)
        self.over = True

    def is_completed(self) -> bool:
        return self.over

    def get_future(self) -> object:
        return self


def ring(capacity: int = 256, made: Any = ring_writer) -> RingWriter:
    return made.RingWriter(None, this_process(rank=0, world=2, capacity=capacity))


def depart(line: Line, pace: Pace, *, looked_for: bool) -> Flight:
    flight = line.depart(pace, 7, 3, 1024, 0x11, 99)
    flight.fly(Work(), looked_for)
    return flight


def record(writer: RingWriter, number: int) -> Any:
    return writer.rows(np.array([number]))[0]


@both
@given(EVENTS)
def test_a_group_serves_one_at_a_time_and_ends_are_said_once(made: Any, events: list[tuple[str, int]]) -> None:
    writer, pace = ring(made=made), made.Pace()
    line, flights = made.Line(writer, 1), list[Any]()
    looked_for, ended = list[bool](), dict[int, int]()  # by flight; ended: when, as it was said first
    for what, which in events:
        if what == "depart":
            looked_for.append(which % 2 == 0)
            flights.append(depart(line, pace, looked_for=looked_for[-1]))
        elif what == "look":
            writer.look()
        elif flights:
            one = flights[which % len(flights)]
            if what == "land":
                one.land(time.monotonic_ns(), False)
            elif what == "fail":
                one.fail()
            elif what == "wait":
                one.wait()
            else:
                one.work.over = True
        waiting = [number for number in range(len(flights)) if number not in ended]
        if what in ("land", "fail", "wait") and flights:
            now_over = {which % len(flights)} & set(waiting)
        else:
            now_over = {n for n in waiting if looked_for[n] and flights[n].work.over} if what == "look" else set[int]()
        if now_over and what != "fail":  # those before the last of them are asked, until one is under way
            for number in waiting:
                if number == max(now_over) or not (looked_for[number] and flights[number].work.over):
                    break
                now_over.add(number)
        rows = [record(writer, one.number) for one in flights]
        ended = {number: abs(int(rows[number]["ended"])) for number in now_over} | ended
        assert {number: abs(int(row["ended"])) for number, row in enumerate(rows) if row["ended"]} == ended
        waiting = [number for number in range(len(flights)) if number not in ended]
        assert [number for number in waiting if rows[number]["started"]] == waiting[:1], "the first travels, alone"
        assert writer.flying == [flights[number] for number in waiting if looked_for[number]]
        now = time.monotonic_ns()
        for number, end in ended.items():
            assert flights[number].enqueued <= rows[number]["started"] <= end <= now


@both
@given(st.permutations(range(4)), st.lists(st.booleans(), min_size=4, max_size=4), st.integers(0, 10**6))
def test_collectives_awaited_in_any_order_have_a_start_and_an_end(
    made: Any, order: list[int], over: list[bool], taken: int
) -> None:
    """Also where what was before one was never seen to end."""
    writer, pace = ring(made=made), made.Pace()
    pace.taken = taken
    line = made.Line(writer, 1)
    flights: list[Any] = [depart(line, pace, looked_for=True) for _ in range(4)]
    for flight, is_over in zip(flights, over, strict=True):
        flight.work.over = is_over
    returned: dict[int, int] = {}
    for which in order:
        flights[which].wait()
        returned[which] = time.monotonic_ns()
    for which, flight in enumerate(flights):
        row = record(writer, flight.number)
        assert flight.enqueued == row["enqueued"] <= row["started"] <= row["ended"] <= returned[which]


@both
def test_a_start_that_was_not_seen_tells_no_pace(made: Any) -> None:
    writer, paces = ring(made=made), (made.Pace(), made.Pace())
    line = made.Line(writer, 1)
    first, second = (depart(line, pace, looked_for=True) for pace in paces)
    second.wait()
    first.wait()
    assert paces[0].taken > 0 == paces[1].taken


@both
def test_a_record_of_a_collective_says_what_it_was_given(made: Any) -> None:
    writer, pace = ring(made=made), made.Pace()
    line = made.Line(writer, 5)
    first, second = (depart(line, pace, looked_for=True) for _ in range(2))
    rows = [record(writer, flight.number) for flight in (first, second)]
    assert [row["sequence"] for row in rows] == [0, 1]
    for row in rows:
        assert (row["kind"], row["group"], row["step"], row["name"], row["bytes"]) == (
            RecordKind.COLLECTIVE,
            5,
            7,
            3,
            1024,
        )
        assert (row["call"], row["signature"], row["peer"]) == (0x11, 99, -1)
    assert writer.flying == [first, second]


@both
def test_whoever_waits_hears_what_went_wrong(made: Any) -> None:
    writer, pace = ring(made=made), made.Pace()
    flight: Any = depart(made.Line(writer, 1), pace, looked_for=True)
    flight.work.error = "connection closed by peer"
    with pytest.raises(RuntimeError, match="closed by peer"):
        flight.wait()
    assert record(writer, flight.number)["ended"] < 0 and writer.flying == [] and pace.taken == 0


@both
def test_more_under_way_than_a_look_sees_to_end_all_the_same(made: Any) -> None:
    writer, pace = ring(made=made), made.Pace()
    flights: list[Any] = [depart(made.Line(writer, 1), pace, looked_for=True) for _ in range(50)]
    for flight in flights:
        flight.work.over = True
    for _ in range(4):
        writer.look()
    assert writer.flying == [] and all(record(writer, flight.number)["ended"] for flight in flights)


@both
def test_an_act_that_fails_ends_the_run_and_leaves_its_record_open(made: Any) -> None:
    writer, done = ring(made=made), []

    def fails(_of: object) -> None:
        raise ValueError("no")

    acts = (
        (done.append, int(RecordKind.COMPUTE), 1),
        (done.append, 0, 0),
        (fails, int(RecordKind.WAIT), 2),
        (done.append, 2, 1),
    )
    with pytest.raises(ValueError, match=r"^no$"):
        writer.run(acts, "x", 4)
    first, second = record(writer, 1), record(writer, 2)
    assert done == ["x", "x"] and first["ended"] >= first["started"] > 0 and (second["ended"], second["step"]) == (0, 4)


@NATIVE
@pytest.mark.parametrize(
    "wrong",
    [
        lambda writer: writer.begin(2),
        lambda writer: writer.begin(2, 1, 0, 1, color=3),
        lambda writer: writer.begin(2, 1, 0, 1, enqueued=3),
        lambda writer: writer.begin("2", 1, 0),
        lambda writer: writer.end(),
        lambda writer: writer.end(1, failed="no number"),
        lambda writer: writer.size(1, 2, True),
        lambda writer: writer.run([], None, 0),
        lambda writer: writer.run((3,), None, 0),
        lambda writer: Line(writer, 1).depart(writer, 0, 0, 0, 0, 0),  # type: ignore[arg-type]
        lambda writer: Line(Pace(), 1),  # type: ignore[arg-type]
        lambda writer: Flight(),
    ],
)
def test_what_is_called_wrongly_says_so(wrong: Any) -> None:
    with pytest.raises(TypeError):
        wrong(ring())


@both
def test_numbers_beyond_the_ring_change_nothing(made: Any) -> None:
    writer = ring(16, made)
    first = writer.begin(RecordKind.COMPUTE, 1, 0)
    for _ in range(16):
        last = writer.enter(RecordKind.COMPUTE, 1, 0)
    for number in (first, -5, 0, last + 1, 2**40):
        writer.end(number, 77)
    assert not writer.rows(np.arange(1, last + 1))["ended"].any()


@both
def test_threads_that_end_what_another_looks_for(made: Any) -> None:
    """Each collective ends once, whoever is first, and is let go."""
    writer, pace = ring(1 << 12, made), made.Pace()
    line, flights = made.Line(writer, 1), list[Flight]()
    stop = threading.Event()

    def looks() -> None:
        while not stop.is_set():
            writer.look()

    def lands() -> None:
        while not stop.is_set():
            for flight in flights[-3:]:
                flight.land(10**18, False)

    threads = [threading.Thread(target=work) for work in (looks, looks, lands)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for number in range(2000):
            flight: Any = depart(line, pace, looked_for=number % 3 > 0)
            flights.append(flight)
            flight.work.over = number % 5 == 0
            flight.wait()
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(before)
    assert writer.flying == [] and all(record(writer, flight.number)["ended"] for flight in flights)
    assert len({sys.getrefcount(one) for one in flights[:-1]}) == 1, "none is held by anybody else"


@NATIVE
def test_nothing_is_kept_of_what_has_ended() -> None:
    writer, pace, work = ring(), Pace(), Work()
    line = Line(writer, 1)
    before = sys.getrefcount(work), sys.getrefcount(pace), sys.getrefcount(line), sys.getrefcount(writer)
    for number in range(1000):
        flight = line.depart(pace, 0, 0, 0, 0, 0)
        flight.fly(work, number % 2 == 0)
        work.over = number % 3 == 0
        writer.look()
        flight.wait()
    del flight
    gc.collect()
    assert (sys.getrefcount(work), sys.getrefcount(pace), sys.getrefcount(line), sys.getrefcount(writer)) == before


@NATIVE
def test_what_was_never_made_or_is_made_again_is_refused() -> None:
    writer, pace = ring(), Pace()
    none, nobodys, line = Writer.__new__(Writer), Line.__new__(Line), Line(writer, 1)
    flight = depart(line, pace, looked_for=True)
    for call in (
        lambda: none.begin(RecordKind.COMPUTE, 0, 0), lambda: none.enter(RecordKind.COMPUTE, 0, 0),
        lambda: none.start(1), lambda: none.end(1), lambda: none.size(1, 8), lambda: none.run(((len, 1, 0),), "", 0),
        lambda: Line(none, 1), lambda: nobodys.depart(pace, 0, 0, 0, 0, 0),
        lambda: line.__init__(ring(), 2), lambda: Writer.__init__(writer, mmap.mmap(-1, 4096 + 64), 1),
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match="made"):
            call()
    none.look()
    assert none.flying == [] and writer.flying == [flight]


@both
@pytest.mark.parametrize("capacity", [2**58, 2**62, 0, -64, 3])
def test_a_ring_is_no_larger_than_its_memory(made: Any, capacity: int) -> None:
    with pytest.raises(ValueError, match="power of two"):
        made.Writer(mmap.mmap(-1, 4096), capacity)


@both
def test_a_collective_may_be_parted_from_its_work_while_that_is_asked(made: Any) -> None:
    class Parting(Work):
        def is_completed(self) -> bool:
            flight.fly(Work(), False)
            gc.collect()
            return self.over

        def wait(self) -> None:
            self.is_completed()

    flight = made.Line(ring(made=made), 1).depart(made.Pace(), 0, 0, 0, 0, 0)
    for ask in (flight.is_completed, flight.wait):
        flight.fly(Parting(), True)
        ask()


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["begin", "enter", "start", "end", "failed", "size", "depart", "fail", "run"]),
            st.sampled_from([*RecordKind]), st.integers(0, 2**16 - 1), st.integers(0, 2**31 - 1), st.integers(1, 2**62),
        ),
        max_size=60,
    )
)  # fmt: skip
@NATIVE
def test_both_writers_leave_the_same_bytes(events: list[tuple[str, RecordKind, int, int, int]]) -> None:
    """All but the times that they read from a clock."""

    def written(made: Any) -> Any:
        writer = ring(16, made)
        line, number = made.Line(writer, 3), 0
        for what, kind, small, middle, large in events:
            if what == "begin":
                number = writer.begin(
                    kind, middle, middle, large, started=large, ended=small, size=large, group=small, sequence=middle,
                    peer=middle, call=small & 255, signature=middle,
                )  # fmt: skip
            elif what == "enter":
                number = writer.enter(kind, middle, -1, size=large)
            elif what in ("start", "size"):
                getattr(writer, what)(number - small % 20, large)
            elif what in ("end", "failed"):
                writer.end(number - small % 20, large, failed=what == "failed")
            elif what == "run":
                writer.run(((len, kind, middle), (len, 0, 0)), "", small)
            else:
                number = (one := line.depart(made.Pace(), middle, middle, large, small & 255, middle)).number
                if what == "fail":
                    one.fail()
        rows = writer.rows(np.arange(1, writer.begin(RecordKind.DATA, 0, 0) + 1))
        for name in ("enqueued", "started", "ended"):
            rows[name] = np.where(np.abs(rows[name] - time.monotonic_ns()) < 10**12, 1, np.sign(rows[name]))
        return rows

    assert written(ring_writer).tobytes() == written(PLAIN).tobytes()
