"""One run, and every figure of it that is shown in several places: terminal, JSON, timeline, page,
metrics of a step and of Prometheus say the same."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any

import pytest

from plait.core.base.text import seconds_text
from plait.core.job.plan import Plan
from plait.core.record.records import Records
from plait.core.record.ring import read_ring
from plait.launch.collect.metrics import Live
from tests.support.command import plait, succeed, values
from tests.support.runs import train, write_job

pytestmark = pytest.mark.slow
STEPS = 24
AHEAD = ("strategy.tp=1", "strategy.dp=2", "strategy.shard=zero1", "strategy.slices.batch=1")
AXES = ("tp", "cp", "dp")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that gathers the weights of its next step ahead."""
    job = write_job(tmp_path_factory.mktemp("run"), steps=STEPS, every=10)
    train(job, "run.timeline_steps=100", *AHEAD)
    return job.parent / "runs" / "job"


def answer(*words: object) -> dict[str, Any]:
    return values(*words)


def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_nothing_of_a_step_exceeds_it(run: Path) -> None:
    """Also in the steps after an evaluation or a checkpoint, for which gathers began before
    these."""
    assert len(lines(run)) == STEPS
    for one in lines(run):
        assert 0 <= one["exposed_seconds"] <= one["communication_seconds"] <= one["seconds"]


def test_communication_and_its_parts(run: Path) -> None:
    """Of all steps but the first, in the mean: the page's text is the terminal's."""
    found, timeline = answer("diagnose", run), answer("diagnose", run, "--timeline")
    mean, parts = found["mean_step"], {one["what"]: one["seconds"] for one in found["shares"]}
    assert (mean["count"], mean["first"], mean["last"]) == (STEPS - 1, 2, STEPS) and timeline["steps"] == STEPS - 1
    inside = [seconds for what, seconds in parts.items() if what not in ("evaluation", "checkpoint")]
    assert sum(inside) == pytest.approx(mean["seconds"])
    comm = timeline["communication"]
    assert comm["exposed"] == pytest.approx(sum(parts.get(axis, 0.0) for axis in AXES), rel=1e-6)
    assert comm["waited"] <= comm["exposed"] <= comm["total"] <= mean["seconds"]
    assert timeline["communication_of_all"] == pytest.approx({n: comm[n] for n in ("total", "exposed")}, rel=1e-6)
    own = lines(run)[1:]
    hidden = 1 - sum(one["exposed_seconds"] for one in own) / sum(one["communication_seconds"] for one in own)
    assert timeline["hidden_of_rank_0"] == pytest.approx(hidden, abs=1e-6)
    said = plait("diagnose", run, "--timeline").stdout
    total, exposed, waits = (f"{comm[name] * 1e3:.1f} ms" for name in ("total", "exposed", "waited"))
    assert f"communication, over the last: {total} a step, exposed {exposed} ({waits} of it in waits), hidden" in said


def test_what_prometheus_is_told(run: Path) -> None:
    """Of rank 0, over all steps, as its lines have it."""
    live, ring = Live(run, Plan.read(run / "plan.json")), read_ring(run / "rings" / "rank-00000.ring")
    done = ring.table[ring.table["step"] < STEPS]  # what was gathered for another is of none
    live.add(ring.header, Records(done, ring.names, ring.groups))
    sums = {
        (sample.name.removeprefix("plait_"), sample.labels.get("axis"))
        : sample.value for family in live.collect() for sample in family.samples
    }  # fmt: skip
    exposed = sum(sums.get(("exposed_communication_seconds_total", axis), 0.0) for axis in AXES)
    assert exposed == pytest.approx(sum(one["exposed_seconds"] for one in lines(run)), rel=1e-6)
    assert sums["hidden_communication_ratio", None] == pytest.approx(lines(run)[-1]["hidden"], abs=1e-6)


def test_the_median_step_lateness_and_what_was_predicted(run: Path, tmp_path: Path) -> None:
    found, text = answer("diagnose", run), plait("diagnose", run).stdout
    median = sorted(one["seconds"] for one in lines(run)[1:])[(STEPS - 1) // 2]
    assert found["steps"]["median"] == pytest.approx(median)
    assert f"{STEPS - 1} steps (2 to {STEPS}), median {median * 1e3:.1f} ms" in text
    succeed("view", run, "--save", tmp_path / "page.html")
    page = html.unescape((tmp_path / "page.html").read_text())
    for line in text.partition("\nnote: ")[0].splitlines()[1:]:
        assert line.strip() in page, "the text of the page is the terminal's"
    latest = found["lateness"][0]
    ms = f"{seconds_text(latest['seconds'], signed=True)} of a step"
    share = f"{latest['share']:+.1%}"
    assert re.search(rf"<li>rank {latest['rank']}\b[^<>]*: {re.escape(f'{share}, {ms}')}", page)
    if not found["stragglers"]:
        assert f"is rank {latest['rank']}: {share} own work against its peers, {ms}" in text
    slowest = answer("diagnose", run, "--timeline")["slowest"]
    assert all(one["times"] == pytest.approx(one["seconds"] / median) for one in slowest)
    if predicted := found["predicted"]:
        rows = {row["axis"]: row["measured"] for row in predicted["rows"] if row["kind"] == "exposed"}
        assert rows == pytest.approx({one["axis"]: one["exposed"] for one in predicted["overlap"]})
        parts = {one["what"]: one["seconds"] for one in found["shares"]}
        assert rows == pytest.approx({axis: parts[axis] for axis in rows}, rel=1e-6)
        assert predicted["step_seconds"]["measured"] == found["steps"]["median"]
        assert f"{median * 1e3:.1f} ms measured (the median of {STEPS - 1})" in page
