"""Settings that are emitted, read back and predicted as their framework runs them."""

from __future__ import annotations

from typing import Any

import pytest

from plait.core.base.env import specs_folder
from plait.core.base.errors import JobError
from plait.core.cluster.hardware import Cluster
from plait.core.job.spec import Job
from plait.plan.answer import Planner
from plait.plan.as_emitted import as_emitted, read_back, told_both
from plait.plan.asking import job_at, point_of
from plait.plan.emit import check_emits, emit
from plait.plan.frameworks import FRAMEWORKS
from plait.plan.read_megatron import megatron_told
from plait.plan.read_shell import Argument, arguments
from plait.plan.space import enumerate_space
from tests.plan.test_emit_rules import broken
from tests.plan.test_frameworks import job

H100 = Cluster.preset("h100")
EMITTED = ("megatron", "torchtitan", "deepspeed")


def planner(one: Job) -> Planner:
    return Planner(one, H100, 128256)


def drawn(framework: str, count: int, model: str = "llama3-70b") -> list[Job]:
    """Plans of a framework's space, evenly over it."""
    one = job(framework, model, ranks=64)
    space = enumerate_space(planner(one).asked, most=20_000)
    return [job_at(one, space.row(at)) for at in range(0, len(space), len(space) // count)][:count]


@pytest.mark.parametrize("framework", EMITTED)
def test_what_was_planned_for_a_framework_is_read_back_and_predicted_alike(framework: str) -> None:
    """40 plans each: nothing is unsaid but the tokenizer's vocabulary, and time and memory are equal."""
    for one in drawn(framework, 40):
        found, own = emit(one, framework), planner(one)
        told = read_back(found, framework, one)
        assert told.unknown == told.unmodelled == [], str(one.strategy)
        assert framework != "megatron" or broken(one) == []
        before, after = own.predict(one), as_emitted(own, found, framework, one)
        degrees = {"overlap": before.point["tp"], "shard_overlap": before.point["dp"] * before.point["cp"]}
        idle = {key for key, ranks in degrees.items() if ranks == 1}  # nothing is sent
        assert {key for key in after.point if after.point[key] != before.point[key]} <= idle, str(found.unsaid)
        assert (after.seconds, after.most_memory) == pytest.approx((before.seconds, before.most_memory))


def test_what_plait_plans_another_runs_otherwise_and_both_are_said() -> None:
    strategy = {"dp": 4, "tp": 4, "shard": "zero1", "slices": {"batch": 2}, "sequence_parallel": True}
    one = Job.from_dict(job("plait").to_dict() | {"strategy": strategy} | {
        "train": {"global_batch_size": 64, "micro_batch_size": 4, "precision": "bf16-mixed"}
    })  # fmt: skip
    own = planner(one)
    best = own.checked().best
    emitted = emit(one, "megatron")
    after = as_emitted(own, emitted, "megatron", one)
    assert own.framework is None and after.seconds != best.seconds and after.most_memory != best.most_memory
    told = told_both(own, best, emitted, "megatron")
    assert told.startswith("Planned for Plait: ") and FRAMEWORKS["megatron"].version in told


def test_what_does_not_fit_as_it_is_emitted_is_said() -> None:
    one = job("megatron", "llama3-70b", 16, tp=8, dp=2, sequence_parallel=True)
    own = planner(one)
    assert told_both(own, own.predict(one), emit(one, "megatron"), "megatron").endswith("which does not fit.")


@pytest.mark.parametrize(("ranks", "nodes"), [(4, 1), (8, 1), (64, 8)])
def test_lines_that_start_it(ranks: int, nodes: int) -> None:
    one = job("megatron", ranks=ranks, dp=ranks)
    torchrun, slurm = emit(one, "megatron", 8).launch
    assert f"--nproc-per-node={min(8, ranks)}" in torchrun and "pretrain_gpt.py" in torchrun
    assert ("--nnodes=" in torchrun) == (nodes > 1) and f"srun --nodes={nodes} --ntasks-per-node=1" in slurm
    assert "-m torchtitan.train --module plait_plan --config planned" in emit(one, "torchtitan", 8).launch[0]
    assert emit(one, "megatron").launch == []


MIXTRAL = {"tp": 2, "pp": 4, "dp": 8, "ep": 8, "shard": "zero1", "sequence_parallel": True}


@pytest.mark.parametrize(
    ("model", "recipe", "strategy"),
    [
        ({"preset": "mixtral-8x7b"}, {}, {}),
        ({"preset": "mixtral-8x7b"}, {"moe_token_dispatcher": "deepep"}, {}),
        ({"preset": "mixtral-8x7b"}, {"expert_tensor_parallel_size": 1, "overlap_moe_expert_parallel_comm": True},
         {"schedule": "interleaved", "virtual_stages": 2}),
        ({"preset": "mixtral-8x7b", "experts": {"count": 8, "per_token": 2, "first_dense": 4}}, {}, {}),
        ({"preset": "qwen3-30b-a3b"}, {}, {"tp": 1, "pp": 2, "dp": 32, "sequence_parallel": False}),
    ],
)  # fmt: skip
def test_experts_are_emitted_for_megatron(
    model: dict[str, Any], recipe: dict[str, Any], strategy: dict[str, Any]
) -> None:
    values = job("megatron", "mixtral-8x7b", 64).to_dict()
    train = {"global_batch_size": 256, "micro_batch_size": 1, "precision": "bf16-mixed"}
    one = Job.from_dict(values | {"model": model, "recipe": recipe, "train": train, "strategy": MIXTRAL | strategy})
    check_emits(one, "megatron")
    found, own = emit(one, "megatron"), Planner(one, H100, one.model_spec(1).vocab)
    told = read_back(found, "megatron", one)
    assert told.unknown == told.unmodelled == []
    assert as_emitted(own, found, "megatron", one).seconds == pytest.approx(own.predict(one).seconds)
    with pytest.raises(JobError, match="not be emitted yet"):
        check_emits(one, "torchtitan")


@pytest.mark.parametrize("preset", sorted(file.stem for file in (specs_folder() / "models").glob("*.toml")))
def test_a_model_s_flags_are_read_as_that_model(preset: str) -> None:
    """Its shapes and its parameters, or what differs is named. The vocabulary is a tokenizer's."""
    values = job("megatron", dp=16).to_dict()
    one = Job.from_dict(values | {"model": {"preset": preset}, "data": {"sequence_length": 512}})
    model = one.model_spec(128)
    found = emit(one, "megatron")
    back = megatron_told("a.sh", [*arguments(found.text), Argument("padded-vocab-size", (str(model.vocab),))])
    read = Job.from_dict(one.to_dict() | {"model": back.values["model"]}).model_spec(128)
    own, their = model.to_dict(), read.to_dict()
    named = " ".join(found.unsaid)
    differ = {key for key in own.keys() | their.keys() if own.get(key) != their.get(key)}
    said = {"without", "experts"} | ({"family"} if model.levels else set())
    assert {key for key in differ - said if f"model.{key}" not in named} == set()
    assert all(one in named for one in model.without)
    assert back.unknown == back.unmodelled == []
    assert differ & SAID or read.num_parameters == model.num_parameters


SAID = {"family", "parallel_block", "levels"}
"""What makes other parameters."""


@pytest.mark.parametrize("precision", ["fp8", "mxfp8"])
def test_precisions_are_emitted_for_megatron(precision: str) -> None:
    one = job("megatron", dp=16, shard="zero1").changed([f"train.precision={precision}"])
    check_emits(one, "megatron")
    found, own = emit(one, "megatron"), Planner(one, Cluster.preset("b200"), 128256)
    assert read_back(found, "megatron", one).get("train.precision") == precision
    assert as_emitted(own, found, "megatron", one).seconds == own.predict(one).seconds
    with pytest.raises(JobError, match="not be emitted yet"):
        check_emits(one.changed(["train.precision=nvfp4"]), "megatron")


@pytest.mark.parametrize(
    "recipe",
    [
        {"grad_reduce_in_bf16": True}, {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "fp8"},
        {"optimizer_offload_fraction": 0.5, "grad_reduce_in_bf16": True},
    ],
)  # fmt: skip
def test_recipes_are_emitted_for_megatron(recipe: dict[str, Any]) -> None:
    one = Job.from_dict(job("megatron", dp=8, tp=2, shard="zero1").to_dict() | {"recipe": recipe})
    on = Cluster.preset("gb200") if "optimizer_offload_fraction" in recipe else H100
    found, own = emit(one, "megatron"), Planner(one, on, 128256)
    told = read_back(found, "megatron", one)
    assert {key: told.get(f"recipe.{key}") for key in recipe} == recipe and told.unknown == []
    before, after = own.predict(one), as_emitted(own, found, "megatron", one)
    assert (after.seconds, after.most_memory) == pytest.approx((before.seconds, before.most_memory))


def test_stages_that_embedding_and_head_have_to_themselves_are_emitted() -> None:
    one = job("megatron", "llama3-405b", 128, tp=8, pp=16, schedule="interleaved", virtual_stages=8, shard="zero1")
    assert "--pipeline-model-parallel-layout 'E|(t*1|)*126L'" in emit(one, "megatron").text
    back = read_back(emit(one, "megatron"), "megatron", one).job()
    assert point_of(back)["virtual"] == 8 and broken(one) == []
