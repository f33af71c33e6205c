"""Emitted settings, loaded by the frameworks themselves. They are installed first, a gigabyte in
all: ``-m contract``."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from plait.core.job.spec import Job
from plait.plan.emit import emit
from plait.plan.search.request import job_at, search_request
from plait.plan.search.space import enumerate_space
from tests.plan.search.test_request import H100
from tests.plan.search.test_request import job as open_job
from tests.plan.test_as_emitted import drawn as for_framework
from tests.support.frameworks import answer, installed

pytestmark = [pytest.mark.contract, pytest.mark.system]

TITAN = """
import json, sys, types
from dataclasses import asdict
from torchtitan.distributed.parallel_dims import ParallelDims
from torchtitan.distributed.pipeline_parallel import _get_pipeline_metadata
found = []
for text, ranks in json.load(sys.stdin):
    made = {}
    exec(text.replace("MODULE", "llama3").replace("CONFIGURATION", "llama3_8b").replace("FLAVOR", "8B"), made)
    config = made["planned"]()
    config.__post_init__()
    config.parallelism.__post_init__()
    config.compile.__post_init__()
    dims = ParallelDims.from_config(config.parallelism, ranks)
    parts = config.parallelism.module_fqns_per_model_part
    if dims.pp > 1:
        _get_pipeline_metadata(dims, config.parallelism, config.model_spec.model)
    batch = config.training.local_batch_size * dims.dp_replicate * dims.dp_shard
    assert config.training.global_batch_size % batch == 0
    model = config.model_spec.model
    found.append({"parts": parts, "layers": len(model.layers), "dim": model.dim})
print(json.dumps(found))
"""
MEGATRON = """
import json, sys
import torch
from megatron.core import parallel_state
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
found = []
for values in json.load(sys.stdin):
    pp, rounds = values["pipeline_model_parallel_size"], values["virtual_pipeline_model_parallel_size"]
    if layout := values.get("pipeline_model_parallel_layout"):
        rounds = PipelineParallelLayerLayout.get_num_stages_from_str(layout) // pp
        values["virtual_pipeline_model_parallel_size"] = rounds = rounds if rounds > 1 else None
    parallel_state.set_pipeline_model_parallel_world_size(pp)
    parallel_state.set_virtual_pipeline_model_parallel_world_size(rounds)
    config = TransformerConfig(**values, pipeline_dtype=torch.bfloat16)
    layers = []
    for stage in range(rounds or 1):
        for rank in range(pp):
            parallel_state.set_pipeline_model_parallel_rank(rank)
            layers.append(get_num_layers_to_build(config, vp_stage=stage if rounds else None, pp_rank=rank))
    found.append(layers)
print(json.dumps(found))
"""
DEEPSPEED = """
import json, sys
from deepspeed.runtime import config
found = []
for text, ranks in json.load(sys.stdin):
    config.dist.get_rank, config.dist.get_world_size = lambda: 0, lambda ranks=ranks: ranks
    told = config.DeepSpeedConfig(json.loads(text))
    found.append([told.zero_config.stage, told.train_batch_size, told.gradient_accumulation_steps,
                  told.zero_config.overlap_comm, told.pipeline["activation_checkpoint_interval"]])
print(json.dumps(found))
"""
NUMBERS = {
    "num-layers": "num_layers", "hidden-size": "hidden_size", "ffn-hidden-size": "ffn_hidden_size",
    "num-attention-heads": "num_attention_heads", "num-query-groups": "num_query_groups", "kv-channels": "kv_channels",
    "tensor-model-parallel-size": "tensor_model_parallel_size", "context-parallel-size": "context_parallel_size",
    "pipeline-model-parallel-size": "pipeline_model_parallel_size",
    "recompute-num-layers": "recompute_num_layers",
}  # fmt: skip
WORDS = {
    "recompute-granularity": "recompute_granularity", "recompute-method": "recompute_method",
    "normalization": "normalization", "cp-comm-type": "cp_comm_type",
    "pipeline-model-parallel-layout": "pipeline_model_parallel_layout",
}  # fmt: skip
SWITCHES = {"sequence-parallel": "sequence_parallel", "swiglu": "gated_linear_unit", "qk-layernorm": "qk_layernorm",
            "bf16": "bf16"}  # fmt: skip


def named(model: str, batch: int, **strategy: Any) -> Job:
    train = {"global_batch_size": batch, "micro_batch_size": batch // 16, "precision": "bf16-mixed"}
    values = {"model": {"preset": model}, "data": {"sequence_length": 4096}, "train": train, "strategy": strategy}
    return Job.from_dict(values)


NAMED = [
    named("llama3-405b", 64, tp=8, pp=8, dp=2, schedule="interleaved", virtual_stages=15, recompute="full"),
    named("llama3-70b", 64, tp=8, pp=6, dp=2, schedule="1f1b", recompute="selective", sequence_parallel=True),
    named("llama3-70b", 64, tp=2, pp=4, dp=2, schedule="zb-v", shard="fsdp"),
    named("llama3-8b", 64, tp=2, pp=3, cp=2, dp=2, schedule="1f1b", cp_comm_type="ring", stage_layers=[11, 12, 9]),
    named("llama3-8b", 64, dp=4, shard="fsdp", cuda_graphs=False, compile=True),
    named("qwen3-8b", 64, dp=4, shard="zero1", cp=2, cp_comm_type="ring", recompute="full"),
]  # fmt: skip


def drawn(count: int) -> list[Job]:
    """Plans of a space, evenly over it."""
    one = open_job()
    space = enumerate_space(search_request(one, one.model_spec(vocab=257), H100), most=20_000)
    return [job_at(one, space.row(at)) for at in range(0, len(space), len(space) // count)][:count]


def given(one: Job) -> dict[str, Any]:
    """Megatron-LM's flags as its ``TransformerConfig`` takes them."""
    text = "\n".join(line for line in emit(one, "megatron").text.splitlines() if not line.startswith("#"))
    parts = [part.split(maxsplit=1) for part in " ".join(shlex.split(text.replace("\\\n", " "))).split("--")[1:]]
    flags = {name: rest[0].strip() if rest else "" for name, *rest in parts}
    found: dict[str, Any] = {NUMBERS[name]: int(value) for name, value in flags.items() if name in NUMBERS}
    found |= {WORDS[name]: value for name, value in flags.items() if name in WORDS}
    found |= {SWITCHES[name]: True for name in flags if name in SWITCHES}
    rounds = int(flags.get("num-virtual-stages-per-pipeline-rank", 1))
    return found | {"virtual_pipeline_model_parallel_size": rounds if rounds > 1 else None}


def test_torchtitan_takes_what_is_emitted(tmp_path: Path) -> None:
    jobs = [*NAMED, *(one for one in drawn(40))]
    asked = [(emit(one, "torchtitan").text, one.world_size) for one in jobs]
    found = answer(installed("torchtitan", tmp_path), TITAN, asked)
    for one, got in zip(NAMED, found, strict=False):
        model = one.model_spec(vocab=128256)
        assert (got["layers"], got["dim"]) == (model.num_layers, model.hidden)
        if got["parts"]:
            names = [name for part in got["parts"] for name in part if name.startswith("layers.")]
            assert names == [f"layers.{layer}" for layer in range(model.num_layers)]
            assert len(got["parts"]) % one.strategy.pp == 0


def test_megatron_takes_what_is_emitted(tmp_path: Path) -> None:
    jobs = [*NAMED, *drawn(40)]
    found = answer(installed("megatron", tmp_path), MEGATRON, [given(one) for one in jobs])
    for one, layers in zip(jobs, found, strict=True):
        assert sum(layers) == one.model_spec(vocab=1).num_layers
        sizes = list(one.strategy.stage_layers) or [max(layers), min(layers)]
        assert (layers == sizes) if one.strategy.stage_layers else max(layers) - min(layers) <= 1


def test_deepspeed_takes_what_is_emitted(tmp_path: Path) -> None:
    """By the rules of its own configuration, which refuses keys that it does not know and batches
    that do not divide."""
    jobs = [*NAMED, *drawn(40), *for_framework("deepspeed", 40)]
    asked = [(emit(one, "deepspeed").text, one.degrees[0][0] * one.strategy.cp) for one in jobs]
    found = answer(installed("deepspeed", tmp_path), DEEPSPEED, asked)
    for one, (stage, batch, times, overlap, interval) in zip(jobs, found, strict=True):
        factors = one.sharding(one.degrees[0][0] * one.strategy.cp)
        shared = sum(factor > 1 for factor in (factors.params, factors.grads, factors.optim))
        assert stage == (min(1, shared) if one.strategy.pp > 1 else shared)  # its pipelines refuse more
        assert (batch, times) == (one.train.global_batch_size, one.num_micro_batches)
        assert overlap == (one.base_strategy.shard_overlap != "none")
        assert interval == (one.strategy.pp > 1 and one.base_strategy.recompute == "full")
