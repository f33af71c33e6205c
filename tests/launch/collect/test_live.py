"""What Prometheus is told: its own parser reads it, and the dashboard asks for nothing else."""

from __future__ import annotations

import json
import re
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from plait.core.base.env import specs_folder
from plait.core.cluster.hardware import HERE
from plait.core.job.spec import Job
from plait.core.record.records import Records
from plait.core.record.ring import OpPlace, RecordKind, Ring
from plait.core.record.ring_writer import RingWriter, this_process
from plait.launch.collect.metrics import MEASURED, Live
from plait.plan.make import make_plan
from tests.support.ports import own_port

TIER = "unit"

JOB = {
    "model": {"family": "gpt", "num_layers": 1, "hidden": 8, "num_heads": 2, "vocab": 16, "max_sequence": 8},
    "data": {"sequence_length": 8},
    "train": {"global_batch_size": 2, "micro_batch_size": 1},
    "strategy": {"tp": 2},
}


@pytest.fixture
def live(tmp_path: Path) -> Live:
    return Live(tmp_path / "runs" / "gpt", make_plan(Job.from_dict(JOB), HERE, vocab=16))


def add_step(live: Live, rank: int, number: int, seconds: float) -> None:
    """A step in which half of 0.2 s of tp's communication is waited for, then 0.1 s for another
    stage and
    0.05 s for a gather."""
    ring = RingWriter(None, this_process(rank=rank, world=2, capacity=64))
    op = ring.name("attn0.R0", OpPlace("attn", 0, 0, True))
    gather = ring.name("gather mlp1", OpPlace("mlp", 1, -1, True))
    crossing = ring.name("0RECV_F0", OpPlace("pp", 0, 0, True))
    for kind, name, began, ended in (
        (RecordKind.COMPUTE, op, 0, 500), (RecordKind.COLLECTIVE, op, 400, 600), (RecordKind.WAIT, op, 500, 600),
        (RecordKind.IDLE, crossing, 600, 700), (RecordKind.WAIT, gather, 700, 750),
    ):  # fmt: skip
        start = 10**9 + began * 10**6
        ring.begin(kind, name, number, start, start, 10**9 + ended * 10**6)
    ring.begin(RecordKind.STEP, ring.name("step"), number, 10**9, 10**9, 10**9 + round(seconds * 1e9))
    found = Ring(ring.header, ring.rows(np.arange(1, 7)), ring.names, ring.groups)
    live.add(ring.header, Records.of(found))
    live.at(replace(ring.header, step=number + 1, stepped=5), 0)


def scraped(live: Live) -> Iterator[tuple[str, dict[str, str], float]]:
    port = own_port()
    close = live.serve(port, "127.0.0.1", pytest.fail)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            text = answer.read().decode()
    finally:
        close()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            yield sample.name, dict(sample.labels), sample.value


def test_sums_and_last_values_of_every_rank(live: Live) -> None:
    for rank in (0, 1):
        add_step(live, rank, 0, 0.9)
        add_step(live, rank, 1, 1.2)
    live.measured({"step": 2, "loss": 3.5, "mfu": 0.4, "tokens_per_second": 1000, "strange": "x"})
    found = {(name, *(labels[key] for key in sorted(labels))): value for name, labels, value in scraped(live)}
    assert found["plait_steps_total", "1"] == 2
    assert found["plait_step_duration_seconds_count",] == 4
    assert found["plait_step_duration_seconds_sum",] == pytest.approx(4.2)
    assert found["plait_step_duration_seconds_bucket", "1.0"] == 2
    assert found["plait_step_duration_seconds_bucket", "+Inf"] == 4
    assert found["plait_communication_seconds_total", "tp", "0"] == pytest.approx(0.4)
    exposed = {axis: found["plait_exposed_communication_seconds_total", axis, "0"] for axis in ("tp", "dp")}
    assert exposed == pytest.approx({"tp": 0.2, "dp": 0.1})
    assert not any(key[1:2] == ("pp",) for key in found), "waiting for a stage is an activity, and no communication"
    assert found["plait_activity_seconds_total", "idle", "0"] == pytest.approx(0.2)
    assert found["plait_activity_seconds_total", "compute", "1"] == pytest.approx(1.0)
    assert found["plait_hidden_communication_ratio", "0"] == pytest.approx(0.4)
    assert (found["plait_loss",], found["plait_model_flops_utilization_ratio",]) == (3.5, 0.4)
    assert any(name == "plait_run_info" and labels["run"] == "gpt" for name, labels, _ in scraped(live))


def test_a_value_that_is_not_known_takes_the_one_before_away(live: Live) -> None:
    live.measured({"step": 1, "loss": 3.5, "eval_loss": 4.0, "mfu": 0.4})
    live.measured({"step": 2, "loss": 3.4, "mfu": None})
    found = {name: value for name, _, value in scraped(live)}
    assert "plait_model_flops_utilization_ratio" not in found
    assert (found["plait_loss"], found["plait_evaluation_loss"]) == (3.4, 4.0)


def test_the_dashboard_asks_for_what_there_is(live: Live) -> None:
    add_step(live, 0, 0, 1.0)
    live.measured(dict.fromkeys(MEASURED, 1.0))
    there = {name for name, _, _ in scraped(live)}
    text = (specs_folder() / "dashboards" / "grafana.json").read_text()
    asked = set(re.findall(r"\bplait_\w+", json.dumps([p["targets"] for p in json.loads(text)["panels"]])))
    assert asked and asked <= there
    assert not re.search(r"https?://", text), "nothing from elsewhere"


def test_a_port_that_is_taken_costs_the_metrics_only(live: Live) -> None:
    port, said = own_port(), list[str]()
    close = live.serve(port, "127.0.0.1", said.append)
    live.serve(port, "127.0.0.1", said.append)()
    close()
    assert len(said) == 1 and f"127.0.0.1:{port}" in said[0] and "run.metrics_port" in said[0]


def test_where_a_rank_is_and_since_when_is_told_as_long_as_it_runs(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "plait.launch.collect.metrics.time",
        SimpleNamespace(monotonic_ns=lambda: 7_000_000_000, monotonic=time.monotonic),
    )
    header = this_process(rank=1, world=4, plan="feed", capacity=64)
    live.at(replace(header, step=0, stepped=2_500_000_000, host="n7"), 3)
    live.at(replace(header, rank=2, step=5, closed=True, host="n8"), 0)
    live.at(replace(header, rank=3, step=-1, host="n8"), 0)
    found = {(name, labels.get("rank")): value for name, labels, value in scraped(live)}
    assert found["plait_step", "1"] == 1
    assert found["plait_step_age_seconds", "1"] == 4.5
    assert not {("plait_step", "2"), ("plait_step", "3")} & found.keys()
    assert found["plait_records_lost_total", "1"] == 3
    (run,) = (labels for name, labels, _ in scraped(live) if name == "plait_run_info")
    assert run == {"run": "gpt", "plan": "feed", "host": "n7", "tp": "2"}
