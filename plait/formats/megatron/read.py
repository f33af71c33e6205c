"""Reader of Megatron-LM's arguments, also from a Megatron-Bridge recipe, as a job: keys that follow
from several flags. The rows of ``flags`` set all other keys.

Missing flags have Megatron-LM's defaults: dropout of 0.1, learned positions, LayerNorm, tied
embeddings, a feed-forward size of four times the hidden size (two thirds of it with SwiGLU), and
with bf16 gradients that accumulate in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from plait.formats.base.frameworks import FRAMEWORKS, GROUPS, MEMORY_OPTIONS
from plait.formats.base.parsed_config import ParsedConfig
from plait.formats.base.rows import Settings
from plait.formats.base.shell import Argument
from plait.formats.megatron.flags import FLAGS, RENAMED, SEVERAL, SWITCHES
from plait.formats.megatron.model import read_experts, read_model
from plait.formats.megatron.rules import RULES, Rule, layout, stages_of
from plait.formats.megatron.unknown import resolve

COMM_TYPES = ("p2p", "a2a", "allgather", "a2a+p2p")
"""Values of --cp-comm-type without ``_``: communication of context-parallel attention."""
FUSED_LOGIT = {"native": 6.0, "te": 4.0}
"""Bytes per logit with a fused loss: bf16 and fp32 in place (megatron/core/fusions); Transformer
Engine's kernel writes the gradient over the logits."""
VERSION = FRAMEWORKS["megatron"].version
SIZES_GROUPS = "microbatch-group-size-per-virtual-pipeline-stage"
"""The flag that sets another size than pp for the groups of micro-batches."""


def parse_megatron(
    file: str, arguments: Sequence[Argument], *, rules: Sequence[Rule] = RULES,
    overrides: Mapping[str, str] | None = None,
    causes: Mapping[str, str] | None = None,
) -> ParsedConfig:  # fmt: skip
    """Return the job of a command line. rules: Megatron-LM's rules to check; none for a command
    line that has run. overrides: keys set by the user beyond the command line. causes: the cause of
    each unknown value. Raises JobError for broken rules, contradictions, wrong values, and unknown
    values that matter."""
    told = ParsedConfig("megatron", file, rounds=0)
    if any(one.name.startswith("deepspeed") for one in arguments):
        told.caveat = "This is Megatron-DeepSpeed's (--deepspeed); rules and predictions are those of Megatron-LM."
    arguments = resolve(
        told, [one._replace(name=RENAMED.get(one.name, one.name)) for one in arguments], overrides or {}, causes or {}
    )
    _check(told, {one.name: one.values for one in arguments}, rules)
    flags = FLAGS.read(told, _settings(told, arguments))
    for read in (read_model, read_experts, _ramp, _tensor, _context, _sharding, _pipeline, _recomputed, _precision,
                 _ranks):  # fmt: skip
        read(told, flags)
    return told


def _check(parsed: ParsedConfig, flags: Mapping[str, Sequence[str]], rules: Sequence[Rule]) -> None:
    for rule in rules:
        if rule.broken(flags) and rule.older:
            parsed.notes.append(f"--{rule.flag}: {rule.problem} ({VERSION}, {rule.source}). {rule.fix}.")
        elif rule.broken(flags):
            raise parsed.refuse(f"--{rule.flag}", f"{rule.problem} ({VERSION}, {rule.source})", rule.fix)


def _settings(parsed: ParsedConfig, arguments: Sequence[Argument]) -> Iterator[tuple[str, Any, str]]:
    """Yield (name, value, text) of each flag; of a repeated flag the last."""
    last = {one.name: one for one in arguments}
    for one in arguments:
        name = one.name
        if name in FLAGS.named and name not in SWITCHES and not one.values:
            raise parsed.refuse(f"--{name}", "has no value", "Give it one, or leave it out")
        if one.values != last[name].values and name in FLAGS.named:
            values = " ".join(last[name].values)
            parsed.notes.append(f"--{name} is set twice: its last value, {values}, counts, as it does there.")
            continue
        if name == SIZES_GROUPS:
            parsed.exempt = (*parsed.exempt, GROUPS)
        if name.isupper():  # a variable of the environment
            parsed.harmless.append(f"--{name}")
        elif name in SWITCHES:
            yield name, True, str(one)
        else:
            yield name, one.values if name in SEVERAL else " ".join(one.values[:1]), str(one)


def _ramp(parsed: ParsedConfig, flags: Settings) -> None:
    """Set the batch ramp-up; Plait has no ramp that is rounded down to a fitting batch."""
    name, rounds = "rampup-batch-size", "decrease-batch-size-if-needed"
    if ramp := flags[name]:
        if len(ramp) != 3:
            problem = f"it has {len(ramp)} numbers"
            raise parsed.refuse(f"--{name}", problem, "Give three: the first batch, the increment, the samples")
        if ramp[0] != parsed.get("train.global_batch_size"):  # equal: a ramp without increase
            if rounds in flags:
                parsed.unmodelled.append(f"--{rounds}")
            else:
                names = ("start", "increment", "samples")
                parsed.set("train.rampup_batch_size", dict(zip(names, ramp, strict=True)))
    for each in sorted({name, "step-batch-size-schedule"} & flags.keys()):
        parsed.notes.append(f"--{each}: what is predicted is a step of the full batch.")


def _tensor(parsed: ParsedConfig, flags: Settings) -> None:
    if "sequence-parallel" in flags and parsed.get("strategy.tp", 1) == 1:
        parsed.notes.append("--sequence-parallel does nothing where tp is 1.")


def _context(parsed: ParsedConfig, flags: Settings) -> None:
    if (exchanged := flags["ds-sequence-parallel-size"]) > 1:  # Megatron-DeepSpeed's
        parsed.set("strategy.cp", exchanged)
        parsed.set("strategy.cp_comm_type", "ulysses")
        return
    cp, sizes = parsed.get("strategy.cp", 1), flags["hierarchical-context-parallel-sizes"]
    kind, *others = dict.fromkeys(one.replace("_", "").lower() for one in flags["cp-comm-type"])
    if unknown := next((one for one in (kind, *others) if one not in COMM_TYPES), ""):
        raise parsed.refuse("--cp-comm-type", f"'{unknown}' is unknown", f"Use {', '.join(COMM_TYPES)}")
    if others:
        parsed.unmodelled.append(f"--cp-comm-type {' '.join((kind, *others))} (all layers are counted as {kind})")
    if (kind == "a2a+p2p") != bool(sizes):
        problem = f"{kind} is set {'with' if sizes else 'without'} --hierarchical-context-parallel-sizes"
        raise parsed.refuse("--cp-comm-type", problem, "Give both or neither")
    if cp == 1:
        return
    if kind == "allgather":
        parsed.notes.append("--cp-comm-type allgather is counted as a ring.")
    parsed.set("strategy.cp_comm_type", "ulysses" if kind == "a2a" else "ring")
    if sizes:
        ulysses, ring = sizes[0], sizes[-1]
        if ulysses * ring != cp:
            problem = f"{ulysses} x {ring} is not --context-parallel-size {cp}"
            raise parsed.refuse("--hierarchical-context-parallel-sizes", problem, "Use factors of it")
        parsed.set("strategy.cp_comm_type", {"ulysses": ulysses, "ring": ring})


def _sharding(parsed: ParsedConfig, flags: Settings) -> None:
    """Set the sharding of gradients and optimizer states, and its overlap with computation."""
    torch, owned = "use-torch-fsdp2" in flags, "use-distributed-optimizer" in flags
    fsdp = torch or "use-megatron-fsdp" in flags
    if torch:
        _check_torch_fsdp(parsed, flags)
    reduces, gathers = "overlap-grad-reduce" in flags, "overlap-param-gather" in flags
    if gathers and not fsdp and not (owned and reduces):
        other = "overlap-grad-reduce" if owned else "use-distributed-optimizer"
        raise parsed.refuse("--overlap-param-gather", f"is set without --{other}", "Give both")
    shard = "zero1" if owned else "ddp"
    if fsdp:
        own = flags["data-parallel-sharding-strategy"] or ("fsdp" if torch else "ddp")
        shard = shard if own == "ddp" else own
    elif parsed.caveat and flags["zero-stage"] not in (None, "ddp"):
        shard = flags["zero-stage"]
    parsed.set("strategy.shard", shard)
    parsed.shard_copies = flags["num-distributed-optimizer-instances"] or 1
    alone = shard == "ddp"  # nothing is gathered
    hidden = "both" if gathers or torch or (reduces and alone) else "backward" if reduces else "none"
    tensor = "sync" if "no-async-tensor-model-parallel-allreduce" in flags else "async"
    parsed.set("strategy.overlap", {"tp": tensor, "shard": hidden})


def _check_torch_fsdp(parsed: ParsedConfig, flags: Settings) -> None:
    """Raise JobError for flags that Megatron-LM's arguments.py refuses together with torch's
    FSDP2."""
    beside = [f"--{name}" for name in ("use-distributed-optimizer", "fp16") if name in flags]
    degrees = {name: flags[name] or 1 for name in ("pipeline-model-parallel-size", "expert-model-parallel-size")}
    beside += [f"--{name} {size}" for name, size in degrees.items() if size > 1]
    if beside:
        raise parsed.refuse("--use-torch-fsdp2", f"conflicts with {beside[0]}", "Keep one of the two")


def _pipeline(parsed: ParsedConfig, flags: Settings) -> None:
    pp, layers = parsed.get("strategy.pp", 1), parsed.get("model.num_layers", 0)
    rounds, each = "num-virtual-stages-per-pipeline-rank", "num-layers-per-virtual-pipeline-stage"
    cut = "pipeline-model-parallel-layout"
    ways = [name for name in (rounds, each, cut) if name in flags]
    if len(ways) > 1:
        raise parsed.refuse(f"--{ways[0]}", f"conflicts with --{ways[1]}", "Keep one of the two")
    counted = layers + sum(f"account-for-{what}-in-pipeline-split" in flags for what in ("embedding", "loss"))
    virtual = flags[rounds]
    if each in flags and layers:
        virtual = counted // pp // flags[each]
        if counted % (pp * flags[each]):
            problem = f"{flags[each]} layers do not divide the {counted} of {pp} places"
            raise parsed.refuse(f"--{each}", problem, "Use a divisor of the layers of a pipeline rank")
    elif cut in flags:
        virtual = _cut(parsed, flags[cut], layers, pp)
    uneven = [name for name in flags if name.startswith("decoder-")]
    if uneven:
        _check_uneven(parsed, flags, sorted(uneven), virtual)
    elif layers and cut not in flags and counted % (pp * virtual):
        problem = f"{layers} layers do not divide over {pp * virtual} stages"
        raise parsed.refuse("--num-layers", problem, "Megatron-LM wants a --pipeline-model-parallel-layout then")
    if virtual > 1 and pp == 1:
        raise parsed.refuse(f"--{ways[0]}", f"{virtual} stages a rank without a pipeline", "Leave it out")
    parsed.set("strategy.schedule", "interleaved" if virtual > 1 else "1f1b")
    parsed.set("strategy.virtual_stages", virtual)
    if "no-overlap-p2p-communication" in flags:
        parsed.options["rounds_hide_transfers"] = False


def _check_uneven(parsed: ParsedConfig, flags: Settings, uneven: Sequence[str], virtual: int) -> None:
    """Raise JobError, as Megatron-LM does, if the layers of first and last pipeline rank leave the
    other ranks no equal number of layers."""
    own = [flags[name] for name in uneven]
    layers, others = parsed.get("model.num_layers", 0), parsed.get("strategy.pp", 1) - len(own)
    left = layers - sum(own)
    if layers and (left < 0 or (left % others if others > 0 else left)):
        problem = f"{own[0]} of {layers} layers leave {left} for {max(others, 0)} other places"
        raise parsed.refuse(f"--{uneven[0]}", problem, "Use a number that leaves each of them equally many")
    for name, size in zip(uneven, own, strict=True):
        if size % virtual:
            raise parsed.refuse(f"--{name}", f"{size} layers do not divide over {virtual} stages", "Use a multiple")
    parsed.notes.append(f"Stages of unequal length ({', '.join(uneven)}) are predicted as equal ones.")


def _cut(parsed: ParsedConfig, text: str, layers: int, pp: int) -> int:
    """Return the stages per rank of a layout; note a layout whose stages differ from the
    prediction's. Raises JobError for a wrong layout."""
    key = "--pipeline-model-parallel-layout"
    sizes = stages_of(text)
    if sizes is None:
        raise parsed.refuse(key, f"'{text}' cannot be read", "Write E, t, L, | and (...)*n, as in Et*3|(t*4|)*2t*3L")
    if layers and sum(sizes) != layers:
        raise parsed.refuse(key, f"it has {sum(sizes)} layers, not the {layers} of --num-layers", "Correct one of them")
    if len(sizes) % pp:
        raise parsed.refuse(
            key, f"{len(sizes)} stages are no multiple of the {pp} pipeline ranks", "Use a multiple of them"
        )
    known = [[stage.num_layers for stage in MEMORY_OPTIONS[name].stages(sum(sizes), len(sizes))]
             for name in ("megatron", "zero-bubble")]  # fmt: skip
    if sizes not in known and max(sizes) - min(sizes) > 1:
        parsed.notes.append(f"The layout's stages ({layout(sizes)}) are predicted as equal ones.")
    return len(sizes) // pp


def _recomputation(parsed: ParsedConfig, flags: Settings) -> tuple[str, str]:
    """Return granularity and method of the recomputation; --recompute-activations always means
    selective. Raises JobError for contradictory flags."""
    kind, method = flags["recompute-granularity"], flags["recompute-method"]
    over = "recompute-activations" in flags
    if "checkpoint-activations" in flags and not (over or kind):
        parsed.notes.append("--checkpoint-activations, an older name, is read as full recomputation of every layer.")
        return "full", "uniform"
    if method and (over or kind != "full"):
        beside = "--recompute-activations" if over else f"--recompute-granularity {kind or '(none)'}"
        raise parsed.refuse("--recompute-method", f"conflicts with {beside}", "It is full recomputation's")
    if over and kind == "full":
        parsed.notes.append("--recompute-activations puts selective in place of --recompute-granularity full.")
    if kind == "full" and not method and not over:
        problem = "full is set without --recompute-method"
        raise parsed.refuse("--recompute-granularity", problem, "Add --recompute-method uniform or block")
    return "selective" if over else kind, method


def _recomputed(parsed: ParsedConfig, flags: Settings) -> None:
    kind, method = _recomputation(parsed, flags)
    parsed.set("strategy.recompute", kind or "none")
    count, modules = flags["recompute-num-layers"], flags["recompute-modules"]
    if kind == "full":
        stages = parsed.get("strategy.pp", 1) * parsed.get("strategy.virtual_stages", 1)
        if method == "block" and count is not None and count * stages < parsed.get("model.num_layers", 0):
            parsed.set("strategy.recompute", {"kind": "full", "layers": count})
        if method == "uniform" and (count or 1) > 1:
            parsed.unmodelled.append(f"--recompute-num-layers {count} (inputs of all layers are counted as kept)")
    elif kind == "selective":
        others = [one for one in modules if one not in ("core_attn", "layernorm")]
        if others:
            parsed.unmodelled.append(f"--recompute-modules {' '.join(others)}")
        if len(others) == len(modules):
            parsed.set("strategy.recompute", "none")
        if "core_attn" not in modules:
            parsed.options["recompute_attention"] = False


def _precision(parsed: ParsedConfig, flags: Settings) -> None:
    if {"bf16", "fp16"} <= flags.keys():
        raise parsed.refuse("--bf16", "conflicts with --fp16", "Keep one of the two")
    half, quantised = {"bf16", "fp16"} & flags.keys(), _quantised(parsed, flags)
    if "fp16" in flags:
        parsed.notes.append("fp16 is counted as bf16: as fast and as large.")
    parsed.set("train.precision", quantised or ("bf16-mixed" if half else "fp32"))
    aware = half and "use-precision-aware-optimizer" in flags
    if not aware:
        parsed.set("recipe.exp_avg_dtype", "fp32")
        parsed.set("recipe.exp_avg_sq_dtype", "fp32")
    if not half:
        if quantised:
            parsed.notes.append("Products of 8 or 4 bits without --bf16 are counted as beside it: parameters in bf16.")
        return
    summed = "fp16" in flags and "accumulate-allreduce-grads-in-fp32" not in flags
    if summed or "grad-reduce-in-bf16" in flags or (aware and flags["main-grads-dtype"] == "bf16"):
        parsed.set("recipe.grad_reduce_in_bf16", True)
    if aware and flags["main-params-dtype"] == "bf16":
        parsed.unmodelled.append("--main-params-dtype bf16")
    if (kind := flags["optimizer"]) != "adam":
        parsed.unmodelled.append(f"--optimizer {kind} (counted as Adam)")
    if "optimizer-cpu-offload" in flags:
        parsed.set("recipe.optimizer_offload_fraction", flags["optimizer-offload-fraction"])
    if "cross-entropy-loss-fusion" in flags:
        parsed.options["logit_bytes"] = FUSED_LOGIT.get(flags["cross-entropy-fusion-impl"], FUSED_LOGIT["native"])
    backend = flags["attention-backend"]
    local = flags["transformer-impl"] == "local" and "use-flash-attn" not in flags
    if backend in ("unfused", "local") or (backend == "auto" and local):
        parsed.options["fused_attention"] = False


def _quantised(parsed: ParsedConfig, flags: Settings) -> str:
    """Return the precision of products in 8 or 4 bits; empty if there are none. With 4 bits
    parameters are not kept in 4 bits."""
    eight = sorted({"fp8-format", "fp8"} & flags.keys())
    if "fp4-format" in flags:
        if eight:
            raise parsed.refuse("--fp4-format", f"conflicts with --{eight[0]}", "Keep one of the two")
        if (kind := flags["fp4-recipe"]) != "nvfp4":
            parsed.unmodelled.append(f"--fp4-recipe {kind} (counted as nvfp4)")
        return "nvfp4"
    if not eight:
        return ""
    recipe = flags["fp8-recipe"]
    if recipe not in ("delayed", "tensorwise", "mxfp8"):
        parsed.unmodelled.append(f"--fp8-recipe {recipe} (counted as one scale a tensor)")
    parsed.set("recipe.fp8_param_gather", "fp8-param-gather" in flags)
    return "mxfp8" if recipe == "mxfp8" else "fp8"


def _ranks(parsed: ParsedConfig, flags: Settings) -> None:
    """Set the number of ranks that the script's launcher starts. If it is no multiple of tp x pp x
    cp, note this and ask for the number: one node of a larger job is a placeholder."""
    each, nodes = flags["nproc-per-node"] or "", flags["nnodes"] or ""
    if not each.isdigit() or not nodes.isdigit():
        return
    ranks = int(each) * int(nodes)
    needed = parsed.get("strategy.tp", 1) * parsed.get("strategy.pp", 1) * parsed.get("strategy.cp", 1)
    if ranks % needed:
        parsed.notes.append(f"The script starts {ranks} ranks, no multiple of tp x pp x cp = {needed}.")
        parsed.required["cluster.ranks"] = f"it starts {ranks} ranks, no multiple of tp x pp x cp = {needed}"
    else:
        parsed.set("cluster.ranks", ranks)
