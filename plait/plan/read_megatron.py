"""Megatron-LM's arguments, and a recipe of Megatron-Bridge, as a job (``megatron_flags`` has the table).

What Megatron-LM takes for granted where a flag is missing is taken for granted here: dropout of 0.1, learned
positions, LayerNorm, tied embeddings, a feed-forward size of four times the hidden one (two thirds of it with
SwiGLU), gradients that bf16 accumulates in fp32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from plait.plan.frameworks import FRAMEWORKS, GROUPS, KEPT
from plait.plan.megatron_flags import (
    DEGREES,
    HARMLESS,
    HARMLESS_STARTS,
    LAUNCH,
    SAME,
    SHARDED,
    SHARDED_BY_STAGE,
    SWITCHES,
    TYPES,
    UNDERSTOOD,
    UNMODELLED,
    UNMODELLED_STARTS,
)
from plait.plan.megatron_layout import layout, stages_of
from plait.plan.megatron_rules import RULES, Flags, Rule
from plait.plan.megatron_unknown import KEYS, resolve
from plait.plan.read_megatron_model import positive, read_experts, read_model, whole_flag
from plait.plan.read_shell import Argument
from plait.plan.told import Told, number, whole_number

COMM_TYPES = ("p2p", "a2a", "allgather", "a2a+p2p")
"""Ways of attention over several ranks; written with ``_``, too."""
FUSED_LOGIT = {"native": 6.0, "te": 4.0}
"""Bytes of a logit where the loss is one kernel: bf16 and fp32 in place (megatron/core/fusions); Transformer
Engine's writes the gradient over it."""
VERSION = FRAMEWORKS["megatron"].version
SIZES_GROUPS = "microbatch-group-size-per-virtual-pipeline-stage"
"""With it groups of micro-batches are no longer as large as there are places."""


def megatron_told(
    file: str, given: Sequence[Argument], *, rules: Sequence[Rule] = RULES, said: Mapping[str, str] | None = None,
    why: Mapping[str, str] | None = None,
) -> Told:  # fmt: skip
    """The job of a command line. rules: Megatron-LM's, to which it is held; none where it has run. said: keys
    of the job that stand beside it; why: what decides values that are not known. Raises JobError for what
    breaks rules, for other contradictions, for values that are none, and for those that are not known."""
    told = Told("megatron", file, rounds=0)
    if any(one.name.startswith("deepspeed") for one in given):
        told.caveat = "This is Megatron-DeepSpeed's (--deepspeed); rules and predictions are those of Megatron-LM."
    given = resolve(told, [one._replace(name=SAME.get(one.name, one.name)) for one in given], said or {}, why or {})
    flags = _sorted(told, given)
    _check(told, {one.name: one.values for one in given}, rules)
    for read in (
        _degrees,
        read_model,
        read_experts,
        _tensor,
        _context,
        _sharding,
        _pipeline,
        _recomputed,
        _precision,
        _ranks,
    ):
        read(told, flags)
    return told


def _check(told: Told, flags: Flags, rules: Sequence[Rule]) -> None:
    for rule in rules:
        if rule.broken(flags) and rule.older:
            told.notes.append(f"--{rule.flag}: {rule.problem} ({VERSION}, {rule.source}). {rule.fix}.")
        elif rule.broken(flags):
            raise told.refuse(f"--{rule.flag}", f"{rule.problem} ({VERSION}, {rule.source})", rule.fix)


def _sorted(told: Told, given: Sequence[Argument]) -> dict[str, Sequence[str]]:
    """Flags that are understood, by name; the rest is told apart."""
    found = dict[str, Sequence[str]]()
    for one in given:
        name = one.name
        if name in UNDERSTOOD:
            if name not in SWITCHES and not one.values:
                raise told.refuse(f"--{name}", "has no value", "Give it one, or leave it out")
            if name in found and tuple(found[name]) != one.values:
                told.notes.append(
                    f"--{name} stands twice: its last value, {' '.join(one.values)}, counts, as it does there."
                )
            found[name] = one.values
        elif name in LAUNCH or name in HARMLESS or name.startswith(HARMLESS_STARTS) or name.isupper():
            told.harmless.append(f"--{name}")  # in capitals: of the environment
        elif name in UNMODELLED or name.startswith(UNMODELLED_STARTS):
            told.unmodelled.append(str(one))
            told.freed = (*told.freed, GROUPS) if name == SIZES_GROUPS else told.freed
        else:
            told.strange(name, str(one), KEYS)
    return found


def _degrees(told: Told, flags: Flags) -> None:
    for name, key in DEGREES.items():
        if (value := whole_flag(told, flags, name)) is not None:
            told.set(key, positive(told, name, value))
    _ramp(told, flags)


def _ramp(told: Told, flags: Flags) -> None:
    """The ramp of the batch; one that Megatron-LM rounds down to what fits is no setting of ours."""
    name, rounds = "rampup-batch-size", "decrease-batch-size-if-needed"
    if name in flags:
        if len(flags[name]) != 3:
            problem = f"it has {len(flags[name])} numbers"
            raise told.refuse(f"--{name}", problem, "Give three: the first batch, the increment, the samples")
        start, increment, samples = (whole_number(told, f"--{name}", one) for one in flags[name])
        if start != told.get("train.global_batch_size"):  # its own ramp of no rise
            ramp = {"start": start, "increment": increment, "samples": samples}
            if rounds in flags:
                told.unmodelled.append(f"--{rounds}")
            else:
                told.set("train.rampup_batch_size", ramp)
    for each in sorted({name, "step-batch-size-schedule"} & flags.keys()):
        told.notes.append(f"--{each}: what is predicted is a step of the full batch.")


def _tensor(told: Told, flags: Flags) -> None:
    if "sequence-parallel" in flags and told.get("strategy.tp", 1) == 1:
        told.notes.append("--sequence-parallel does nothing where tp is 1.")
    told.set("strategy.sequence_parallel", "sequence-parallel" in flags)


def _context(told: Told, flags: Flags) -> None:
    if (exchanged := whole_flag(told, flags, "ds-sequence-parallel-size", 1) or 1) > 1:  # Megatron-DeepSpeed's
        told.set("strategy.cp", exchanged)
        told.set("strategy.cp_comm_type", "ulysses")
        return
    cp = told.get("strategy.cp", 1)
    kinds = list(dict.fromkeys(one.replace("_", "").lower() for one in flags.get("cp-comm-type", ("p2p",))))
    kind = kinds[0]
    if unknown := next((one for one in kinds if one not in COMM_TYPES), ""):
        raise told.refuse("--cp-comm-type", f"'{unknown}' is unknown", f"Use {', '.join(COMM_TYPES)}")
    if len(kinds) > 1:
        told.unmodelled.append(f"--cp-comm-type {' '.join(kinds)} (all layers are counted as {kind})")
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
    if "use-torch-fsdp2" in fsdp:
        _check_torch_fsdp(told, flags)
    if "overlap-param-gather" in flags and not owned and not fsdp:
        raise told.refuse("--overlap-param-gather", "stands without --use-distributed-optimizer", "Give both")
    if "overlap-param-gather" in flags and "overlap-grad-reduce" not in flags and not fsdp:
        raise told.refuse("--overlap-param-gather", "stands without --overlap-grad-reduce", "Give both")
    shard = SHARDED[kind] if fsdp else "ddp"
    if told.caveat and not fsdp and "zero-stage" in flags:
        stage = whole_flag(told, flags, "zero-stage") or 0
        shard = dict(enumerate(SHARDED_BY_STAGE)).get(stage, "")
        if not shard:
            raise told.refuse("--zero-stage", f"{stage} is unknown", "Use 0 to 3")
    told.set("strategy.shard", "zero1" if owned and shard == "ddp" else shard)
    told.instances = whole_flag(told, flags, "num-distributed-optimizer-instances", 1) or 1
    reduces, gathers = "overlap-grad-reduce" in flags, "overlap-param-gather" in flags or "use-torch-fsdp2" in fsdp
    alone = shard == "ddp" and not owned  # nothing is gathered
    hidden = "both" if gathers or (reduces and alone) else "backward" if reduces else "none"
    tensor = "sync" if "no-async-tensor-model-parallel-allreduce" in flags else "async"
    told.set("strategy.overlap", {"tp": tensor, "shard": hidden})


def _check_torch_fsdp(told: Told, flags: Flags) -> None:
    """Refuse what Megatron-LM's arguments.py refuses beside torch's FSDP2."""
    beside = [f"--{name}" for name in ("use-distributed-optimizer", "fp16") if name in flags]
    degrees = {name: told.get(f"strategy.{key}", 1) for name, key in (("pipeline", "pp"), ("expert", "ep"))}
    beside += [f"--{name}-model-parallel-size {size}" for name, size in degrees.items() if size > 1]
    if beside:
        raise told.refuse("--use-torch-fsdp2", f"stands beside {beside[0]}", "Keep one of the two")


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
        virtual = whole_flag(told, flags, rounds) or 1
    elif each in flags and layers:
        size = whole_flag(told, flags, each) or 1
        virtual = (layers + ended) // pp // size
        if (layers + ended) % (pp * size):
            problem = f"{size} layers do not divide the {layers + ended} of {pp} places"
            raise told.refuse(f"--{each}", problem, "Use a divisor of a place's layers")
    elif cut in flags:
        virtual = _cut(told, flags[cut][0], layers, pp)
    uneven = [f"decoder-{end}-pipeline-num-layers" for end in ("first", "last") if
              f"decoder-{end}-pipeline-num-layers" in flags]  # fmt: skip
    if layers and not uneven and cut not in flags and (layers + ended) % (pp * virtual):
        problem = f"{layers} layers do not divide over {pp * virtual} stages"
        raise told.refuse("--num-layers", problem, "Megatron-LM wants a --pipeline-model-parallel-layout then")
    if uneven:
        _check_uneven(told, flags, uneven, virtual)
    if virtual > 1 and pp == 1:
        raise told.refuse(f"--{ways[0]}", f"{virtual} stages a rank without a pipeline", "Leave it out")
    told.set("strategy.schedule", "interleaved" if virtual > 1 else "1f1b")
    told.set("strategy.virtual_stages", virtual)
    if "no-overlap-p2p-communication" in flags:
        told.options["rounds_hide_transfers"] = False


def _check_uneven(told: Told, flags: Flags, uneven: Sequence[str], virtual: int) -> None:
    """Refuse first and last places that leave the others no equal number of layers, as Megatron-LM does."""
    own = [whole_flag(told, flags, name) or 0 for name in uneven]
    layers, others = told.get("model.num_layers", 0), told.get("strategy.pp", 1) - len(own)
    left = layers - sum(own)
    if layers and (left < 0 or (left % others if others > 0 else left)):
        problem = f"{own[0]} of {layers} layers leave {left} for {max(others, 0)} other places"
        raise told.refuse(f"--{uneven[0]}", problem, "Use a number that leaves each of them equally many")
    for name, size in zip(uneven, own, strict=True):
        if size % virtual:
            raise told.refuse(f"--{name}", f"{size} layers do not divide over {virtual} stages", "Use a multiple")
    told.notes.append(f"Stages of unequal length ({', '.join(uneven)}) are predicted as equal ones.")


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


def _recomputation(told: Told, flags: Flags) -> tuple[str, str]:
    """The granularity, which --recompute-activations makes selective whatever else is said, and the
    method."""
    kind, method = (flags.get(f"recompute-{name}", ("",))[0] for name in ("granularity", "method"))
    if kind not in ("", "full", "selective"):
        raise told.refuse("--recompute-granularity", f"'{kind}' is unknown", "Use full or selective")
    over = "recompute-activations" in flags
    if "checkpoint-activations" in flags and not (over or kind):
        told.notes.append("--checkpoint-activations, an older name, is read as full recomputation of every layer.")
        return "full", "uniform"
    if method and (over or kind != "full"):
        beside = "--recompute-activations" if over else f"--recompute-granularity {kind or '(none)'}"
        raise told.refuse("--recompute-method", f"stands beside {beside}", "It is full recomputation's")
    if over:
        if kind == "full":
            told.notes.append("--recompute-activations puts selective in place of --recompute-granularity full.")
        return "selective", ""
    if kind == "full" and not method:
        problem = "full stands without --recompute-method"
        raise told.refuse("--recompute-granularity", problem, "Add --recompute-method uniform or block")
    if method not in ("", "uniform", "block"):
        raise told.refuse("--recompute-method", f"'{method}' is unknown", "Use uniform or block")
    return kind, method


def _recomputed(told: Told, flags: Flags) -> None:
    kind, method = _recomputation(told, flags)
    if kind == "full":
        count = whole_flag(told, flags, "recompute-num-layers")
        stages = told.get("strategy.pp", 1) * told.get("strategy.virtual_stages", 1)
        some = method == "block" and count is not None and count * stages < told.get("model.num_layers", 0)
        told.set("strategy.recompute", {"kind": "full", "layers": count} if some else "full")
        if method == "uniform" and (count or 1) > 1:
            told.unmodelled.append(f"--recompute-num-layers {count} (inputs of all layers are counted as kept)")
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
    told.set("train.precision", _quantised(told, flags) or precision)
    if not half and told.get("train.precision") != precision:
        told.notes.append("Products of 8 or 4 bits without --bf16 are counted as beside it: parameters in bf16.")
    if not half:
        return
    if "grad-reduce-in-bf16" in flags or ("fp16" in flags and "accumulate-allreduce-grads-in-fp32" not in flags):
        told.set("recipe.grad_reduce_in_bf16", True)
    _optimizer(told, flags)
    if "cross-entropy-loss-fusion" in flags:
        kernel = flags.get("cross-entropy-fusion-impl", ("native",))[0]
        told.options["logit_bytes"] = FUSED_LOGIT["te" if kernel == "te" else "native"]
    backend = flags.get("attention-backend", ("auto",))[0]
    local = flags.get("transformer-impl", ("",))[0] == "local" and "use-flash-attn" not in flags
    if backend in ("unfused", "local") or (backend == "auto" and local):
        told.options["fused_attention"] = False


def _quantised(told: Told, flags: Flags) -> str:
    """Products in 8 or 4 bits; nothing where there are none. Of 4 bits none keeps parameters in them here."""
    eight = sorted({"fp8-format", "fp8"} & flags.keys())
    if "fp4-format" in flags:
        if eight:
            raise told.refuse("--fp4-format", f"stands beside --{eight[0]}", "Keep one of the two")
        if (kind := flags.get("fp4-recipe", ("nvfp4",))[0]) != "nvfp4":
            told.unmodelled.append(f"--fp4-recipe {kind} (counted as nvfp4)")
        return "nvfp4"
    if not eight:
        return ""
    recipe = flags.get("fp8-recipe", ("delayed",))[0]
    if recipe not in ("delayed", "tensorwise", "mxfp8"):
        told.unmodelled.append(f"--fp8-recipe {recipe} (counted as one scale a tensor)")
    told.set("recipe.fp8_param_gather", "fp8-param-gather" in flags)
    return "mxfp8" if recipe == "mxfp8" else "fp8"


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
        told.asked["cluster.ranks"] = f"it starts {each * nodes} ranks, no multiple of tp x pp x cp = {needed}"
    else:
        told.set("cluster.ranks", each * nodes)


def _launched(flags: Flags, name: str) -> int | None:
    text = flags.get(name, ("",))[0]
    return int(text) if text.isdigit() else None
