"""Reader and writer of DeepSpeed's configuration (JSON): batches, ZeRO, precision and the
optimizer.

Model, sequences, pipeline and recomputation are in the user's program, not in the configuration.
The reader asks for their keys, and the writer lists what the configuration cannot express.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from plait.core.parallel.strategy import SLICED
from plait.formats.base.parsed_config import ParsedConfig, number, whole_number
from plait.formats.base.rows import ANY, Emitted, Row, Settings, Table, WriterContext, boolean, count, part

TARGET = "DeepSpeed 0.19.8"
STAGES = {0: "ddp", 1: "zero1", 2: "zero2", 3: "zero3"}
TYPES = {
    **dict.fromkeys(("fp32", "float32", "float"), 4.0),
    **dict.fromkeys(("fp16", "float16", "half", "bf16", "bfloat16", "bfp16"), 2.0),
}
"""Bytes per gradient element by DeepSpeed's dtype name."""
OPTIMIZERS = {"adam": "adamw", "adamw": "adamw", "muon": "muon", "sgd": "sgd"}
BATCHES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
HALVES = ("bf16.enabled", "bfloat16.enabled", "fp16.enabled")
AUTOCAST = ("torch_autocast.enabled", "amp.enabled")


def size(parsed: ParsedConfig, key: str, value: Any) -> int:
    """Return a number of sequences, such as a batch size. Raises JobError for text and for numbers
    below 1."""
    if isinstance(value, str):
        raise parsed.refuse(key, f"'{value}' is a text", "Write the number without quotes")
    return count(parsed, key, value)


ROWS = (
    Row("train_batch_size", "train.global_batch_size", size),
    Row("train_micro_batch_size_per_gpu", "train.micro_batch_size", size),
    part("gradient_accumulation_steps", "train.micro_batch_size", size),
    Row("tensor_parallel.autotp_size", "strategy.tp", count, omitted=1),
    Row("pipeline.stages", "strategy.pp", count, omitted=1),
    Row("sequence_parallel_size", "strategy.cp", count, omitted=1),
    part("zero_optimization.stage", "strategy.shard", STAGES, "ddp"),
    part("zero_optimization.overlap_comm", kind=boolean),
    part("zero_optimization.zero_hpz_partition_size", "", whole_number, 1),
    part("zero_optimization.cpu_offload", kind=boolean, default=False),
    part("zero_optimization.offload_optimizer.device", default="none"),
    part("zero_optimization.offload_optimizer.ratio", "", number, 1.0),
    part("communication_data_type", "", TYPES),
    part("data_types.grad_accum_dtype", "", TYPES),
    part("tensor_parallel.tp_overlap_comm", default=False),
    part("pipeline.activation_checkpoint_interval", "", whole_number),
    part("activation_checkpointing.partition_activations"),
    part("activation_checkpointing.cpu_checkpointing"),
    part("optimizer.type", default="AdamW"),
    *(part(key, "train.precision", boolean, False) for key in HALVES),
    *(part(key, kind=boolean, default=False) for key in AUTOCAST),
    part("torch_autocast.dtype"),
    Row("", "train.rampup_batch_size", refusal="its batch has one size"),
    Row("", "strategy.cuda_graphs", default=False, refusal="nothing is captured"),
    Row("", "strategy.compile", default=False, refusal="the program calls engine.compile()"),
    Row("", "train.optimizer_dtype", default="master", omitted="fp32", refusal="moments are in fp32"),
    Row("", "recipe.exp_avg_dtype", default="fp32", refusal="moments are in fp32"),
    Row("", "recipe.exp_avg_sq_dtype", default="fp32", refusal="moments are in fp32"),
    Row("", "recipe.activation_offload_fraction", default=0.0, refusal="nothing is moved"),
    Row("", "recipe.vocabulary_parallel_stages", default=False, refusal="embedding and head stay at the ends"),
    Row("", "strategy.sequence_parallel", default=False, refusal="every rank has the whole residual stream"),
)
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


def _with_tables(names: str) -> dict[str, Any]:
    """Return the names, with a pattern ``NAME.*`` for all keys of a table of each name."""
    return dict.fromkeys([*names.split(), *(f"{name}.*" for name in names.split())], ANY)


KEYS = Table(rows=ROWS, unmodelled=_with_tables(_UNMODELLED), harmless=_with_tables(_HARMLESS))
FIRST = {key.partition(".")[0] for key in KEYS.named}
"""Top-level keys that identify a DeepSpeed configuration."""
TABLES = ("zero_optimization", "bf16", "bfloat16", "fp16", "tensor_parallel", "pipeline", "torch_autocast", "amp")
"""Keys whose values are tables."""
REQUIRED = ("zero_optimization.stage", "tensor_parallel.autotp_size", "pipeline.stages", "sequence_parallel_size")
"""Settings for which no program replaces ``auto``."""


def parse_deepspeed(file: str, values: Mapping[str, Any]) -> ParsedConfig:
    """Return the job of a configuration. Raises JobError for contradictions and wrong values."""
    told, flat = ParsedConfig("deepspeed", file), dict(flattened(values))
    for key in TABLES:
        if key in flat:
            raise told.refuse(key, f"{flat[key]} is no table", 'Write {"enabled": true}, or the table\'s keys')
    open_ = [key for key, value in flat.items() if value == "auto"]
    told.unknown += [f"{key} = auto (which Hugging Face's Trainer would fill in)" for key in open_]
    for key in REQUIRED:
        if key in open_:
            told.require(KEYS.keys[key], f"{key} = auto")
    said = ((key, value, f"{key} = {value}") for key, value in flat.items() if value not in ("auto", None))
    settings = KEYS.read(told, said)
    _batches(told, settings, open_)
    _sharding(told, settings)
    _recomputed(told, settings)
    kind = settings["optimizer.type"]
    if str(kind).lower() not in OPTIMIZERS:
        told.unmodelled.append(f"optimizer.type = {kind} (AdamW is predicted)")
    told.set("train.optimizer", OPTIMIZERS.get(str(kind).lower(), "adamw"))
    _precision(told, settings, open_)
    told.set("strategy.schedule", "1f1b")
    return told


def flattened(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested tables by ``table.key``."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from flattened(cast("Mapping[str, Any]", value), f"{before}{key}.")
        else:
            yield f"{before}{key}", value


def _batches(parsed: ParsedConfig, settings: Settings, open_: Sequence[str]) -> None:
    """Set batch, micro-batch and replicas: train_batch_size = micro-batch x accumulation x
    replicas. With all three settings the number of replicas follows; else the job supplies the
    missing value. open_: settings with the value ``auto``."""
    batch, micro, times = map(settings.get, BATCHES)
    if batch and micro and times:
        if batch % (micro * times):
            problem = f"{batch} is not {micro} x {times} times whole replicas"
            raise parsed.refuse(BATCHES[0], problem, f"Use a multiple of {micro * times}")
        replicas = batch // (micro * times)
        parsed.set("strategy.dp", replicas)
        parsed.replicas_reason = f"{BATCHES[0]} = {batch} is {micro} x {times} sequences on each of {replicas} replicas"
    elif micro and not batch and BATCHES[2] not in open_ and (times or BATCHES[0] not in open_):
        parsed.local_batch = micro * (times or 1)
    elif not micro:
        parsed.rounds = 0 if BATCHES[1] in open_ else times or 1
    if batch and not micro:
        rounds = times or 1
        parsed.notes.append(
            f"{BATCHES[1]} is missing: what {BATCHES[0]} leaves a replica is {rounds} micro-batch"
            f"{'es' if rounds > 1 else ''}, as there."
        )


def _sharding(parsed: ParsedConfig, settings: Settings) -> None:
    zero3 = settings["zero_optimization.stage"] == "zero3"
    parsed.set("strategy.shard", settings["zero_optimization.stage"])
    overlap = settings.get("zero_optimization.overlap_comm", zero3)
    beside = settings["tensor_parallel.tp_overlap_comm"]
    parsed.set("strategy.overlap", {"tp": "async" if beside else "sync", "shard": "both" if overlap else "none"})
    near = settings["zero_optimization.zero_hpz_partition_size"]
    parsed.secondary_ranks = near if near > 1 else 0
    where = settings["zero_optimization.offload_optimizer.device"]
    if where not in ("none", "cpu"):
        parsed.unmodelled.append(f"zero_optimization.offload_optimizer.device = {where} (counted as cpu)")
    if where != "none" or settings["zero_optimization.cpu_offload"]:
        ratio = settings["zero_optimization.offload_optimizer.ratio"]
        parsed.set("recipe.optimizer_offload_fraction", ratio if zero3 else 1.0)
    options = {"communication_data_type": "gradient_bytes", "data_types.grad_accum_dtype": "main_gradient_bytes"}
    parsed.options |= {option: settings[key] for key, option in options.items() if key in settings}


def _recomputed(parsed: ParsedConfig, settings: Settings) -> None:
    """Set the recomputation of a pipeline; without a pipeline only the model's code has it."""
    key = "pipeline.activation_checkpoint_interval"
    every = settings[key]
    if every is None:
        parsed.notes.append(
            "The model's code sets recomputation: none is predicted (strategy.recompute=full predicts it for all "
            "layers)."
        )
    else:
        parsed.set("strategy.recompute", "full" if every else "none")
        if every > 1:
            parsed.notes.append(f"{key} = {every} is predicted as 1: each layer's input is kept.")
    for name in ("partition_activations", "cpu_checkpointing"):
        if settings[f"activation_checkpointing.{name}"] is True:
            parsed.unmodelled.append(f"activation_checkpointing.{name} = True")


def _precision(parsed: ParsedConfig, settings: Settings, open_: Sequence[str]) -> None:
    """Set the precision. open_: settings with the value ``auto``, which Hugging Face's Trainer
    fills in."""
    half, cast_too = ([key for key in keys if settings[key]] for keys in (HALVES, AUTOCAST))
    left = [key for key in HALVES if key in open_]
    if "fp16.enabled" in half and len(half) > 1:
        raise parsed.refuse("fp16.enabled", "true conflicts with bf16", "Keep one of the two")
    if left and not half and not cast_too:
        parsed.require("train.precision", f"{left[0]} = auto")
    parsed.set("train.precision", "bf16-mixed" if half or cast_too else "fp32")
    if "fp16.enabled" in half:
        parsed.notes.append("fp16 is counted as bf16: as fast and as large.")
    if cast_too and not half:
        parsed.notes.append(f"{cast_too[0]}: products are counted in bf16, and so are parameters, which stay in fp32.")


def write_deepspeed(words: WriterContext) -> Emitted:
    """Return the configuration as JSON text."""
    words.note_unsupported(
        "the model, its sequences and ranks (the program's, which the prediction takes from the job)"
    )
    job = words.job
    settings = KEYS.write(words) | {BATCHES[2]: job.num_micro_batches, "gradient_clipping": job.train.clip_grad}
    precision = job.train.precision
    if precision not in ("fp32", "bf16-mixed"):
        words.note_unsupported(f"train.precision = {precision} (fp32 stands for it)")
    if precision == "bf16-mixed":
        settings["bf16.enabled"] = True
    for write in (_write_optimizer, _write_zero, _write_degrees, _write_recomputed):
        settings |= write(words)
    return Emitted(json.dumps(_nested(settings), indent=2) + "\n", words.unsupported, TARGET)


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested tables of values named ``table.key``."""
    found = dict[str, Any]()
    for key, value in flat.items():
        *tables, last = key.split(".")
        table = found
        for name in tables:
            table = table.setdefault(name, {})
        table[last] = value
    return found


def _write_optimizer(words: WriterContext) -> dict[str, Any]:
    train = words.job.train
    names = {"adamw": "AdamW", "muon": "Muon", "sgd": "SGD"}
    own: dict[str, dict[str, Any]] = {
        "adamw": {"betas": list(train.adam_betas), "eps": train.adam_eps},
        "muon": {"momentum": train.muon.momentum},
        "sgd": {"momentum": train.sgd.momentum, "nesterov": train.sgd.nesterov},
    }
    params = {"lr": train.learning_rate, "weight_decay": train.weight_decay} | own[train.optimizer]
    untested = {"zero_allow_untested_optimizer": True} if train.optimizer == "sgd" else {}
    return {"optimizer": {"type": names[train.optimizer], "params": params}} | untested


def _write_zero(words: WriterContext) -> dict[str, Any]:
    """Return the ZeRO settings whose stage shards as the strategy does."""
    sharding, replicas = words.sharding, words.replicas
    factors = {"params": sharding.params, "grads": sharding.grads, "optim": sharding.optim}
    for name, factor in factors.items():
        if factor not in (1, replicas):
            words.note_unsupported(f"shard.{name} = {factor} (ZeRO shards over all {replicas} dp x cp ranks)")
    overlap = words.strategy.shard_overlap
    if overlap in ("forward", "backward") and replicas > 1:
        words.note_unsupported(f"overlap.shard = {overlap} (overlap_comm is about both)")
    stage = sum(factor > 1 for factor in factors.values())
    if stage > 1 and words.section.pp > 1:
        words.note_unsupported(f"ZeRO-{stage} within a pipeline (ZeRO-1 stands for it)")
        stage = 1
    found: dict[str, Any] = {"stage": stage, "overlap_comm": overlap != "none"}
    if sharding.secondary and stage == 3:
        found["zero_hpz_partition_size"] = sharding.secondary
    if fraction := words.job.recipe.optimizer_offload_fraction:
        found["offload_optimizer"] = {"device": "cpu"} | ({"ratio": fraction} if stage == 3 else {})
        key = "recipe.optimizer_offload_fraction"
        if stage < 3 and fraction < 1:
            words.note_unsupported(f"{key} = {fraction} (before stage 3 all or nothing is on the host)")
        if not stage:
            words.note_unsupported(f"{key} without sharding (it is ZeRO that offloads)")
    return {"zero_optimization": found}


def _write_degrees(words: WriterContext) -> dict[str, Any]:
    """Return the settings of tensor parallelism and pipeline beyond their degrees, and note the
    inexpressible."""
    strategy, pp, found = words.strategy, words.section.pp, dict[str, Any]()
    if words.tp > 1:
        found["tensor_parallel.tp_overlap_comm"] = strategy.overlap != "sync"
        if strategy.overlap in (*SLICED, "no-communication"):
            words.note_unsupported(f"overlap.tp = {strategy.overlap} (tp_overlap_comm stands for it)")
        if pp > 1:
            why = "the program's mpu; autotp_size is what is read back"
            words.note_unsupported(f"strategy.tp = {words.tp} within a pipeline ({why})")
    if strategy.cp > 1 and pp > 1:
        words.note_unsupported(f"cp = {strategy.cp} within a pipeline, which it refuses: say pp = 1")
    if strategy.ring > 1:
        words.note_unsupported(f"cp_comm_type with rings of {strategy.ring} (all exchange heads)")
    if pp > 1:
        words.schedule("deepspeed", ("1f1b",), {})
        cut = words.section.stage_layers
        if cut:
            words.note_unsupported(f"stage_layers = {list(cut)} (PipelineModule's partition_method says it)")
        found["pipeline.activation_checkpoint_interval"] = int(strategy.recompute in ("full", "layer"))
    return found


def _write_recomputed(words: WriterContext) -> dict[str, Any]:
    """Return how recomputed layers keep their inputs. A pipeline's key, else the model's code,
    turns recomputation on."""
    strategy = words.strategy
    if strategy.recompute == "none":
        return {}
    if strategy.recompute_layers is not None:
        words.note_unsupported(f"recompute of {strategy.recompute_layers} layers of every stage (all are recomputed)")
    if strategy.recompute == "selective":
        words.note_unsupported("recompute = selective (nothing is recomputed)")
        return {}
    if words.section.pp == 1:
        words.note_unsupported(
            "recompute = full (the model's code asks for it, as by gradient_checkpointing_enable(); the prediction "
            "counts on it)"
        )
    return {"activation_checkpointing": {"partition_activations": False, "cpu_checkpointing": False}}
