"""torchtitan's configurations as a job: a module of its ``config_registry`` kind (0.3.0, 2026), and the TOML
that it read until February 2026. Both have the same tables and nearly the same keys.

What a file leaves out is torchtitan's default: 8 sequences of 2,048 tokens a replica, FSDP2 over all ranks,
1F1B, micro-batches of one sequence in a pipeline, selective recomputation. A module that begins with the
configuration of another may leave out what that one says, a log what it did not print: batch and sequence are
asked for then.

| file of torchtitan 0.3.0 | fact |
|---|---|
| config/configs.py | ``DEFAULTS``; its TOML had the same (v0.1.0 to v0.2.2, from June 2025), no CUDA graphs |
| distributed/activation_checkpoint.py | selection op by op; in a TOML of every second layer |
| trainer.py | training.dtype is that of parameters, and so of shards of gradients and of moments |
| components/loss.py | parts of the loss, in pipelines, too |
| components/quantization/float8.py | rows have a scale each; in a TOML tensors have |
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from plait.core.model.precision import MASTER, QUANTISED, Precision
from plait.plan.emit_torchtitan import DETAILS, FLAVORS, TYPES
from plait.plan.megatron_flags import ROPE_ORIGINAL
from plait.plan.read_literals import Called, LiteralSettings
from plait.plan.told import Told, number, whole_number
from plait.plan.torchtitan_stages import PARTS, given_stages, number_of, pipeline

_PASSED = """
job profiling profiler metrics optimizer param_groups lr_scheduler checkpoint comm debug memory_estimation
fault_tolerance validation validator eval inference sampling dataloader data source collator processor tokenizer
renderer encoder hf_transformers global loss loss_fn float8 mx quantize converters
"""
PASSED = frozenset(_PASSED.split())
"""Tables about data, logs, checkpoints and rates, and about what other keys say; keys of all others are
understood or named."""
_UNDERSTOOD = """
training.disable_cuda_graphs training.dtype loss.num_chunks model.converters training.local_batch_size
training.batch_size training.global_batch_size training.seq_len training.mixed_precision_param
training.mixed_precision_reduce
model.name model.flavor parallelism.data_parallel_replicate_degree parallelism.data_parallel_shard_degree
parallelism.tensor_parallel_degree parallelism.enable_async_tensor_parallel
parallelism.enable_sequence_parallel parallelism.pipeline_parallel_degree
parallelism.pipeline_parallel_schedule parallelism.pipeline_parallel_microbatch_size
parallelism.pipeline_parallel_layers_per_stage parallelism.pipeline_parallel_first_stage_less_layers
parallelism.pipeline_parallel_last_stage_less_layers parallelism.context_parallel_degree
parallelism.fsdp_reshard_after_forward activation_checkpoint.mode activation_checkpoint compile.enable
activation_checkpoint.selective_ac_option activation_checkpoint.memory_budget
training.compile compile.enable_async_tensor_parallel parallelism.module_fqns_per_model_part model_spec
config.model_spec config.activation_checkpoint first parts
"""
UNDERSTOOD = frozenset(_UNDERSTOOD.split())
EXPERTS = "parallelism.expert_parallel_degree"
"""Without effect where it is 1."""
KEYS: Mapping[str, str] = {
    "parallelism.tensor_parallel_degree": "strategy.tp", "parallelism.pipeline_parallel_degree": "strategy.pp",
    "parallelism.context_parallel_degree": "strategy.cp", "training.seq_len": "data.sequence_length",
    "parallelism.data_parallel_replicate_degree": "strategy.shard", "training.dtype": "train.precision",
    "parallelism.data_parallel_shard_degree": "cluster.ranks", "training.local_batch_size": "train.micro_batch_size",
    "training.global_batch_size": "train.global_batch_size", "training.mixed_precision_param": "train.precision",
    "parallelism.pipeline_parallel_schedule": "strategy.schedule", "activation_checkpoint.mode": "strategy.recompute",
    "parallelism.enable_sequence_parallel": "strategy.sequence_parallel",
    "parallelism.fsdp_reshard_after_forward": "strategy.shard", "model.flavor": "model.preset",
    EXPERTS: "strategy.ep",
}  # fmt: skip
"""Keys of a job that say what a setting says: asked for where nobody knows it before a run."""
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
"""Known to change time or memory, and not in the prediction: keys, and the defaults that change nothing; None
where every value does."""
_HARMLESS = """
training.steps training.max_norm training.dataset training.dataset_path training.warmup_steps training.gc_freq
training.gc_debug training.seed training.data_parallel_type
model.tokenizer_path model.hf_assets_path model.print_after_conversion model.norm_type training.debug
hf_assets_path dump_folder description training.debug_moe_force_load_balance
config.hf_assets_path config.dump_folder
"""
HARMLESS = frozenset(_HARMLESS.split())
DEFAULTS: Mapping[str, Any] = {
    "training.local_batch_size": 8, "training.seq_len": 2048, "training.disable_cuda_graphs": False,
    "compile.enable": False,
}  # fmt: skip
"""Of keys that a file has to leave out itself, as torchtitan 0.3.0 has them."""
TOLD_DEFAULTS = ("training.local_batch_size", "training.seq_len")
OLD = {"training.batch_size": "training.local_batch_size", "training.compile": "compile.enable"}
"""Keys of the first half of 2025."""
EAGER = (
    "Predicted as compiled, as those of torchtitan's published runs are that predictions are fitted to: without "
    "compile.enable its steps took 16% longer, in 7 to 8% more memory (Llama 3.1 8B, 8 and 128 H100)."
)
"""Its benchmarks/llama3_h100_202412_torchtitan.md (b5bcd76), tables 1 and 3: 6,667 and 6,514 tokens a second
and GPU in 77.0 and 62.0 GiB, without torch.compile 5,762 and 5,605 in 82.4 and 67.0. Its rows that the
planner's constants are fitted to (docs/adr/0013) are compiled."""


def torchtitan_told(file: str, settings: LiteralSettings, *, python: bool, whole: bool = True) -> Told:
    """The job of a configuration. whole: what it does not say is torchtitan's default, unless a function of
    another module may say it. Raises JobError for contradictions and for values that are none."""
    told, values = Told("torchtitan", file), _literal(settings)
    whole = whole and not settings.bases and not any("(**" in one for one in settings.computed)
    taken = _defaults(settings, values) if whole else {}
    values |= taken
    _sorted(told, settings)
    _model(told, settings, python=python)
    _batches(told, values)
    _degrees(told, values)
    told.unknown += pipeline(told, values, settings.computed)
    _recomputed(told, values, option="op" if python else "2")
    _types(told, values)
    _loss(told, values, python=python, whole=whole)
    _quantised(told, settings, python=python)
    _run(told, values, python=python)
    for key, text in {**{key: f"{one}()" for key, one in settings.values.items() if _computed(key, one)},
                      **settings.open}.items():  # fmt: skip
        if key in KEYS:
            told.ask(KEYS[key], f"{key} = {text}")
    if some := [f"{key} = {taken[key]:,}" for key in TOLD_DEFAULTS if key in taken]:
        told.notes.append(f"The file leaves out what torchtitan has a default for: {', '.join(some)}.")
    told.notes += settings.unseen
    return told


def _literal(settings: LiteralSettings) -> dict[str, Any]:
    """Values by their present keys, without numbers and switches that a call gives, and without keys that are
    left to their defaults (None)."""
    given = {key: value for key, value in settings.values.items() if not _computed(key, value)}
    given = {OLD.get(key, key): value for key, value in given.items() if key not in OLD or OLD[key] not in given}
    nothing = [key for key, value in given.items() if value is None and key.startswith("parallelism.")]
    return {key: value for key, value in given.items() if key not in nothing}


def _defaults(settings: LiteralSettings, values: Mapping[str, Any]) -> dict[str, Any]:
    """Of keys that the file neither says nor computes, of tables that no function gives."""
    found, given = dict[str, Any](), {key.rpartition(".")[2]: one for key, one in settings.values.items()}
    for key, default in DEFAULTS.items():
        table = key.partition(".")[0]
        computed = any(re.search(rf"{key}\b|\b{table} = ", one) for one in settings.computed)
        function = str(given.get(table, "")).rpartition(".")[2][:1].islower()
        if not (computed or function or key in values or key in settings.values):
            found[key] = default
    return found


def _computed(key: str, value: Any) -> bool:
    return isinstance(value, Called) and key.partition(".")[0] in ("training", "parallelism", "compile") and "." in key


def _types(told: Told, values: Mapping[str, Any]) -> None:
    """What is computed and summed in, and what parameters, gradients and moments are kept in. FSDP2 has whole
    gradients of a pipeline, and those on their way to shards, in what it sums in."""
    known = {theirs: ours for ours, theirs in TYPES.items()}
    keys = {"training.mixed_precision_param": "bfloat16", "training.dtype": "float32"}
    computes, keeps = (values.get(key, default) for key, default in keys.items())
    for key, kind in zip(keys, (computes, keeps), strict=True):
        if kind not in known:
            raise told.refuse(key, f"'{kind}' is unknown", f"Use {' or '.join(known)}")
    told.set("train.precision", known[computes])
    if values.get("training.mixed_precision_reduce") == "bfloat16":
        told.options["gradient_bytes"] = 2.0
    own = 2.0 if keeps == "bfloat16" else 4.0
    moment = 2.0 if values.get("optimizer.implementation") == BF16_MOMENTS else own
    if moment < MASTER:
        moved = (2 * (own + 2 * moment) + own) / (7 * MASTER)  # read and written; gradients are read
        told.options |= {"parameter_bytes": own, "optimizer_bytes": 2 * moment, "states_moved": moved}
    if own < MASTER and told.get("strategy.pp") == 1:
        if told.get("strategy.cp") == values.get("parallelism.data_parallel_shard_degree") == 1:
            told.options["main_gradient_bytes"] = own
        else:
            told.notes.append("Shards of gradients, which are kept in bf16, are counted as the fp32 of their sums.")


BF16_MOMENTS = "fused_opt_states_bf16"


def _loss(told: Told, values: Mapping[str, Any], *, python: bool, whole: bool) -> None:
    """Parts of the loss, which there were none of in 2025. A module has to name its loss."""
    loss = str(values.get("config.loss", values.get("loss", "")))
    if not python or (loss and "Chunked" not in loss):
        told.options["loss_chunks"] = 1
    elif "loss.num_chunks" in values:
        told.options["loss_chunks"] = whole_number(told, "loss.num_chunks", values["loss.num_chunks"])
    elif whole and not loss:
        told.notes.append("The file names no loss: that of torchtitan's own configurations, in parts, is predicted.")


def _run(told: Told, values: Mapping[str, Any], *, python: bool) -> None:
    """What of how it runs the prediction does not have: kernels that are not compiled, CUDA graphs, other
    optimizers."""
    compiled = values.get("compile.enable")
    if compiled is False or (compiled and "model" not in values.get("compile.components", ["model"])):
        told.notes.append(EAGER)
    key = "training.disable_cuda_graphs"
    if python and values.get(key) is False:
        if told.get("strategy.pp", 1) > 1:
            told.notes.append(f"torchtitan 0.3.0 refuses CUDA graphs with a pipeline: {key} = True is predicted.")
        else:
            told.unmodelled.append(f"{key} = False (steps are captured)")
    for key in ("optimizer.name", "param_groups.optimizer_name"):
        if (name := values.get(key, "AdamW")) not in ("Adam", "AdamW"):
            told.unmodelled.append(f"{key} = {name} (AdamW is predicted)")


def _quantised(told: Told, settings: LiteralSettings, *, python: bool) -> None:
    """Products in 8 bits, by converters: their names in a TOML, calls in a module. Those of experts alone do
    nothing to other models."""
    called = [name for name, _ in settings.calls if "converter" in name.lower()]
    named = [one for one in (*map(str, settings.values.get("model.converters", ())), *called)
             if "grouped" not in one.lower()]  # fmt: skip
    kinds = [kind for kind in CONVERTED if any(_converts(name, kind) for name in named)]
    strange = [one for one in named if not any(_converts(one, kind) for kind in CONVERTED)]
    told.unmodelled += [f"the converter {one}" for one in strange]
    if not kinds:
        return
    precision = CONVERTED[kinds[0]]
    told.set("train.precision", precision)
    gathered = [value for key, value in settings.values.items() if key.endswith("enable_fsdp_float8_all_gather")]
    if QUANTISED[precision].primary:
        told.set("recipe.fp8_param_gather", gathered[-1:] == [True])
    recipes = [value for key, value in settings.values.items() if key.endswith(".recipe_name")]
    recipes = recipes or ["rowwise" if python else "tensorwise"]
    told.unmodelled += [f"recipe_name = {one} (counted as one scale a tensor)" for one in recipes
                        if "float8" in kinds and one != "tensorwise"]  # fmt: skip


CONVERTED: Mapping[str, Precision] = {"float8": "fp8", "mx": "mxfp8", "nvfp4": "nvfp4"}
"""How names of converters begin, and the precision that they are."""


def _converts(name: str, kind: str) -> bool:
    """Whether a converter of a module (``Float8LinearConverter.Config``), or of a TOML
    (``quantize.linear.mx``), is of a kind."""
    parts = name.lower().split(".")
    return parts[-1] == kind or any("converter" in part and part.startswith(kind) for part in parts)


def _sorted(told: Told, settings: LiteralSettings) -> None:
    for key, value in settings.values.items():
        table = key.partition(".")[0]
        if _computed(key, value):
            told.unknown.append(f"{key} = {value}(...) (computed)")
        elif key in UNDERSTOOD or (isinstance(value, Called) and key not in UNMODELLED):
            continue
        elif key in UNMODELLED and value != UNMODELLED[key]:
            if value != BF16_MOMENTS:
                told.unmodelled.append(f"{key} = {value}")
        elif (
            key in HARMLESS or key in UNMODELLED or (table in PASSED and "." in key) or (key == EXPERTS and value == 1)
        ):
            told.harmless.append(key)
        elif key == EXPERTS:
            told.asked[KEYS[key]] = f"{key} = {value}: experts are not read of this file"
        else:
            told.strange(key, f"{key} = {value}", KEYS)
    told.unknown += [f"{one} (computed)" for one in settings.computed if PARTS not in one]


def _model(told: Told, settings: LiteralSettings, *, python: bool) -> None:
    """A flavor's shapes, as the table that emission uses has them."""
    values, flavor = settings.values, str(settings.values.get("model.flavor", ""))
    family = str(values.get("model.name", ""))
    if python:
        flavor = next((first for name, first in reversed(settings.calls) if name == "model_registry"), "")
        named = [part for module in settings.modules for part in module.split(".") if part in DETAILS]
        named += [part for part in Path(told.file).parts if part in DETAILS]
        family = next(iter(named), "")
    shape = next((shape for shape, one in FLAVORS.items() if (one.family, one.name) == (family, flavor)), None)
    if shape is None:
        told.unknown.append(f"the model {family or '(of no known family)'} {flavor}".strip())
        return
    layers, hidden, heads, kv, ffn, normed = shape
    told.set("model", {
        "family": "llama", "num_layers": layers, "hidden": hidden, "num_heads": heads, "num_kv_heads": kv,
        "ffn_hidden": ffn, "qk_norm": normed, **DETAILS[family],
    })  # fmt: skip
    told.values["model"].pop("parallel_block")
    if family == "llama3":
        told.set("model.rope_scaling", {"factor": 8.0, **ROPE_ORIGINAL})


def _batches(told: Told, values: Mapping[str, Any]) -> None:
    if "training.seq_len" in values:
        told.set("data.sequence_length", whole_number(told, "training.seq_len", values["training.seq_len"]))
        told.values.get("model", {})["max_sequence"] = told.get("data.sequence_length")
    if (batch := number_of(told, values, "training.global_batch_size", -1)) > 0:
        told.set("train.global_batch_size", batch)


def _degrees(told: Told, values: Mapping[str, Any]) -> None:
    """Degrees, shards and the batch of a replica."""
    names = ("tensor_parallel", "pipeline_parallel", "context_parallel", "data_parallel_replicate")
    degree = {name: number_of(told, values, f"parallelism.{name}_degree", 1) for name in names}
    for name, value in degree.items():
        if value < 1:
            raise told.refuse(f"parallelism.{name}_degree", f"{value} is not positive", "Use at least 1")
    tp, pp, cp, copies = degree.values()
    shard = number_of(told, values, "parallelism.data_parallel_shard_degree", -1)
    for key, value in (("tp", tp), ("pp", pp), ("cp", cp)):
        told.set(f"strategy.{key}", value)
    if cp > 1:
        told.set("strategy.cp_comm_type", "ring")
    _micro_batches(told, values, pp)
    if shard > 0:
        told.set("cluster.ranks", copies * shard * tp * pp * cp)
        told.set("strategy.dp", copies * shard)
        told.why = f"data_parallel_replicate_degree x data_parallel_shard_degree = {copies} x {shard}"
    after = values.get("parallelism.fsdp_reshard_after_forward")
    stays = pp > 1 or after == "never"
    if pp > 1 and after == "always":  # and not behind a backward: torch's pipelines keep them for the next
        told.unmodelled.append("parallelism.fsdp_reshard_after_forward = always")
    told.set("strategy.shard", "zero1" if pp > 1 else "zero2" if stays else "fsdp")
    told.instances = copies
    beside = any(values.get(f"{table}.enable_async_tensor_parallel") is True for table in ("parallelism", "compile"))
    flat = values.get("parallelism.enable_sequence_parallel", True)
    told.set("strategy.sequence_parallel", flat is not False)
    # A ring gathers behind attention whatever tp does (torch's context parallelism, _AllGatherRotater)
    ring = tp == 1 and cp > 1
    told.set("strategy.overlap", {"tp": "async" if beside or ring else "sync", "shard": "both"})
    if beside and values.get("compile.enable") is not True:
        raise told.refuse("parallelism.enable_async_tensor_parallel", "needs compile.enable = true", "Set both")


def _micro_batches(told: Told, values: Mapping[str, Any], pp: int) -> None:
    """The batch of a replica and how it is cut: one micro-batch without a pipeline, whatever its size."""
    sizes = "training.local_batch_size", "parallelism.pipeline_parallel_microbatch_size"
    local = number_of(told, values, sizes[0], 0)
    micro = number_of(told, values, sizes[1], 1) if pp > 1 else local
    for key, size in zip(sizes, (local, micro), strict=True):
        if size < 1 and key in values:
            raise told.refuse(key, f"{size} is not positive", "Use at least 1")
    if micro and local % micro:
        raise told.refuse(sizes[1], f"{micro} does not divide a local batch of {local}", "Use a divisor of it")
    told.local = local
    if micro:
        told.set("train.micro_batch_size", micro)
    elif "training.global_batch_size" in values:
        told.rounds = 0


POLICIES = {"FullAC": "full", "SelectiveAC": "selective", "MemoryBudgetAC": "memory_budget"}


def _recomputed(told: Told, values: Mapping[str, Any], option: str) -> None:
    """Selective recomputation keeps attention and every second product: half of a layer's work again. option:
    which it is by default."""
    kind = values.get("config.activation_checkpoint", values.get("activation_checkpoint", ""))
    mode = values.get("activation_checkpoint.mode")
    if mode is None:
        mode = "none" if kind is None else POLICIES.get(str(kind).partition(".")[0], "selective")
    if mode not in ("none", *POLICIES.values()):
        raise told.refuse("activation_checkpoint.mode", f"'{mode}' is unknown", "Use none, selective or full")
    share = _again(told, values, mode, option)
    if share in (0, 1):
        told.set("strategy.recompute", "full" if share else "none")
        return
    stages = told.get("strategy.pp", 1) * told.get("strategy.virtual_stages", 1)
    layers = sum(given_stages(values)) or told.get("model.num_layers", 0)
    told.set(
        "strategy.recompute", {"kind": "full", "layers": math.ceil(-(-layers // stages) * share)} if layers else "full"
    )
    if not layers:
        told.notes.append("How many layers there are the file does not say: all are counted as computed again.")
    told.freed = (*told.freed, "recompute_layers")
    told.again = share if layers else 0.0


def _again(told: Told, values: Mapping[str, Any], mode: str, option: str) -> float:
    """The share of layers whose recomputation stands for a mode."""
    if mode in ("none", "full"):
        return float(mode == "full")
    option = str(values.get("activation_checkpoint.selective_ac_option", option))
    if mode == "memory_budget":
        key = "activation_checkpoint.memory_budget"
        budget = number(told, key, values.get(key, 0.5))
        if not 0 <= budget <= 1:
            raise told.refuse(key, f"{budget:g} is no share", "Use 0 to 1")
        told.notes.append(f"A memory budget of {budget:g} is predicted as full recomputation of so many fewer layers.")
        return 1 - budget
    if option.isdigit() and int(option):
        told.notes.append(f"Recomputation of every layer whose number {option} divides: layers are alike.")
        return 1 / int(option)
    told.notes.append("Selective recomputation is predicted as full recomputation of half of the layers.")
    return 0.5
