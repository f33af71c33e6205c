"""Columns made of a ring say what spans made one by one say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.core.record.records import SPANS, Records, axis_of, sent_bytes
from plait.core.record.ring import OpPlace, RecordKind, Ring, call_of
from plait.core.record.ring_writer import RingWriter, this_process
from plait.core.record.rollup import HOST, STEP_SUMS
from plait.core.record.timeline import OpSpan, Span, spans_of
from plait.diagnose.measured.recording import rollup_of, seconds_of
from tests.support.exposure import exposure_of


@dataclass(frozen=True)
class Op:
    """An op by its text and place."""

    text: str
    site: str
    layer: int
    slice: int
    forward: bool

    def __str__(self) -> str:
        return self.text


ops = st.builds(
    Op,
    text=st.sampled_from(["a", "b"]),  # the same text in both directions is one name
    site=st.sampled_from(["attn", "mlp"]),
    layer=st.integers(0, 1),
    slice=st.just(0),
    forward=st.booleans(),
)
entries = st.tuples(
    ops, st.sampled_from(sorted(SPANS)), st.integers(0, 2), st.integers(1, 10**6), st.integers(0, 10**4)
)  # fmt: skip


def ring_of(found: Sequence[tuple[Op, RecordKind, int, int, int]]) -> Records:
    ring = RingWriter(None, this_process(rank=0, world=1, capacity=64))
    for op, kind, step, start, taken in found:
        name = ring.name(str(op), OpPlace(op.site, op.layer, op.slice, op.forward))
        ring.begin(kind, name, step, start, start, start + taken)
    table = ring.rows(np.arange(1, len(found) + 1))
    return Records.of(Ring(ring.header, table, ring.names, ring.groups))


@given(st.lists(entries, max_size=20, unique_by=lambda one: one[3]))
@settings(max_examples=80, deadline=None)
def test_columns_are_what_spans_are_one_by_one(found: list[tuple[Op, RecordKind, int, int, int]]) -> None:
    records, want = ring_of(found), list[Span]()
    for step in range(3):
        mine = [OpSpan(op, SPANS[k], s / 1e9, (s + t) / 1e9, 0) for op, k, at, s, t in found if at == step]
        want += spans_of(step, 5, mine)
    columns = records.spans(5)
    columns |= {name: columns.pop(f"{name}_ns") / 1e9 for name in ("start", "end")}
    values = [columns[field.name].tolist() for field in fields(Span)]
    assert [Span(*row) for row in zip(*values, strict=True)] == want


@given(st.lists(entries, max_size=20))
@settings(max_examples=80, deadline=None)
def test_exposed_communication_is_what_spans_say(found: list[tuple[Op, RecordKind, int, int, int]]) -> None:
    found = [(op, kind, 0, start, taken) for op, kind, _, start, taken in found]
    want = exposure_of(spans_of(0, 0, [OpSpan(op, SPANS[k], s / 1e9, (s + t) / 1e9) for op, k, _, s, t in found]))
    assert ring_of(found).exposure() == pytest.approx(want, abs=1e-12)
    waits = [taken for _, kind, _, _, taken in found if kind is RecordKind.IDLE]
    assert ring_of(found).idle() == (pytest.approx(sum(waits) / 1e9) if waits else None)


def test_what_has_no_known_start_has_no_length() -> None:
    """As rings of earlier versions have it of collectives that ended out of their order."""
    op, now = Op("a", "attn", 0, 0, True), 10**15
    known = ring_of(
        [(op, kind, 0, now + n, 10) for n, kind in enumerate((RecordKind.COLLECTIVE, RecordKind.WAIT, RecordKind.IDLE))]
    )
    table = known.table
    unknown = table[:1].copy()
    unknown["started"] = 0
    both = Records(np.concatenate([table, unknown]), known.names, known.groups)
    assert both.exposure() == known.exposure() and both.exposure() == pytest.approx((1.1e-8, 2e-9))
    assert both.seconds() == known.seconds() and both.idle() == known.idle()
    for one, other in ((both.spans(0), known.spans(0)), (both.rolled_up(0), known.rolled_up(0))):
        assert {name: column.tolist() for name, column in one.items()} == {n: c.tolist() for n, c in other.items()}


@given(st.lists(entries, max_size=20))
@settings(max_examples=80, deadline=None)
def test_sums_are_those_of_the_spans(found: list[tuple[Op, RecordKind, int, int, int]]) -> None:
    want: dict[tuple[int, str, str, str], list[int]] = {}
    for op, kind, step, _, taken in found:
        direction = "forward" if op.forward else "backward"
        want.setdefault((step, SPANS[kind], op.site, direction), []).append(taken)
    rows = ring_of(found).rolled_up(0)
    keys = zip(*(rows[name].tolist() for name in ("step", "kind", "site", "direction")), strict=True)
    sums = zip(*(rows[name].tolist() for name in ("n", "sum_ns", "min_ns", "max_ns")), strict=True)
    told = dict(zip(keys, sums, strict=True))
    assert {key: row for key, row in told.items() if key[1] not in (HOST, *STEP_SUMS)} == {
        key: (len(taken), sum(taken), min(taken), max(taken)) for key, taken in want.items()
    }


@given(st.lists(entries, max_size=20))
@settings(max_examples=80, deadline=None)
def test_sums_of_steps_are_those_that_readers_make_of_spans(found: list[tuple[Op, RecordKind, int, int, int]]) -> None:
    """One definition, whoever adds up; and nothing of a step exceeds it."""
    records, kinds = ring_of(found), (HOST, *STEP_SUMS)
    rows = records.rolled_up(0)
    keys = zip(*(rows[name].tolist() for name in ("step", "kind", "site")), strict=True)
    mine = {key: ns / 1e9 for key, ns in zip(keys, rows["sum_ns"].tolist(), strict=True) if key[1] in kinds}
    columns = records.spans(0)
    spans = pl.DataFrame({name: column.tolist() for name, column in columns.items() if not name.endswith("_ns")})
    times = {name: columns[f"{name}_ns"] / 1e9 for name in ("start", "end")}
    axes = [axis_of(*one) for one in spans.select("kind", "name").iter_rows()]
    spans = spans.with_columns(axis=pl.Series(axes, dtype=pl.String), **{k: pl.Series(v) for k, v in times.items()})
    theirs = {
        (step, kind, site): seconds
        for step, kind, site, seconds in rollup_of(spans).select("step", "kind", "site", "seconds").iter_rows()
        if kind in kinds
    }
    assert mine == pytest.approx(theirs, abs=1e-12)
    for step, length in seconds_of(spans).items():
        still = sum(seconds for (at, kind, _), seconds in mine.items() if (at, kind) == (step, "exposed"))
        total = mine.get((step, "communication", ""), 0.0)
        assert 0 <= still <= total + 1e-12 and total <= length + 1e-12


@pytest.mark.parametrize(
    ("kind", "name", "axis"),
    [
        ("idle", "0RECV_F0", "pp"), ("transfer", "0SEND_F0", "pp"), ("idle", "gather attn0", "pp"),
        ("comm", "gather attn0", "dp"), ("comm", "publish vectors0", "dp"), ("wait", "need mlp1", "dp"),
        ("wait", "settle vectors0", "dp"), ("comm", "reduce attn0", "dp"), ("wait", "drop mlp0", "tp"),
        ("wait", "attn0.K0", "cp"), ("comm", "block1.T0.1", "cp"), ("comm", "attn0.E0", "cp"),
        ("comm", "attn0.R0", "tp"), ("wait", "mlp0.C0", "tp"), ("wait", "head.F0", "tp"), ("comm", "mlp0.F0", "tp"),
        ("comm", "attn0", "tp"), ("comm", "attn0.", "tp"), ("compute", "attn0.K0", ""), ("optimizer", "optimizer", ""),
        ("compute", "gather attn0", ""),
    ],
)  # fmt: skip
def test_along_which_axis_a_span_communicates(kind: str, name: str, axis: str) -> None:
    assert axis_of(kind, name) == axis


@pytest.mark.parametrize(
    ("verb", "size", "sent"),
    [("all_reduce", 4, 1500), ("all_gather", 4, 750), ("reduce_scatter", 4, 750), ("all_to_all", 4, 750),
     ("broadcast", 4, 750), ("rotate", 4, 1000), ("rotate", 1, 1000), ("all_reduce", 1, 0)],
)  # fmt: skip
def test_bytes_that_a_rank_sends_of_a_thousand(verb: str, size: int, sent: int) -> None:
    assert sent_bytes(verb, 1000, size) == sent


def made(write: Callable[[RingWriter], None]) -> Records:
    ring = RingWriter(None, this_process(rank=0, world=4, capacity=64))
    write(ring)
    count = int(ring.begin(RecordKind.COMPUTE, ring.name("last"), -1, 1, 1, 0)) - 1
    return Records.of(Ring(ring.header, ring.rows(np.arange(1, count + 1)), ring.names, ring.groups))


ATTENTION = OpPlace("attn", 3, 1, True)


def test_what_a_collective_sent_follows_from_its_group() -> None:
    def write(ring: RingWriter) -> None:
        name = ring.name("attn3.R1", ATTENTION)
        for verb, group, size in (
            ("all_reduce", ring.group([0, 1], "tp"), 1000),
            ("all_reduce", ring.group([0, 1, 2, 3], "tp"), 1000),
            ("all_gather", ring.group([0, 1, 2, 3], "tp"), 1000),
        ):
            ring.begin(RecordKind.COLLECTIVE, name, 0, 1, 2, 9, size=size, group=group, call=call_of(verb, "float32"))
        ring.begin(RecordKind.TRANSFER, name, 0, 1, 3, 9, size=70)

    columns = made(write).spans(5)
    assert columns["bytes"].tolist() == [1000, 1500, 750, 70]
    assert columns["rank"].tolist() == [5] * 4
    assert columns["seq"].tolist() == [0, 1, 2, 0]
    assert columns["layer"].tolist() == [3] * 4
    assert columns["slice"].tolist() == [1] * 4


def test_a_collective_of_an_unknown_group_sent_nothing_that_is_known() -> None:
    def write(ring: RingWriter) -> None:
        ring.begin(RecordKind.COLLECTIVE, ring.name("a", ATTENTION), 0, 1, 2, 9, size=1000, group=7,
                   call=call_of("all_reduce", "float32"))  # fmt: skip

    assert made(write).spans(0)["bytes"].tolist() == [0]


def test_what_is_beside_a_plans_ops_has_its_own_name_for_a_site() -> None:
    def write(ring: RingWriter) -> None:
        ring.begin(RecordKind.DATA, ring.name("batch"), 2, 10, 10, 30)
        ring.begin(RecordKind.COMPUTE, ring.name("nowhere"), 2, 10, 10, 30)  # has no place, so is in no timeline
        ring.begin(RecordKind.COMPUTE, ring.name("attn3.F1", ATTENTION), 2, 40, 40, 50)
        ring.begin(RecordKind.OPTIMIZER, ring.name("adam"), -1, 60, 60, 70)  # of no step
        ring.begin(RecordKind.CHECKPOINT, ring.name("save"), 2, 60, 60, 0)  # has not ended

    records = made(write)
    columns = records.spans(0)
    assert columns["kind"].tolist() == ["data", "compute"]
    assert columns["site"].tolist() == ["batch", "attn"]
    assert (columns["layer"].tolist(), columns["slice"].tolist()) == ([-1, 3], [-1, 1])
    assert columns["direction"].tolist() == ["", "forward"]
    assert records.seconds() == {"data": pytest.approx(2e-8), "compute": pytest.approx(1e-8)}


def test_seconds_of_kinds_are_sums_and_axes_count_overlaps_once() -> None:
    def write(ring: RingWriter) -> None:
        for text, kind, taken in (
            ("attn3.R0", RecordKind.COLLECTIVE, 5), ("attn3.R0", RecordKind.COLLECTIVE, 7),
            ("attn3.C0", RecordKind.COLLECTIVE, 11), ("attn3.R0", RecordKind.WAIT, 13),
            ("gather attn3", RecordKind.JOB, 17), ("attn3.K0", RecordKind.COLLECTIVE, 19),
        ):  # fmt: skip
            ring.begin(kind, ring.name(text, ATTENTION), 0, 100, 100, 100 + taken)

    records = made(write)
    assert records.seconds() == {"comm": pytest.approx(59e-9), "wait": pytest.approx(13e-9)}
    assert records.exposure() == pytest.approx((19e-9, 19e-9))
    assert records.exposure_by_axis() == {
        "tp": pytest.approx((13e-9, 13e-9)), "cp": pytest.approx((19e-9, 6e-9)), "dp": pytest.approx((17e-9, 0.0)),
    }  # fmt: skip


def test_groups_and_processors_are_rolled_up_beside_a_timeline() -> None:
    def write(ring: RingWriter) -> None:
        group = ring.group([0, 1], "tp")
        place = ring.name("attn3.R1", ATTENTION._replace(forward=False))
        ring.begin(RecordKind.COLLECTIVE, place, 4, 1, 10, 15, group=group)
        ring.begin(RecordKind.COLLECTIVE, ring.name("other"), 4, 1, 10, 13, group=group)
        ring.begin(RecordKind.SEND, ring.name("h"), 5, 1, 10, 14)
        ring.begin(RecordKind.STEP, ring.name("step"), 4, 1, 10, 90, size=55)
        ring.begin(RecordKind.STEP, ring.name("step"), 5, 1, 10, 80)  # nobody knows what it had

    rows = made(write).rolled_up(2)
    told = sorted(
        zip(*(rows[name].tolist() for name in ("step", "kind", "site", "direction", "n", "sum_ns")), strict=True)
    )
    assert told == [
        (4, "collective", "tp", "", 1, 3), (4, "comm", "attn", "backward", 1, 5), (4, "communication", "", "", 1, 5),
        (4, "exposed", "tp", "", 1, 5), (4, "processor", "", "", 1, 55),
        (4, "step", "", "", 1, 80), (5, "send", "", "", 1, 4), (5, "step", "", "", 1, 70),
    ]  # fmt: skip
    assert set(rows["rank"].tolist()) == {2}
    assert rows["min_ns"].tolist() == rows["max_ns"].tolist() == rows["sum_ns"].tolist()


def test_a_ring_without_records_has_nothing_to_say() -> None:
    records = made(lambda _: None)
    assert records.seconds() == {}
    assert records.idle() is None
    assert len(records.rolled_up(0)["step"]) == 0
    assert len(records.spans(0)["step"]) == 0
