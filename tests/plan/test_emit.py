"""Strategies as settings of other frameworks: everything is said, or named as unsaid."""

from __future__ import annotations

from typing import Any

import pytest

from plait.core.base.errors import JobError
from plait.core.job.spec import Job
from plait.formats.megatron.rules import layout
from plait.plan.emit import WRITERS, check_emits, emit


def job(model: dict[str, Any] | str = "llama3-8b", *, recipe: dict[str, Any] | None = None, plan: str = "plait",
        precision: str = "bf16-mixed", optimizer: str = "adamw", **strategy: Any) -> Job:  # fmt: skip
    values: dict[str, Any] = {
        "model": {"preset": model} if isinstance(model, str) else model, "data": {"sequence_length": 4096},
        "train": {"global_batch_size": 64, "micro_batch_size": 2, "precision": precision, "optimizer": optimizer},
        "strategy": {"overlap": "async"} | strategy, "recipe": recipe or {}, "plan": {"framework": plan},
    }  # fmt: skip
    return Job.from_dict(values)


ALWAYS = ("the vocabulary (", "model.rope_scaling, ", "the model, its sequences")
"""Of every job, and of Llama 3, whose frequencies differ from 3.1's."""
PARTS = 'parts = [[f"layers.{layer}" for layer in range(*ends)] for ends in pairwise(first)]'
ZERO1 = "--overlap-grad-reduce --use-distributed-optimizer --overlap-param-gather"
FSDP = f"{ZERO1} --use-megatron-fsdp --data-parallel-sharding-strategy"
STAYS = "shard.params = 1 (parameters are gathered in every forward and kept until its backward)"
BLOCK = "--recompute-granularity full --recompute-method block --recompute-num-layers"
MEGATRON: list[tuple[dict[str, Any], str, list[str]]] = [
    ({}, "--bf16", []),
    ({"tp": 2, "overlap": "domino", "slices": {"batch": 2}}, "--tensor-model-parallel-size 2",
     ["slices 2x1 of Domino", "overlap.tp = domino (its own overlap"]),
    ({"tp": 2, "overlap": "sync"}, "", ["overlap.tp = sync (its all-reduce runs behind"]),
    ({"tp": 2, "overlap": "no-communication"}, "", ["overlap.tp = no-communication (it communicates)"]),
    ({"tp": 2, "sequence_parallel": True}, "--sequence-parallel", []),
    ({"dp": 4}, "--overlap-grad-reduce", []),
    ({"dp": 4, "shard": "zero1"}, ZERO1, []),
    ({"dp": 4, "shard": "zero2"}, f"{FSDP} optim_grads --ckpt-format fsdp_dtensor", []),
    ({"dp": 4, "shard": "fsdp"}, f"{FSDP} optim_grads_params --ckpt-format fsdp_dtensor", []),
    ({"dp": 4, "shard": {"params": 2, "grads": 2, "optim": 4}}, f"{FSDP} optim_grads_params",
     ["shard.grads = 2 (it is sharded 4 ways", "shard.params = 2 (it is sharded 4 ways"]),
    ({"dp": 4, "shard": {"params": 1, "grads": 1, "optim": 2}}, "--num-distributed-optimizer-instances 2", []),
    ({"dp": 4, "shard": {"params": 4, "grads": 4, "optim": 4, "secondary": 2}}, "",
     ["shard.secondary = 2 (no second copy"]),
    ({"dp": 4, "shard": "zero1", "overlap": {"tp": "async", "shard": "none"}}, "--use-distributed-optimizer", []),
    ({"dp": 4, "shard": "zero1", "overlap": {"tp": "async", "shard": "forward"}}, ZERO1,
     ["overlap.shard = forward (overlap-param-gather needs"]),
    ({"dp": 4, "shard": "zero1", "overlap": {"tp": "async", "shard": "backward"}},
     "--overlap-grad-reduce --use-distributed-optimizer", []),
    ({"dp": [4, 2], "tp": [2, 4], "pp": 2, "schedule": "1f1b"}, "", ["unequal pipeline ranks"]),
    ({"pp": 2, "schedule": "interleaved", "virtual_stages": 4, "recompute": "full"},
     f"--num-virtual-stages-per-pipeline-rank 4 {BLOCK} 4", []),
    ({"pp": 2, "schedule": "zb-v", "recompute": "full"}, f"--num-virtual-stages-per-pipeline-rank 2 {BLOCK} 8",
     ["schedule = zb-v (interleaved stands for it)"]),
    ({"pp": 2, "schedule": "zb-h1"}, "", ["schedule = zb-h1 (1f1b stands for it)"]),
    ({"pp": 3, "schedule": "gpipe", "recompute": "full"},
     f"--pipeline-model-parallel-layout 'Et*11|(t*11|)*1t*10L' {BLOCK} 11", ["schedule = gpipe (1f1b stands for it)"]),
    ({"recompute": {"kind": "full", "layers": 3}}, f"{BLOCK} 3", []),
    ({"recompute": {"kind": "selective", "layers": 3}},
     "--recompute-granularity selective --recompute-modules layernorm",
     ["recompute = selective of the MLP's", "recompute of 3 layers of every stage"]),
    ({"recompute": "selective", "plan": "megatron"}, "--recompute-modules core_attn", []),
    ({"compile": True}, "", ["strategy.compile = true (its own fused kernels"]),
    ({"cuda_graphs": True}, "", ["strategy.cuda_graphs = true (its graphs hold"]),
    ({"cp": 4, "cp_comm_type": {"ulysses": 2, "ring": 2}},
     "--cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2", []),
    ({"cp": 2, "cp_comm_type": "ring"}, "--cp-comm-type p2p", []),
    ({"cp": 2, "cp_comm_type": "ulysses"}, "--cp-comm-type a2a", []),
    ({"precision": "fp64"}, "", ["train.precision = fp64"]),
    # models
    ({"model": "llama3-405b"}, "--num-layers 126 --num-query-groups 8 --rotary-base 500000 --use-rope-scaling", []),
    ({"model": "qwen3-8b"}, "--qk-layernorm --rotary-base 1000000 --untie-embeddings-and-output-weights", []),
    ({"model": "mistral-7b"}, "--window-size 4095,0", []),
    ({"model": {"family": "llama", "num_layers": 6, "hidden": 64, "num_heads": 4, "ffn_hidden": 96,
                "max_sequence": 4096, "window": 128, "full_every": 3}}, "--window-attn-skip-freq 3", []),
    ({"model": {"family": "llama", "num_layers": 6, "hidden": 64, "num_heads": 4, "ffn_hidden": 96,
                "max_sequence": 4096, "window": 128, "full_first": 2}}, "--window-attn-skip-freq '[0,0,1,1,1,1]'", []),
    ({"model": {"preset": "llama3-8b", "parallel_block": True}}, "", ["model.parallel_block = true (attention comes"]),
    # its rules: what breaks one is not emitted
    ({"precision": "fp8"}, "--fp8-param-gather --use-distributed-optimizer", []),
    ({"precision": "fp8", "dp": 4}, "--fp8-format hybrid", ["recipe.fp8_param_gather (its distributed"]),
    ({"recipe": {"exp_avg_dtype": "bf16"}},
     "--use-precision-aware-optimizer --exp-avg-dtype bf16 --use-distributed-optimizer", []),
    ({"recipe": {"exp_avg_dtype": "bf16"}, "dp": 4}, "", ["recipe.exp_avg_dtype and exp_avg_sq_dtype (its"]),
    ({"recipe": {"optimizer_offload_fraction": 0.5}, "dp": 4, "shard": "zero1"},
     "--optimizer-cpu-offload --optimizer-offload-fraction 0.5 --use-precision-aware-optimizer", []),
    ({"recipe": {"optimizer_offload_fraction": 0.5}, "precision": "mxfp8"}, "--optimizer-cpu-offload",
     ["recipe.fp8_param_gather (beside an optimizer"]),
    ({"model": "mistral-7b", "cp": 2, "cp_comm_type": "ring"}, "--cp-comm-type all_gather",
     ["cp_comm_type of layers with windows"]),
    ({"model": "mixtral-8x7b", "tp": 4, "sequence_parallel": False}, "--sequence-parallel",
     ["sequence_parallel = false (experts"]),
    ({"model": "mixtral-8x7b", "pp": 4, "dp": 2, "ep": 2, "schedule": "1f1b",
      "recipe": {"overlap_moe_expert_parallel_comm": True}},
     "", ["recipe.overlap_moe_expert_parallel_comm (it is set without several stages"]),
    ({"model": "mixtral-8x7b", "dp": 2, "recipe": {"overlap_moe_expert_parallel_comm": True}}, "",
     ["recipe.overlap_moe_expert_parallel_comm (it is set without ranks that divide"]),
]  # fmt: skip
TORCHTITAN: list[tuple[dict[str, Any], str, list[str]]] = [
    ({}, "training.mixed_precision_param = 'bfloat16'", []),
    ({}, 'config.model_spec = model_registry("8B"); config.activation_checkpoint = None; compile.enable = True', []),
    ({"precision": "fp32"}, "training.mixed_precision_param = 'float32'", []),
    ({"precision": "fp64"}, "", ["train.precision = fp64 (the configuration's own stands)"]),
    ({"tp": 2, "overlap": "sync", "sequence_parallel": True},
     "parallelism.tensor_parallel_degree = 2; parallelism.enable_sequence_parallel = True", []),
    ({"tp": 2, "overlap": "domino", "slices": {"batch": 2}}, "compile.enable_async_tensor_parallel = True",
     ["slices 2x1 of Domino", "overlap.tp = domino (async tensor parallelism"]),
    ({"dp": 4, "overlap": {"tp": "sync", "shard": "none"}}, "", ["overlap.shard = none (FSDP2 always prefetches)"]),
    ({"dp": 4, "shard": "fsdp"},
     "parallelism.data_parallel_shard_degree = 4; parallelism.fsdp_reshard_after_forward = 'always'", []),
    ({"dp": 4, "shard": "zero2"}, "parallelism.fsdp_reshard_after_forward = 'never'", [STAYS]),
    ({"dp": 4, "shard": {"params": 1, "grads": 1, "optim": 2}},
     "parallelism.data_parallel_replicate_degree = 2; parallelism.data_parallel_shard_degree = 2",
     ["shard factors that differ (params 1, grads 1, optim 2; all three become 2)", STAYS]),
    ({"dp": 4, "shard": {"params": 4, "grads": 4, "optim": 4, "secondary": 2}}, "", ["shard.secondary = 2"]),
    ({"dp": 2, "cp": 2, "cp_comm_type": "ring", "shard": "fsdp"},
     "parallelism.data_parallel_shard_degree = 2; parallelism.context_parallel_degree = 2", []),
    ({"dp": 2, "cp": 4, "cp_comm_type": "ulysses"}, "parallelism.data_parallel_replicate_degree = 2",
     ["shard.optim = 1 (FSDP2 also shards over the 4 context-parallel ranks: 4)",
      "cp_comm_type with 4 ranks that exchange heads (all are one ring)"]),
    ({"pp": 2, "schedule": "interleaved", "virtual_stages": 4},
     "parallelism.pipeline_parallel_schedule = 'Interleaved1F1B'; "
     "first = [0, 4, 8, 12, 16, 20, 24, 28, 32]  # layer of every stage, and the end; " + PARTS, []),
    ({"pp": 2, "schedule": "zb-v"}, "parallelism.pipeline_parallel_schedule = 'ZBVZeroBubble'", []),
    ({"pp": 3, "schedule": "eager-1f1b"}, "parallelism.pipeline_parallel_schedule = '1F1B'; "
     "parallelism.pipeline_parallel_microbatch_size = 2; training.local_batch_size = 64",
     ["schedule = eager-1f1b (1f1b stands for it)"]),
    ({"pp": 3, "schedule": "1f1b", "stage_layers": [10, 11, 11]},
     "first = [0, 10, 21, 32]  # layer of every stage, and the end", []),
    ({"recompute": "full"}, "config.activation_checkpoint = FullAC.Config()", []),
    ({"recompute": {"kind": "full", "layers": 3}}, "", ["recompute of 3 layers of every stage (all are recomputed)"]),
    ({"recompute": "selective"}, "config.activation_checkpoint = SelectiveAC.Config()",
     ["recompute = selective as ours"]),
    ({"cuda_graphs": True}, "training.disable_cuda_graphs = False", []),
    ({"pp": 2, "schedule": "1f1b", "cuda_graphs": True}, "training.disable_cuda_graphs = True",
     ["cuda_graphs (it has none with pipelines)"]),
    # models
    ({"model": "llama3-405b"}, 'config.model_spec = model_registry("405B")', []),
    ({"model": {"preset": "llama3-8b", "num_layers": 8}}, 'config.model_spec = model_registry("FLAVOR")',
     ["the model's shapes (name a module"]),
    *(({"model": {"preset": "llama3-8b", key: value}}, "", [f"model.{key} = {value} (theirs has {theirs})"])
      for key, value, theirs in (("tied_embeddings", True, False), ("rope_theta", 1e4, 5e5), ("window", 512, 0),
                                 ("norm_eps", 1e-6, 1e-5), ("parallel_block", True, False),
                                 ("attention_dropout", 0.1, 0.0), ("vocab", 32000, 128256))),
]  # fmt: skip
DEEPSPEED: list[tuple[dict[str, Any], str, list[str]]] = [
    ({"dp": 8, "shard": "ddp"}, '"stage": 0; "overlap_comm": true; "gradient_accumulation_steps": 4', []),
    ({"dp": 8, "shard": "zero2", "overlap": "sync"}, '"stage": 2; "overlap_comm": false', []),
    ({"dp": 8, "overlap": {"tp": "sync", "shard": "forward"}}, "", ["overlap.shard = forward (overlap_comm"]),
    ({"dp": 8, "shard": {"params": 8, "grads": 8, "optim": 8, "secondary": 4}}, '"zero_hpz_partition_size": 4', []),
    ({"dp": 8, "shard": {"params": 1, "grads": 1, "optim": 4}}, '"stage": 1', ["shard.optim = 4 (ZeRO shards over"]),
    ({"dp": 4, "pp": 2, "schedule": "1f1b", "recompute": "full"},
     '"activation_checkpoint_interval": 1; "cpu_checkpointing": false', []),
    ({"dp": 8, "recompute": "full"}, '"cpu_checkpointing": false', ["recompute = full (the model's code"]),
    ({"dp": 8, "recompute": {"kind": "selective", "layers": 3}}, "",
     ["recompute of 3 layers", "recompute = selective (nothing"]),
    ({"dp": 4, "pp": 2, "schedule": "zb-h1"}, '"stages": 2', ["schedule = zb-h1 (1f1b stands"]),
    ({"dp": 4, "pp": 2, "schedule": "1f1b", "stage_layers": [15, 17]}, "", ["stage_layers = [15, 17] ("]),
    ({"dp": 4, "pp": 2, "schedule": "1f1b", "shard": "zero3"}, '"stage": 1', ["ZeRO-3 within a pipeline"]),
    ({"dp": 2, "tp": 2, "pp": 2, "schedule": "1f1b"}, "", ["strategy.tp = 2 within a pipeline"]),
    ({"dp": 2, "pp": 2, "cp": 2, "cp_comm_type": "ulysses", "schedule": "1f1b"}, "",
     ["cp = 2 within a pipeline, which it refuses"]),
    ({"dp": 4, "tp": 2, "sequence_parallel": True, "overlap": "domino"},
     '"autotp_size": 2; "tp_overlap_comm": true', ["strategy.sequence_parallel = true (every rank has",
                                                   "overlap.tp = domino (tp_overlap_comm"]),
    ({"dp": 4, "cp": 2, "cp_comm_type": "ring"}, '"sequence_parallel_size": 2', ["cp_comm_type with rings of 2"]),
    ({"dp": 8, "compile": True}, "", ["strategy.compile = true (the program calls"]),
    ({"optimizer": "muon"}, '"type": "Muon"; "momentum": 0.95', []),
    ({"optimizer": "sgd"}, '"type": "SGD"; "nesterov": false; "zero_allow_untested_optimizer": true', []),
    ({"dp": 8, "precision": "fp64"}, "", ["train.precision = fp64 (fp32 stands for it)"]),
    ({"dp": 8, "shard": "fsdp", "recipe": {"optimizer_offload_fraction": 0.5}}, '"ratio": 0.5', []),
    ({"dp": 8, "shard": "zero1", "recipe": {"optimizer_offload_fraction": 0.5}}, '"device": "cpu"',
     ["recipe.optimizer_offload_fraction = 0.5 (before stage 3"]),
    ({"dp": 8, "recipe": {"optimizer_offload_fraction": 1.0}}, '"device": "cpu"',
     ["recipe.optimizer_offload_fraction without sharding"]),
    ({"dp": 8, "recipe": {"exp_avg_dtype": "bf16"}}, "", ["recipe.exp_avg_dtype = bf16 (moments are in fp32)"]),
]  # fmt: skip
ROWS = [
    (name, *row)
    for name, rows in {"megatron": MEGATRON, "torchtitan": TORCHTITAN, "deepspeed": DEEPSPEED}.items() for row in rows
]  # fmt: skip


@pytest.mark.parametrize(("framework", "changed", "says", "cannot"), ROWS)
def test_a_strategy_is_said_or_named(framework: str, changed: dict[str, Any], says: str, cannot: list[str]) -> None:
    """cannot: how all sentences begin on what is unsaid, but for those of every job."""
    found = emit(job(**changed), framework)
    lines = {line.strip().rstrip("\\, ") for line in found.text.splitlines()}
    if framework == "torchtitan":
        compile(found.text, "plait_plan.py", "exec")
    wanted = says.split("; ") if framework != "megatron" else [f"--{one}".strip() for one in says.split("--")[1:]]
    assert [one for one in wanted if one and one.strip() not in lines] == []
    unsaid = [one for one in found.unsupported if not one.startswith(ALWAYS)]
    assert len(unsaid) == len(cannot), unsaid
    assert [one for one in cannot if not any(line.startswith(one) for line in unsaid)] == [], unsaid


@pytest.mark.parametrize(("ranks", "nodes"), [(4, 1), (32, 4)])
def test_lines_that_start_it(ranks: int, nodes: int) -> None:
    torchrun, slurm = emit(job(dp=ranks), "megatron", 8).launch
    assert f"--nproc-per-node={min(8, ranks)}" in torchrun and "pretrain_gpt.py" in torchrun
    assert ("--nnodes=" in torchrun) == (nodes > 1) and f"srun --nodes={nodes} --ntasks-per-node=1" in slurm
    assert emit(job(), "megatron").launch == []


def test_another_framework_is_answered_with_the_known_ones() -> None:
    with pytest.raises(JobError, match=r"did you mean 'megatron'.*torchtitan or megatron or deepspeed"):
        emit(job(), "megatronn")
    assert set(WRITERS) == {"torchtitan", "megatron", "deepspeed"}


def test_what_no_framework_is_told_is_refused() -> None:
    check_emits(job("mixtral-8x7b", dp=8), "megatron")
    for one, framework in ((job("mixtral-8x7b", dp=8), "torchtitan"), (job(precision="nvfp4"), "megatron")):
        with pytest.raises(JobError, match="not be emitted yet"):
            check_emits(one, framework)


def test_a_layout_groups_equal_stages() -> None:
    assert layout([1, 1]) == "Et*1|t*1L"
    assert layout([2, 2, 2, 1, 1, 3]) == "Et*2|(t*2|)*2(t*1|)*2t*3L"
