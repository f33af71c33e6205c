"""NeMo 1's YAML of a Megatron model (``trainer``, ``exp_manager``, ``model``), as Megatron-LM's flags: it
runs on that core. Names are those of ``megatron_gpt_config.yaml`` and of files beside it, in
``examples/nlp/language_modeling/conf``, whatever the release.

| of the file | what becomes of it |
|---|---|
| what ``SAME_AS`` and the functions below know | a flag of Megatron-LM, or several |
| another key of ``model`` that is a flag's with ``_`` for ``-`` | that flag |
| ``HARMLESS``, and tables on data, schedules, logs, checkpoints | counted, without effect |
| null, ``???``; references such as ``${.encoder_seq_length}`` | not set; followed |
| all others, also where they are false | named, as not understood |
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, cast

from plait.plan.megatron_flags import known_flag
from plait.plan.read_deepspeed import flattened
from plait.plan.read_megatron import megatron_told
from plait.plan.read_megatron_model import TOKENIZERS
from plait.plan.read_shell import Argument
from plait.plan.told import Told

SHAPED = ("num_layers", "hidden_size", "tensor_model_parallel_size", "encoder_seq_length")
"""Keys of ``model`` by which a file is known."""
SAME_AS: Mapping[str, str] = {
    "trainer.devices": "nproc-per-node", "trainer.num_nodes": "nnodes",
    "model.encoder_seq_length": "seq-length", "model.num_moe_experts": "num-experts",
    "model.virtual_pipeline_model_parallel_size": "num-virtual-stages-per-pipeline-rank",
    "model.activations_checkpoint_granularity": "recompute-granularity",
    "model.activations_checkpoint_method": "recompute-method",
    "model.activations_checkpoint_num_layers": "recompute-num-layers", "model.fp8_params": "fp8-param-gather",
    "model.ub_tp_comm_overlap": "tp-comm-overlap",
}  # fmt: skip
"""Keys that are flags of other names."""
_TRAINER = """
accelerator logger enable_checkpointing replace_sampler_ddp use_distributed_sampler max_epochs max_steps max_time
log_every_n_steps val_check_interval check_val_every_n_epoch limit_val_batches limit_test_batches
limit_train_batches num_sanity_val_steps accumulate_grad_batches gradient_clip_val benchmark strategy
enable_model_summary sync_batchnorm detect_anomaly
"""
_MODEL = """
mcore_gpt resume_from_checkpoint pre_process post_process persist_layer_norm native_amp_init_scale
native_amp_growth_interval use_scaled_init_method init_method_std do_layer_norm_weight_decay headscale onnx_safe
apex_transformer_log_level gradient_as_bucket_view grad_allreduce_chunk_size_mb grad_div_ar_fusion
bias_activation_fusion bias_dropout_add_fusion masked_softmax_fusion gradient_accumulation_fusion gc_interval
get_attention_mask_from_fusion batch_p2p_comm batch_p2p_sync sync_batch_comm seed use_cpu_initialization
rotary_percentage transformer_engine transformer_block_type attention_type ffn_dropout fp8_margin fp8_interval
fp8_amax_history_len fp8_amax_compute_algo reduce_amax use_emha fp32_residual_connection fp16_lm_cross_entropy
apply_query_key_layer_scaling cpu_offloading override_vocab_size reset_lr precision dist_ckpt_format
dist_ckpt_load_on_device dist_ckpt_parallel_save hysteresis megatron_amp_O2
"""
HARMLESS = frozenset(
    ["name", "restore_from_path", *(f"trainer.{key}" for key in _TRAINER.split()),
     *(f"model.{key}" for key in _MODEL.split()), "model.optim.lr", "model.optim.weight_decay", "model.optim.betas",
     "model.optim.eps"]
)  # fmt: skip
HARMLESS_TABLES = ("exp_manager.", "model.data.", "model.tokenizer.", "model.nsys_profile.", "model.optim.sched.",
                   "model.exp_manager.", "hydra.")  # fmt: skip
UNSEEN = ("model.fp32_residual_connection", "model.fp16_lm_cross_entropy", "model.cpu_offloading")
"""Of the harmless: not so where they are true."""
SHARDED = ("distributed_fused_adam", "mcore_distributed_optim", "megatron_distributed_optim")
"""Optimizers that share their states out."""
NORMS = {"rmsnorm": "RMSNorm", "layernorm": "LayerNorm", "low_precision_layernorm": "LayerNorm"}
GATED = ("swiglu", "fast-swiglu", "geglu", "fast-geglu", "reglu", "fast-reglu")
_REFERENCE = re.compile(r"\$\{(\.*)([\w.]+)\}")
_PRODUCT = re.compile(r"\$\{multiply:\s*([^,]+?)\s*,\s*([^,]+?)\s*\}")
"""Of two numbers or references, as NeMo's launcher has it."""
LONGEST, DIGITS = 100, 12
"""References that lead to each other, and digits of a factor: a file may have any."""

Flag = tuple[str, Any]


def is_nemo(values: Any) -> bool:
    """Whether a YAML file is one of NeMo 1's."""
    if not isinstance(values, Mapping):
        return False
    model = cast("Mapping[str, Any]", values).get("model")
    return "trainer" in values and isinstance(model, Mapping) and bool(set(SHAPED) & set(cast("Any", model)))


def nemo_told(file: str, values: Mapping[str, Any]) -> Told:
    """The job of such a file. Raises JobError for contradictions and for values that are none."""
    flat = {key: value for key, value in _resolved(dict(flattened(values))).items() if value not in (None, "???")}
    flags, unknown, harmless = dict[str, Any](), list[str](), list[str]()
    for key, value in flat.items():
        section, _, name = key.rpartition(".")
        flag = SAME_AS.get(key, name.replace("_", "-"))
        if key in UNSEEN and value is True:
            unknown.append(f"{key} = true")
        elif key in SPECIAL:
            found = SPECIAL[key](value, flat)
            flags |= dict(found or ())
            unknown += [] if found is not None else [f"{key} = {value}"]
        elif key in HARMLESS or key.startswith(HARMLESS_TABLES):
            harmless.append(key)
        elif key in SAME_AS or (section == "model" and known_flag(flag)):
            flags[flag] = value
        else:
            unknown.append(f"{key} = {str(value).lower() if isinstance(value, bool) else value}")
    if flags.get("recompute-granularity") == "selective":  # which has neither there, whatever is said
        flags = {
            name: value for name, value in flags.items() if name not in ("recompute-method", "recompute-num-layers")
        }
    given = [_argument(flag, value) for flag, value in flags.items() if value is not False]
    told = megatron_told(file, given, rules=())  # it came with an older core
    told.unknown, told.harmless = [*unknown, *told.unknown], [*harmless, *told.harmless]
    told.notes.insert(0, "A file of NeMo 1's is predicted as Megatron-LM, on whose core it runs.")
    if {"bf16", "fp16"} & flags.keys() and flat.get("model.megatron_amp_O2") is not True:
        told.unmodelled.append("model.megatron_amp_O2 = false (weights are counted in half precision, too)")
    return told


def _argument(flag: str, value: Any) -> Argument:
    if value is True:
        return Argument(flag, ())
    some: list[Any] = list(cast("list[Any]", value)) if isinstance(value, list) else [value]
    return Argument(flag, tuple(map(str, some)))


def _resolved(flat: Mapping[str, Any]) -> dict[str, Any]:
    """References followed, each once: ``${a.b}`` from the top, ``${.b}`` in the same table, a dot more for
    each above it; and products of them. Circles, chains of more than ``LONGEST`` and products of more than
    ``DIGITS`` stay as they are."""
    found = dict[str, Any]()

    def at(key: str, depth: int) -> Any:
        if key not in found and depth < LONGEST:
            found[key] = flat[key]
            found[key] = follow(key, flat[key], depth + 1)
        return found.get(key, flat[key])

    def follow(key: str, value: Any, depth: int) -> Any:
        if isinstance(value, str) and (product := _PRODUCT.fullmatch(value)):
            factors = [str(follow(key, one, depth)) for one in product.groups()]
            small = all(one.isdecimal() and len(one) <= DIGITS for one in factors)
            return math.prod(map(int, factors)) if small else value
        match = _REFERENCE.fullmatch(value) if isinstance(value, str) else None
        if not match:
            return value
        above = key.split(".")[: -len(match[1])] if match[1] else []
        there = ".".join([*above, match[2]])
        return at(there, depth) if there in flat else value

    return {key: at(key, 0) for key in flat}


# ---- keys that are no one flag: what they are as flags, None where that is not known ----


def _precision(value: Any, _: Mapping[str, Any]) -> list[Flag] | None:
    kind = str(value).removesuffix("-mixed").removesuffix("-true")
    return {"bf16": [("bf16", True)], "16": [("fp16", True)], "32": list[Flag]()}.get(kind)


def _sequence(value: Any, _: Mapping[str, Any]) -> list[Flag] | None:
    return [("seq-length", value)]


def _activation(value: Any, _: Mapping[str, Any]) -> list[Flag] | None:
    if value in GATED:
        return [("swiglu", True)]
    return {"gelu": list[Flag](), "squared-relu": [("squared-relu", True)], "openai-gelu": [("openai-gelu", True)]}.get(
        str(value)
    )


def _normalization(value: Any, _: Mapping[str, Any]) -> list[Flag] | None:
    if value == "layernorm1p":
        return [("apply-layernorm-1p", True)]
    return [("normalization", NORMS[value])] if value in NORMS else None


def _optimizer(value: Any, flat: Mapping[str, Any]) -> list[Flag] | None:
    """One that shares its states reduces beside the backward unless told not to, and gathers beside the
    forward where told to."""
    if value not in SHARDED:
        return [] if value in ("fused_adam", "adam", "adamw") else [("optimizer", value)]
    found: list[Flag] = [("use-distributed-optimizer", True)]
    reduces = flat.get("model.optim.overlap_grad_sync", True) is True
    found += [("overlap-grad-reduce", True)] if reduces else []
    found += [("overlap-param-gather", True)] if reduces and flat.get("model.optim.overlap_param_sync") is True else []
    return found


def _reduced(value: Any, _: Mapping[str, Any]) -> list[Flag] | None:
    kind = str(value).removeprefix("torch.")
    return {"bf16": [("grad-reduce-in-bf16", True)], "bfloat16": [("grad-reduce-in-bf16", True)], "fp32": list[Flag](),
            "float32": list[Flag]()}.get(kind)  # fmt: skip


def _fp8(value: Any, flat: Mapping[str, Any]) -> list[Flag] | None:
    return [("fp8-format", "e4m3" if flat.get("model.fp8_e4m3") is True else "hybrid")] if value is True else []


def _flash(value: Any, flat: Mapping[str, Any]) -> list[Flag] | None:
    """Without it Transformer Engine chooses, where that is used."""
    engine = flat.get("model.transformer_engine") is True or flat.get("model.mcore_gpt") is True
    return [("use-flash-attn", True)] if value is True else [] if engine else [("attention-backend", "unfused")]


def _overlapped(value: Any, _: Mapping[str, Any]) -> list[Flag] | None:
    return [] if value is True else [("no-overlap-p2p-communication", True)]


def _tokenizer(value: Any, _: Mapping[str, Any]) -> list[Flag] | None:
    return [("tokenizer-type", value)] if value in TOKENIZERS else []


def _with(name: str, off: bool) -> Callable[[Any, Mapping[str, Any]], list[Flag] | None]:
    """A flag that stands where a key is ``off``."""
    return lambda value, _: [(name, True)] if value is off else []


def _grouped(value: Any, _: Mapping[str, Any]) -> list[Flag] | None:
    return [("group-query-attention", True), ("num-query-groups", value)]


def _said_elsewhere(value: Any, _: Mapping[str, Any]) -> list[Flag] | None:
    return []


SPECIAL: Mapping[str, Callable[[Any, Mapping[str, Any]], list[Flag] | None]] = {
    "trainer.precision": _precision, "model.data.seq_length": _sequence, "model.activation": _activation,
    "model.normalization": _normalization, "model.optim.name": _optimizer, "model.optim.grad_sync_dtype": _reduced,
    "model.optim.overlap_grad_sync": _said_elsewhere, "model.optim.overlap_param_sync": _said_elsewhere,
    "model.fp8": _fp8, "model.fp8_e4m3": _said_elsewhere, "model.fp8_hybrid": _said_elsewhere,
    "model.use_flash_attention": _flash, "model.overlap_p2p_comm": _overlapped, "model.tokenizer.type": _tokenizer,
    "model.bias": _with("disable-bias-linear", off=False), "model.num_query_groups": _grouped,
    "model.share_embeddings_and_output_weights": _with("untie-embeddings-and-output-weights", off=False),
}  # fmt: skip
