"""Strategies in other frameworks' words: everything is said, or named as unsaid."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.core.errors import JobError
from plait.core.job import Job
from plait.plan.asking import asked_of, job_at
from plait.plan.emit import FRAMEWORKS, emit
from plait.plan.space import enumerate_space
from tests.plan.test_asking import H100
from tests.plan.test_asking import job as open_job


def job(**strategy: Any) -> Job:
    return Job.from_dict(
        {
            "model": {"preset": "llama3-8b"},
            "data": {"sequence_length": 4096},
            "train": {"global_batch_size": 64, "micro_batch_size": 2, "precision": "bf16-mixed"},
            "strategy": strategy,
        }
    )


def flags(one: Job) -> dict[str, str]:
    lines = [line.removesuffix(" \\") for line in emit(one, "megatron").text.splitlines()]
    return {name: value for name, _, value in (line.removeprefix("--").partition(" ") for line in lines)}


def tables(one: Job) -> dict[str, Any]:
    return tomllib.loads(emit(one, "torchtitan").text)


PLAIN = {"tp": 2, "pp": 2, "dp": 4, "schedule": "1f1b", "sequence_parallel": True, "p1": 1, "overlap": "async"}


def test_megatron() -> None:
    found = flags(job(**PLAIN, shard="zero1", recompute="full"))
    assert found == {
        "tensor-model-parallel-size": "2", "pipeline-model-parallel-size": "2", "context-parallel-size": "1",
        "micro-batch-size": "2", "global-batch-size": "64", "seq-length": "4096", "sequence-parallel": "",
        "overlap-grad-reduce": "", "use-distributed-optimizer": "", "overlap-param-gather": "",
        "recompute-granularity": "full", "recompute-method": "block", "recompute-num-layers": "16", "bf16": "",
    }  # fmt: skip


def test_torchtitan() -> None:
    found = tables(job(**PLAIN, shard="fsdp"))
    assert found["training"] == {
        "local_batch_size": 16, "global_batch_size": 64, "seq_len": 4096,
        "mixed_precision_param": "bfloat16", "mixed_precision_reduce": "float32",
    }  # fmt: skip
    assert found["activation_checkpoint"] == {"mode": "none"}
    parallel = found["parallelism"]
    assert (parallel["data_parallel_replicate_degree"], parallel["data_parallel_shard_degree"]) == (1, 4)
    assert (parallel["pipeline_parallel_schedule"], parallel["pipeline_parallel_layers_per_stage"]) == ("1F1B", 16)
    assert parallel["fsdp_reshard_after_forward"] == "always"


@pytest.mark.parametrize(
    ("strategy", "framework", "words"),
    [
        ({"overlap": "domino", "p1": 2}, "megatron", "slices 2x1 of Domino"),
        ({"overlap": "domino", "p1": 2}, "torchtitan", "slices 2x1 of Domino"),
        ({"schedule": "zb-h1"}, "megatron", "schedule = zb-h1 (1f1b stands for it)"),
        ({"schedule": "zb-v"}, "megatron", "schedule = zb-v (interleaved stands for it)"),
        ({"sequence_parallel": False}, "torchtitan", "sequence_parallel = false"),
        ({"recompute": {"kind": "full", "layers": 3}}, "torchtitan", "recompute of 3 layers"),
        ({"recompute": "selective"}, "megatron", "only norms are recomputed"),
        ({"shard": {"params": 2, "grads": 2, "optim": 4}}, "megatron", "shard.params = 2 (it is sharded 4 ways"),
        ({"shard": "zero1"}, "torchtitan", "shard factors that differ"),
        ({"shard": {"params": 4, "grads": 4, "optim": 4, "secondary": 2}}, "torchtitan", "shard.secondary = 2"),
        ({"cp": 2, "cp_kind": "ulysses"}, "torchtitan", "2 ranks that exchange heads"),
        ({"stage_layers": [17, 15]}, "megatron", "stage_layers = [17, 15]"),
        ({"dp": [4, 2], "tp": [2, 4]}, "megatron", "unequal places"),
        ({"compile": True}, "megatron", "compile"),
        ({"cuda_graphs": True, "shard": "zero1"}, "megatron", "cuda_graphs"),
        ({"cuda_graphs": True, "shard": "zero1"}, "torchtitan", "cuda_graphs"),
    ],
)
def test_what_they_cannot_say_is_named(strategy: dict[str, Any], framework: str, words: str) -> None:
    found = emit(job(**PLAIN | strategy), framework)
    assert any(words in line for line in found.unsaid), found.unsaid


def test_torchtitan_compiles_where_the_strategy_does() -> None:
    found = [tables(job(**PLAIN | {"overlap": "sync", "compile": on})).get("compile") for on in (False, True)]
    assert found == [None, {"enable": True}]


def test_context_parallelism_of_both_kinds() -> None:
    both = flags(job(**PLAIN | {"cp": 4, "cp_kind": {"ulysses": 2, "ring": 2}}))
    assert (both["cp-comm-type"], both["hierarchical-context-parallel-sizes"]) == ("a2a+p2p", "2 2")
    assert flags(job(**PLAIN | {"cp": 2, "cp_kind": "ring"}))["cp-comm-type"] == "p2p"
    assert flags(job(**PLAIN | {"cp": 2, "cp_kind": "ulysses"}))["cp-comm-type"] == "a2a"


ONE = open_job()
SPACE = enumerate_space(asked_of(ONE, ONE.model_spec(vocab=257), H100), most=20_000)


@given(st.integers(0, len(SPACE) - 1))
def test_degrees_and_batches_are_those_of_the_job(at: int) -> None:
    one = job_at(ONE, SPACE.row(at))
    found, parallel, training = flags(one), tables(one)["parallelism"], tables(one)["training"]
    megatron = [int(found[f"{name}-parallel-size"]) for name in ("tensor-model", "pipeline-model", "context")]
    titan = [parallel[f"{name}_parallel_degree"] for name in ("tensor", "pipeline", "context")]
    assert megatron == titan == [one.strategy.tp, one.strategy.pp, one.strategy.cp]
    replicas = parallel["data_parallel_replicate_degree"] * parallel["data_parallel_shard_degree"]
    assert replicas == one.strategy.dp
    assert int(found["micro-batch-size"]) == SPACE.micro[at]
    assert training["global_batch_size"] == int(found["global-batch-size"]) == 64
    assert 64 % (training["local_batch_size"] * replicas) == 0


def test_another_framework_is_answered_with_the_known_ones() -> None:
    with pytest.raises(JobError, match=r"did you mean 'megatron'.*torchtitan or megatron"):
        emit(job(), "megatronn")
    assert set(FRAMEWORKS) == {"torchtitan", "megatron"}
