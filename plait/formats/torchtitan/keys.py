"""torchtitan's settings as table rows, shared by reader and writer: of Python modules like its
``config_registry`` (0.3.0, 2026), and of the TOML files used until February 2026. Both have the
same tables and nearly the same keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from plait.formats.base.parsed_config import ParsedConfig, number, whole_number
from plait.formats.base.rows import Row, Table, boolean, count, part

SCHEDULES = {"gpipe": "GPipe", "1f1b": "1F1B", "interleaved": "Interleaved1F1B", "zb-v": "ZBVZeroBubble"}
"""Names of torch's schedule classes, which torchtitan takes, by Plait's schedule."""
TYPES = {"bfloat16": "bf16-mixed", "float32": "fp32"}


class Flavor(NamedTuple):
    """A torchtitan model. family, name: its model and flavor. base: a registered configuration with
    the same vocabulary and without fp8."""

    family: str
    base: str
    name: str


FLAVORS = {
    (32, 4096, 32, 8, 14336, False): Flavor("llama3", "llama3_8b", "8B"),
    (80, 8192, 64, 8, 28672, False): Flavor("llama3", "llama3_70b", "70B"),
    (126, 16384, 128, 8, 53248, False): Flavor("llama3", "llama3_70b", "405B"),
    (36, 4096, 32, 8, 12288, True): Flavor("qwen3", "qwen3_14b", "8B"),
    (40, 5120, 40, 8, 17408, True): Flavor("qwen3", "qwen3_14b", "14B"),
    (64, 5120, 64, 8, 25600, True): Flavor("qwen3", "qwen3_32b", "32B"),
}
"""Flavors by layers, hidden size, heads, key/value heads, feed-forward size, and whether queries
and keys are normalised."""
UNKNOWN = Flavor("MODULE", "CONFIGURATION", "FLAVOR")
SAME: dict[str, Any] = {
    "tied_embeddings": False, "parallel_block": False, "window": 0, "qkv_bias": False, "dropout": 0.0,
    "attention_dropout": 0.0,
}  # fmt: skip
DETAILS: dict[str, dict[str, Any]] = {
    "llama3": SAME | {"vocab": 128256, "rope_theta": 500000.0, "norm_eps": 1e-5, "head_size": 128},
    "qwen3": SAME | {"vocab": 151936, "rope_theta": 1000000.0, "norm_eps": 1e-6, "head_size": 128},
}
"""Values of model settings that all flavors of a torchtitan model family share, by family; another
model may differ in them. All llama3 flavors have Llama 3.1's rotary frequencies."""

LLAMA_ROPE = {"factor": 8.0, "low_freq_factor": 1, "high_freq_factor": 4, "original_max_positions": 8192}
"""The scaling of Llama 3.1."""


def batch(parsed: ParsedConfig, key: str, value: Any) -> int | None:
    """Return the sequences per step; None for a value below 1, which means that the replica's batch
    decides."""
    found = whole_number(parsed, key, value)
    return found if found > 0 else None


PARTS = "parallelism.module_fqns_per_model_part"
EACH = "parallelism.pipeline_parallel_layers_per_stage"
LESS = tuple(f"parallelism.pipeline_parallel_{end}_stage_less_layers" for end in ("first", "last"))
BATCHES = ("training.local_batch_size", "parallelism.pipeline_parallel_microbatch_size")
EXPERTS = "parallelism.expert_parallel_degree"
"""The key of the expert-parallel degree; 1 has no effect."""
ROWS = (
    Row("training.global_batch_size", "train.global_batch_size", batch),
    Row("training.seq_len", "data.sequence_length", whole_number),
    Row("training.mixed_precision_param", "train.precision", TYPES, "bf16-mixed", "the configuration's own stands"),
    Row("parallelism.tensor_parallel_degree", "strategy.tp", count, 1),
    Row("parallelism.pipeline_parallel_degree", "strategy.pp", count, 1),
    Row("parallelism.context_parallel_degree", "strategy.cp", count, 1),
    Row("parallelism.enable_sequence_parallel", "strategy.sequence_parallel", boolean, True),
    Row("", "train.rampup_batch_size", refusal="its batch has one size"),
    Row("", "shard.secondary", default=0, refusal="no second copy of parameters is kept"),
    Row("", "model.levels", default=0, refusal="its layers all have one length"),
    part("parallelism.data_parallel_replicate_degree", "strategy.shard", count, 1),
    part("parallelism.data_parallel_shard_degree", "cluster.ranks", whole_number, -1),
    part(BATCHES[0], "train.micro_batch_size", count, 0),
    part(BATCHES[1], "", count, 1),
    part(EACH, "", count),
    *(part(key, "", whole_number, 1) for key in LESS),
    part(PARTS),
    part("parallelism.pipeline_parallel_schedule", "strategy.schedule", default="1F1B"),
    part("parallelism.fsdp_reshard_after_forward", "strategy.shard"),
    part("parallelism.enable_async_tensor_parallel"),
    part("compile.enable_async_tensor_parallel"),
    part("compile.enable"),
    part("activation_checkpoint.mode", "strategy.recompute"),
    part("activation_checkpoint.selective_ac_option"),
    part("activation_checkpoint.memory_budget", "", number, 0.5),
    part("activation_checkpoint"),
    part("config.activation_checkpoint"),
    part("training.dtype", "train.precision", {"bfloat16": 2.0, "float32": 4.0}, 4.0),
    part("training.mixed_precision_reduce"),
    part("training.disable_cuda_graphs"),
    part("loss.num_chunks", "", whole_number),
    part("model.flavor", "model.preset", default=""),
    part("model.name", default=""),
    part("model.converters", default=()),
    part("model_spec"),
    part("config.model_spec"),
    part("first"),
    part("parts"),
)
UNMODELLED: Mapping[str, Any] = {
    "compile.components": ["model", "loss"], "compile.backend": "inductor",
    "parallelism.disable_loss_parallel": False, "parallelism.context_parallel_rotate_method": "allgather",
    "parallelism.context_parallel_load_balancer": "headtail", "parallelism.expert_tensor_parallel_degree": 1,
    "parallelism.fsdp_prefetch": None, "parallelism.enable_fsdp_symm_mem": False,
    "parallelism.spmd_backend": "spmd_types", "parallelism.pipeline_parallel_schedule_csv": "",
    "model_spec.attn_backend": None, "model_spec.moe_comm_backend": None,
    "model_spec.non_blocking_capacity_factor": None, "model_spec.num_mtp_layers": None,
    "model_spec.tp_gemm_backend": "default", "config.model_converters": None,
    "training.enable_cpu_offload": False, "training.deterministic": False, "debug.deterministic": False,
    "debug.detect_anomaly": False, "fault_tolerance.enable": False,
    "optimizer.implementation": "fused", "optimizer.early_step_in_backward": False,
    "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns": ["moe.router.gate"],
    "activation_checkpoint.force_recompute_mm_shapes_by_fqns": ["moe.router.gate"],
    "activation_checkpoint.early_stop": False, "activation_checkpoint.preserve_rng_state": True,
    "activation_checkpoint.determinism_check": "default", "activation_checkpoint.debug": False,
}  # fmt: skip
"""Keys that change time or memory and are not in the prediction, with the default that changes
nothing."""
_HARMLESS = """
training.steps training.max_norm training.dataset training.dataset_path training.warmup_steps training.gc_freq
training.gc_debug training.seed training.data_parallel_type
model.tokenizer_path model.hf_assets_path model.print_after_conversion model.norm_type training.debug
hf_assets_path dump_folder description training.debug_moe_force_load_balance
config.hf_assets_path config.dump_folder
"""
_PASSED = """
job profiling profiler metrics optimizer param_groups lr_scheduler checkpoint comm debug memory_estimation
fault_tolerance validation validator eval inference sampling dataloader data source collator processor tokenizer
renderer encoder hf_transformers global loss loss_fn float8 mx quantize converters
"""
KEYS = Table(
    rows=ROWS, unmodelled=UNMODELLED, whole=True,
    harmless=frozenset([*_HARMLESS.split(), *(f"{name}.*" for name in _PASSED.split())]),
)  # fmt: skip
"""All known settings. All keys of tables about data, logs, checkpoints and learning rates are
harmless."""
