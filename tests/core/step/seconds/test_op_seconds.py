"""The one price list: columns of mixed structures are each strategy alone, and what slices and
parts cost."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.core.step.columns.points import OVERLAPS, RECOMPUTES, StrategyTable
from plait.core.step.columns.shapes import Options, Shapes
from plait.core.step.ops import Kind
from plait.core.step.seconds.layer_sums import LayerSums
from plait.core.step.seconds.op_seconds import OpSeconds, Priced
from tests.plan.layers import A100, BF16, GPT, LLAMA, MIXTRAL, SEQUENCE

MODELS = [Shapes.of(LLAMA), Shapes.of(GPT), replace(Shapes.of(GPT), parallel_block=1), Shapes.of(MIXTRAL)]

rows_of_all_kinds = st.builds(
    lambda tp, ulysses, ring, micro, p1, p2, recompute, flat, overlap, graphs: {
        "tp": tp, "cp": ulysses * ring, "ring": ring, "micro": micro * p1, "p1": p1, "p2": p2, "graphs": graphs,
        "recompute": recompute, "sequence_parallel": int(flat and tp > 1), "overlap": overlap,
    },
    st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]), st.sampled_from([1, 2, 4]), st.integers(1, 3),
    st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]), st.integers(0, len(RECOMPUTES) - 1), st.booleans(),
    st.integers(0, len(OVERLAPS) - 1), st.integers(0, 1),
)  # fmt: skip


def priced(model: Any, rows: list[dict[str, int]], sequence: Any = SEQUENCE, options: Options | None = None) -> Priced:
    return Priced(model, StrategyTable.of(rows), A100, sequence, BF16, options or Options())


def one(model: Any = MODELS[0], /, **row: int) -> OpSeconds:
    """Prices of one strategy."""
    ((which, found),) = priced(model, [row]).structures()
    assert list(which) == [0]
    return found


def kinds(ops: OpSeconds) -> list[tuple[Any, Kind]]:
    """(site, kind) of all ops of a layer and of the ends."""
    found: list[tuple[Any, Kind]] = [
        (site, kind) for site, _ in ops.graph.segments for kind in ops.graph.kinds(site, 0)
    ]
    return [*found, ("leave", Kind.NORM), ("leave", Kind.NORM_BACKWARD)]


def at(value: Any, number: int, count: int) -> float:
    """One of a column, or the number that all have."""
    return float(np.broadcast_to(np.asarray(value), count)[number])


@given(rows=st.lists(rows_of_all_kinds, min_size=2, max_size=8), data=st.data())
@settings(max_examples=12, deadline=None)
def test_columns_of_mixed_structures_are_each_strategy_alone(rows: list[dict[str, int]], data: st.DataObject) -> None:
    """Of a model each, with a sequence and options of its own."""
    models = [data.draw(st.sampled_from(MODELS)) for _ in rows]
    sequences = np.array([data.draw(st.sampled_from([512, 4096])) for _ in rows])
    work = np.array([data.draw(st.sampled_from([1.0, 2.0])) for _ in rows])
    mixed = priced(Shapes.stack(models), rows, sequences, Options(norm_work=work))
    seen = list[int]()
    for which, ops in mixed.structures():
        seen += list(which)
        for place, number in enumerate(which):
            options = Options(norm_work=float(work[number]))
            ((_, alone),) = priced(models[number], [rows[number]], int(sequences[number]), options).structures()
            assert alone.graph == ops.graph
            for site, kind in kinds(alone):
                count = len(ops.priced.points)
                together, own = ops.compute(site, kind), alone.compute(site, kind)
                for part, told in zip(together, own, strict=True):
                    assert at(part, place, count) == pytest.approx(at(told, 0, 1), rel=1e-12)
                for name in ("sent", "calls", "parts") if site != "leave" else ():
                    found, want = (getattr(each, name)(site, kind) for each in (ops, alone))
                    assert at(found, place, count) == pytest.approx(at(want, 0, 1), rel=1e-12), (site, kind, name)
    assert sorted(seen) == list(range(len(rows)))


@given(rows=st.lists(rows_of_all_kinds, min_size=2, max_size=8), model=st.sampled_from(MODELS))
@settings(max_examples=8, deadline=None)
def test_sums_of_columns_are_each_strategys(rows: list[dict[str, int]], model: Shapes) -> None:
    together = LayerSums.of(priced(model, rows))
    for number, row in enumerate(rows):
        alone = LayerSums.of(priced(model, [row]))
        for found, want in zip(columns_of(together), columns_of(alone), strict=True):
            assert [column[number] for column in found] == [column[0] for column in want]


def columns_of(sums: LayerSums) -> list[tuple[Any, ...]]:
    """Of passes, and of the host's phases."""
    passes = [sums.forward, sums.backward, sums.again, sums.embed, sums.head, sums.leave, sums.head_backward,
              sums.unlisted, sums.unlisted_backward]  # fmt: skip
    phases = (sums.late, sums.late_again)
    assert len(passes) == len(sums) - len(phases)
    assert [[*each] for each in phases] == [["F", "B", "I", "W"], ["B", "I"]]
    return [*passes, *(late for each in phases for waits in each.values() for late in waits)]


@given(row=rows_of_all_kinds, model=st.sampled_from(MODELS))
@settings(max_examples=20, deadline=None)
def test_a_layer_is_the_sum_of_its_ops(row: dict[str, int], model: Shapes) -> None:
    ops = one(model, **row)
    sums = LayerSums.of(priced(model, [row]))
    passes = [sums.forward, sums.backward, sums.again]
    own = [each for each in kinds(ops) if each[0] in ("attn", "mlp", "block")]
    seconds = sum(at(ops.compute(site, kind).seconds, 0, 1) for site, kind in own)
    assert sum(float(each.seconds[0]) for each in passes) == pytest.approx(seconds)
    sent = sum(at(ops.sent(site, kind), 0, 1) for site, kind in own)
    assert sum(float((each.tp + each.heads + each.ring + each.home)[0]) for each in passes) == pytest.approx(sent)
    calls = sum(at(ops.calls(site, kind), 0, 1) for site, kind in own)
    assert sum(float(each.calls[0]) for each in passes) == calls
    assert float(sums.again.seconds[0]) == 0 if row["recompute"] == 0 else float(sums.again.seconds[0]) > 0
    for each in passes:
        assert at(each.second, 0, 1) + at(each.weights, 0, 1) <= at(each.products, 0, 1) * (1 + 1e-12)
