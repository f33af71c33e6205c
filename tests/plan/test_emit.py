"""Strategies in other frameworks' words: everything is said, or named as unsaid."""

from __future__ import annotations

import shlex
import sys
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.core.base.errors import JobError
from plait.core.job.spec import Job
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


def lines(one: Job) -> list[str]:
    """Of Megatron-LM's command line, one for each flag."""
    text = emit(one, "megatron").text
    return [line.removesuffix(" \\") for line in text.splitlines() if not line.startswith("#")]


def flags(one: Job) -> dict[str, str]:
    """By name, but for the model's shapes."""
    found = {name.removeprefix("--"): " ".join(values) for name, *values in map(shlex.split, lines(one))}
    return {name: value for name, value in found.items() if name not in MODEL_FLAGS}


MODEL_FLAGS = {
    "num-layers", "hidden-size", "ffn-hidden-size", "num-attention-heads", "max-position-embeddings", "norm-epsilon",
    "hidden-dropout", "attention-dropout", "kv-channels", "group-query-attention", "num-query-groups",
    "position-embedding-type", "normalization", "swiglu", "disable-bias-linear", "rotary-base", "use-rope-scaling",
    "rope-scaling-factor", "untie-embeddings-and-output-weights", "qk-layernorm", "window-size",
    "window-attn-skip-freq",
}  # fmt: skip


def tables(one: Job) -> dict[str, Any]:
    """What the module for torchtitan sets, run with stand-ins for torchtitan's own modules."""
    registry, policies = ModuleType("config_registry"), ModuleType("activation_checkpoint")
    names = "training parallelism compile"
    settings = SimpleNamespace(**{name: SimpleNamespace() for name in names.split()}, activation_checkpoint="unset")
    for name in ("llama3_8b", "llama3_70b", "qwen3_14b", "qwen3_32b", "CONFIGURATION"):
        setattr(registry, name, lambda: settings)
    models = SimpleNamespace(model_registry=lambda flavor: flavor)
    for name in ("FullAC", "SelectiveAC"):
        setattr(policies, name, SimpleNamespace(Config=lambda name=name: name))
    known = {f"torchtitan.models.{family}.config_registry": registry for family in ("llama3", "qwen3", "MODULE")}
    known |= {f"torchtitan.models.{family}": models for family in ("llama3", "qwen3", "MODULE")}
    known |= {"torchtitan.distributed.activation_checkpoint": policies}
    made = dict[str, Any]()
    with mock.patch.dict(sys.modules, known):
        exec(emit(one, "torchtitan").text, made)
        assert made["planned"]() is settings
    return {name: vars(getattr(settings, name)) for name in names.split()} | {
        "again": settings.activation_checkpoint, "model": settings.model_spec,
    }  # fmt: skip


PLAIN = {
    "tp": 2,
    "pp": 2,
    "dp": 4,
    "schedule": "1f1b",
    "sequence_parallel": True,
    "slices": {"batch": 1},
    "overlap": "async",
}


def test_megatron() -> None:
    found = flags(job(**PLAIN, shard="zero1", recompute="full"))
    assert found == {
        "tensor-model-parallel-size": "2", "pipeline-model-parallel-size": "2", "context-parallel-size": "1",
        "micro-batch-size": "2", "global-batch-size": "64", "seq-length": "4096", "sequence-parallel": "",
        "overlap-grad-reduce": "", "use-distributed-optimizer": "", "overlap-param-gather": "",
        "recompute-granularity": "full", "recompute-method": "block", "recompute-num-layers": "16", "bf16": "",
    }  # fmt: skip


def cut(*sizes: int) -> list[list[str]]:
    """Names of the modules of every stage, of so many layers each."""
    layers = iter(range(sum(sizes)))
    parts = [[f"layers.{next(layers)}" for _ in range(size)] for size in sizes]
    return [["tok_embeddings", *parts[0]], *parts[1:-1], [*parts[-1], "norm", "lm_head"]]


def test_torchtitan() -> None:
    found = tables(job(**PLAIN, shard="fsdp"))
    assert found["training"] == {
        "local_batch_size": 16, "global_batch_size": 64, "seq_len": 4096, "mixed_precision_param": "bfloat16",
        "disable_cuda_graphs": True,
    }  # fmt: skip
    assert found["again"] is None and found["model"] == "8B"
    parallel = found["parallelism"]
    assert (parallel["data_parallel_replicate_degree"], parallel["data_parallel_shard_degree"]) == (1, 4)
    assert parallel["pipeline_parallel_schedule"] == "1F1B"
    assert parallel["module_fqns_per_model_part"] == cut(16, 16)
    assert parallel["fsdp_reshard_after_forward"] == "always"


@pytest.mark.parametrize(
    ("strategy", "framework", "words"),
    [
        ({"overlap": "domino", "slices": {"batch": 2}}, "megatron", "slices 2x1 of Domino"),
        ({"overlap": "domino", "slices": {"batch": 2}}, "torchtitan", "slices 2x1 of Domino"),
        ({"overlap": "fixed", "slices": {"batch": 2}}, "megatron", "slices 2x1 of Domino"),
        ({"overlap": "fixed"}, "megatron", "overlap.tp = fixed"),
        ({"overlap": "fixed"}, "torchtitan", "overlap.tp = fixed"),
        ({"schedule": "zb-h1"}, "megatron", "schedule = zb-h1 (1f1b stands for it)"),
        ({"schedule": "zb-v"}, "megatron", "schedule = zb-v (interleaved stands for it)"),
        ({"recompute": {"kind": "full", "layers": 3}}, "torchtitan", "recompute of 3 layers"),
        ({"recompute": "selective"}, "megatron", "only norms are recomputed"),
        ({"shard": {"params": 2, "grads": 2, "optim": 4}}, "megatron", "shard.params = 2 (it is sharded 4 ways"),
        ({"shard": "zero1"}, "torchtitan", "shard factors that differ"),
        ({"shard": {"params": 4, "grads": 4, "optim": 4, "secondary": 2}}, "torchtitan", "shard.secondary = 2"),
        ({"cp": 2, "cp_comm_type": "ulysses"}, "torchtitan", "2 ranks that exchange heads"),
        ({"dp": [4, 2], "tp": [2, 4]}, "megatron", "unequal places"),
        ({"compile": True}, "megatron", "compile"),
        ({"cuda_graphs": True, "shard": "zero1"}, "megatron", "cuda_graphs"),
        ({"cuda_graphs": True, "shard": "zero1"}, "torchtitan", "cuda_graphs (it has none with pipelines)"),
        ({"overlap": "sync"}, "megatron", "overlap.tp = sync"),
    ],
)
def test_what_they_cannot_say_is_named(strategy: dict[str, Any], framework: str, words: str) -> None:
    found = emit(job(**PLAIN | strategy), framework)
    assert any(words in line for line in found.unsaid), found.unsaid


NO_SYNC = {"tp": "sync", "shard": "none"}
STAYS = "shard.params = 1 (parameters are gathered in every forward and kept until its backward)"


def added(one: Job) -> str:
    """Flags beyond degrees, batches, precision and the model's shapes."""
    always = 6
    return " ".join(line for line in lines(one)[always:] if line.split()[0].removeprefix("--") not in MODEL_FLAGS)


def unsaid(one: Job, framework: str) -> list[str]:
    """But the vocabulary, which is a tokenizer's, and rotary frequencies, in which Llama 3 and 3.1 differ."""
    found = emit(one, framework).unsaid
    return [what for what in found if not what.startswith(("the vocabulary (", "model.rope_scaling, "))]


@pytest.mark.parametrize(
    ("strategy", "flags", "cannot"),
    [
        ({}, "", []),
        ({"tp": 2}, "", ["overlap.tp = domino (its own overlap behind weight gradients stands for it)"]),
        ({"tp": 2, "overlap": "sync"}, "",
         ["overlap.tp = sync (its all-reduce runs behind weight gradients, which no flag forbids)"]),
        ({"tp": 2, "overlap": "no-communication"}, "", ["overlap.tp = no-communication (it communicates)"]),
        ({"tp": 2, "overlap": "async"}, "", []),
        ({"tp": 2, "overlap": "async", "slices": {"batch": 1, "columns": 1}}, "", []),
        ({"dp": 4}, "--overlap-grad-reduce", []),
        ({"dp": 4, "shard": "zero1"}, "--overlap-grad-reduce --use-distributed-optimizer --overlap-param-gather", []),
        ({"dp": 4, "shard": "zero2"},
         "--overlap-grad-reduce --use-distributed-optimizer --overlap-param-gather --use-megatron-fsdp "
         "--data-parallel-sharding-strategy optim_grads --ckpt-format fsdp_dtensor", []),
        ({"dp": 4, "shard": "fsdp"},
         "--overlap-grad-reduce --use-distributed-optimizer --overlap-param-gather --use-megatron-fsdp "
         "--data-parallel-sharding-strategy optim_grads_params --ckpt-format fsdp_dtensor", []),
        ({"dp": 4, "shard": {"params": 1, "grads": 2, "optim": 4}},
         "--overlap-grad-reduce --use-distributed-optimizer --overlap-param-gather --use-megatron-fsdp "
         "--data-parallel-sharding-strategy optim_grads --ckpt-format fsdp_dtensor",
         ["shard.grads = 2 (it is sharded 4 ways, as optimizer states are)"]),
        ({"dp": 4, "shard": {"params": 1, "grads": 1, "optim": 2}},
         "--overlap-grad-reduce --use-distributed-optimizer --num-distributed-optimizer-instances 2 "
         "--overlap-param-gather", []),
        ({"dp": 4, "overlap": NO_SYNC}, "", []),
        ({"dp": 4, "shard": "zero1", "overlap": NO_SYNC}, "--use-distributed-optimizer", []),
        ({"dp": 4, "shard": "zero1", "overlap": NO_SYNC | {"shard": "forward"}},
         "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
         ["overlap.shard = forward (overlap-param-gather needs overlap-grad-reduce)"]),
        ({"dp": 4, "shard": "zero1", "overlap": NO_SYNC | {"shard": "backward"}},
         "--overlap-grad-reduce --use-distributed-optimizer", []),
        ({"pp": 2, "schedule": "interleaved", "virtual_stages": 4, "recompute": "full"},
         "--num-virtual-stages-per-pipeline-rank 4 --recompute-granularity full --recompute-method block "
         "--recompute-num-layers 4", []),
        ({"pp": 2, "schedule": "zb-v", "recompute": "full"},
         "--num-virtual-stages-per-pipeline-rank 2 --recompute-granularity full --recompute-method block "
         "--recompute-num-layers 8", ["schedule = zb-v (interleaved stands for it)"]),
        ({"pp": 3, "schedule": "gpipe", "recompute": "full"},
         "--pipeline-model-parallel-layout 'Et*11|(t*11|)*1t*10L' --recompute-granularity full "
         "--recompute-method block --recompute-num-layers 11",
         ["schedule = gpipe (1f1b stands for it)"]),
        ({"recompute": {"kind": "full", "layers": 3}},
         "--recompute-granularity full --recompute-method block --recompute-num-layers 3", []),
        ({"recompute": {"kind": "selective", "layers": 3}},
         "--recompute-granularity selective --recompute-modules layernorm",
         ["recompute = selective of the MLP's activation (only norms are recomputed)",
          "recompute of 3 layers of every stage (all are recomputed)"]),
        ({"compile": True, "overlap": "sync"}, "", ["compile (its own fused kernels stand for it)"]),
    ],
)  # fmt: skip
def test_flags_of_megatron(strategy: dict[str, Any], flags: str, cannot: list[str]) -> None:
    one = job(**strategy)
    assert added(one) == f"{flags} --bf16".strip()
    assert unsaid(one, "megatron") == cannot


@pytest.mark.parametrize(
    ("strategy", "parallel", "cannot"),
    [
        ({}, {}, []),
        ({"tp": 2, "overlap": "sync"}, {"tensor_parallel_degree": 2, "enable_sequence_parallel": False}, []),
        ({"tp": 2, "overlap": "sync", "sequence_parallel": True},
         {"tensor_parallel_degree": 2, "enable_sequence_parallel": True}, []),
        ({"tp": 2}, {"tensor_parallel_degree": 2, "enable_sequence_parallel": False},
         ["overlap.tp = domino (async tensor parallelism, which needs compile, is nearest)"]),
        ({"overlap": NO_SYNC}, {}, []),
        ({"dp": 4, "overlap": NO_SYNC}, {"data_parallel_replicate_degree": 4},
         ["overlap.shard = none (FSDP2 always prefetches)"]),
        ({"dp": 4, "shard": "zero2"},
         {"data_parallel_shard_degree": 4, "fsdp_reshard_after_forward": "never"}, [STAYS]),
        ({"dp": 4, "shard": {"params": 1, "grads": 1, "optim": 2}},
         {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 2, "fsdp_reshard_after_forward": "never"},
         ["shard factors that differ (params 1, grads 1, optim 2; all three become 2)", STAYS]),
        ({"dp": 4, "shard": {"params": 2, "grads": 4, "optim": 4}},
         {"data_parallel_shard_degree": 4, "fsdp_reshard_after_forward": "always"},
         ["shard factors that differ (params 2, grads 4, optim 4; all three become 4)"]),
        ({"dp": 2, "cp": 2, "cp_comm_type": "ring", "shard": "fsdp"},
         {"data_parallel_shard_degree": 2, "fsdp_reshard_after_forward": "always", "context_parallel_degree": 2}, []),
        ({"dp": 2, "cp": 4, "cp_comm_type": "ulysses"},
         {"data_parallel_replicate_degree": 2, "context_parallel_degree": 4},
         ["shard.optim = 1 (FSDP2 shards over the 4 ranks of a sequence as well: 4)",
          "cp_comm_type with 4 ranks that exchange heads (all are one ring)"]),
        ({"pp": 2, "schedule": "interleaved", "virtual_stages": 4},
         {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "Interleaved1F1B",
          "module_fqns_per_model_part": cut(*[4] * 8), "pipeline_parallel_microbatch_size": 2}, []),
        ({"pp": 2, "schedule": "zb-v"},
         {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "ZBVZeroBubble",
          "module_fqns_per_model_part": cut(*[8] * 4), "pipeline_parallel_microbatch_size": 2}, []),
        ({"pp": 3, "schedule": "eager-1f1b"},
         {"pipeline_parallel_degree": 3, "pipeline_parallel_schedule": "1F1B",
          "module_fqns_per_model_part": cut(11, 11, 10), "pipeline_parallel_microbatch_size": 2},
         ["schedule = eager-1f1b (1f1b stands for it)"]),
        ({"pp": 3, "schedule": "1f1b", "stage_layers": [10, 11, 11]},
         {"pipeline_parallel_degree": 3, "pipeline_parallel_schedule": "1F1B",
          "module_fqns_per_model_part": cut(10, 11, 11), "pipeline_parallel_microbatch_size": 2},
         []),
        ({"recompute": {"kind": "full", "layers": 3}}, {},
         ["recompute of 3 layers of every stage (all are recomputed)"]),
        ({"recompute": "full"}, {}, []),
        ({"recompute": {"kind": "none", "layers": 3}}, {}, []),
        ({"recompute": "selective"}, {},
         ["recompute = selective as ours (theirs also recomputes some matrix products)"]),
    ],
)  # fmt: skip
def test_settings_of_torchtitan(strategy: dict[str, Any], parallel: dict[str, Any], cannot: list[str]) -> None:
    one = job(**strategy)
    ones = dict.fromkeys(
        ["data_parallel_replicate_degree", "data_parallel_shard_degree", *(
            f"{name}_parallel_degree" for name in ("tensor", "pipeline", "context"))], 1)  # fmt: skip
    found = tables(one)
    assert found["parallelism"] == ones | parallel
    assert unsaid(one, "torchtitan") == cannot
    assert found["training"]["local_batch_size"] == (64 if "pp" in strategy else 2)
    beside = one.base_strategy.tp > 1 and one.base_strategy.overlap != "sync"
    assert found["compile"] == {"enable": True} | ({"enable_async_tensor_parallel": True} if beside else {})
    kind = one.base_strategy.recompute
    assert found["again"] == {"none": None, "selective": "SelectiveAC", "full": "FullAC"}[kind]


@pytest.mark.parametrize("precision", ["bf16-mixed", "fp32", "fp64"])
def test_a_precision_that_they_do_not_have_is_named(precision: str) -> None:
    one = job().changed([f'train.precision="{precision}"'])
    told = {"bf16-mixed": "bfloat16", "fp32": "float32"}.get(precision)
    training = tables(one)["training"]
    assert training.get("mixed_precision_param") == told
    assert ("bf16" in flags(one)) == (precision == "bf16-mixed")
    for framework in FRAMEWORKS:
        instead = {"torchtitan": " (the configuration's own stands)", "deepspeed": " (fp32 stands for it)"}
        named = [line for line in unsaid(one, framework) if not line.startswith("the model")]
        assert named == ([] if told else [f"train.precision = fp64{instead.get(framework, '')}"])


def test_torchtitan_compiles_as_what_is_predicted_does() -> None:
    found = [tables(job(**PLAIN | {"overlap": "sync", "compile": on}))["compile"] for on in (False, True)]
    assert found == [{"enable": True}, {"enable": True}]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tied_embeddings": True}, "model.tied_embeddings = True (theirs has False)"),
        ({"rope_theta": 1e4}, "model.rope_theta = 10000.0 (theirs has 500000.0)"),
        ({"norm_eps": 1e-6}, "model.norm_eps = 1e-06 (theirs has 1e-05)"),
        ({"window": 512}, "model.window = 512 (theirs has 0)"),
        ({"parallel_block": True}, "model.parallel_block = True (theirs has False)"),
        ({"attention_dropout": 0.1}, "model.attention_dropout = 0.1 (theirs has 0.0)"),
        ({"vocab": 32000}, "model.vocab = 32000 (theirs has 128256)"),
        ({}, "model.rope_scaling, which theirs has (that of 3.1)"),
    ],
)
def test_what_their_model_has_otherwise_is_named(change: dict[str, Any], words: str) -> None:
    one = job(slices={"batch": 1})
    values = one.to_dict()
    values["model"] |= change
    told = emit(Job.from_dict(values), "torchtitan").unsaid
    assert words in told and len(told) == 1 + bool(change)


def test_their_own_model_is_theirs_whole() -> None:
    values = job(slices={"batch": 1}).to_dict() | {"model": {"preset": "llama3-405b"}}
    assert emit(Job.from_dict(values), "torchtitan").unsaid == []


def test_torchtitan_captures_where_the_strategy_does() -> None:
    found = [tables(job(cuda_graphs=on))["training"]["disable_cuda_graphs"] for on in (False, True)]
    assert found == [True, False]


def test_context_parallelism_of_both_kinds() -> None:
    both = flags(job(**PLAIN | {"cp": 4, "cp_comm_type": {"ulysses": 2, "ring": 2}}))
    assert (both["cp-comm-type"], both["hierarchical-context-parallel-sizes"]) == ("a2a+p2p", "2 2")
    assert flags(job(**PLAIN | {"cp": 2, "cp_comm_type": "ring"}))["cp-comm-type"] == "p2p"
    assert flags(job(**PLAIN | {"cp": 2, "cp_comm_type": "ulysses"}))["cp-comm-type"] == "a2a"


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
    with pytest.raises(JobError, match=r"did you mean 'megatron'.*torchtitan or megatron or deepspeed"):
        emit(job(), "megatronn")
    assert set(FRAMEWORKS) == {"torchtitan", "megatron", "deepspeed"}
