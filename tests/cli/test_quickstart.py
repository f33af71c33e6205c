"""The README's first minute: every number that is printed, written or drawn of the quickstart can be, and
those that say the same agree."""

from __future__ import annotations

import base64
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

from plait.cli.main import app
from plait.core.job.plan import Plan
from plait.core.record.records import Records
from plait.core.record.ring import RecordKind
from plait.core.record.ring_follower import RingFollower
from plait.core.record.timeline import Timeline
from plait.core.runs.ring_calls import ring_path
from plait.launch.collect.live import Live
from tests.support.exposure import exposure_of

pytestmark = [pytest.mark.slow, pytest.mark.smoke]

ROOT = Path(__file__).parents[2]
TOKENS = 16 * 128
FEW = 12, "train.steps=12", "train.warmup_steps=4", "train.eval_every=6", "train.checkpoint_every=4"
MORE = 24
STEP = re.compile(
    r"step +(\d+)/(\d+)  loss ([\d.]+)  (?:eval [\d.]+  )?([\d,]+) tokens/s  "
    r"exposed ([\d.]+) ms \((\d+)%\), hidden (\d+)%$"
)
CLOSE, ROUNDED = 1e-9, 0.51


@dataclass(frozen=True)
class Run:
    """A run that has ended, and what it printed."""

    folder: Path
    said: str
    steps: int

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    @cached_property
    def seconds(self) -> list[float]:
        return [line["seconds"] for line in self.metrics]

    @cached_property
    def longest(self) -> float:
        """Seconds in which ranks ran: nothing that is said of the run took longer."""
        [attempt] = (json.loads(line) for line in (self.folder / "attempts.jsonl").read_text().splitlines())
        return attempt["ended"] - attempt["started"]

    def told(self, *words: object) -> str:
        """What a verb prints."""
        found = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
        assert found.exit_code in (0, 3) and found.stderr == ""
        return found.stdout

    def json(self, *words: object) -> Any:
        return json.loads(self.told(*words, "--json"))


def train(tmp: Path, job: Path, steps: int, *settings: str) -> Run:
    argv = [sys.executable, "-m", "plait.cli.main", "train", str(job), f"run.folder={tmp}", *settings]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, cwd=tmp)
    assert (done.returncode, done.stderr) == (0, "")
    return Run(tmp / "quickstart", done.stdout, steps)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """As the README says; and the plan that it wrote, with slices whose collectives end out of order."""
    steps, *settings = FEW
    first = train(tmp_path_factory.mktemp("as"), ROOT / "specs" / "jobs" / "quickstart.toml", steps, *settings)
    plan = Plan.read(first.folder / "plan.json")
    assert plan.costs is not None and plan.job is not None
    job = plan.job.changed([f"train.steps={MORE}", "train.checkpoint_every=0", "run.name=quickstart"])
    other = tmp_path_factory.mktemp("sliced")
    sliced = replace(plan, job=job, strategy=replace(plan.strategy, p1=2, p2=2), origin="")
    sliced.write(other / "plan.json")
    return {"as the README says": first, "slices of columns": train(other, other / "plan.json", MORE)}


@pytest.fixture(params=["as the README says", "slices of columns"])
def run(request: pytest.FixtureRequest, runs: dict[str, Run]) -> Run:
    return runs[request.param]


def test_what_training_prints_is_what_its_metrics_say(run: Run) -> None:
    lines = run.said.splitlines()
    assert max(map(len, lines)) <= 100
    assert "warning" not in run.said
    assert lines[0].startswith("gpt of 4 layers, hidden 128: 842,624 parameters (fp32) on 2 ranks (tp 2, slices ")
    assert f"{run.steps} steps of 2,048 tokens (16 sequences of 128)" in " ".join(" ".join(lines[:4]).split())
    found = {int(match[1]): match for line in lines if (match := STEP.match(line))}
    assert len(found) == sum(line.startswith("step ") for line in lines) >= 2
    for step, match in found.items():
        line = run.metrics[step - 1]
        assert int(match[2]) == run.steps
        assert float(match[3]) == pytest.approx(line["loss"], abs=ROUNDED * 1e-3)
        assert float(match[4].replace(",", "")) == pytest.approx(line["tokens_per_second"], abs=ROUNDED)
        assert float(match[5]) == pytest.approx(line["exposed_seconds"] * 1e3, abs=ROUNDED)
        assert int(match[6]) == pytest.approx(100 * line["exposed_seconds"] / line["seconds"], abs=ROUNDED)
        assert int(match[7]) == pytest.approx(100 * line["hidden"], abs=ROUNDED)
        assert line["mfu"] is None and "MFU" not in run.said, "of a processor nobody knows the peak"
    seconds = int(lines[-1].split(f"trained {run.steps} steps in ")[1].split()[0])
    assert sum(run.seconds) - 0.5 <= seconds <= run.longest + 0.5


def test_metrics_are_possible_and_agree_with_each_other(run: Run) -> None:
    assert [line["step"] for line in run.metrics] == list(range(1, run.steps + 1))
    assert sum(run.seconds) < run.longest
    for line in run.metrics:
        assert 0 < line["exposed_seconds"] <= line["communication_seconds"] < line["seconds"]
        assert line["hidden"] == pytest.approx(1 - line["exposed_seconds"] / line["communication_seconds"])
        assert line["tokens_per_second"] * line["seconds"] == pytest.approx(TOKENS)
        assert line["device"]["peak_flops"] is None and line["device"]["matmul_rate_share"] > 0
        assert 0 < line["loss"] < 6
    last = run.metrics[-1]
    for name, size in last["memory_tensors"].items():
        assert 10 << 20 < size < last["memory_process"][name] < 2 << 30


def test_the_timeline_has_what_the_metrics_have(run: Run) -> None:
    ring = RingFollower(ring_path(run.folder, 0))
    ring.advance()
    table = ring.take(0, run.steps)
    lengths = {
        int(row["step"]): (row["ended"] - row["started"]) / 1e9 for row in table[table["kind"] == RecordKind.STEP]
    }
    parts = [Timeline.read_parquet(path) for path in sorted((run.folder / "timeline").glob("*.parquet"))]
    spans = [span for part in parts for span in part.spans]
    assert {span.step for span in spans} == set(range(run.steps)) and {span.rank for span in spans} == {0, 1}
    for line in run.metrics:
        own = [span for span in spans if (span.step, span.rank) == (line["step"] - 1, 0)]
        inside = [span for span in own if span.kind not in ("evaluation", "checkpoint")]
        assert all(span.start <= span.end for span in own)
        assert lengths[line["step"] - 1] == pytest.approx(line["seconds"], rel=0.1, abs=0.05)
        begin, end = min(span.start for span in inside), max(span.end for span in inside)
        assert end - begin < 1.5 * line["seconds"] + 0.1
        found = exposure_of(own)
        assert found.total == pytest.approx(line["communication_seconds"], rel=1e-6)
        assert found.exposed == pytest.approx(line["exposed_seconds"], rel=1e-6, abs=1e-7)
        computing = sum(span.seconds for span in own if span.kind == "compute")
        assert computing + found.exposed < line["seconds"] + 0.01


def test_plait_timeline(run: Run) -> None:
    found = run.json("diagnose", run.folder, "--timeline")
    mean = sum(run.seconds) / run.steps
    for rows, of in ((found["per_step"], ("compute", "wait")), (found["per_step_of_all"], ("compute", "wait"))):
        assert all(0 <= row["seconds"] < mean + run.longest / run.steps for row in rows)
        assert sum(row["seconds"] for row in rows if row["kind"] in of) < 1.05 * mean
    recent = {(row["kind"], row["site"], row["direction"]): row["seconds"] for row in found["per_step"]}
    for row in found["per_step_of_all"]:  # all steps are kept, so both say the same
        assert row["seconds"] == pytest.approx(recent[row["kind"], row["site"], row["direction"]], abs=1e-8)
    comm = found["communication"]
    assert 0 < comm["exposed"] <= comm["total"] < mean
    assert found["hidden"] == pytest.approx(1 - comm["exposed"] / comm["total"])
    shares = [found["hidden"], *(group["hidden"] for group in found["hidden_by_step"])]
    assert all(0 <= share <= 1 for share in shares)
    assert all(slow["seconds"] < run.longest for slow in found["slowest"])
    assert_possible(run.told("diagnose", run.folder, "--timeline"), run.longest)


def test_plait_timeline_against_the_plan(run: Run) -> None:
    found = run.json("diagnose", run.folder, "--timeline", "--against", run.folder / "plan.json")
    assert (found["never_seen"], found["not_planned"], found["notes"]) == ([], [], [])
    measured, predicted = (dict.fromkeys(("compute", "comm", "wait"), 0.0) for _ in range(2))
    for row in found["rows"]:
        measured[row["kind"]] += row["measured"]
        predicted[row["kind"]] += row["predicted"]
    for kind in ("compute", "comm"):
        assert 1 / 8 < measured[kind] / predicted[kind] < 8, kind
    mean = sum(run.seconds) / run.steps
    for comm in found["communication"].values():
        assert 0 <= comm["exposed"] <= comm["total"] < 2 * mean
        assert comm["hidden"] == pytest.approx(1 - comm["exposed"] / comm["total"])
    assert_possible(run.told("diagnose", run.folder, "--timeline", "--against", run.folder / "plan.json"), run.longest)


def test_plait_diagnose(run: Run) -> None:
    found = run.json("diagnose", run.folder)
    steps = found["steps"]
    assert steps["count"] == run.steps - 1
    assert (
        min(run.seconds) <= steps["p10"] <= steps["median"] <= steps["p90"] <= steps["longest"] == max(run.seconds[1:])
    )
    assert steps["tokens_per_second"] == pytest.approx(TOKENS / sorted(run.seconds)[run.steps // 2], rel=0.5)
    inside = [share for share in found["shares"] if share["what"] not in ("evaluation", "checkpoint")]
    assert sum(share["share"] for share in inside) == pytest.approx(1)
    mean = sum(run.seconds[1:]) / (run.steps - 1)
    assert mean * 0.99 < sum(share["seconds"] for share in inside) < mean * 1.2 + 0.02
    assert all(
        share["share"] >= 0 and 0 <= (share["late"] or 0.0) <= share["seconds"] + CLOSE for share in found["shares"]
    )
    predicted = found["predicted"]
    assert predicted["matched"] == 1
    for row in predicted["rows"]:
        assert row["measured"] < mean and (row["kind"] == "exposed" or 1 / 30 < row["ratio"] < 30), row
    for one in predicted["overlap"]:
        assert 0 <= one["planned"] <= 1 and 0 <= one["measured"] <= 1 and one["exposed"] <= one["total"] < mean
    assert 0.2 < predicted["step_seconds"]["measured"] / predicted["step_seconds"]["predicted"] < 8
    [memory] = found["memory"]
    assert 0.8 < memory["measured"] / memory["predicted"] < 2.5 and memory["measured"] < memory["process"]
    good = found["goodput"]
    assert good["productive"] == pytest.approx(sum(run.seconds)) and good["total"] == pytest.approx(run.longest)
    assert 0 < good["share"] < 1 and (good["attempts"], good["redone"], good["apart"]) == (1, 0, 0)
    what_if = found["what_if"]
    assert what_if["slowdown"] == what_if["replayed"] / what_if["ideal"] > 0.8 and what_if["m_w"] is None
    assert (
        what_if["replayed"] == pytest.approx(what_if["recorded"], rel=0.2) and what_if["recorded"] < 1.2 * mean + 0.02
    )
    assert_possible(run.told("diagnose", run.folder), run.longest)


def test_plait_report_draws_what_can_be(run: Run, tmp_path: Path) -> None:
    run.told("view", run.folder, "--save", tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    found = dict(re.findall(r'<script type="application/json" data-figure="([^"]+)">(.*?)</script>', page, re.DOTALL))
    figures = {name: json.loads(text) for name, text in found.items()}
    assert {"timeline-figure", "series-figure", "memory-figure", "prediction-figure"} <= figures.keys()
    longest = 1e3 * max(run.seconds) * 1.5 + 100
    for bar in bars(figures["timeline-figure"]):  # with what came after the step
        assert 0 <= bar <= 1e3 * run.longest
    for bar in bars(figures["prediction-figure"]):
        assert 0 <= bar <= longest
    for trace in figures["memory-figure"]["data"]:
        assert all(0 <= size < 2048 for size in numbers(trace["y"]))
    maps = [trace for name in figures for trace in figures[name]["data"] if trace["type"] == "heatmap"]
    heat = [value for trace in maps for value in numbers(trace["z"])]
    assert heat and all(-longest < value < longest for value in heat), "ms, or by how many more than equals"
    body = re.sub(r"<script.*?</script>|<style.*?</style>", "", page, flags=re.DOTALL)
    assert_possible(re.sub(r"<[^>]+>", " ", body), run.longest)


def bars(figure: Mapping[str, Any]) -> Iterator[float]:
    for trace in figure["data"]:
        if trace["type"] == "bar":
            yield from (value for name in ("x", "base") for value in numbers(trace.get(name) or []))


def numbers(value: Any) -> list[float]:
    """Of a figure's array, in whichever form Plotly takes it; without gaps."""
    if isinstance(value, dict):
        value = np.frombuffer(base64.b64decode(value["bdata"]), value["dtype"]).tolist()
    flat = [one for row in value for one in (row if isinstance(row, list) else [row])]
    return [one for one in flat if one is not None and one == one]


def test_plait_trace_export(run: Run, tmp_path: Path) -> None:
    run.told("trace", "export", run.folder, "--out", tmp_path / "trace.json", "--steps", "2-4")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert {event["pid"] for event in spans} == {0, 1}
    within = 1e6 * (sum(run.seconds[1:4]) * 1.5 + run.longest)
    assert all(event["dur"] >= 0 and event["ts"] >= 0 and event["ts"] + event["dur"] < within for event in spans)
    assert max(event["dur"] for event in spans if event["cat"].startswith("comm")) < 1e6 * max(run.seconds[1:4])


def test_counters_for_prometheus_only_grow_and_no_faster_than_time(run: Run) -> None:
    live, before = Live(run.folder, Plan.read(run.folder / "plan.json")), dict[tuple[str, str], float]()
    registry = CollectorRegistry()
    registry.register(live)  # type: ignore[arg-type]
    rings = [RingFollower(ring_path(run.folder, rank)) for rank in (0, 1)]
    for ring in rings:
        ring.advance()
    for step in range(run.steps):
        for ring in rings:
            live.add(ring.header, Records(ring.take(step, step), ring.names, ring.groups))
            live.at(ring.header, 0)
        live.measured(run.metrics[step])
        now = {
            (sample.name, json.dumps(sample.labels, sort_keys=True)): sample.value
            for family in text_string_to_metric_families(generate_latest(registry).decode())
            for sample in family.samples
        }
        for (name, labels), value in now.items():
            if name.endswith(("_total", "_bucket", "_sum", "_count")):
                grown = value - before.get((name, labels), 0.0)
                assert grown >= 0, name
                if name.endswith("_seconds_total"):
                    beside = "evaluation" in labels or "checkpoint" in labels  # of the step, and as long as they take
                    most = run.longest if beside else 2 * run.seconds[step] + run.longest / run.steps
                    assert grown < most, (name, labels)
            if name.endswith("_ratio"):
                assert 0 <= value <= 1.5
        before = now
    hid = {rank: before["plait_hidden_communication_ratio", f'{{"rank": "{rank}"}}'] for rank in (0, 1)}
    assert hid[0] == pytest.approx(run.metrics[-1]["hidden"], rel=1e-6)
    total = sum(line["communication_seconds"] for line in run.metrics)
    assert before["plait_communication_seconds_total", '{"axis": "tp", "rank": "0"}'] >= total * (1 - 1e-6)
    assert before["plait_steps_total", '{"rank": "1"}'] == run.steps


def assert_possible(said: str, longest: float) -> None:
    """Times of a text are no longer than the run, and percentages are of something."""
    for number, unit in re.findall(r"(?<![\w.])(-?[\d,]+(?:\.\d+)?) (ms|s|us)\b", said):
        seconds = float(number.replace(",", "")) * {"s": 1, "ms": 1e-3, "us": 1e-6}[unit]
        assert abs(seconds) <= longest, f"{number} {unit}"
    for number in re.findall(r"(?<![\w.+])([\d.]+) ?%(?! (?:longer|more))", said):
        assert 0 <= float(number) <= 100, f"{number} %"
    assert not re.search(r"\b(nan|inf|None|-1)\b", said)
