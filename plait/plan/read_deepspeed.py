"""A DeepSpeed configuration (JSON) as a job. It says how gradients and optimizer states are shared out and
how large batches are; models, sequences and ranks are asked for by their keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from plait.plan.told import Told, number, whole_number

STAGES = {0: "ddp", 1: "zero1", 2: "zero2", 3: "zero3"}
"""``zero_optimization.stage``, and the sharding that it is."""
DEGREES = {"tensor_parallel.autotp_size": "strategy.tp", "pipeline.stages": "strategy.pp",
           "sequence_parallel_size": "strategy.cp"}  # fmt: skip
_UNDERSTOOD = """
zero_optimization.offload_optimizer.device zero_optimization.offload_optimizer.ratio train_batch_size
zero_optimization.cpu_offload torch_autocast.enabled torch_autocast.dtype amp.enabled
train_micro_batch_size_per_gpu gradient_accumulation_steps zero_optimization.stage
zero_optimization.overlap_comm zero_optimization.zero_hpz_partition_size bf16.enabled bfloat16.enabled
fp16.enabled tensor_parallel.autotp_size pipeline.stages data_types.grad_accum_dtype communication_data_type
sequence_parallel_size tensor_parallel.tp_overlap_comm pipeline.activation_checkpoint_interval optimizer.type
activation_checkpointing.partition_activations activation_checkpointing.cpu_checkpointing
"""
UNDERSTOOD = frozenset(_UNDERSTOOD.split())
_UNMODELLED = """
zero_optimization.offload_param zero_optimization.cpu_offload_param activation_checkpointing
zero_optimization.zero_quantized_weights pipeline.partition_method
zero_optimization.zero_quantized_gradients zero_optimization.zero_quantized_nontrainable_weights
zero_optimization.sub_group_size zero_optimization.stage3_prefetch_bucket_size
zero_optimization.stage3_param_persistence_threshold zero_optimization.stage3_max_live_parameters
zero_optimization.stage3_max_reuse_distance zero_optimization.mics_shard_size
zero_optimization.mics_hierarchical_params_gather compile prescale_gradients
zero_optimization.round_robin_gradients zero_optimization.contiguous_gradients
"""
UNMODELLED = frozenset(_UNMODELLED.split())
"""Known to change time or memory, and not in the prediction; a table stands for all of its keys."""
_HARMLESS = """
optimizer scheduler gradient_clipping steps_per_print wall_clock_breakdown dump_state memory_breakdown
tensorboard wandb csv_monitor comet flops_profiler comms_logger zero_allow_untested_optimizer
zero_force_ds_cpu_optimizer checkpoint aio elasticity curriculum_learning data_efficiency seed
gradient_predivide_factor sparse_gradients disable_allgather fp16 bf16 bfloat16
zero_optimization.allgather_partitions zero_optimization.reduce_scatter
zero_optimization.allgather_bucket_size zero_optimization.reduce_bucket_size
zero_optimization.stage3_gather_16bit_weights_on_model_save zero_optimization.load_from_fp32_weights
zero_optimization.offload_optimizer zero_optimization.elastic_checkpoint
zero_optimization.ignore_unused_parameters zero_optimization.cpu_offload_use_pin_memory graph_harvesting
dataloader_drop_last use_node_local_storage amp.opt_level torch_autocast.lower_precision_safe_modules
"""
HARMLESS = frozenset(_HARMLESS.split())
TABLES = ("zero_optimization", "bf16", "bfloat16", "fp16", "tensor_parallel", "pipeline", "torch_autocast", "amp")
"""Keys whose values are tables."""
SWITCHES = ("bf16.enabled", "bfloat16.enabled", "fp16.enabled", "torch_autocast.enabled", "amp.enabled",
            "zero_optimization.cpu_offload", "zero_optimization.overlap_comm")  # fmt: skip
TYPES = {
    "fp32": 4.0,
    "float32": 4.0,
    "float": 4.0,
    "fp16": 2.0,
    "float16": 2.0,
    "half": 2.0,
    "bf16": 2.0,
    "bfloat16": 2.0,
    "bfp16": 2.0,
}
"""Bytes of a gradient."""


def deepspeed_told(file: str, values: Mapping[str, Any]) -> Told:
    """The job of a configuration. Raises JobError for contradictions and for values that are none."""
    told, flat = Told("deepspeed", file), dict(flattened(values))
    for key, value in flat.items():
        starts = {key, key.rpartition(".")[0], key.partition(".")[0], ".".join(key.split(".")[:2])}
        if key in UNDERSTOOD or value in ("auto", None):
            if value == "auto":
                told.unknown.append(f"{key} = auto (which Hugging Face's Trainer would fill in)")
        elif starts & UNMODELLED:
            told.unmodelled.append(f"{key} = {value}")
        elif starts & HARMLESS:
            told.harmless.append(key)
        else:
            told.strange(key, f"{key} = {value}", KEYS)
    for key in TABLES:
        if key in flat:
            raise told.refuse(key, f"{flat[key]} is no table", 'Write {"enabled": true}, or the table\'s keys')
    for key in SWITCHES:
        if flat.get(key, False) not in (True, False, "auto", None):
            raise told.refuse(key, f"'{flat[key]}' is neither true nor false", "Write true or false, without quotes")
    _batches(told, flat)
    for key, ours in ASKED.items():
        if flat.get(key) == "auto":
            told.ask(ours, f"{key} = auto")
    left = [key for key in HALVES if flat.get(key) == "auto"]
    flat = {key: value for key, value in flat.items() if value not in ("auto", None)}
    _sharding(told, flat)
    _recomputed(told, flat)
    _optimizer(told, flat)
    _precision(told, flat, left)
    for key, degree in (
        ("tensor_parallel.autotp_size", "tp"),
        ("pipeline.stages", "pp"),
        ("sequence_parallel_size", "cp"),
    ):
        if key in flat:
            told.set(f"strategy.{degree}", whole_number(told, key, flat[key]))
    told.set("strategy.schedule", "1f1b")
    return told


ASKED = {"zero_optimization.stage": "strategy.shard", **DEGREES}
"""Settings that nobody fills in for auto, and the keys of a job that say them."""
KEYS = {
    **ASKED, "train_batch_size": "train.global_batch_size", "bf16.enabled": "train.precision",
    "train_micro_batch_size_per_gpu": "train.micro_batch_size",
    "gradient_accumulation_steps": "train.micro_batch_size", "fp16.enabled": "train.precision",
}  # fmt: skip
"""Settings that change degrees, sizes or precision, and the keys of a job that say them."""
HALVES = ("bf16.enabled", "bfloat16.enabled", "fp16.enabled")
AUTOCAST = ("torch_autocast.enabled", "amp.enabled")


def _precision(told: Told, flat: Mapping[str, Any], left: Sequence[str]) -> None:
    """In what it computes. left: settings that its Trainer would fill in."""
    half = [key for key in HALVES if flat.get(key) is True]
    cast_too = [key for key in AUTOCAST if flat.get(key) is True]
    if "fp16.enabled" in half and len(half) > 1:
        raise told.refuse("fp16.enabled", "true stands beside bf16", "Keep one of the two")
    if left and not half and not cast_too:
        told.ask("train.precision", f"{left[0]} = auto")
    told.set("train.precision", "bf16-mixed" if half or cast_too else "fp32")
    if "fp16.enabled" in half:
        told.notes.append("fp16 is counted as bf16: as fast and as large.")
    if cast_too and not half:
        told.notes.append(f"{cast_too[0]}: products are counted in bf16, and so are parameters, which stay in fp32.")


def flattened(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Values of tables within tables, by ``table.key``."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from flattened(cast("Mapping[str, Any]", value), f"{before}{key}.")
        else:
            yield f"{before}{key}", value


def _batches(told: Told, flat: Mapping[str, Any]) -> None:
    """train_batch_size = micro-batch x accumulation x replicas; two of them say how many replicas there are,
    and a job says the rest."""
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    said = {key: whole_number(told, key, flat[key]) for key in keys if flat.get(key) not in ("auto", None)}
    if texts := [key for key in keys if isinstance(flat.get(key), str) and key in said]:
        raise told.refuse(texts[0], f"'{flat[texts[0]]}' is a text", "Write the number without quotes")
    for key, value in said.items():
        if value < 1:
            raise told.refuse(key, f"{value} is not positive", "Use at least 1")
    batch, micro, times = (said.get(key) for key in keys)
    if batch:
        told.set("train.global_batch_size", batch)
    if micro:
        told.set("train.micro_batch_size", micro)
    if batch and micro and times:
        if batch % (micro * times):
            problem = f"{batch} is not {micro} x {times} times whole replicas"
            raise told.refuse("train_batch_size", problem, f"Use a multiple of {micro * times}")
        told.set("strategy.dp", batch // (micro * times))
        told.why = f"{keys[0]} = {batch} is {micro} x {times} sequences on each of {batch // (micro * times)} replicas"
    elif micro and not batch and flat.get(keys[2]) != "auto" and (times or flat.get(keys[0]) != "auto"):
        told.local = micro * (times or 1)
    elif not micro:
        told.rounds = times or 1
    if batch and not micro:
        told.notes.append(
            f"{keys[1]} is missing: what {keys[0]} leaves a replica is {told.rounds} micro-batch"
            f"{'es' if told.rounds > 1 else ''}, as there."
        )
    if micro is None and flat.get(keys[1]) == "auto":
        told.rounds = 0


def _sharding(told: Told, flat: Mapping[str, Any]) -> None:
    stage = whole_number(told, "zero_optimization.stage", flat.get("zero_optimization.stage", 0))
    if stage not in STAGES:
        raise told.refuse("zero_optimization.stage", f"{stage} is unknown", f"Use {', '.join(map(str, STAGES))}")
    told.set("strategy.shard", STAGES[stage])
    overlap = flat.get("zero_optimization.overlap_comm", stage == 3)
    beside = flat.get("tensor_parallel.tp_overlap_comm", False)
    told.set("strategy.overlap", {"tp": "async" if beside else "sync", "shard": "both" if overlap else "none"})
    if (near := flat.get("zero_optimization.zero_hpz_partition_size", 1)) not in (0, 1):
        told.secondary = whole_number(told, "zero_optimization.zero_hpz_partition_size", near)
    where = flat.get("zero_optimization.offload_optimizer.device", "none")
    if where not in ("none", "cpu"):
        told.unmodelled.append(f"zero_optimization.offload_optimizer.device = {where} (counted as cpu)")
    if where != "none" or flat.get("zero_optimization.cpu_offload") is True:
        ratio = flat.get("zero_optimization.offload_optimizer.ratio", 1.0) if stage == 3 else 1.0
        told.set("recipe.optimizer_offload_fraction", number(told, "zero_optimization.offload_optimizer.ratio", ratio))
    keys = {"communication_data_type": "gradient_bytes", "data_types.grad_accum_dtype": "main_gradient_bytes"}
    for key, option in keys.items():
        if key in flat:
            if flat[key] not in TYPES:
                raise told.refuse(key, f"'{flat[key]}' is unknown", f"Use {', '.join(TYPES)}")
            told.options[option] = TYPES[flat[key]]


def _recomputed(told: Told, flat: Mapping[str, Any]) -> None:
    """Which layers are computed again a pipeline says; of other models their code alone knows."""
    key = "pipeline.activation_checkpoint_interval"
    if key in flat:
        every = whole_number(told, key, flat[key])
        told.set("strategy.recompute", "full" if every else "none")
        if every > 1:
            told.notes.append(f"{key} = {every} is predicted as 1: each layer's input is kept.")
    else:
        told.notes.append(
            "Which layers are computed again the model's code says: none are predicted (strategy.recompute=full "
            "predicts all)."
        )
    for name in ("partition_activations", "cpu_checkpointing"):
        if flat.get(f"activation_checkpointing.{name}") is True:
            told.unmodelled.append(f"activation_checkpointing.{name} = True")


def _optimizer(told: Told, flat: Mapping[str, Any]) -> None:
    kind = str(flat.get("optimizer.type", "AdamW"))
    known = {"adam": "adamw", "adamw": "adamw", "muon": "muon", "sgd": "sgd"}.get(kind.lower())
    if known is None:
        told.unmodelled.append(f"optimizer.type = {kind} (AdamW is predicted)")
    told.set("train.optimizer", known or "adamw")
