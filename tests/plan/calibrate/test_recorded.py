"""Refitting a cluster's constants to recorded runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from plait.core.base.codec.toml_text import to_toml
from plait.core.base.errors import JobError
from plait.core.cluster.hardware import Cluster, Hosts
from plait.core.job.spec import Job
from plait.core.step.columns.points import StrategyTable
from plait.core.step.seconds.closed_form import step_seconds
from plait.plan.calibrate import recorded
from plait.plan.calibrate.fit import (
    Calibrated,
    FittedConstant,
    Predict,
    Scatter,
    constant_of,
    timed_constants,
    with_constants,
)
from plait.plan.calibrate.recorded import Recorded, read_seconds, refit
from plait.plan.make import make_plan

CLUSTER = Cluster.preset("a100-80")


def _runs(truth: Cluster) -> list[Recorded]:
    """Jobs of several shapes, each as long as the closed form says of ``truth``."""
    found: list[Recorded] = []
    for hidden, layers, tp, dp, micro in (
        (1024, 8, 1, 2, 4),
        (2048, 8, 2, 2, 2),
        (4096, 4, 4, 1, 1),
        (4096, 8, 1, 1, 2),
    ):
        model = {"family": "gpt", "num_layers": layers, "hidden": hidden, "num_heads": 16, "vocab": 32000}
        job = Job.from_dict(
            {
                "model": model | {"max_sequence": 2048},
                "data": {"sequence_length": 2048},
                "train": {"global_batch_size": 16, "micro_batch_size": micro, "precision": "bf16-mixed"},
                "strategy": {"tp": tp, "dp": dp, "slices": {"batch": 1, "columns": 1}, "shard": "zero1"},
            }
        )
        plan = make_plan(job, Hosts(), vocab=256)
        one = Recorded("run", plan, 1.0)
        seconds = step_seconds(
            plan.model, StrategyTable.of([one.point]), truth, sequence=2048, precision="bf16-mixed"
        ).total[0]
        found.append(replace(one, seconds=float(seconds)))
    return found


def test_a_slower_device_is_found_and_the_next_prediction_is_near() -> None:
    slow = {"matmul": (constant_of(CLUSTER, "matmul").value * 0.8, 0.0)}
    runs = _runs(with_constants(CLUSTER, slow, source="test", date="2026"))
    found = refit(CLUSTER, runs, date="2026-01-01")
    measured = np.array([run.seconds for run in runs])
    before, after = (np.abs(each / measured - 1).max() for each in (found.before, found.after))
    assert before > 0.1
    assert after < 0.05
    assert constant_of(found.cluster, "matmul").value < constant_of(CLUSTER, "matmul").value * 0.9
    assert constant_of(found.cluster, "matmul").source == f"4 recorded runs, fitted from {CLUSTER.name}"


def test_a_refitted_cluster_survives_its_file(tmp_path: Path) -> None:
    changed = with_constants(CLUSTER, {"inside.share": (0.5, 0.1)}, source="test", date="2026")
    (tmp_path / "cluster.toml").write_text(to_toml(changed.model_dump(mode="json", exclude_none=True)))
    assert Cluster.read(tmp_path / "cluster.toml") == changed
    assert constant_of(changed, "inside.share").value == 0.5
    assert "inside.share" in set(timed_constants(CLUSTER))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"seconds": 1.0}\n' * 5, "2 steps after the first 3"),
        (None, "cannot be read"),
    ],
)
def test_runs_that_tell_nothing_are_refused(tmp_path: Path, text: str | None, words: str) -> None:
    _runs(CLUSTER)[0].plan.write(tmp_path / "plan.json")
    if text is not None:
        (tmp_path / "metrics.jsonl").write_text(text)
    with pytest.raises(JobError, match=words):
        Recorded.read(tmp_path)


def test_a_plan_without_a_job_says_nothing_of_a_cluster(tmp_path: Path) -> None:
    replace(_runs(CLUSTER)[0].plan, job=None).write(tmp_path / "plan.json")
    with pytest.raises(JobError, match="without a job file"):
        Recorded.read(tmp_path)


def test_the_median_of_later_steps_counts(tmp_path: Path) -> None:
    _runs(CLUSTER)[0].plan.write(tmp_path / "plan.json")
    seconds = [9.0, 9.0, 9.0, 1.0, 2.0, 3.0, 50.0, 2.0]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps({"seconds": each}) + "\n" for each in seconds))
    assert Recorded.read(tmp_path).seconds == 2.0


def test_a_run_of_unequal_places_says_nothing_of_a_closed_form(tmp_path: Path) -> None:
    job = Job.from_dict({
        "model": {"family": "gpt", "num_layers": 2, "hidden": 64, "num_heads": 4, "vocab": 256, "max_sequence": 64},
        "data": {"sequence_length": 64}, "train": {"global_batch_size": 4},
        "strategy": {"pp": 2, "dp": [2, 1], "tp": [1, 2], "schedule": "1f1b"},
    })  # fmt: skip
    make_plan(job, Hosts(), vocab=256).write(tmp_path / "plan.json")
    (tmp_path / "metrics.jsonl").write_text('{"seconds": 1.0}\n' * 9)
    with pytest.raises(JobError, match="pp ranks of different sizes"):
        Recorded.read(tmp_path)


def test_where_a_run_stands_is_what_was_timed() -> None:
    one = _runs(CLUSTER)[1]
    strategy = replace(one.plan.strategy, p1=2, p2=4, sequence_parallel=True)
    found = replace(one, plan=replace(one.plan, strategy=strategy)).point
    assert (found["p1"], found["p2"], found["sequence_parallel"], found["tp"]) == (2, 4, 1, 2)


def _moving(monkeypatch: pytest.MonkeyPatch, by: dict[str, float]) -> dict[str, FittedConstant]:
    """Constants as they are asked to be refitted. by: factors that are found of some; of all others
    1.01."""
    asked = dict[str, FittedConstant]()

    def calibrated(
        predict: Predict, measured: np.ndarray, priors: dict[str, FittedConstant], **given: float
    ) -> Calibrated:
        asked.update(priors)
        assert given == {"scatter": Scatter(noise=0.05, outlier=10.0)}
        assert np.all(predict({name: one.value for name, one in priors.items()}) > 0)
        found = {name: replace(one, value=one.value * by.get(name, 1.0099)) for name, one in priors.items()}
        return Calibrated(constants=found, residuals=np.zeros(len(measured)))

    monkeypatch.setattr(recorded, "calibrate", calibrated)
    return asked


def test_constants_that_moved_by_more_than_a_hundredth_are_new(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = _moving(monkeypatch, {"matmul": 0.9, "memory": 1.011, "inside.half": 3.0})
    runs = _runs(CLUSTER)[:1]
    found = refit(CLUSTER, runs, date="2026-01-01")
    assert found.moved == {
        name: (asked[name].value, pytest.approx(asked[name].value * factor))
        for name, factor in {"matmul": 0.9, "memory": 1.011, "inside.half": 3.0}.items()
    }
    for name, (_, new) in found.moved.items():
        one = constant_of(found.cluster, name)
        assert (one.value, one.date) == (new, "2026-01-01")
        assert one.source == f"1 recorded run, fitted from {CLUSTER.name}"
    assert constant_of(found.cluster, "attention_forward") == constant_of(CLUSTER, "attention_forward")
    for told, cluster in ((found.before, CLUSTER), (found.after, found.cluster)):
        total = step_seconds(
            runs[0].plan.model, StrategyTable.of([runs[0].point]), cluster, sequence=2048, precision="bf16-mixed"
        ).total
        assert told == pytest.approx(total, rel=1e-15)


def test_shares_of_a_peak_end_there_and_no_constant_is_believed_to_a_tenth(monkeypatch: pytest.MonkeyPatch) -> None:
    """Single runs say nothing about how late nodes are, or what is beside a step."""
    exact = with_constants(CLUSTER, {"matmul": (0.7, 0.01), "memory": (1.2, 0.4)}, source="test", date="2026")
    asked = _moving(monkeypatch, {})
    refit(exact, _runs(CLUSTER)[:1], date="2026-01-01")
    assert set(asked) == set(timed_constants(CLUSTER)) - {"jitter", "step"}
    shares = {"attention_forward", "attention_backward", "inside.share", "across.share"}
    shares |= {"matmul", "matmul_fp8", "matmul_mxfp8", "matmul_nvfp4"}
    assert {name for name, one in asked.items() if one.most == 1.0} == shares & set(asked)
    assert asked["memory"].most == 1.2
    assert all(one.most == float("inf") for name, one in asked.items() if name not in {*shares, "memory"})
    assert (asked["matmul"].error, asked["memory"].error) == (0.1, 0.4)


def test_a_constant_of_nothing_can_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    none = with_constants(CLUSTER, {"host_layer": (0.0, 0.0)}, source="test", date="2026")
    asked = _moving(monkeypatch, {"host_layer": 1e6})
    found = refit(none, _runs(CLUSTER)[:1], date="2026-01-01")
    assert asked["host_layer"].value == 1e-12
    assert constant_of(found.cluster, "host_layer").value == pytest.approx(1e-6)


def test_seconds_of_every_step_that_a_run_has_recorded(tmp_path: Path) -> None:
    lines = [{"step": 1, "seconds": 2}, {"seconds": 1e-9}, {"seconds": 1e9, "loss": None}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_seconds(tmp_path) == [2.0, 1e-9, 1e9]
    (tmp_path / "metrics.jsonl").write_text("")
    assert read_seconds(tmp_path) == []


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"\xff\xfe", r"metrics\.jsonl: is damaged: 'utf-8' codec"),
        (b"{}\n" * 30, r"line 1: is damaged: it has no seconds"),
        (b'{"seconds": null}\n', "line 1: is damaged: "),
        (b'{"seconds": [1]}\n', "line 1: is damaged: "),
        (b'{"seconds": "long"}\n', "line 1: is damaged: "),
        (
            b'{"seconds": 1}\n{"seconds": true}\n',
            "line 2: True is not a valid step time in seconds. Leave this run out",
        ),
        (b'{"seconds": 0.9e-9}\n', "line 1: 9e-10 is not a valid step time"),
        (b'{"seconds": 1.1e9}\n', "line 1: 1100000000.0 is not a valid step time"),
        (b'{"seconds": 1' + b"0" * 400 + b"}\n", "line 1: "),
    ],
)
def test_metrics_that_say_no_seconds_are_named_by_their_line(tmp_path: Path, content: bytes, says: str) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(content)
    with pytest.raises(JobError, match=says) as caught:
        read_seconds(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_metrics_that_cannot_be_read_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(JobError, match=r"metrics\.jsonl: cannot be read: No such file.*Name a run's folder"):
        read_seconds(tmp_path)
    monkeypatch.setattr(recorded, "DOCUMENT", 10)
    (tmp_path / "metrics.jsonl").write_bytes(b'{"seconds": 1}\n')
    with pytest.raises(JobError, match=r"metrics\.jsonl: is damaged: .*10"):
        read_seconds(tmp_path)


def test_every_constant_is_explained() -> None:
    text = (Path(__file__).parents[3] / "docs" / "profile.md").read_text()
    assert [name for name in timed_constants(CLUSTER) if f"`{name}`" not in text] == []
