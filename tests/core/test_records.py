"""Columns made of a ring say what spans made one by one say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.core.records import SPANS, Records
from plait.core.ring import Kind, Place, Ring
from plait.core.ring_writer import RingWriter, this_process
from plait.core.timeline import OpSpan, Span, hidden, spans_of


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


def ring_of(found: Sequence[tuple[Op, Kind, int, int, int]]) -> Records:
    ring = RingWriter(None, this_process(rank=0, world=1, capacity=64))
    for op, kind, step, start, taken in found:
        name = ring.name(str(op), Place(op.site, op.layer, op.slice, op.forward))
        ring.begin(kind, name, step, start, start, start + taken)
    table = ring.rows(np.arange(1, len(found) + 1))
    return Records.of(Ring(ring.header, table, ring.names, ring.groups))


@given(st.lists(entries, max_size=20, unique_by=lambda one: one[3]))
@settings(max_examples=80, deadline=None)
def test_columns_are_what_spans_are_one_by_one(found: list[tuple[Op, Kind, int, int, int]]) -> None:
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
def test_hidden_communication_is_what_spans_say(found: list[tuple[Op, Kind, int, int, int]]) -> None:
    found = [(op, kind, 0, start, taken) for op, kind, _, start, taken in found]
    want = hidden(spans_of(0, 0, [OpSpan(op, SPANS[k], s / 1e9, (s + t) / 1e9) for op, k, _, s, t in found]))
    assert ring_of(found).hidden() == pytest.approx(want, abs=1e-12)
    waits = [taken for _, kind, _, _, taken in found if kind is Kind.IDLE]
    assert ring_of(found).idle() == (pytest.approx(sum(waits) / 1e9) if waits else None)


def test_what_has_no_known_start_has_no_length() -> None:
    """As rings of earlier versions have it of collectives that ended out of their order."""
    op, now = Op("a", "attn", 0, 0, True), 10**15
    known = ring_of([(op, kind, 0, now + n, 10) for n, kind in enumerate((Kind.COLLECTIVE, Kind.WAIT, Kind.IDLE))])
    table = known.table
    unknown = table[:1].copy()
    unknown["started"] = 0
    both = Records(np.concatenate([table, unknown]), known.names, known.groups)
    assert both.hidden() == known.hidden() and both.hidden().total == pytest.approx(1e-8)
    assert both.seconds() == known.seconds() and both.idle() == known.idle()
    for one, other in ((both.spans(0), known.spans(0)), (both.rolled_up(0), known.rolled_up(0))):
        assert {name: column.tolist() for name, column in one.items()} == {n: c.tolist() for n, c in other.items()}


@given(st.lists(entries, max_size=20))
@settings(max_examples=80, deadline=None)
def test_sums_are_those_of_the_spans(found: list[tuple[Op, Kind, int, int, int]]) -> None:
    want: dict[tuple[int, str, str, str], list[int]] = {}
    for op, kind, step, _, taken in found:
        direction = "forward" if op.forward else "backward"
        want.setdefault((step, SPANS[kind], op.site, direction), []).append(taken)
    rows = ring_of(found).rolled_up(0)
    keys = zip(*(rows[name].tolist() for name in ("step", "kind", "site", "direction")), strict=True)
    sums = zip(*(rows[name].tolist() for name in ("n", "sum_ns", "min_ns", "max_ns")), strict=True)
    assert dict(zip(keys, sums, strict=True)) == {
        key: (len(taken), sum(taken), min(taken), max(taken)) for key, taken in want.items()
    }
