"""A strategy and its model as Megatron-LM's command line: flags of ``arguments.py`` at commit d98e8a64
(22 August 2026).
"""

from __future__ import annotations

from itertools import chain
from shlex import quote
from typing import Any

from plait.core.model.spec import ROPE_THETA
from plait.core.parallel.strategy import SLICED
from plait.plan.emit_words import Emitted, Words
from plait.plan.megatron_flags import DEGREES, EXPERTS, LATENT, LLAMA, ROPE_ORIGINAL, SHAPES
from plait.plan.megatron_layout import layout
from plait.plan.megatron_rules import OVERLAP, Flags, broken

TARGET = "Megatron-LM d98e8a64 (August 2026)"
SCHEDULES = ("1f1b", "interleaved")
OF_SHARDS = {
    "recipe.fp8_param_gather": ("fp8-param-gather",),
    "recipe.exp_avg_dtype and exp_avg_sq_dtype": ("exp-avg-dtype", "exp-avg-sq-dtype"),
    "recipe.optimizer_offload_fraction": ("optimizer-cpu-offload", "optimizer-offload-fraction"),
}
"""Keys, and the flags that say them, of its distributed optimizer alone."""
RECIPES = {"fp8": "delayed", "mxfp8": "mxfp8"}
"""By precision, what ``--fp8-recipe`` says."""


def megatron(words: Words) -> Emitted:
    """The flags, one a line, after what the environment must have."""
    job, section, strategy = words.job, words.section, words.strategy
    words.common()
    if strategy.cuda_graphs:
        words.cannot("cuda_graphs (what it captures are layers or steps, collectives included)")
    if strategy.compile:
        words.cannot("compile (its own fused kernels stand for it)")
    said = {
        "strategy.tp": words.tp, "strategy.pp": section.pp, "strategy.cp": section.cp,
        "train.micro_batch_size": words.micro, "train.global_batch_size": job.train.global_batch_size,
        "data.sequence_length": job.data.sequence_length,
    }  # fmt: skip
    flags: dict[str, Any] = {flag: said[key] for flag, key in DEGREES.items()}
    if rampup := job.train.rampup_batch_size:
        flags["rampup-batch-size"] = (rampup.start, rampup.increment, rampup.samples)
    sharding = _sharding(words)
    flags |= _context(words) | _tensor(words) | sharding | _pipeline(words) | _recomputed(words) | _precision(words)
    flags |= _recipe(words) | _model(words) | _experts(words)
    _keep_rules(words, flags)
    lines = [f"--{name}" if value is True else f"--{name} {_quoted(value)}" for name, value in flags.items()]
    head = [f"# For {TARGET}; {words.ranks} ranks."]
    if (words.tp > 1 or section.cp > 1) and "use-megatron-fsdp" not in sharding:
        head.append("# It wants CUDA_DEVICE_MAX_CONNECTIONS=1 in the environment (before Blackwell).")
    return Emitted("\n".join(head) + "\n" + " \\\n".join(lines) + "\n", words.unsaid, TARGET)


def _quoted(value: Any) -> str:
    """For a shell: one word, or several."""
    return " ".join(quote(str(one)) for one in _several(value))


def _context(words: Words) -> dict[str, Any]:
    strategy = words.strategy
    if strategy.cp == 1:
        return {}
    ulysses = strategy.cp // strategy.ring
    if 1 in (ulysses, strategy.ring):
        return {"cp-comm-type": "a2a" if strategy.ring == 1 else "p2p"}
    return {"cp-comm-type": "a2a+p2p", "hierarchical-context-parallel-sizes": (ulysses, strategy.ring)}


def _tensor(words: Words) -> dict[str, Any]:
    strategy, found = words.strategy, dict[str, Any]()
    if words.tp == 1:
        return found
    if strategy.sequence_parallel:
        found["sequence-parallel"] = True
    instead = {
        "sync": "its all-reduce runs behind weight gradients, which no flag forbids",
        **dict.fromkeys(SLICED, "its own overlap behind weight gradients stands for it"),
        "no-communication": "it communicates",
    }
    if strategy.overlap in instead:
        words.cannot(f"overlap.tp = {strategy.overlap} ({instead[strategy.overlap]})")
    return found


def _sharding(words: Words) -> dict[str, Any]:
    """One optimizer shard factor that every later one follows; the rest is Megatron-FSDP's."""
    sharding, replicas, found = words.sharding, words.replicas, dict[str, Any]()
    if replicas == 1:
        return found
    overlap = words.strategy.shard_overlap
    if overlap in ("backward", "both"):
        found["overlap-grad-reduce"] = True
    if sharding.optim == 1:
        return found
    found["use-distributed-optimizer"] = True
    if replicas > sharding.optim:
        found["num-distributed-optimizer-instances"] = replicas // sharding.optim
    if overlap in ("forward", "both"):
        if overlap == "forward":
            words.cannot("overlap.shard = forward (overlap-param-gather needs overlap-grad-reduce)")
        found |= {"overlap-grad-reduce": True, "overlap-param-gather": True}
    grads, params = sharding.grads > 1, sharding.params > 1
    if grads or params:
        shared = "optim_grads_params" if params else "optim_grads"
        found |= {"use-megatron-fsdp": True, "data-parallel-sharding-strategy": shared, "ckpt-format": "fsdp_dtensor"}
    for name in ("grads", "params"):
        factor = getattr(sharding, name)
        if factor not in (1, sharding.optim):
            words.cannot(f"shard.{name} = {factor} (it is sharded {sharding.optim} ways, as optimizer states are)")
    return found


def _pipeline(words: Words) -> dict[str, Any]:
    """Rounds of the pipeline; where stages are unequal, what each holds."""
    if words.section.pp == 1:
        return {}
    cuts = _cuts(words)
    rounds = {"interleaved": words.section.virtual_stages, "zb-v": 2}.get(cuts)
    sizes = [stage.num_layers for stage in words.stages(cuts)]
    if len(set(sizes)) > 1:
        return {"pipeline-model-parallel-layout": layout(sizes)}
    return {"num-virtual-stages-per-pipeline-rank": rounds} if rounds else {}


def _cuts(words: Words) -> str:
    """The schedule by which the model is cut. Interleaved rounds that stand for zb-v keep its stages."""
    if words.section.pp == 1:
        return words.section.schedule
    name = words.schedule("megatron", SCHEDULES, {"zb-v": "interleaved"})
    return "zb-v" if (words.section.schedule, name) == ("zb-v", "interleaved") else name


def _recomputed(words: Words) -> dict[str, Any]:
    strategy = words.strategy
    if strategy.recompute in ("full", "layer"):
        largest = max(stage.num_layers for stage in words.stages(_cuts(words)))
        some = strategy.recompute_layers
        return {
            "recompute-granularity": "full", "recompute-method": "block",
            "recompute-num-layers": largest if some is None else some,
        }  # fmt: skip
    if strategy.recompute == "selective" and words.job.plan.framework == "megatron":
        return {"recompute-granularity": "selective", "recompute-modules": "core_attn"}
    if strategy.recompute == "selective":
        words.cannot("recompute = selective of the MLP's activation (only norms are recomputed)")
        if strategy.recompute_layers is not None:
            words.cannot(f"recompute of {strategy.recompute_layers} layers of every stage (all are recomputed)")
        return {"recompute-granularity": "selective", "recompute-modules": "layernorm"}
    return {}


def _precision(words: Words) -> dict[str, Any]:
    precision = words.job.train.precision
    if precision == "bf16-mixed":
        return {"bf16": True}
    if precision in ("fp8", "mxfp8"):
        gathered = {"fp8-param-gather": True} if words.job.recipe.fp8_param_gather else {}
        return {"bf16": True, "fp8-format": "hybrid", "fp8-recipe": RECIPES[precision]} | gathered
    if precision != "fp32":
        words.cannot(f"train.precision = {precision}")
    return {}


def _recipe(words: Words) -> dict[str, Any]:
    """Types of gradients and moments, and what lies on the host."""
    recipe, found = words.job.recipe, dict[str, Any]()
    if recipe.grad_reduce_in_bf16:
        found["grad-reduce-in-bf16"] = True
    if (recipe.exp_avg_dtype, recipe.exp_avg_sq_dtype) != ("fp32", "fp32"):
        found |= {"use-precision-aware-optimizer": True, "exp-avg-dtype": recipe.exp_avg_dtype}
        found["exp-avg-sq-dtype"] = recipe.exp_avg_sq_dtype
    if recipe.optimizer_offload_fraction:
        found |= {"optimizer-cpu-offload": True, "optimizer-offload-fraction": recipe.optimizer_offload_fraction}
        found["use-precision-aware-optimizer"] = True
    if recipe.activation_offload_fraction:
        words.cannot(f"recipe.activation_offload_fraction = {recipe.activation_offload_fraction} (nothing is moved)")
    if recipe.vocabulary_parallel_stages:
        words.cannot("recipe.vocabulary_parallel_stages (embedding and head stay at the ends)")
    return found


def _model(words: Words) -> dict[str, Any]:
    """Shapes of the model."""
    model = words.model
    found: dict[str, Any] = {flag: getattr(model, name) for flag, name in SHAPES.items()}
    if model.kv_lora_rank:
        found |= {"multi-latent-attention": True} | {flag: getattr(model, name) for flag, (name, _) in LATENT.items()}
        found |= {} if model.rope_scaling else {"rope-type": "rope"}
    elif model.head_size * model.num_heads != model.hidden:
        found["kv-channels"] = model.head_size
    if model.num_kv_heads != model.num_heads:
        found |= {"group-query-attention": True, "num-query-groups": model.num_kv_heads}
    if model.family == "llama":
        found |= dict(LLAMA) | _rotation(words)
    if not model.tied_embeddings:
        found["untie-embeddings-and-output-weights"] = True
    if model.qk_norm:
        found["qk-layernorm"] = True
    if model.window:
        found |= {"window-size": f"{model.window - 1},0"} | _windows(words)
    if model.parallel_block:
        words.cannot("model.parallel_block (attention comes before the MLP)")
    if model.levels:
        words.cannot("model.levels (its layers all have one length)")
    words.cannot("the vocabulary (it is its tokenizer's, padded by make-vocab-size-divisible-by)")
    return found


def _experts(words: Words) -> dict[str, Any]:
    """Routed experts, which ranks share them out, and how tokens reach them."""
    experts, section, recipe = words.model.experts, words.section, words.job.recipe
    if experts is None:
        return {}
    said = {
        "model.experts.count": experts.count, "model.experts.per_token": experts.per_token,
        "model.experts.ffn_hidden": experts.ffn_hidden, "strategy.ep": section.ep,
    }  # fmt: skip
    found: dict[str, Any] = {flag: said[key] for flag, key in EXPERTS.items()} | {"moe-grouped-gemm": True}
    if experts.shared:
        found["moe-shared-expert-intermediate-size"] = experts.shared_width
    if experts.capacity:
        found["moe-expert-capacity-factor"] = experts.capacity
    if experts.first_dense:
        dense, sparse = experts.first_dense, words.model.num_layers - experts.first_dense
        found["moe-layer-freq"] = f"([0]*{dense}+[1]*{sparse})"
    elif experts.every > 1:
        found["moe-layer-freq"] = experts.every
    once = recipe.moe_token_dispatcher == "deepep"
    found["moe-token-dispatcher-type"] = "flex" if once else "alltoall"
    found |= {"moe-flex-dispatcher-backend": "deepep"} if once else {}
    found |= {"overlap-moe-expert-parallel-comm": True} if recipe.overlap_moe_expert_parallel_comm else {}
    return found | ({"expert-tensor-parallel-size": 1} if recipe.expert_tensor_parallel_size else {})


def _rotation(words: Words) -> dict[str, Any]:
    model, found = words.model, dict[str, Any]()
    if model.rope_theta != ROPE_THETA:
        found["rotary-base"] = round(model.rope_theta)
    if model.rope_scaling:
        found |= {"use-rope-scaling": True, "rope-scaling-factor": model.rope_scaling.factor}
        other = {name: getattr(model.rope_scaling, name) for name in ROPE_ORIGINAL}
        if other != ROPE_ORIGINAL:
            words.cannot(f"model.rope_scaling beyond its factor ({other}; it takes {ROPE_ORIGINAL})")
    return found


def _windows(words: Words) -> dict[str, Any]:
    """Layers without a window."""
    model = words.model
    if not model.full_first and not model.full_every:
        return {}
    if not model.full_first:
        return {"window-attn-skip-freq": model.full_every}
    within = [int(bool(model.window_at(layer))) for layer in range(model.num_layers)]
    return {"window-attn-skip-freq": str(within).replace(" ", "")}


def _keep_rules(words: Words, flags: dict[str, Any]) -> None:
    """Change flags that break rules of Megatron-LM's (``megatron_rules``), and name what changes."""
    _keep_optimizer(words, flags)
    refused = broken(_listed(flags))
    if "window-size" in refused:
        flags.pop("hierarchical-context-parallel-sizes", None)
        flags["cp-comm-type"] = "all_gather"
        words.cannot("cp_comm_type of layers with windows (keys and values are gathered, behind nothing)")
    if "num-experts" in refused:
        flags["sequence-parallel"] = True
        words.cannot("sequence_parallel = false (experts of several tensor-parallel ranks need it)")
    if OVERLAP in refused:
        del flags[OVERLAP]
        words.cannot(f"recipe.overlap_moe_expert_parallel_comm (it {refused[OVERLAP].problem})")


def _keep_optimizer(words: Words, flags: dict[str, Any]) -> None:
    """What its distributed optimizer alone has."""
    if {"fp8-param-gather", "use-precision-aware-optimizer"} & broken(_listed(flags)).keys():
        if words.replicas == 1:  # it shares nothing out then
            flags["use-distributed-optimizer"] = True
        else:
            for key in (key for key, names in OF_SHARDS.items() if names[0] in flags):
                words.cannot(f"{key} (its distributed optimizer alone has it)")
            for name in (*chain(*OF_SHARDS.values()), "use-precision-aware-optimizer"):
                flags.pop(name, None)
    if "optimizer-cpu-offload" in broken(_listed(flags)):
        del flags["fp8-param-gather"]
        words.cannot("recipe.fp8_param_gather (beside an optimizer on the host it needs delayed scaling)")


def _listed(flags: dict[str, Any]) -> Flags:
    """Values as a command line has them."""
    return {name: () if value is True else tuple(map(str, _several(value))) for name, value in flags.items()}


def _several(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)
