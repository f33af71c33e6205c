"""All that is said of a run, as programs read it: what counts from where, and what is left
unsaid."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from plait.core.base.ignored_input import IgnoredInput
from plait.core.runs.evidence import Verdict
from plait.diagnose.measured.compare import AxisOverlap, ComparedRow, Prediction
from plait.diagnose.measured.reading import RecordedRun, read_run
from plait.diagnose.measured.recording import Recording
from plait.diagnose.measured.run_files import ImportRemarks
from plait.diagnose.report import Report, explain
from plait.diagnose.series import series_of
from tests.diagnose.verdicts.test_stragglers import recording, slower
from tests.support.recordings.made import TRANSFER, At, Job, write_run

SLOW = slower(lambda at: 1.5 if (at.dp, at.stage) == (1, 1) and at.step >= 10 else 1.0)


@pytest.fixture(scope="module")
def seen() -> Recording:
    """A rank of eight is slow from the 11th step on."""
    return recording(Job(dp=4, pp=2, micro_batches=4, compute=SLOW, steps=30))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RecordedRun:
    job = Job(dp=4, pp=2, micro_batches=4, compute=SLOW, steps=30)
    return read_run(write_run(tmp_path_factory.mktemp("run") / "run", job))


def of(run: RecordedRun, **more: Any) -> Report:
    changed = replace(run, **more)
    return explain(changed.recording, "run", run=changed)


def test_steps_are_counted_from_one_for_programs(seen: Recording) -> None:
    report = explain(seen, "a name", notes=["a note"])
    told = report.to_dict()
    json.dumps(told)
    assert (told["run"], told["ranks"], told["notes"]) == ("a name", 8, ["a note"])
    assert report.steps is not None
    assert told["steps"] == report.steps._asdict() | {
        "first": 2, "last": 30, "longest_at": report.steps.longest_at + 1,
    }  # fmt: skip
    [one] = told["stragglers"]
    assert (one["ranks"], one["hosts"], one["since"], one["until"]) == ([5], [], 11, 30)
    assert one["cost_seconds_per_step"] == report.costs[0] and one["what"] == "slow processor"
    spread = report.verdicts.spread
    assert told["nearest"] == {"rank": spread.peer, "z": spread.z, "named_from": spread.named_from,
                               "by": report.verdicts.nearest_by}  # fmt: skip
    latest = told["lateness"][0]
    assert latest == {"rank": 5, "share": one["effect"], "seconds": one["seconds"], "since": one["since"]}
    assert [each["since"] for each in told["lateness"][1:]] == [None] * 7
    assert report.mean is not None
    assert told["mean_step"] == {"seconds": report.mean.seconds, "count": 29, "first": 2, "last": 30}
    assert told["comparable_ranks"] == 8 and told["arrivals"][0]["axis"] == "dp"
    assert report.what_if is not None
    assert told["what_if"]["slowdown"] == report.what_if.slowdown
    assert told["what_if"]["costs"] == list(report.costs)
    assert [tuple(one.values())[:2] for one in told["what_if"]["worst"]] == [
        (one.pp, one.dp) for one in report.what_if.worst[:5]
    ]  # fmt: skip
    assert len(report.what_if.worst) == 8 and len(told["what_if"]["worst"]) == 5
    assert told["drift"]["share"] == report.drift.share  # type: ignore[union-attr]
    assert told["axes"] == {"pp": 2, "dp": 4}
    assert [told[name] for name in ("hang", "late", "predicted", "loss", "checkpoints", "goodput")] == [None] * 6


def test_a_prediction_and_a_hang_for_programs(seen: Recording) -> None:
    prediction = Prediction(
        rows=(ComparedRow("compute", "mlp", "forward", 2.0, 3.0),), overlap=(AxisOverlap("tp", 0.5, 0.4, 2.0, 1.2),),
        seconds=2.0, matched=0.5,
    )  # fmt: skip
    hang = Verdict(cause="crashed", why="it is gone.", ranks=(3,))
    report = replace(explain(seen, "run", prediction=prediction), hang=hang)
    told = report.to_dict()
    assert report.steps is not None
    assert told["predicted"]["step_seconds"] == {"predicted": 2.0, "measured": report.steps.median}
    assert told["predicted"]["matched"] == 0.5
    assert told["predicted"]["rows"] == [
        {"kind": "compute", "axis": "mlp", "direction": "forward", "predicted": 2.0, "measured": 3.0, "ratio": 1.5}
    ]
    assert told["predicted"]["overlap"] == [
        prediction.overlap[0]._asdict() | {"missed": prediction.overlap[0].missed}
    ]  # fmt: skip
    assert told["hang"]["ranks"] == (3,)
    untold = explain(seen, "run", prediction=prediction._replace(seconds=None)).to_dict()
    assert untold["predicted"]["step_seconds"] is None


def test_the_cost_is_of_the_time_since_the_last_began(seen: Recording) -> None:
    found = explain(seen, "run").what_if
    assert found is not None and found.steps == 20, "before, nobody was slow"
    clean = explain(recording(Job(dp=4, pp=2, micro_batches=4, steps=30)), "run").what_if
    assert clean is not None and clean.steps == 29, "all but the first"


def test_axes_are_told_where_it_is_known_where_ranks_stand(run: RecordedRun, seen: Recording) -> None:
    assert explain(seen, "run").axes == of(run).axes == {"pp": 2, "dp": 4}
    assert of(run, plan=None).axes == {}


def test_a_goodput_is_one_of_a_run_of_ours(run: RecordedRun) -> None:
    assert of(run).goodput is not None
    assert of(run, plan=None).goodput is None
    assert of(run, plan=None, metrics=({"step": 1, "seconds": 1.0},)).goodput is not None
    assert of(run, plan=None, attempts=({"started": 1.0},)).goodput is not None
    assert explain(run.recording, "run").goodput is None


def said(**more: Any) -> ImportRemarks:
    return ImportRemarks((), IgnoredInput(), steps=True)._replace(**more)


def test_of_recordings_of_others_only_what_they_tell_is_said(run: RecordedRun) -> None:
    whole = of(run, import_remarks=said())
    assert [one.ranks for one in whole.stragglers] == [(5,)] and whole.verdicts.arrivals
    assert whole.steps is not None and whole.mean is not None
    assert whole.late is None, "it computes longer, and so is not late for another reason"
    assert whole.costs[0] is not None
    apart = of(run, import_remarks=said(shared_clock=False))
    assert apart.verdicts.arrivals == () and [one.ranks for one in apart.stragglers] == [(5,)]
    stepless = of(run, import_remarks=said(steps=False))
    assert (stepless.steps, stepless.mean) == (None, None)
    for unknown, named in (({5: 3}, []), ({4: 3}, [(5,)])):
        assert [one.ranks for one in of(run, import_remarks=said(unknown=unknown)).stragglers] == named


def test_where_ends_of_transfers_are_not_known_a_cost_is_not_either(run: RecordedRun) -> None:
    seen = run.recording
    lost = replace(seen, spans=seen.spans.with_columns(
        meeting=pl.when(pl.col("kind") == "transfer").then(None).otherwise("meeting")
    ))  # fmt: skip
    assert of(run, recording=lost, import_remarks=said()).costs == (None,)
    assert of(run, recording=lost).costs[0] is not None, "of a run of ours they are"


def test_a_link_has_no_cost_of_its_own() -> None:
    """And the cost of the rank after it is that rank's."""

    def transfer(at: At) -> float:
        return TRANSFER * (200 if (at.dp, at.stage, at.way) == (2, 0, "forward") else 1)

    slow = slower(lambda at: 1.3 if (at.dp, at.stage) == (1, 1) else 1.0)
    report = explain(recording(Job(dp=8, pp=2, compute=slow, transfer=transfer, steps=20)), "run")
    costs = {one.what: cost for one, cost in zip(report.stragglers, report.costs, strict=True)}
    assert set(costs) == {"slow link", "slow processor"}
    assert costs["slow link"] is None and costs["slow processor"] is not None


def test_what_was_passed_over_is_the_runs_or_the_recordings(run: RecordedRun, seen: Recording) -> None:
    over = IgnoredInput()
    over.note("rows", "x", 3)
    assert of(run, passed_over=over).to_dict()["passed_over"] == [{"what": "rows", "count": 3, "first": "x"}]


def test_checkpoints_are_those_of_the_runs_folder(run: RecordedRun, tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "step-00000004").mkdir(parents=True)
    found = of(run, folder=tmp_path).checkpoints
    assert found is not None and found.count == 1
    assert of(run).checkpoints is None and explain(run.recording, "run").checkpoints is None


def line_of(step: int, seconds: float, mfu: float | None, **device: Any) -> dict[str, Any]:
    """A line of metrics.jsonl; without device, as earlier versions wrote it."""
    line = {"step": step, "seconds": seconds, "tokens_per_second": 100 / seconds, "mfu": mfu}
    return line | ({"device": {"name": "NVIDIA H200", "kind": "cuda", **device}} if device else {})


@pytest.mark.parametrize(
    ("device", "mfu", "told"),
    [
        ({}, 0.59, ""),
        ({"peak_flops": 989.4e12, "matmul_rate_share": 0.3}, 0.2,
         "In the median step, over all ranks: MFU {:.1%}, of 989.4 TFLOP/s (NVIDIA "
         "H200); model FLOPs at {:.0%} of "),
        ({"peak_flops": None, "matmul_rate_share": 0.3}, None,
         ": model FLOPs at {1:.0%} of the rate that matrix products alone reached on "
         "rank 0 when the run began."),
    ],
    ids=["of an earlier version", "of a known device", "of an unknown one"],
)  # fmt: skip
def test_mfu_and_the_share_of_a_measured_rate_are_two_figures(
    run: RecordedRun, device: dict[str, Any], mfu: float | None, told: str
) -> None:
    steps = of(run).steps
    assert steps is not None
    lines = tuple(line_of(step, 2 * steps.median, mfu, **device) for step in range(1, 30))
    report = of(run, metrics=lines)
    text = report.text(200)
    found = report.to_dict()["utilisation"]
    if not told:
        assert found is None and "MFU" not in text
        assert not series_of(lines, ["mfu"])
        return
    share = device["matmul_rate_share"]
    assert found["matmul_rate_share"] == pytest.approx(2 * share), "of the median step, half as long as in the lines"
    assert found["mfu"] == (None if mfu is None else pytest.approx(2 * mfu))
    assert told.format(2 * (mfu or 0), 2 * share) in text
