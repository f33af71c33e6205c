"""Writer of a strategy and its model as Megatron-LM's command line: flags of ``arguments.py`` at
commit d98e8a64 (22 August 2026), by the rows of ``flags``, and by the functions here for settings
that take several flags."""

from __future__ import annotations

from itertools import chain
from shlex import quote
from typing import Any, cast

from plait.core.parallel.strategy import SLICED
from plait.core.step.schedules import own_chunks
from plait.formats.base.rows import Emitted, WriterContext
from plait.formats.megatron.flags import FLAGS, PRECISIONS
from plait.formats.megatron.model import write_experts, write_model
from plait.formats.megatron.rules import OVERLAP, Flags, broken, layout

TARGET = "Megatron-LM d98e8a64 (August 2026)"
SCHEDULES = ("1f1b", "interleaved")
AWARE = "use-precision-aware-optimizer"
OF_SHARDS = {
    "recipe.fp8_param_gather": ("fp8-param-gather",),
    "recipe.exp_avg_dtype and exp_avg_sq_dtype": ("exp-avg-dtype", "exp-avg-sq-dtype"),
    "recipe.optimizer_offload_fraction": ("optimizer-cpu-offload", "optimizer-offload-fraction"),
}
"""Flags by key of features that only Megatron-LM's distributed optimizer has."""


def write_megatron(words: WriterContext) -> Emitted:
    """Return the flags, one per line, after comments on version, ranks and environment."""
    flags = FLAGS.write(words)
    for write in (_batch, _context, _tensor, _sharding, _pipeline, _recomputed, _precision, write_model,
                  write_experts):  # fmt: skip
        flags |= write(words)
    _keep_rules(words, flags)
    lines = [f"--{name}" if value is True else f"--{name} {_quoted(value)}" for name, value in flags.items()]
    head = [f"# For {TARGET}; {words.job.world_size} ranks."]
    if (words.tp > 1 or words.section.cp > 1) and "use-megatron-fsdp" not in flags:
        head.append("# It wants CUDA_DEVICE_MAX_CONNECTIONS=1 in the environment (before Blackwell).")
    return Emitted("\n".join(head) + "\n" + " \\\n".join(lines) + "\n", words.unsupported, TARGET)


def _quoted(value: Any) -> str:
    """Return a flag's values quoted for a shell."""
    return " ".join(quote(str(one)) for one in _several(value))


def _batch(words: WriterContext) -> dict[str, Any]:
    ramp = words.job.train.rampup_batch_size
    return {"rampup-batch-size": (ramp.start, ramp.increment, ramp.samples)} if ramp else {}


def _context(words: WriterContext) -> dict[str, Any]:
    cp, ring = words.strategy.cp, words.strategy.ring
    if cp == 1:
        return {}
    if ring in (1, cp):
        return {"cp-comm-type": "a2a" if ring == 1 else "p2p"}
    return {"cp-comm-type": "a2a+p2p", "hierarchical-context-parallel-sizes": (cp // ring, ring)}


def _tensor(words: WriterContext) -> dict[str, Any]:
    overlap = words.strategy.overlap
    instead = {
        "sync": "its all-reduce runs behind weight gradients, which no flag forbids",
        **dict.fromkeys(SLICED, "its own overlap behind weight gradients stands for it"),
        "no-communication": "it communicates",
    }
    if words.tp > 1 and overlap in instead:
        words.note_unsupported(f"overlap.tp = {overlap} ({instead[overlap]})")
    return {}


def _sharding(words: WriterContext) -> dict[str, Any]:
    """Return the sharding flags: one shard factor, the optimizer's. Sharded gradients and
    parameters follow it and need Megatron-FSDP."""
    sharding, replicas, overlap = words.sharding, words.replicas, words.strategy.shard_overlap
    found = dict[str, Any]()
    if replicas == 1:
        return found
    if overlap in ("backward", "both") or (overlap == "forward" and sharding.optim > 1):
        found["overlap-grad-reduce"] = True
    if sharding.optim == 1:
        return found
    found["use-distributed-optimizer"] = True
    if replicas > sharding.optim:
        found["num-distributed-optimizer-instances"] = replicas // sharding.optim
    if overlap == "forward":
        words.note_unsupported("overlap.shard = forward (overlap-param-gather needs overlap-grad-reduce)")
    if overlap in ("forward", "both"):
        found["overlap-param-gather"] = True
    if sharding.grads > 1 or sharding.params > 1:
        shared = "optim_grads_params" if sharding.params > 1 else "optim_grads"
        found |= {"use-megatron-fsdp": True, "data-parallel-sharding-strategy": shared, "ckpt-format": "fsdp_dtensor"}
    for name, factor in (("grads", sharding.grads), ("params", sharding.params)):
        if factor not in (1, sharding.optim):
            words.note_unsupported(
                f"shard.{name} = {factor} (it is sharded {sharding.optim} ways, as optimizer states are)"
            )
    return found


def _pipeline(words: WriterContext) -> dict[str, Any]:
    """Return the virtual stages per rank, or, if stages are unequal, the layout."""
    if words.section.pp == 1:
        return {}
    sizes = [stage.num_layers for stage in words.stages(_cuts(words))]
    if len(set(sizes)) > 1:
        return {"pipeline-model-parallel-layout": layout(sizes)}
    rounds = len(sizes) // words.section.pp
    return {"num-virtual-stages-per-pipeline-rank": rounds} if rounds > 1 else {}


def _cuts(words: WriterContext) -> str:
    """Return the schedule that determines the stages. If the interleaved schedule replaces one with
    several stages per rank, the stages stay those of the replaced schedule."""
    own = words.section.schedule
    if words.section.pp == 1:
        return own
    name = words.schedule("megatron", SCHEDULES, {own: "interleaved"} if own_chunks(own) > 1 else {})
    return own if own_chunks(own) > 1 and name == "interleaved" else name


def _recomputed(words: WriterContext) -> dict[str, Any]:
    strategy = words.strategy
    kind, some = strategy.recompute, strategy.recompute_layers
    if kind == "none":
        return {}
    if kind != "selective":
        layers = max(stage.num_layers for stage in words.stages(_cuts(words))) if some is None else some
        return {"recompute-granularity": "full", "recompute-method": "block", "recompute-num-layers": layers}
    if words.job.plan.framework == "megatron":
        return {"recompute-granularity": "selective", "recompute-modules": "core_attn"}
    words.note_unsupported("recompute = selective of the MLP's activation (only norms are recomputed)")
    if some is not None:
        words.note_unsupported(f"recompute of {some} layers of every stage (all are recomputed)")
    return {"recompute-granularity": "selective", "recompute-modules": "layernorm"}


def _precision(words: WriterContext) -> dict[str, Any]:
    """Return the flags of precision, of the dtypes of gradients and moments, and of optimizer
    offload."""
    precision, recipe = words.job.train.precision, words.job.recipe
    if precision not in PRECISIONS:
        words.note_unsupported(f"train.precision = {precision}")
    found: dict[str, Any] = dict(PRECISIONS.get(precision, {}))
    if recipe.fp8_param_gather and "fp8-format" in found:
        found["fp8-param-gather"] = True
    if recipe.grad_reduce_in_bf16:
        found["grad-reduce-in-bf16"] = True
    if recipe.optimizer_offload_fraction:
        found |= {"optimizer-cpu-offload": True, "optimizer-offload-fraction": recipe.optimizer_offload_fraction}
    if recipe.optimizer_offload_fraction or (recipe.exp_avg_dtype, recipe.exp_avg_sq_dtype) != ("fp32", "fp32"):
        found[AWARE] = True
    return found


def _keep_rules(words: WriterContext, flags: dict[str, Any]) -> None:
    """Change flags that break Megatron-LM's rules (``rules``), and note each change."""
    _keep_optimizer(words, flags)
    refused = broken(_listed(flags))
    if "window-size" in refused:
        flags.pop("hierarchical-context-parallel-sizes", None)
        flags["cp-comm-type"] = "all_gather"
        words.note_unsupported("cp_comm_type of layers with windows (keys and values are gathered, behind nothing)")
    if "num-experts" in refused:
        flags["sequence-parallel"] = True
        words.note_unsupported("sequence_parallel = false (experts of several tensor-parallel ranks need it)")
    if OVERLAP in refused:
        del flags[OVERLAP]
        words.note_unsupported(f"recipe.overlap_moe_expert_parallel_comm (it {refused[OVERLAP].problem})")


def _keep_optimizer(words: WriterContext, flags: dict[str, Any]) -> None:
    """Add the distributed optimizer for flags that need it, or drop these flags."""
    if {"fp8-param-gather", AWARE} & broken(_listed(flags)).keys():
        if words.replicas == 1:  # nothing is sharded then
            flags["use-distributed-optimizer"] = True
        else:
            for key in (key for key, names in OF_SHARDS.items() if set(names) & flags.keys()):
                words.note_unsupported(f"{key} (its distributed optimizer alone has it)")
            for name in (*chain(*OF_SHARDS.values()), AWARE):
                flags.pop(name, None)
    if "optimizer-cpu-offload" in broken(_listed(flags)):
        del flags["fp8-param-gather"]
        words.note_unsupported("recipe.fp8_param_gather (beside an optimizer on the host it needs delayed scaling)")


def _listed(flags: dict[str, Any]) -> Flags:
    """Return flags with their values as texts, as on a command line; a flag that is True has no
    values."""
    return {name: () if value is True else tuple(map(str, _several(value))) for name, value in flags.items()}


def _several(value: Any) -> tuple[Any, ...]:
    return cast("tuple[Any, ...]", value) if isinstance(value, tuple) else (value,)
