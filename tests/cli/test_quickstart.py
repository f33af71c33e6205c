"""The README's first minute: every number that is printed, written or drawn of the quickstart can
be, and those that say the same agree."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from plait.cli.main import app
from plait.core.job.plan import Plan

pytestmark = [pytest.mark.slow, pytest.mark.smoke]

ROOT = Path(__file__).parents[2]
TOKENS = 16 * 128
FEW = 12, "train.steps=12", "train.warmup_steps=4", "train.eval_every=6", "train.checkpoint_every=4"
MORE = 24
STEP = re.compile(
    r"step +(\d+)/(\d+)  loss ([\d.]+)  (?:eval [\d.]+  )?lr \d\.\de-\d\d  ([\d,]+) tokens/s  "
    r"exposed ([\d.]+) ms \((\d+)%\), hidden (\d+)%(?:  [\d:]+ left)?$"
)
STAGES = ["planning", "starting 2 ranks", "preparing the data", "building the model"]
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
    """As the README says; and the plan that it wrote, with slices whose collectives end out of
    order."""
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
    assert max(map(len, lines)) <= 120
    assert [stage for line in lines for stage in STAGES if line.startswith(stage)] == STAGES
    assert "warning" not in run.said
    assert lines[1].startswith("gpt of 4 layers, hidden 128: 842,624 parameters (fp32) on 2 ranks (tp 2, slices ")
    assert f"{run.steps} steps of 2,048 tokens (16 sequences of 128)" in " ".join(" ".join(lines[:5]).split())
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


def assert_possible(said: str, longest: float) -> None:
    """Times of a text are no longer than the run, and percentages are of something."""
    for number, unit in re.findall(r"(?<![\w.])(-?[\d,]+(?:\.\d+)?) (ms|s|us)\b", said):
        seconds = float(number.replace(",", "")) * {"s": 1, "ms": 1e-3, "us": 1e-6}[unit]
        assert abs(seconds) <= longest, f"{number} {unit}"
    for number in re.findall(r"(?<![\w.+])([\d.]+) ?%(?! (?:longer|more))", said):
        assert 0 <= float(number) <= 100, f"{number} %"
    assert not re.search(r"\b(nan|inf|None|-1)\b", said)
