"""Refitting a cluster's constants to recorded runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from plait.core.cluster import Cluster, Hosts
from plait.core.errors import JobError
from plait.core.job import Job
from plait.core.toml import to_toml
from plait.plan.closed_form import step_seconds
from plait.plan.constants import constant_of, timed_constants, with_constants
from plait.plan.make import make_plan
from plait.plan.points import Points
from plait.plan.recorded import Recorded, refit

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
                "strategy": {"tp": tp, "dp": dp, "slices": {"p1": 1, "p2": 1}, "shard": "zero1"},
            }
        )
        plan = make_plan(job, Hosts(), vocab=256)
        one = Recorded("run", plan, 1.0)
        seconds = step_seconds(plan.model, Points.of([one.point]), truth, sequence=2048, precision="bf16-mixed").total[
            0
        ]
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


def test_runs_as_predicted_move_nothing() -> None:
    found = refit(CLUSTER, _runs(CLUSTER), date="2026-01-01")
    assert not found.moved
    assert found.cluster == CLUSTER


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
        ('{"seconds": 1.0}\n{"sec', "is damaged"),
        ('{"step": 1}\n' * 9, "line 1: is damaged: it has no seconds"),
        ('{"seconds": 1.0}\n{"seconds": -1.0}\n' * 5, "line 2: -1.0 are no seconds"),
        ('{"seconds": 1.0}\n' * 9 + '{"seconds": NaN}', "line 10: is damaged: NaN is no number"),
        ('{"seconds": true}\n' * 9, "line 1: True are no seconds"),
        ('{"seconds": 1%s}' % ("0" * 400), "line 1: is damaged"),
        ("[1.0]\n" * 9, "line 1: is damaged"),
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
