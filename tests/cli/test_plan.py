"""``plait plan``, and what ``plait train`` does with a job that leaves settings to the planner."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from plait.cli.main import app
from plait.core.base.errors import InfeasiblePlan
from plait.core.cluster.hardware import Cluster
from plait.core.job.plan import Plan
from plait.core.step.orders.segment_costs import segment_costs
from plait.plan.search.simulate import simulate_plan
from tests.support.runs import metrics, train, write_job

TIER = "unit"

JOB = """
[model]
family = "gpt"
num_layers = 4
hidden = 256
num_heads = 4
max_sequence = 256

[data]
sequence_length = 256

[train]
global_batch_size = 8
precision = "bf16-mixed"

[cluster]
preset = "a100-80"
ranks = 4

[plan]
top = 4
constraints = ["cp = 1", "batch_slices = 1", "column_slices = 1"]
"""
STRATEGY = """
[strategy]
tp = 2
dp = 2
shard = "zero1"
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    file = tmp_path / "mine.toml"
    file.write_text(JOB)
    return file


def plait(*words: Any) -> str:
    """What it prints; its own errors are raised."""
    done = CliRunner().invoke(app, ["plan", *map(str, words)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_the_answer_and_a_plan_that_is_obeyed(job: Path) -> None:
    said = plait(job)
    assert "on 4 GPUs of a100-80: the 4 best of " in said
    assert "A step is " in said
    assert "The runner-up, strategy 2, has " in said
    plan = Plan.read(job.with_suffix(".plan.json"))
    assert plan.job
    assert plan.job.open == ()
    assert plan.layout.world_size == 4
    assert not plan.choices.any
    again = json.loads(plait(job, "--json"))
    best = again["candidates"][0]
    assert best["strategy"]["tp"] == plan.job.strategy.tp
    assert [one["seconds"] for one in again["candidates"]] == sorted(one["seconds"] for one in again["candidates"])
    assert len(again["candidates"]) == 4
    assert best["low"] < best["seconds"] < best["high"]
    assert sum(best["parts"].values()) == pytest.approx(best["seconds"])


def test_a_plan_is_called_as_its_job_and_an_older_file_is_said_to_be_another(job: Path) -> None:
    other = job.with_name("other.v2.toml")
    other.write_text(JOB)
    older = job.with_name("plan.json")
    for file, name in ((job, "mine.plan.json"), (other, "other.v2.plan.json")):
        done = CliRunner().invoke(app, ["plan", str(file), "plan.points=2000"], catch_exceptions=False)
        assert f"The plan is in {job.with_name(name)}; plait train " in " ".join(done.stdout.split())
        assert Plan.read(job.with_name(name)).job and "is not this plan" not in done.stderr
    older.write_text("{}")
    done = CliRunner().invoke(app, ["plan", str(job), "plan.points=2000"], catch_exceptions=False)
    assert f"{older} is not this plan, which is in {job.with_name('mine.plan.json')}" in " ".join(done.stderr.split())
    assert older.read_text() == "{}"


def test_explaining_shows_parts_and_memory(job: Path) -> None:
    said = plait(job, "--show", "details", "--out", job.with_name("other.json"))
    for words in (
        "chance to fit",
        "tokens/s  ",
        "Where the step goes",
        "What fills a rank's memory",
        "with the causal half",
    ):
        assert words in said
    assert job.with_name("other.json").is_file()
    assert not job.with_suffix(".plan.json").exists()


def test_keys_that_nobody_asked_for_are_named(job: Path) -> None:
    job.write_text(JOB + STRATEGY)
    done = CliRunner().invoke(app, ["plan", str(job)], catch_exceptions=False)
    assert "note: [strategy] leaves out pp, schedule, " in " ".join(done.stderr.split())
    job.write_text(JOB)
    done = CliRunner().invoke(app, ["plan", str(job), "strategy.tp=2"], catch_exceptions=False)
    assert "leaves out" not in done.stderr
    plan = Plan.read(job.with_suffix(".plan.json"))
    assert plan.chosen["strategy.tp"] == "given" and plan.chosen["strategy.pp"] == "searched"
    assert plan.job and plan.job.strategy.tp == 2 and plan.layout.world_size == 4


@pytest.mark.parametrize(
    "changed",
    [
        ["strategy.shard=ddp"],
        ["strategy.shard=fsdp", "train.micro_batch_size=8", "train.global_batch_size=16", "data.sequence_length=4096"],
        ["strategy.tp=1", "strategy.dp=1", "strategy.shard=ddp", "cluster.ranks=1"],
    ],
)
def test_the_change_that_is_named_is_enough(job: Path, changed: list[str]) -> None:
    job.write_text(JOB + STRATEGY)
    big = ["model.hidden=6144", "model.num_layers=24", "model.num_heads=64", "model.max_sequence=4096", *changed]
    with pytest.raises(InfeasiblePlan) as caught:
        plait(job, "--evaluate", *big)
    told = str(caught.value).partition("It would fit with ")[2].rstrip(".").split()
    assert told, str(caught.value)
    assert plait(job, "--evaluate", *big, *told)


def test_what_is_not_there_is_not_planned_for(job: Path) -> None:
    job.write_text(JOB + STRATEGY)
    plait(job, "--evaluate", "--what-if", "link=9")
    assert not job.with_suffix(".plan.json").exists()


def test_emitting_a_plan_keeps_it(job: Path) -> None:
    job.write_text(JOB + STRATEGY)
    plan = job.with_suffix(".plan.json")
    assert "--tensor-model-parallel-size 2" in plait(job, "--evaluate", "--show", "megatron")
    before = plan.read_bytes()
    said = plait(plan, "--show", "torchtitan")
    compile(said, "plait_plan.py", "exec")
    assert "parallelism.tensor_parallel_degree = 2" in said
    assert said.startswith("# torchrun --nproc-per-node=4 -m torchtitan.train --module plait_plan --config planned\n")
    assert "# Planned for Plait: " in said and " As torchtitan 0.3.0 would run these settings: " in said
    assert "\n# torchtitan cannot say: " in said
    assert plan.read_bytes() == before


def test_a_plan_is_predicted_as_it_stands(job: Path) -> None:
    """With slices that timed steps chose, and orders made from what they measured."""
    job.write_text(JOB + STRATEGY)
    plait(job, "--evaluate")
    plan = Plan.read(job.with_suffix(".plan.json"))
    costs = segment_costs(plan.model, plan.strategy, batch=4, sequence=256).late(3.0)
    sliced = replace(plan, strategy=replace(plan.strategy, p1=2, overlap="domino"), costs=costs)
    refined = job.with_name("refined.json")
    sliced.write(refined)
    before, after = (
        json.loads(plait(file, "--json"))["candidates"][0] for file in (job.with_suffix(".plan.json"), refined)
    )
    assert (before["point"]["p1"], after["point"]["p1"]) == (1, 2)
    assert after["seconds"] == simulate_plan(sliced, Cluster.preset("a100-80")).seconds != before["seconds"]


def test_pictures(job: Path) -> None:
    job.write_text(JOB + STRATEGY.replace("dp = 2", "pp = 2\nschedule = '1f1b'"))
    file = job.with_name("step.html")
    plait(job, "--evaluate", "--draw", file, "train.micro_batch_size=2")
    for words in ("pp rank 0", "pp rank 1, network", "forward", "backward", "usable", "GiB of a rank", "<title>mine"):
        assert words in file.read_text()


def test_clusters_are_listed() -> None:
    assert "H100-SXM5-80GB" in plait()
    assert "gb200" in json.loads(plait("--json"))


# ---- plait train ----


def write_open(folder: Path) -> Path:
    """A job without [strategy]."""
    job = write_job(folder, steps=3)
    job.write_text(job.read_text().partition("[strategy]")[0])
    return job


@pytest.mark.system
@pytest.mark.slow
def test_training_plans_what_is_open_and_goes_on_as_planned(tmp_path: Path) -> None:
    job = write_open(tmp_path)
    dry = train(job, "--dry-run", "cluster.ranks=2")
    assert dry.stdout.startswith("planned for 2 ranks of here: ")
    assert "on 2 ranks" in dry.stdout
    done = train(job, "cluster.ranks=2")
    assert dry.stdout.splitlines()[0] in done.stdout.splitlines()[:2]
    plan = Plan.read(tmp_path / "runs" / "job" / "plan.json")
    assert plan.layout.world_size == 2
    assert plan.job
    assert plan.job.open == ()
    more = train(job, "cluster.ranks=2", "train.steps=4")
    assert "as planned before: " in more.stdout
    assert "resuming after step 3" in more.stdout
    assert [one["step"] for one in metrics(job)] == [1, 2, 3, 4]


@pytest.mark.system
@pytest.mark.slow
def test_measuring_chooses_by_what_is_measured(tmp_path: Path) -> None:
    job = write_open(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "plait.cli.main", "plan", str(job), "--measure", "2", "--json", "cluster.ranks=2",
         "plan.constraints=['pp = 1']"],
        capture_output=True, text=True, check=False, timeout=300, env=os.environ,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    measured = [one["measured"] for one in told["candidates"][:2]]
    assert min(measured) > 0
    assert told["chosen"] == measured.index(min(measured))
    plan = Plan.read(tmp_path / "job.plan.json")
    assert plan.job
    assert plan.job.to_dict()["strategy"] == told["candidates"][told["chosen"]]["strategy"]
    assert not (tmp_path / "runs").exists()


@pytest.mark.system
def test_a_full_disk_below_what_is_printed_is_one_paragraph() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "plait.cli.main", "plan"],
            stdout=full, stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith("plait: what is printed cannot be written: No space left on device")
    assert "Traceback" not in done.stderr


SCRIPT = """
torchrun --nproc-per-node 8 --nnodes 2 pretrain_gpt.py --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 \\
  --num-attention-heads 32 --group-query-attention --num-query-groups 8 --seq-length 4096 \\
  --max-position-embeddings 4096 --normalization RMSNorm --position-embedding-type rope --swiglu \\
  --disable-bias-linear --untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0 --bf16 \\
  --tensor-model-parallel-size 2 --sequence-parallel --micro-batch-size 1 --global-batch-size 64 \\
  --use-distributed-optimizer --overlap-grad-reduce --vocab-size 128256 --save runs --frobnicate 3
"""


def test_another_framework_s_configuration_is_predicted(tmp_path: Path) -> None:
    file = tmp_path / "train.sh"
    file.write_text(SCRIPT)
    said = plait(file, "cluster.preset=h100")
    assert "on 16 GPUs of h100, run by Megatron-LM d98e8a64 (August 2026)" in " ".join(said.split())
    told = json.loads(plait(file, "cluster.preset=h100", "--json"))
    assert told["read"]["not_understood"] == ["--frobnicate 3"] and told["read"]["harmless"] == ["--save"]
    assert len(told["candidates"]) == 1 and told["framework"].startswith("Megatron-LM")
    assert not (tmp_path / "train.plan.json").exists()


def test_a_plan_for_another_framework_is_not_written(job: Path) -> None:
    told = json.loads(plait(job, "plan.framework=torchtitan", "--json"))
    assert told["framework"] == "torchtitan 0.3.0" and told["plan"] is None
    assert not job.with_suffix(".plan.json").exists()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (
            [],
            "A model of 3.29M parameters, batches of 8 sequences x 256 tokens (2.05K tokens), bf16-mixed, on 4 GPUs of",
        ),
        (["train.precision=fp32"], "tokens), fp32, on 4 GPUs of a100-80."),
        (["model={preset='gpt3-125m'}"], "gpt3-125m (125M parameters), batches of 8 sequences x 256 tokens"),
    ],
)
def test_the_first_sentence_is_the_job(job: Path, more: list[str], said: str) -> None:
    assert said in " ".join(plait(job, "--evaluate", "strategy.dp=4", *more).split())


def test_the_table_has_speed_memory_and_sharding_in_words(job: Path) -> None:
    said = plait(job, "--evaluate", "strategy.dp=4", "strategy.shard=zero1")
    head, row = (line.split() for line in said.splitlines() if line.strip().startswith(("pp dp", "1  ")))
    assert head == ["pp", "dp", "cp", "tp", "step", "p10-p90", "tokens/s/GPU", "MFU", "memory"]
    assert row[:5] == ["1", "1", "4", "1", "1"] and row[-3] == "of" and row[-1] in ("GiB", "MiB")
    assert "Its settings: micro-batch 1, sharding ZeRO-1, recompute none." in said
    for words in ("cp type", "sequence parallel", "waiting for other ranks", "Sharding in numbers"):
        assert words not in said


def test_what_would_free_memory_can_be_written(job: Path) -> None:
    """Rows of a table, whose settings a shell passes on as they stand."""
    big = ["model.hidden=4096", "model.num_layers=24", "model.num_heads=32", "strategy.dp=4", "strategy.shard=zero1"]
    said = plait(job, "--evaluate", *big)
    rows = said.partition("What would free memory of strategy 1, all else staying as it is\n")[2].splitlines()[2:5]
    assert rows and all("GiB" in row for row in rows if row.strip())
    for row in filter(None, rows[:3]):
        assert "chance of" in plait(job, "--evaluate", *big, *(one for one in shlex.split(row) if "=" in one))
