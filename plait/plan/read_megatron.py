"""Megatron-LM's arguments, and a recipe of Megatron-Bridge, as a job (``megatron_flags`` has the table).

What Megatron-LM takes for granted where a flag is missing is taken for granted here: dropout of 0.1, learned
positions, LayerNorm, tied embeddings, a feed-forward size of four times the hidden one (two thirds of it with
SwiGLU), gradients that bf16 accumulates in fp32.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from plait.plan.emit_megatron import layout
from plait.plan.frameworks import KEPT
from plait.plan.megatron_flags import (
    DEGREES,
    EXPERTS,
    FRACTIONS,
    HARMLESS,
    HARMLESS_STARTS,
    LAUNCH,
    MORE_SHAPES,
    ROPE_ORIGINAL,
    SHAPES,
    SHARDED,
    SWITCHES,
    TYPES,
    UNMODELLED,
    UNMODELLED_STARTS,
    VALUES,
)
from plait.plan.read_shell import Argument
from plait.plan.told import Told, number, whole_number

Flags = Mapping[str, Sequence[str]]
FUSED_LOGIT = {"native": 6.0, "te": 4.0}
"""Bytes of a logit where the loss is one kernel: bf16 and fp32 in place (megatron/core/fusions); Transformer
Engine's writes the gradient over it."""
TOKENIZERS = {"GPT2BPETokenizer": 50257, "Llama2Tokenizer": 32000, "Llama3Tokenizer": 128256}
"""Tokens of those that have one vocabulary alone."""
SAME = {"layernorm-epsilon": "norm-epsilon", "use-custom-fsdp": "use-megatron-fsdp", "checkpoint-activations": "",
        "model-parallel-size": "tensor-model-parallel-size"}  # fmt: skip
"""Older names."""
UNSAID = re.compile(r"\$|<.*>")
"""What a script leaves to whoever starts it."""


def megatron_told(file: str, given: Sequence[Argument]) -> Told:
    """The job of a command line. Raises JobError for contradictions and for values that are none."""
    told = Told("megatron", file)
    flags = _sorted(told, given)
    for read in (_degrees, _model, _experts, _tensor, _context, _sharding, _pipeline, _recomputed, _precision, _ranks):
        read(told, flags)
    return told


def _sorted(told: Told, given: Sequence[Argument]) -> dict[str, Sequence[str]]:
    """Flags that are understood, by name; the rest is told apart."""
    understood, found = {*DEGREES, *SHAPES, *MORE_SHAPES, *EXPERTS, *SWITCHES, *VALUES}, dict[str, Sequence[str]]()
    for one in given:
        name = SAME.get(one.name, one.name)
        if name in understood:
            if name not in SWITCHES and not one.values:
                raise told.refuse(f"--{one.name}", "has no value", "Give it one, or leave it out")
            values = () if name in SWITCHES else one.values
            if name in found and tuple(found[name]) != tuple(values):
                told.notes.append(
                    f"--{name} stands twice: its last value, {' '.join(values)}, counts, as it does there."
                )
            found[name] = values
        elif name in LAUNCH or name in HARMLESS or name.startswith(HARMLESS_STARTS) or name.isupper():
            told.harmless.append(f"--{name}")  # in capitals: of the environment
        elif name in UNMODELLED or name.startswith(UNMODELLED_STARTS):
            told.unmodelled.append(str(one))
        else:
            told.unknown.append(str(one))
    return found


def _whole(told: Told, flags: Flags, name: str, default: int | None = None) -> int | None:
    """A flag's number. Raises JobError for one that the script leaves open."""
    if name not in flags:
        return default
    text = flags[name][0]
    if UNSAID.search(text):
        fix = "Set it in the script"
        keys = {**DEGREES, **EXPERTS}
        if name in keys:
            fix += f", or add {keys[name]}=... to the command"
            told.unknown.append(f"--{name} {text}")
            return default
        raise told.refuse(f"--{name}", f"'{text}' is left to whoever starts it", fix)
    return whole_number(told, f"--{name}", text)


def _degrees(told: Told, flags: Flags) -> None:
    for name, key in DEGREES.items():
        if (value := _whole(told, flags, name)) is not None:
            if value < 1:
                raise told.refuse(f"--{name}", f"{value} is not positive", "Use at least 1")
            told.set(key, value)
    for name in {"rampup-batch-size", "step-batch-size-schedule"} & flags.keys():
        told.notes.append(f"--{name}: what is predicted is a step of the full batch.")


def _model(told: Told, flags: Flags) -> None:
    """Shapes. A family has them all or nothing: what lies between is counted as the nearest."""
    if "num-layers" not in flags:
        return
    shapes: dict[str, Any] = {}
    for name, key in {**SHAPES, **MORE_SHAPES}.items():
        if name in flags:
            read: Callable[..., Any] = number if name in FRACTIONS else whole_number
            shapes[key] = read(told, f"--{name}", flags[name][0])
    for name in ("hidden-size", "num-attention-heads"):
        if SHAPES[name] not in shapes:
            raise told.refuse(f"--{name}", "is missing", "Give every shape, or name a model in a job of your own")
    if "group-query-attention" not in flags:
        shapes.pop("num_kv_heads", None)
    gated = "swiglu" in flags
    rotary = _positions(told, flags) == "rope"
    grouped = shapes.get("num_kv_heads", shapes["num_heads"]) != shapes["num_heads"]
    hidden = shapes["hidden"]
    ffn = shapes.get("ffn_hidden") or (int(4 * hidden * 2 / 3) // 64 * 64 if gated else 4 * hidden)
    shapes["ffn_hidden"] = ffn
    shapes["family"] = "llama" if gated or rotary or grouped else "gpt"
    if shapes["family"] == "llama":
        _like_llama(told, flags, shapes, gated=gated)
    else:
        shapes.pop("rope_theta", None)
    shapes.setdefault("dropout", 0.1)
    if shapes.pop("attention_dropout", 0.1):
        told.notes.append("Dropout of attention weights is part of its fused kernel, and counted as free.")
    shapes["tied_embeddings"] = "untie-embeddings-and-output-weights" not in flags
    shapes.setdefault("max_sequence", told.get("data.sequence_length", 0))
    _vocabulary(told, flags, shapes)
    for key, value in shapes.items():
        told.set(f"model.{key}", value)


def _positions(told: Told, flags: Flags) -> str:
    kind = flags.get("position-embedding-type", ("learned_absolute",))[0]
    if "use-rotary-position-embeddings" in flags:
        kind = "rope"
    if kind not in ("rope", "learned_absolute", "none"):
        told.notes.append(f"--position-embedding-type {kind} is counted as rotary.")
        kind = "rope"
    return kind


def _like_llama(told: Told, flags: Flags, shapes: dict[str, Any], *, gated: bool) -> None:
    """What of a model with rotary positions, a gate or shared keys is not as Llama's."""
    if not gated:
        ffn, tp = shapes["ffn_hidden"], told.get("strategy.tp", 1)
        shapes["ffn_hidden"] = -(-2 * ffn // (3 * tp)) * tp
        told.notes.append(
            f"An MLP of {ffn:,} without a gate is counted as a gated one of {shapes['ffn_hidden']:,}: as many "
            "parameters, FLOPs and kept bytes."
        )
    if flags.get("normalization", ("LayerNorm",))[0] != "RMSNorm":
        told.notes.append("LayerNorm is counted as RMSNorm.")
    if "disable-bias-linear" not in flags or "add-qkv-bias" in flags:
        told.notes.append("Biases are not counted.")
    if "use-rope-scaling" in flags:
        factor = number(told, "--rope-scaling-factor", flags.get("rope-scaling-factor", ("8.0",))[0])
        shapes["rope_scaling"] = {"factor": factor, **ROPE_ORIGINAL}
    if "qk-layernorm" in flags:
        shapes["qk_norm"] = True
    if "window-size" in flags:
        _window(told, flags, shapes)


def _window(told: Told, flags: Flags, shapes: dict[str, Any]) -> None:
    shapes["window"] = whole_number(told, "--window-size", flags["window-size"][0].strip("(").partition(",")[0]) + 1
    some = "".join(flags.get("window-attn-skip-freq", ("",)))
    if some.isdigit():
        shapes["full_every"] = int(some)
    elif re.fullmatch(r"\[0(,0)*(,1)*\]", some):
        shapes["full_first"] = some.count("0")
    elif some:
        told.unmodelled.append(f"--window-attn-skip-freq {some}")


def _vocabulary(told: Told, flags: Flags, shapes: dict[str, Any]) -> None:
    """As many as the tokenizer has, padded to a multiple."""
    kind, file = flags.get("tokenizer-type", ("",))[0], flags.get("vocab-file", ("",))[0]
    known = "GPT2BPETokenizer" if "gpt2" in file or (file and not kind) else kind
    if "vocab" not in shapes and known in TOKENIZERS:
        shapes["vocab"] = TOKENIZERS[known]
        told.notes.append(f"The vocabulary is that of {known}, {TOKENIZERS[known]:,} tokens, padded.")
    if "vocab" not in shapes:
        return
    each = _whole(told, flags, "make-vocab-size-divisible-by", 128) or 1
    step = each * told.get("strategy.tp", 1)
    shapes["vocab"] = -(-shapes["vocab"] // step) * step


def _experts(told: Told, flags: Flags) -> None:
    if "num-experts" not in flags:
        return
    for name, key in EXPERTS.items():
        if (value := _whole(told, flags, name)) is not None:
            told.set(key, value)
    if told.get("model.experts.per_token") is None:
        told.set("model.experts.per_token", 2)
    if (shared := _whole(told, flags, "moe-shared-expert-intermediate-size")) is not None:
        told.set("model.experts.shared", 1)
        told.set("model.experts.shared_ffn_hidden", shared)
    some = "".join(flags.get("moe-layer-freq", ("1",))).replace(" ", "")
    if some.isdigit():
        told.set("model.experts.every", int(some))
    elif match := re.fullmatch(r"\(?\[0\]\*(\d+)\+\[1\]\*\d+\)?", some):
        told.set("model.experts.first_dense", int(match[1]))
    else:
        told.unmodelled.append(f"--moe-layer-freq {some}")
    if "moe-expert-capacity-factor" in flags:
        key = "--moe-expert-capacity-factor"
        told.set("model.experts.capacity", number(told, key, flags[key.removeprefix("--")][0]))
    _experts_travel(told, flags)


def _experts_travel(told: Told, flags: Flags) -> None:
    """How tokens reach their experts, and whether tensor parallelism cuts these."""
    width, tp = _whole(told, flags, "expert-tensor-parallel-size"), told.get("strategy.tp", 1)
    if width == 1 and tp > 1:
        told.set("recipe.expert_tensor_parallel_size", 1)
    elif width not in (None, tp):
        told.unmodelled.append(f"--expert-tensor-parallel-size {width} (counted as {tp})")
    kind = flags.get("moe-token-dispatcher-type", ("allgather",))[0]
    if "moe-enable-deepep" in flags or kind == "flex":
        told.set("recipe.moe_token_dispatcher", "deepep")
    elif kind == "allgather":
        told.notes.append("Tokens that are gathered (--moe-token-dispatcher-type allgather) are counted as exchanged.")
    if "overlap-moe-expert-parallel-comm" in flags:
        told.set("recipe.overlap_moe_expert_parallel_comm", True)


def _tensor(told: Told, flags: Flags) -> None:
    tp = told.get("strategy.tp", 1)
    if "sequence-parallel" in flags and tp == 1:
        told.notes.append("--sequence-parallel does nothing where tp is 1.")
    told.set("strategy.sequence_parallel", "sequence-parallel" in flags and tp > 1)


def _context(told: Told, flags: Flags) -> None:
    cp = told.get("strategy.cp", 1)
    kind = flags.get("cp-comm-type", ("p2p",))[0]
    sizes = flags.get("hierarchical-context-parallel-sizes")
    if (kind == "a2a+p2p") != (sizes is not None):
        raise told.refuse("--cp-comm-type", f"{kind} stands {'beside' if sizes else 'without'} "
                          "--hierarchical-context-parallel-sizes", "Give both or neither")  # fmt: skip
    if cp == 1:
        return
    if kind == "allgather":
        told.notes.append("--cp-comm-type allgather is counted as a ring.")
    if sizes:
        ulysses, ring = (whole_number(told, "--hierarchical-context-parallel-sizes", one) for one in sizes[:2])
        if ulysses * ring != cp:
            problem = f"{ulysses} x {ring} is not --context-parallel-size {cp}"
            raise told.refuse("--hierarchical-context-parallel-sizes", problem, "Use factors of it")
        told.set("strategy.cp_comm_type", {"ulysses": ulysses, "ring": ring})
    else:
        told.set("strategy.cp_comm_type", "ulysses" if kind == "a2a" else "ring")


def _sharding(told: Told, flags: Flags) -> None:
    """Who owns gradients and optimizer states, and what of it runs beside computation."""
    fsdp, owned = {"use-megatron-fsdp", "use-torch-fsdp2"} & flags.keys(), "use-distributed-optimizer" in flags
    kind = flags.get("data-parallel-sharding-strategy", ("optim_grads_params" if "use-torch-fsdp2" in fsdp else
                                                         "no_shard",))[0]  # fmt: skip
    if fsdp and kind not in SHARDED:
        raise told.refuse("--data-parallel-sharding-strategy", f"'{kind}' is unknown", f"Use {', '.join(SHARDED)}")
    if "overlap-param-gather" in flags and not owned and not fsdp:
        raise told.refuse("--overlap-param-gather", "stands without --use-distributed-optimizer", "Give both")
    if "overlap-param-gather" in flags and "overlap-grad-reduce" not in flags and not fsdp:
        raise told.refuse("--overlap-param-gather", "stands without --overlap-grad-reduce", "Give both")
    shard = SHARDED[kind] if fsdp else "ddp"
    told.set("strategy.shard", "zero1" if owned and shard == "ddp" else shard)
    told.instances = _whole(told, flags, "num-distributed-optimizer-instances", 1) or 1
    reduces, gathers = "overlap-grad-reduce" in flags, "overlap-param-gather" in flags or "use-torch-fsdp2" in fsdp
    alone = shard == "ddp" and not owned  # nothing is gathered
    hidden = "both" if gathers or (reduces and alone) else "backward" if reduces else "none"
    tensor = "sync" if "no-async-tensor-model-parallel-allreduce" in flags else "async"
    told.set("strategy.overlap", {"tp": tensor, "shard": hidden})


def _pipeline(told: Told, flags: Flags) -> None:
    pp = told.get("strategy.pp", 1)
    rounds, each = "num-virtual-stages-per-pipeline-rank", "num-layers-per-virtual-pipeline-stage"
    cut = "pipeline-model-parallel-layout"
    ways = [name for name in (rounds, each, cut) if name in flags]
    if len(ways) > 1:
        raise told.refuse(f"--{ways[0]}", f"stands beside --{ways[1]}", "Keep one of the two")
    layers, virtual = told.get("model.num_layers", 0), 1
    ended = sum(f"account-for-{what}-in-pipeline-split" in flags for what in ("embedding", "loss"))
    if rounds in flags:
        virtual = _whole(told, flags, rounds) or 1
    elif each in flags and layers:
        size = _whole(told, flags, each) or 1
        virtual = (layers + ended) // pp // size
        if (layers + ended) % (pp * size):
            problem = f"{size} layers do not divide the {layers + ended} of {pp} places"
            raise told.refuse(f"--{each}", problem, "Use a divisor of a place's layers")
    elif cut in flags:
        virtual = _cut(told, flags[cut][0], layers, pp)
    uneven = {"decoder-first-pipeline-num-layers", "decoder-last-pipeline-num-layers"} & flags.keys()
    if layers and not uneven and cut not in flags and (layers + ended) % (pp * virtual):
        problem = f"{layers} layers do not divide over {pp * virtual} stages"
        raise told.refuse("--num-layers", problem, "Megatron-LM wants a --pipeline-model-parallel-layout then")
    if uneven:
        told.notes.append(f"Stages of unequal length ({', '.join(sorted(uneven))}) are predicted as equal ones.")
    if virtual > 1 and pp == 1:
        raise told.refuse(f"--{ways[0]}", f"{virtual} stages a rank without a pipeline", "Leave it out")
    told.set("strategy.schedule", "interleaved" if virtual > 1 else "1f1b")
    told.set("strategy.virtual_stages", virtual)
    if "no-overlap-p2p-communication" in flags:
        told.options["rounds_hide_transfers"] = False


def _cut(told: Told, text: str, layers: int, pp: int) -> int:
    """Stages a rank of a layout; one with other stages than a prediction has is named."""
    key = "--pipeline-model-parallel-layout"
    sizes = stages_of(text)
    if sizes is None:
        raise told.refuse(key, f"'{text}' cannot be read", "Write E, t, L, | and (...)*n, as in Et*3|(t*4|)*2t*3L")
    if layers and sum(sizes) != layers:
        raise told.refuse(key, f"it has {sum(sizes)} layers, not the {layers} of --num-layers", "Correct one of them")
    if len(sizes) % pp:
        raise told.refuse(key, f"{len(sizes)} stages are no multiple of the {pp} places", "Use whole rounds of stages")
    known = [
        [stage.num_layers for stage in KEPT[name].stages(sum(sizes), len(sizes))]
        for name in ("megatron", "zero-bubble")
    ]
    if sizes not in known and max(sizes) - min(sizes) > 1:
        told.notes.append(f"The layout's stages ({layout(sizes)}) are predicted as equal ones.")
    return len(sizes) // pp


def stages_of(text: str) -> list[int] | None:
    """Layers of each stage of a layout; None for what is none.

    >>> stages_of("Et*3|(t*4|)*2t*2L"), stages_of("E|(t|)*2L"), stages_of("Et||L")
    ([3, 4, 4, 2], [0, 1, 1, 0], [1, 0, 0])
    """
    plain = text.strip("'\"").replace(" ", "").replace(",", "")
    for _ in range(20):
        opened = re.sub(r"\(([^()]*)\)\*(\d+)", lambda m: m[1] * min(int(m[2]), 2000), plain)
        opened = re.sub(r"([EtmL])\*(\d+)", lambda m: m[1] * min(int(m[2]), 2000), opened)
        if opened == plain:
            break
        plain = opened
    if not re.fullmatch(r"[EtmL|]+", plain):
        return None
    return [stage.count("t") for stage in plain.split("|")]


def _recomputed(told: Told, flags: Flags) -> None:
    kind = flags.get("recompute-granularity", ("",))[0]
    if "recompute-activations" in flags:
        kind = kind or "selective"
    if kind not in ("", "full", "selective"):
        raise told.refuse("--recompute-granularity", f"'{kind}' is unknown", "Use full or selective")
    if "recompute-method" in flags and kind != "full":
        raise told.refuse("--recompute-method", f"stands beside --recompute-granularity {kind or '(none)'}",
                          "It is full recomputation's")  # fmt: skip
    if kind == "full":
        method, count = flags.get("recompute-method", ("",))[0], _whole(told, flags, "recompute-num-layers")
        stages = told.get("strategy.pp", 1) * told.get("strategy.virtual_stages", 1)
        some = method == "block" and count is not None and count * stages < told.get("model.num_layers", 0)
        told.set("strategy.recompute", {"kind": "full", "layers": count} if some else "full")
    elif kind == "selective":
        modules = flags.get("recompute-modules", ("core_attn",))
        others = [one for one in modules if one not in ("core_attn", "layernorm")]
        if others:
            told.unmodelled.append(f"--recompute-modules {' '.join(others)}")
        told.set("strategy.recompute", "selective" if len(others) < len(modules) else "none")
        if "core_attn" not in modules:
            told.options["recompute_attention"] = False
    else:
        told.set("strategy.recompute", "none")


def _precision(told: Told, flags: Flags) -> None:
    if {"bf16", "fp16"} <= flags.keys():
        raise told.refuse("--bf16", "stands beside --fp16", "Keep one of the two")
    half = {"bf16", "fp16"} & flags.keys()
    precision = "bf16-mixed" if half else "fp32"
    if "fp16" in flags:
        told.notes.append("fp16 is counted as bf16: as fast and as large.")
    if {"fp8-format", "fp8", "fp4-format"} & flags.keys():
        recipe = flags.get("fp8-recipe", ("delayed",))[0]
        precision = "nvfp4" if "fp4-format" in flags else "mxfp8" if recipe == "mxfp8" else "fp8"
        told.set("recipe.fp8_param_gather", "fp8-param-gather" in flags)
    told.set("train.precision", precision)
    if not half:
        return
    if "grad-reduce-in-bf16" in flags or ("fp16" in flags and "accumulate-allreduce-grads-in-fp32" not in flags):
        told.set("recipe.grad_reduce_in_bf16", True)
    _optimizer(told, flags)
    if "cross-entropy-loss-fusion" in flags:
        kernel = flags.get("cross-entropy-fusion-impl", ("native",))[0]
        told.options["logit_bytes"] = FUSED_LOGIT["te" if kernel == "te" else "native"]
    backend = flags.get("attention-backend", ("auto",))[0]
    if backend in ("unfused", "local"):
        told.options["fused_attention"] = False


def _optimizer(told: Told, flags: Flags) -> None:
    """Types of a precision-aware optimizer, and what of it lies on the host."""
    if (kind := flags.get("optimizer", ("adam",))[0]) != "adam":
        told.unmodelled.append(f"--optimizer {kind} (counted as Adam)")
    if "use-precision-aware-optimizer" in flags:
        for name in ("exp-avg-dtype", "exp-avg-sq-dtype"):
            kind = flags.get(name, ("fp32",))[0].removeprefix("torch.")
            if kind not in TYPES:
                raise told.refuse(f"--{name}", f"'{kind}' is unknown", f"Use {', '.join(TYPES)}")
            told.set(f"recipe.{name.replace('-', '_')}", TYPES[kind])
        if TYPES.get(flags.get("main-grads-dtype", ("fp32",))[0]) == "bf16":
            told.set("recipe.grad_reduce_in_bf16", True)
        if TYPES.get(flags.get("main-params-dtype", ("fp32",))[0]) == "bf16":
            told.unmodelled.append(f"--main-params-dtype {flags['main-params-dtype'][0]}")
    if "optimizer-cpu-offload" in flags:
        key = "--optimizer-offload-fraction"
        told.set("recipe.optimizer_offload_fraction", number(told, key, flags.get(key[2:], ("1.0",))[0]))


def _ranks(told: Told, flags: Flags) -> None:
    """What the launcher in the same script starts; one node's worth of a larger job is a placeholder."""
    each, nodes = (_launched(flags, name) for name in ("nproc-per-node", "nnodes"))
    if each is None or nodes is None:
        return
    needed = told.get("strategy.tp", 1) * told.get("strategy.pp", 1) * told.get("strategy.cp", 1)
    if (each * nodes) % needed:
        told.notes.append(f"The script starts {each * nodes} ranks, no multiple of tp x pp x cp = {needed}.")
    else:
        told.set("cluster.ranks", each * nodes)


def _launched(flags: Flags, name: str) -> int | None:
    text = flags.get(name, ("",))[0]
    return int(text) if text.isdigit() else None
