"""Reader of torchtitan's configurations as a job: keys that follow from several settings. The rows
of ``keys`` set all other keys.

Missing settings have torchtitan's defaults: 8 sequences of 2,048 tokens per replica, FSDP2 over all
ranks, 1F1B, micro-batches of one sequence in a pipeline, selective recomputation. A module that
extends another module's configuration, and a log, may lack settings that have other values; batch
and sequence length are then asked for.

Stages (distributed/pipeline_parallel.py): embedding and head count as a number of layers each
(``pipeline_parallel_first_stage_less_layers`` and ``last``, 1 by default). The number of stages is
all layers divided by ``pipeline_parallel_layers_per_stage``; without that setting one per rank, or
two for schedules with several stages per rank. Stages are as equal as possible, the first ones
larger.

| file of torchtitan 0.3.0 | fact |
|---|---|
| config/configs.py | ``DEFAULTS``; TOML had the same (v0.1.0 to v0.2.2, from June 2025), no CUDA graphs |
| distributed/activation_checkpoint.py | selective mode is per op; in TOML every second layer |
| trainer.py | training.dtype is the dtype of parameters, and so of shards of gradients and of moments |
| components/loss.py | the loss in parts, in pipelines, too |
| components/quantization/float8.py | a scale per row; in TOML a scale per tensor |
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from plait.core.base.codec.json_text import is_list
from plait.core.model.precision import MASTER, QUANTISED, Precision
from plait.core.parallel.strategy import slice_sizes
from plait.formats.base.frameworks import MEMORY_OPTIONS
from plait.formats.base.literals import Called, LiteralSettings
from plait.formats.base.parsed_config import ParsedConfig
from plait.formats.base.rows import Settings
from plait.formats.torchtitan.keys import (
    BATCHES,
    DETAILS,
    EACH,
    EXPERTS,
    FLAVORS,
    KEYS,
    LESS,
    LLAMA_ROPE,
    PARTS,
    SCHEDULES,
)

DEFAULTS: Mapping[str, Any] = {
    "training.local_batch_size": 8, "training.seq_len": 2048, "training.disable_cuda_graphs": False,
    "compile.enable": False,
}  # fmt: skip
"""torchtitan 0.3.0's defaults of keys that the file itself lacks."""
NOTED_DEFAULTS = ("training.local_batch_size", "training.seq_len")
OLD = {"training.batch_size": "training.local_batch_size", "training.compile": "compile.enable"}
"""Present keys by the keys of the first half of 2025."""
EAGER = (
    "Predicted as compiled, as those of torchtitan's published runs are that predictions are fitted to: without "
    "compile.enable its steps took 16% longer, in 7 to 8% more memory (Llama 3.1 8B, 8 and 128 H100)."
)
"""A note on runs without compilation. Source: torchtitan's
benchmarks/llama3_h100_202412_torchtitan.md (b5bcd76), tables 1 and 3: 6,667 and 6,514 tokens per
second and GPU in 77.0 and 62.0 GiB; without torch.compile 5,762 and 5,605 in 82.4 and 67.0 GiB. The
rows that the planner's constants are fitted to (docs/adr/0013) are compiled."""


def parse_torchtitan(file: str, settings: LiteralSettings, *, python: bool, whole: bool = True) -> ParsedConfig:
    """Return the job of a configuration. python: the file is a Python module, not TOML. whole:
    missing settings have torchtitan's defaults, unless a function of another module may set them.
    Raises JobError for contradictions and wrong values."""
    told = ParsedConfig("torchtitan", file)
    whole = whole and not settings.foreign_calls and not any("(**" in one for one in settings.computed)
    given = dict(_literal(told, settings))
    taken = _defaults(settings, given) if whole else {}
    values = KEYS.read(told, ((key, value, f"{key} = {value}") for key, value in (given | taken).items()))
    told.unknown += [f"{one} (computed)" for one in settings.computed if "module_fqns_per_model_part" not in one]
    _model(told, settings, python=python)
    _degrees(told, values)
    _pipeline(told, values, settings.computed)
    _recomputed(told, values, option="op" if python else "2")
    _types(told, values, settings)
    _loss(told, settings.values, values, python=python, whole=whole)
    _quantised(told, settings, python=python)
    _run(told, settings.values, values, python=python)
    for key, text in {**{key: f"{one}()" for key, one in settings.values.items() if _computed(key, one)},
                      **settings.open}.items():  # fmt: skip
        if key in KEYS.keys:
            told.require(KEYS.keys[key], f"{key} = {text}")
    if some := [f"{key} = {taken[key]:,}" for key in NOTED_DEFAULTS if key in taken]:
        told.notes.append(f"The file leaves out what torchtitan has a default for: {', '.join(some)}.")
    told.notes += settings.foreign_notes
    return told


def _literal(parsed: ParsedConfig, settings: LiteralSettings) -> Iterator[tuple[str, Any]]:
    """Yield the settings by their present keys. Numbers and switches that a call computes are
    listed as unknown; settings of None keep their default."""
    for key, value in settings.values.items():
        if _computed(key, value):
            parsed.unknown.append(f"{key} = {value}(...) (computed)")
        elif key == EXPERTS and value != 1:
            parsed.required["strategy.ep"] = f"{key} = {value}: experts are not read of this file"
        elif (key == "optimizer.implementation" and value == BF16_MOMENTS) or (
            isinstance(value, Called) and key not in {*KEYS.named, *KEYS.unmodelled}
        ):
            continue
        elif OLD.get(key) not in settings.values and not (value is None and key.startswith("parallelism.")):
            yield OLD.get(key, key), value


def _defaults(settings: LiteralSettings, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults of keys that the file neither sets nor computes, in tables that no
    function returns."""
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


def _types(parsed: ParsedConfig, values: Settings, settings: LiteralSettings) -> None:
    """Set the dtypes of gradient reduction, parameters, gradients and moments. FSDP2 keeps a
    pipeline's unsharded gradients, and gradients before their reduction, in the dtype of the
    reduction."""
    if values["training.mixed_precision_reduce"] == "bfloat16":
        parsed.options["gradient_bytes"] = 2.0
    own = values["training.dtype"]
    moment = 2.0 if settings.values.get("optimizer.implementation") == BF16_MOMENTS else own
    if moment < MASTER:
        moved = (2 * (own + 2 * moment) + own) / (7 * MASTER)  # states are read and written, gradients read
        parsed.options |= {"parameter_bytes": own, "optimizer_bytes": 2 * moment, "states_moved": moved}
    if own < MASTER and parsed.get("strategy.pp") == 1:
        if parsed.get("strategy.cp") == values["parallelism.data_parallel_shard_degree"] == 1:
            parsed.options["main_gradient_bytes"] = own
        else:
            parsed.notes.append("Shards of gradients, which are kept in bf16, are counted as the fp32 of their sums.")


BF16_MOMENTS = "fused_opt_states_bf16"


def _loss(parsed: ParsedConfig, literals: Mapping[str, Any], values: Settings, *, python: bool, whole: bool) -> None:
    """Set the number of parts (chunks of the sequence) in which the loss is computed; torchtitan of
    2025 had one. If a complete Python module names no loss, a note says that the default one, in
    parts, is predicted."""
    loss = str(literals.get("config.loss", literals.get("loss", "")))
    if not python or (loss and "Chunked" not in loss):
        parsed.options["loss_chunks"] = 1
    elif "loss.num_chunks" in values:
        parsed.options["loss_chunks"] = values["loss.num_chunks"]
    elif whole and not loss:
        parsed.notes.append("The file names no loss: that of torchtitan's own configurations, in parts, is predicted.")


def _run(parsed: ParsedConfig, literals: Mapping[str, Any], values: Settings, *, python: bool) -> None:
    """Note settings of the run that the prediction lacks: uncompiled kernels, CUDA graphs, other
    optimizers."""
    compiled = values["compile.enable"]
    if compiled is False or (compiled and "model" not in literals.get("compile.components", ["model"])):
        parsed.notes.append(EAGER)
    key = "training.disable_cuda_graphs"
    if python and values[key] is False:
        if parsed.get("strategy.pp") > 1:
            parsed.notes.append(f"torchtitan 0.3.0 refuses CUDA graphs with a pipeline: {key} = True is predicted.")
        else:
            parsed.unmodelled.append(f"{key} = False (steps are captured)")
    for key in ("optimizer.name", "param_groups.optimizer_name"):
        if (name := literals.get(key, "AdamW")) not in ("Adam", "AdamW"):
            parsed.unmodelled.append(f"{key} = {name} (AdamW is predicted)")


def _quantised(parsed: ParsedConfig, settings: LiteralSettings, *, python: bool) -> None:
    """Set the precision of quantised products from converters: names in TOML, calls in a module.
    Converters of experts alone do not affect other models."""
    called = [name for name, _ in settings.calls if "converter" in name.lower()]
    named = [one for one in (*map(str, settings.values.get("model.converters", ())), *called)
             if "grouped" not in one.lower()]  # fmt: skip
    kinds = [kind for kind in CONVERTED if any(_converts(name, kind) for name in named)]
    strange = [one for one in named if not any(_converts(one, kind) for kind in CONVERTED)]
    parsed.unmodelled += [f"the converter {one}" for one in strange]
    if not kinds:
        return
    precision = CONVERTED[kinds[0]]
    parsed.set("train.precision", precision)
    gathered = [value for key, value in settings.values.items() if key.endswith("enable_fsdp_float8_all_gather")]
    if QUANTISED[precision].primary:
        parsed.set("recipe.fp8_param_gather", gathered[-1:] == [True])
    recipes = [value for key, value in settings.values.items() if key.endswith(".recipe_name")]
    recipes = recipes or ["rowwise" if python else "tensorwise"]
    parsed.unmodelled += [f"recipe_name = {one} (counted as one scale a tensor)" for one in recipes
                        if "float8" in kinds and one != "tensorwise"]  # fmt: skip


CONVERTED: Mapping[str, Precision] = {"float8": "fp8", "mx": "mxfp8", "nvfp4": "nvfp4"}
"""Precisions by the prefix of a converter's name."""


def _converts(name: str, kind: str) -> bool:
    """True if a converter of a module (``Float8LinearConverter.Config``) or of TOML
    (``quantize.linear.mx``) is of a kind."""
    parts = name.lower().split(".")
    return parts[-1] == kind or any("converter" in part and part.startswith(kind) for part in parts)


def _model(parsed: ParsedConfig, settings: LiteralSettings, *, python: bool) -> None:
    """Set the shapes of the file's flavor, from the writer's table."""
    values, flavor = settings.values, str(settings.values.get("model.flavor", ""))
    family = str(values.get("model.name", ""))
    if python:
        flavor = next((first for name, first in reversed(settings.calls) if name == "model_registry"), "")
        named = [part for module in settings.modules for part in module.split(".") if part in DETAILS]
        named += [part for part in Path(parsed.file).parts if part in DETAILS]
        family = next(iter(named), "")
    shape = next((shape for shape, one in FLAVORS.items() if (one.family, one.name) == (family, flavor)), None)
    if shape is None:
        parsed.unknown.append(f"the model {family or '(of no known family)'} {flavor}".strip())
        return
    layers, hidden, heads, kv, ffn, normed = shape
    parsed.set("model", {
        "family": "llama", "num_layers": layers, "hidden": hidden, "num_heads": heads, "num_kv_heads": kv,
        "ffn_hidden": ffn, "qk_norm": normed, **DETAILS[family],
    })  # fmt: skip
    parsed.values["model"].pop("parallel_block")
    if family == "llama3":
        parsed.set("model.rope_scaling", LLAMA_ROPE)
    if length := parsed.get("data.sequence_length"):
        parsed.set("model.max_sequence", length)


def _degrees(parsed: ParsedConfig, values: Settings) -> None:
    """Set the sharding factors, each replica's batch and the overlap; rows of the table have set
    the degrees. Raises JobError for asynchronous tensor parallelism without compilation."""
    tp, pp, cp = (parsed.get(f"strategy.{name}") for name in ("tp", "pp", "cp"))
    copies, shard = (values[f"parallelism.data_parallel_{name}_degree"] for name in ("replicate", "shard"))
    if cp > 1:
        parsed.set("strategy.cp_comm_type", "ring")
    _micro_batches(parsed, values, pp)
    if shard > 0:
        parsed.set("cluster.ranks", copies * shard * tp * pp * cp)
        parsed.set("strategy.dp", copies * shard)
        parsed.replicas_reason = f"data_parallel_replicate_degree x data_parallel_shard_degree = {copies} x {shard}"
    after = values["parallelism.fsdp_reshard_after_forward"]
    if pp > 1 and after == "always":  # torch's pipelines keep parameters gathered after the backward
        parsed.unmodelled.append("parallelism.fsdp_reshard_after_forward = always")
    parsed.set("strategy.shard", "zero1" if pp > 1 else "zero2" if after == "never" else "fsdp")
    parsed.shard_copies = copies
    beside = any(values[f"{table}.enable_async_tensor_parallel"] is True for table in ("parallelism", "compile"))
    # A ring overlaps its gathers with attention at any tp (torch's context parallelism, _AllGatherRotater).
    ring = tp == 1 and cp > 1
    parsed.set("strategy.overlap", {"tp": "async" if beside or ring else "sync", "shard": "both"})
    if beside and values["compile.enable"] is not True:
        raise parsed.refuse("parallelism.enable_async_tensor_parallel", "needs compile.enable = true", "Set both")


def _micro_batches(parsed: ParsedConfig, values: Settings, pp: int) -> None:
    """Set the replica's batch and its micro-batches; without a pipeline the batch is one
    micro-batch."""
    local = values[BATCHES[0]]
    micro = values[BATCHES[1]] if pp > 1 else local
    if micro and local % micro:
        raise parsed.refuse(BATCHES[1], f"{micro} does not divide a local batch of {local}", "Use a divisor of it")
    parsed.local_batch = local
    if micro:
        parsed.set("train.micro_batch_size", micro)
    elif "training.global_batch_size" in values:
        parsed.rounds = 0


ROUNDS = {"1f1b": (1, 1), "gpipe": (1, 1), "zb-v": (2, 2), "interleaved": (2, 1000)}
"""The fewest and the most stages per rank, by schedule."""


def file_stages(values: Mapping[str, Any]) -> list[int]:
    """Return the layers of every stage if the file has them, as modules or, in Plait's own files,
    as first layers; else an empty list."""
    first, parts = values.get("first"), values.get(PARTS)
    if is_list(parts):
        return [sum(str(name).startswith("layers.") for name in part) for part in parts]
    if is_list(first) and all(isinstance(layer, int) for layer in first):
        return [end - start for start, end in pairwise(first)]
    return []


def _pipeline(parsed: ParsedConfig, values: Settings, computed: Sequence[str]) -> None:
    """Set schedule and stages. computed: settings that follow from no literal. Raises JobError for
    combinations that torchtitan refuses."""
    given = str(values["parallelism.pipeline_parallel_schedule"])
    name = given.lower()  # torch ignores case in class names
    pp, known = parsed.get("strategy.pp"), {theirs.lower(): ours for ours, theirs in SCHEDULES.items()}
    if pp == 1:
        parsed.set("strategy.schedule", "1f1b")
        return
    if name not in known:
        parsed.unmodelled.append(f"parallelism.pipeline_parallel_schedule = {given} (1F1B is predicted)")
        parsed.exempt = (*parsed.exempt, "strategy.schedule")
    schedule = known.get(name, "1f1b")
    parsed.set("strategy.schedule", schedule)
    sizes = file_stages(values)
    stages = len(sizes) or _counted(parsed, values, ROUNDS.get(known.get(name, "interleaved"), (1, 1000)))
    if stages % pp:
        raise parsed.refuse("parallelism.pipeline_parallel_degree", f"{pp} does not divide {stages} stages",
                          "Use a divisor of them")  # fmt: skip
    if schedule == "interleaved":
        parsed.set("strategy.virtual_stages", stages // pp)
    if not sizes and name in known:
        _shared_out(parsed, values, stages)
    if not sizes:
        parsed.unknown += [f"{one} (computed)" for one in computed if "module_fqns_per_model_part" in one]


def _counted(parsed: ParsedConfig, values: Settings, rounds: tuple[int, int]) -> int:
    """Return the number of stages by the layers per stage. rounds: the schedule's fewest and most
    stages per rank. Raises JobError for numbers that torchtitan refuses."""
    pp, layers = parsed.get("strategy.pp", 1), parsed.get("model.num_layers", 0)
    each, ends = values[EACH], sum(values[key] for key in LESS)
    if not each or not layers:
        return rounds[0] * pp
    stages = -(-(layers + ends) // each)
    what = f"{layers} layers, and {ends} that embedding and head count as, are {stages} stages of {each}"
    if stages % pp:
        raise parsed.refuse(EACH, f"{what}, no multiple of {pp} ranks", "Use a number that gives one")
    if not rounds[0] <= stages // pp <= rounds[1]:
        wanted = f"{rounds[0]}{' or more' if rounds[1] > rounds[0] else ''}"
        problem = f"{what}, {stages // pp} a rank where the schedule has {wanted}"
        raise parsed.refuse(EACH, problem, f"Use a {'smaller' if stages // pp < rounds[0] else 'larger'} number")
    return stages


def _shared_out(parsed: ParsedConfig, values: Settings, stages: int) -> None:
    """Set the stages' layers as torchtitan cuts them, if embedding and head count as one layer each
    or not at all. Otherwise, and for the time of a step, note that equal stages are predicted."""
    layers, less = parsed.get("model.num_layers", 0), [values[key] for key in LESS]
    if not layers:
        return
    counted = layers + sum(less)
    if max(less) > counted // stages:
        key, fewest = LESS[less.index(max(less))], counted // stages
        raise parsed.refuse(key, f"{max(less)} is more than the {fewest} layers of a stage", "Use at most so many")
    sizes = list(slice_sizes(counted, stages))
    sizes[0], sizes[-1] = sizes[0] - less[0], sizes[-1] - less[1]
    own = [stage.num_layers for stage in MEMORY_OPTIONS["torchtitan"].stages(layers, stages)]
    if less == [1, 1]:
        parsed.options["ends_count"] = True
    elif less == [0, 0]:
        parsed.options["ends_fill"] = False
    if sizes != own:
        what = "The time of a step is" if less in ([1, 1], [0, 0]) else "Time and memory are"
        parsed.notes.append(f"Stages have {min(sizes)} to {max(sizes)} layers. {what} predicted with equal ones.")


POLICIES = {"FullAC": "full", "SelectiveAC": "selective", "MemoryBudgetAC": "memory_budget"}


def _recomputed(parsed: ParsedConfig, values: Settings, option: str) -> None:
    """Set the recomputation. Selective recomputation keeps attention and every second product, so
    half of a layer's work is repeated. option: the default kind of selective recomputation."""
    kind = values.get("config.activation_checkpoint", values.get("activation_checkpoint", ""))
    mode = values["activation_checkpoint.mode"]
    if mode is None:
        mode = "none" if kind is None else POLICIES.get(str(kind).partition(".")[0], "selective")
    if mode not in ("none", *POLICIES.values()):
        raise parsed.refuse("activation_checkpoint.mode", f"'{mode}' is unknown", "Use none, selective or full")
    share = _again(parsed, values, mode, option)
    if share in (0, 1):
        parsed.set("strategy.recompute", "full" if share else "none")
        return
    stages = parsed.get("strategy.pp", 1) * parsed.get("strategy.virtual_stages", 1)
    layers = sum(file_stages(values)) or parsed.get("model.num_layers", 0)
    parsed.set(
        "strategy.recompute", {"kind": "full", "layers": math.ceil(-(-layers // stages) * share)} if layers else "full"
    )
    if not layers:
        parsed.notes.append("The file has no number of layers: all layers are counted as recomputed.")
    parsed.exempt = (*parsed.exempt, "recompute_layers")
    parsed.recomputed_share = share if layers else 0.0


def _again(parsed: ParsedConfig, values: Settings, mode: str, option: str) -> float:
    """Return the share of a stage's layers that stands for a recomputation mode, if each is fully
    recomputed."""
    if mode in ("none", "full"):
        return float(mode == "full")
    option = str(values.get("activation_checkpoint.selective_ac_option", option))
    if mode == "memory_budget":
        key = "activation_checkpoint.memory_budget"
        budget = values[key]
        if not 0 <= budget <= 1:
            raise parsed.refuse(key, f"{budget:g} is no share", "Use 0 to 1")
        parsed.notes.append(
            f"A memory budget of {budget:g} is predicted as full recomputation of so many fewer layers."
        )
        return 1 - budget
    if option.isdigit() and int(option):
        parsed.notes.append(f"Recomputation of every layer whose number {option} divides: layers are alike.")
        return 1 / int(option)
    parsed.notes.append("Selective recomputation is predicted as full recomputation of half of the layers.")
    return 0.5
