"""One made-up run, and all that say how much of its communication is exposed: they say the same."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from plait.cli.diagnose import show_timeline
from plait.core.cluster.hardware import HERE
from plait.core.job.plan import Plan
from plait.core.job.spec import Job
from plait.core.record.columns import Coded
from plait.core.record.exposure import Exposure
from plait.core.record.records import Records
from plait.core.record.ring import OpPlace, RecordKind, Ring
from plait.core.record.ring_writer import RingWriter, this_process
from plait.core.record.rollup import RollupSource, rollup_file, write_rollup
from plait.core.record.timeline import write_spans
from plait.diagnose.measured.compare import compare, compare_with_plan, table_of
from plait.diagnose.measured.reading import drawable_recording, read_run, read_timeline
from plait.diagnose.measured.recording import exposed, grid_of, sum_exposure, with_axes
from plait.diagnose.measured.shares import MeanStep, mean_step
from plait.launch.collect.metrics import Live
from plait.plan.make import make_plan
from plait.plan.search.simulate import simulate_plan
from plait.train.record.metrics import DeviceRates, Meter
from plait.train.report import describe

STEPS = 3
OF_A_STEP = (
    (RecordKind.JOB, "publish vectors0", -200, 3),  # begun at the end of the step before, and hidden by the data
    (RecordKind.DATA, "data", 0, 5),
    (RecordKind.COMPUTE, "attn0.F0", 5, 30),
    (RecordKind.COLLECTIVE, "attn0.R0", 20, 44),  # 10 ms beside computation, 4 ms while the host hands it over
    (RecordKind.WAIT, "attn0.R0", 34, 46),  # 2 ms until the rank is woken
    (RecordKind.COMPUTE, "mlp0.F0", 46, 60),
    (RecordKind.COLLECTIVE, "mlp0.R0", 50, 64),
    (RecordKind.JOB, "reduce mlp0", 55, 80),  # of another axis, beside that
    (RecordKind.WAIT, "mlp0.R0", 60, 64),
    (RecordKind.COMPUTE, "mlp0.C0", 64, 75),
    (RecordKind.WAIT, "settle vectors0", 75, 80),
    (RecordKind.OPTIMIZER, "optimizer", 80, 90),
)
"""Records of a step of 0.1 s: kind, name, begin and end in ms."""
TP, DP = Exposure(0.040, 0.020), Exposure(0.028, 0.005)
ALL = Exposure(0.059, 0.025)
"""Seconds: tp lasts from 20 to 46 ms and from 50 to 64, dp from 0 to 3 and from 55 to 80."""
HIDDEN = 34 / 59


@pytest.fixture
def plan() -> Plan:
    job = {
        "model": {"family": "gpt", "num_layers": 1, "hidden": 8, "num_heads": 2, "vocab": 16, "max_sequence": 8},
        "data": {"sequence_length": 8}, "train": {"global_batch_size": 2, "micro_batch_size": 1},
        "strategy": {"tp": 2},
    }  # fmt: skip
    return make_plan(Job.from_dict(job), HERE, vocab=16)


def ring_of(steps: range, rank: int = 0, rows: Sequence[tuple[RecordKind, str, int, int]] = OF_A_STEP) -> Ring:
    ring = RingWriter(None, this_process(rank=rank, world=1, capacity=64))
    for step in steps:
        at = 10**9 + 10**8 * step
        for kind, text, begin, end in rows:
            place = None if kind in (RecordKind.DATA, RecordKind.OPTIMIZER) else OpPlace(text.split(".")[0], 0, 0, True)
            ring.begin(kind, ring.name(text, place), step, at, at + begin * 10**6, at + end * 10**6)
        ring.begin(RecordKind.STEP, ring.name("step"), step, at, at, at + 10**8)
    return Ring(ring.header, ring.rows(np.arange(1, len(steps) * (len(rows) + 1) + 1)), ring.names, ring.groups)


@pytest.fixture
def run(tmp_path: Path, plan: Plan) -> Path:
    """A run's folder."""
    (tmp_path / "timeline").mkdir()
    columns = Records.of(ring_of(range(STEPS))).spans(0)
    write_spans(tmp_path / "timeline" / "rank-00000-step-00000000.parquet", columns, plan.key)
    plan.write(tmp_path / "plan.json")
    return tmp_path


def said(run: Path, **options: Any) -> dict[str, Any]:
    with redirect_stdout(StringIO()) as out:
        show_timeline(run, as_json=True, **options)
    return json.loads(out.getvalue())


def test_the_log_and_metrics(plan: Plan) -> None:
    rates = DeviceRates("cpu", "cpu", 1, 1e12, 4e11)
    metrics = Meter(plan, 2, rates).metrics(0.1, Records.of(ring_of(range(1))))
    assert (metrics["communication_seconds"], metrics["exposed_seconds"]) == pytest.approx(ALL)
    assert metrics["hidden"] == pytest.approx(HIDDEN)
    assert metrics["mfu"] == pytest.approx(plan.model.causal_step_flops(8, 2) / 2 / 0.1 / 1e12)
    assert metrics["device"] == {
        "name": "cpu", "kind": "cpu", "peak_flops": 1e12, "matmul_rate_share": pytest.approx(metrics["mfu"] / 0.4)
    }  # fmt: skip
    assert "exposed 25 ms (25%), hidden 58%" in describe({"loss": 1.0, **metrics})


def test_live_metrics(tmp_path: Path, plan: Plan) -> None:
    live, ring = Live(tmp_path, plan), ring_of(range(STEPS))
    live.add(ring.header, Records.of(ring))
    found = {
        (sample.name.removeprefix("plait_"), sample.labels.get("axis")): sample.value
        for family in live.collect() for sample in family.samples
    }  # fmt: skip
    for axis, one in (("tp", TP), ("dp", DP)):
        assert found["communication_seconds_total", axis] == pytest.approx(STEPS * one.total)
        assert found["exposed_communication_seconds_total", axis] == pytest.approx(STEPS * one.exposed)
    assert found["hidden_communication_ratio", None] == pytest.approx(HIDDEN)


def test_plait_timeline(run: Path) -> None:
    found = said(run)
    assert found["communication"] == pytest.approx({**ALL._asdict(), "waited": 0.021})
    assert [found["hidden"], *(one["hidden"] for one in found["hidden_by_step"])] == pytest.approx([HIDDEN] * 4)
    with redirect_stdout(StringIO()) as out:
        show_timeline(run)
    of_rank_0 = "59.0 ms a step, exposed 25.0 ms (21.0 ms of it in waits), hidden 58%\n"
    assert f"communication, over the last: {of_rank_0}" in out.getvalue()


def test_several_ranks_are_told_apart_from_the_one_of_the_metrics(run: Path, plan: Plan) -> None:
    """Rank 1 waits for nothing: all that it sends is hidden."""
    busy = [one for one in OF_A_STEP if one[0] is not RecordKind.WAIT] + [(RecordKind.COMPUTE, "mlp0.C1", 30, 80)]
    columns = Records.of(ring_of(range(STEPS), rank=1, rows=busy)).spans(1)
    write_spans(run / "timeline" / "rank-00001-step-00000000.parquet", columns, plan.key)
    meter = Meter(plan, 2, DeviceRates("cpu", "cpu", 1, 1e12, 1e12))
    found, metrics = said(run), meter.metrics(0.1, Records.of(ring_of(range(1))))
    assert found["hidden_of_rank_0"] == pytest.approx(metrics["hidden"]) == pytest.approx(HIDDEN)
    assert found["hidden"] > 0.7
    with redirect_stdout(StringIO()) as out:
        show_timeline(run)
    line = next(one for one in out.getvalue().splitlines() if one.startswith("communication, "))
    assert f"hidden {found['hidden']:.0%}; the mean of 2 ranks (rank 0 alone, as in the log" in line
    assert line.endswith("hidden 58%)")


def test_plait_timeline_against_another_run(run: Path) -> None:
    for one in said(run, against=run)["communication"].values():
        assert one == pytest.approx({**ALL._asdict(), "hidden": HIDDEN})


def test_plait_diagnose_and_the_page(run: Path) -> None:
    found = parts_of(mean_step(drawable_recording(read_timeline(run), run, STEPS)))
    assert (found["tp"], found["dp"]) == pytest.approx((TP.exposed, DP.exposed))
    assert found["compute"] == pytest.approx(0.050)
    assert "host" not in found, "handing over a collective that nothing runs beside is waiting for it"
    assert sum(found.values()) == pytest.approx(0.090), "from the first span to the last"


def test_the_plan_beside_the_run(run: Path, plan: Plan) -> None:
    recording = drawable_recording(read_timeline(run), run, STEPS)
    planned = simulate_plan(plan).timeline((1,), [0])
    axes = with_axes(table_of(planned), grid_of(plan.layout), plan.shardings, {0: 0})
    found = compare_with_plan(recording, planned, axes)
    own = sum_exposure(exposed(axes))
    assert found is not None and own.fraction is not None
    assert [one.axis for one in found.overlap] == ["tp"]
    assert found.overlap[0][1:] == pytest.approx((own.fraction, 0.5, *TP, own.exposed))
    assert {row.where: row.measured for row in found.rows if row.kind == "exposed"} == pytest.approx({"tp": TP.exposed})


def test_a_simulated_timeline(plan: Plan) -> None:
    """Its own seconds by axis hold what slows computation down, too; here nothing does."""
    simulated = simulate_plan(plan)
    table = table_of(simulated.timeline((1, 2)))
    found = compare(table, table).measured
    assert found.exposed == pytest.approx(simulated.exposed["tp"], rel=1e-9)


def parts_of(found: MeanStep | None) -> dict[str, float]:
    assert found is not None
    return {one.what: one.seconds for one in found.parts}


@pytest.mark.parametrize("earlier", [False, True])
def test_sums_of_steps_whose_spans_are_gone(run: Path, plan: Plan, earlier: bool) -> None:
    """They tell what spans told; those of an earlier version know waits alone."""
    rows = Records.of(ring_of(range(STEPS))).rolled_up(0)
    if earlier:
        keep = [not one.startswith(("exposed", "communication", "host")) for one in rows["kind"].tolist()]
        rows = {
            name: column._replace(codes=column.codes[keep]) if isinstance(column, Coded) else column[keep]
            for name, column in rows.items()
        }
    shutil.rmtree(run / "timeline")
    source = RollupSource(plan=plan.key, began=1, rings={0: (1, STEPS)})
    write_rollup(rollup_file(run / "timeline", range(1), 0), rows, source)
    found = mean_step(read_run(run).recording)
    parts = parts_of(found)
    assert found is not None and found.seconds == pytest.approx(0.1), "as its step's record has it"
    assert (parts["tp"], parts.get("dp")) == pytest.approx((0.021, None) if earlier else (TP.exposed, DP.exposed))
    assert sum(parts.values()) == pytest.approx(0.1)
    if not earlier:
        line = said(run)
        assert line["communication_of_all"] == pytest.approx(ALL._asdict())
