"""Writer of a strategy as a torchtitan 0.3.0 configuration: a Python module with a function that
changes a registered configuration. torchtitan dropped TOML files in February 2026.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

from plait.formats.base.rows import Emitted, WriterContext
from plait.formats.torchtitan.keys import BATCHES, DETAILS, FLAVORS, KEYS, SAME, SCHEDULES, UNKNOWN, Flavor

TARGET = "torchtitan 0.3.0"
NEAREST = {"eager-1f1b": "1f1b", "slack-1f1b": "1f1b", "zb-h1": "1f1b", "zb-h2": "1f1b"}
"""Replacements of schedules that torchtitan lacks. torch's InterleavedZeroBubble has several stages
per rank, so it is neither ZB-H1 nor ZB-H2."""


def write_torchtitan(words: WriterContext) -> Emitted:
    """Return the module's text."""
    settings = KEYS.write(words) | {
        "training.local_batch_size": words.micro * (words.job.num_micro_batches if words.section.pp > 1 else 1),
        "training.disable_cuda_graphs": not _captures(words),
    }
    settings |= _data_parallel(words) | _tensor_parallel(words)
    pipeline, cuts = _pipeline(words)
    lines = [f"{key} = {value!r}" for key, value in (settings | pipeline).items()]
    if cuts:
        lines += [
            f"first = {cuts}  # layer of every stage, and the end",
            'parts = [[f"layers.{layer}" for layer in range(*ends)] for ends in pairwise(first)]',
            'parts[0].insert(0, "tok_embeddings")',
            'parts[-1] += ["norm", "lm_head"]',
            "parallelism.module_fqns_per_model_part = parts",
        ]
    policy = _recomputed(words)
    lines.append(f"config.activation_checkpoint = {f'{policy}.Config()' if policy else None}")
    return Emitted(_module(words, lines, policy, cuts), words.unsupported, TARGET)


def _module(words: WriterContext, lines: list[str], policy: str, cuts: list[int]) -> str:
    model = words.model
    shape = (
        model.num_layers, model.hidden, model.num_heads, model.num_kv_heads, model.ffn_hidden, bool(model.qk_norm)
    )  # fmt: skip
    known = FLAVORS.get(shape, UNKNOWN) if model.family == "llama" and not model.experts else UNKNOWN
    if known is UNKNOWN:
        words.note_unsupported("the model's shapes (name a module, a configuration and a flavor that have them)")
    _differs(words, known)
    imports = [
        f"from torchtitan.models.{known.family} import model_registry",
        f"from torchtitan.models.{known.family}.config_registry import {known.base} as base",
    ]
    if policy:
        imports.insert(0, f"from torchtitan.distributed.activation_checkpoint import {policy}")
    if cuts:
        imports.insert(0, "from itertools import pairwise\n")
    body = [
        "config = base()",
        f'config.model_spec = model_registry("{known.name}")',
        "training, parallelism, compile = config.training, config.parallelism, config.compile",
    ]
    return "\n".join(
        [
            f"# For {TARGET}, saved as plait_plan.py; {words.job.world_size} ranks.",
            *imports, "", "", "def planned():", *(f"    {line}" for line in (*body, *lines, "return config")), "",
        ]
    )  # fmt: skip


def _differs(words: WriterContext, known: Flavor) -> None:
    """Note how the flavor differs from the model; for an unknown flavor, note values that it would
    need."""
    model = words.model
    for name, theirs in DETAILS.get(known.family, SAME).items():
        ours = getattr(model, name)
        if ours != theirs and (name, ours) != ("vocab", 1):
            words.note_unsupported(f"model.{name} = {ours} (theirs has {theirs})")
    scaled, theirs = model.rope_scaling is not None, known.family == "llama3"
    if known.family in DETAILS and scaled != theirs:
        words.note_unsupported(
            f"model.rope_scaling, {'which theirs has not' if scaled else 'which theirs has (that of 3.1)'}"
        )


def _captures(words: WriterContext) -> bool:
    """True if the step is captured as a CUDA graph; torchtitan captures only whole steps without a
    pipeline."""
    if words.strategy.cuda_graphs and words.section.pp > 1:
        words.note_unsupported("cuda_graphs (it has none with pipelines)")
    return words.strategy.cuda_graphs and words.section.pp == 1


def _data_parallel(words: WriterContext) -> dict[str, Any]:
    """Return the data-parallel settings. Context-parallel ranks always shard weights; FSDP2 has one
    shard factor for parameters, gradients and optimizer states."""
    sharding, cp = words.sharding, words.section.cp
    factors = sharding.params, sharding.grads, sharding.optim
    wanted = max(factors)
    shard = max(1, wanted // cp)
    if shard * cp != wanted:
        words.note_unsupported(
            f"shard.optim = {wanted} (FSDP2 also shards over the {cp} context-parallel ranks: {shard * cp})"
        )
    planned = words.job.plan.framework == "torchtitan"  # planned with FSDP2's own sharding
    if len(set(factors)) > 1 and factors[:2] != (1, wanted) and not planned:
        told = f"params {factors[0]}, grads {factors[1]}, optim {factors[2]}"
        words.note_unsupported(f"shard factors that differ ({told}; all three become {shard * cp})")
    kept = factors[0] == 1 and wanted > 1
    if kept and not planned:
        words.note_unsupported(
            "shard.params = 1 (parameters are gathered in every forward and kept until its backward)"
        )
    if words.strategy.shard_overlap != "both" and words.replicas > 1:
        words.note_unsupported(f"overlap.shard = {words.strategy.shard_overlap} (FSDP2 always prefetches)")
    after = {"parallelism.fsdp_reshard_after_forward": "never" if kept else "always"} if wanted > 1 else {}
    return {
        "parallelism.data_parallel_replicate_degree": words.dp // shard,
        "parallelism.data_parallel_shard_degree": shard,
    } | after


def _tensor_parallel(words: WriterContext) -> dict[str, Any]:
    """Return the settings of compilation and tensor parallelism. The step is always compiled, like
    the published steps that predictions are fitted to."""
    strategy = words.strategy
    if strategy.cp > 1 and strategy.ring < strategy.cp:
        words.note_unsupported(
            f"cp_comm_type with {strategy.cp // strategy.ring} ranks that exchange heads (all are one ring)"
        )
    found: dict[str, Any] = {"compile.enable": True}
    if words.tp > 1 and strategy.overlap != "sync":
        words.note_unsupported(
            f"overlap.tp = {strategy.overlap} (async tensor parallelism, which needs compile, is nearest)"
        )
        found["compile.enable_async_tensor_parallel"] = True
    return found


def _pipeline(words: WriterContext) -> tuple[dict[str, Any], list[int]]:
    """Return the pipeline's settings, and the first layer of every stage followed by the number of
    layers."""
    if words.section.pp == 1:
        return {}, []
    name = words.schedule("torchtitan", SCHEDULES, NEAREST)
    found = {"parallelism.pipeline_parallel_schedule": SCHEDULES[name], BATCHES[1]: words.micro}
    return found, list(accumulate((stage.num_layers for stage in words.stages(name)), initial=0))


def _recomputed(words: WriterContext) -> str:
    """Return the name of the recomputation policy; empty without recomputation."""
    strategy = words.strategy
    if strategy.recompute != "none" and strategy.recompute_layers is not None:
        words.note_unsupported(f"recompute of {strategy.recompute_layers} layers of every stage (all are recomputed)")
    if strategy.recompute == "selective":
        words.note_unsupported("recompute = selective as ours (theirs also recomputes some matrix products)")
    return {"none": "", "selective": "SelectiveAC", "full": "FullAC", "layer": "FullAC"}[strategy.recompute]
