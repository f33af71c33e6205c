"""A strategy as a configuration of torchtitan 0.3.0: a Python module with a function that changes one of its
registered configurations. Its TOML files are gone since February 2026.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any, NamedTuple

from plait.plan.emit_words import Emitted, Words

TARGET = "torchtitan 0.3.0"
SCHEDULES = {"gpipe": "GPipe", "1f1b": "1F1B", "interleaved": "Interleaved1F1B", "zb-v": "ZBVZeroBubble"}
"""torchtitan passes the names of torch's schedule classes on."""
NEAREST = {"eager-1f1b": "1f1b", "slack-1f1b": "1f1b", "zb-h1": "1f1b", "zb-h2": "1f1b"}
"""torch's InterleavedZeroBubble has several stages a rank, so it is neither ZB-H1 nor ZB-H2."""
TYPES = {"bf16-mixed": "bfloat16", "fp32": "float32"}


class Flavor(NamedTuple):
    """A model of theirs. base: a registered configuration with its vocabulary and without fp8."""

    family: str
    base: str
    name: str


FLAVORS = {
    (32, 4096, 32, 8, 14336, False): Flavor("llama3", "llama3_8b", "8B"),
    (80, 8192, 64, 8, 28672, False): Flavor("llama3", "llama3_70b", "70B"),
    (126, 16384, 128, 8, 53248, False): Flavor("llama3", "llama3_70b", "405B"),
    (36, 4096, 32, 8, 12288, True): Flavor("qwen3", "qwen3_14b", "8B"),
    (40, 5120, 40, 8, 17408, True): Flavor("qwen3", "qwen3_14b", "14B"),
    (64, 5120, 64, 8, 25600, True): Flavor("qwen3", "qwen3_32b", "32B"),
}
"""By layers, hidden size, heads, key/value heads, feed-forward size, and whether queries and keys are
normalised."""
UNKNOWN = Flavor("MODULE", "CONFIGURATION", "FLAVOR")
SAME: dict[str, Any] = {
    "tied_embeddings": False, "parallel_block": False, "window": 0, "dropout": 0.0, "attention_dropout": 0.0,
}  # fmt: skip
DETAILS: dict[str, dict[str, Any]] = {
    "llama3": SAME | {"vocab": 128256, "rope_theta": 500000.0, "norm_eps": 1e-5, "head_size": 128},
    "qwen3": SAME | {"vocab": 151936, "rope_theta": 1000000.0, "norm_eps": 1e-6, "head_size": 128},
}
"""Of all flavors of a family, what a model may have otherwise. All of llama3's have 3.1's frequencies."""


def torchtitan(words: Words) -> Emitted:
    """The module, as text."""
    job = words.job
    words.common()
    if job.train.rampup_batch_size:
        words.cannot("train.rampup_batch_size (its batch has one size)")
    training: dict[str, Any] = {
        "local_batch_size": words.micro * (job.num_micro_batches if words.section.pp > 1 else 1),
        "global_batch_size": job.train.global_batch_size,
        "seq_len": job.data.sequence_length,
        "disable_cuda_graphs": not _captures(words),
    }
    if job.train.precision in TYPES:
        training["mixed_precision_param"] = TYPES[job.train.precision]
    else:
        words.cannot(f"train.precision = {job.train.precision} (the configuration's own stands)")
    parallelism = _data_parallel(words) | _tensor_parallel(words) | _context_parallel(words)
    pipeline, cuts = _pipeline(words)
    settings = {"training": training, "parallelism": parallelism | pipeline, "compile": _compiled(words)}
    lines = [f"{table}.{key} = {value!r}" for table, values in settings.items() for key, value in values.items()]
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
    return Emitted(_module(words, lines, policy, cuts), words.unsaid, TARGET)


def _module(words: Words, lines: list[str], policy: str, cuts: list[int]) -> str:
    model = words.model
    shape = (
        model.num_layers, model.hidden, model.num_heads, model.num_kv_heads, model.ffn_hidden, bool(model.qk_norm)
    )  # fmt: skip
    known = FLAVORS.get(shape, UNKNOWN) if model.family == "llama" and not model.experts else UNKNOWN
    if known is UNKNOWN:
        words.cannot("the model's shapes (name a module, a configuration and a flavor that have them)")
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
            f"# For {TARGET}, saved as plait_plan.py; {words.ranks} ranks.",
            *imports, "", "", "def planned():", *(f"    {line}" for line in (*body, *lines, "return config")), "",
        ]
    )  # fmt: skip


def _differs(words: Words, known: Flavor) -> None:
    """Name what the flavor has otherwise; of an unknown one, what it would have to have."""
    model = words.model
    for name, theirs in DETAILS.get(known.family, SAME).items():
        ours = getattr(model, name)
        if ours != theirs and (name, ours) != ("vocab", 1):
            words.cannot(f"model.{name} = {ours} (theirs has {theirs})")
    scaled, theirs = model.rope_scaling is not None, known.family == "llama3"
    if known.family in DETAILS and scaled != theirs:
        words.cannot(f"model.rope_scaling, {'which theirs has not' if scaled else 'which theirs has (that of 3.1)'}")
    if model.levels:
        words.cannot(f"model.levels = {model.levels} (its layers all have one length)")


def _captures(words: Words) -> bool:
    """CUDA graphs, which it has of whole steps without pipelines."""
    if words.strategy.cuda_graphs and words.section.pp > 1:
        words.cannot("cuda_graphs (it has none with pipelines)")
    return words.strategy.cuda_graphs and words.section.pp == 1


def _data_parallel(words: Words) -> dict[str, Any]:
    """Context parallel ranks always share out weights; FSDP2 has one factor for parameters, gradients and
    optimizer states."""
    sharding, cp = words.sharding, words.section.cp
    factors = sharding.params, sharding.grads, sharding.optim
    wanted = max(factors)
    shard = max(1, wanted // cp)
    if shard * cp != wanted:
        words.cannot(f"shard.optim = {wanted} (FSDP2 shards over the {cp} ranks of a sequence as well: {shard * cp})")
    planned = words.job.plan.framework == "torchtitan"  # with what it does
    if len(set(factors)) > 1 and factors[:2] != (1, wanted) and not planned:
        told = f"params {factors[0]}, grads {factors[1]}, optim {factors[2]}"
        words.cannot(f"shard factors that differ ({told}; all three become {shard * cp})")
    kept = factors[0] == 1 and wanted > 1
    if kept and not planned:
        words.cannot("shard.params = 1 (parameters are gathered in every forward and kept until its backward)")
    if words.strategy.shard_overlap != "both" and words.replicas > 1:
        words.cannot(f"overlap.shard = {words.strategy.shard_overlap} (FSDP2 always prefetches)")
    found: dict[str, Any] = {
        "data_parallel_replicate_degree": words.dp // shard,
        "data_parallel_shard_degree": shard,
    }
    return found | ({"fsdp_reshard_after_forward": "never" if kept else "always"} if wanted > 1 else {})


def _tensor_parallel(words: Words) -> dict[str, Any]:
    found: dict[str, Any] = {"tensor_parallel_degree": words.tp}
    return found | ({"enable_sequence_parallel": words.strategy.sequence_parallel} if words.tp > 1 else {})


def _context_parallel(words: Words) -> dict[str, Any]:
    strategy = words.strategy
    if strategy.cp > 1 and strategy.ring < strategy.cp:
        words.cannot(f"cp_comm_type with {strategy.cp // strategy.ring} ranks that exchange heads (all are one ring)")
    return {"context_parallel_degree": words.section.cp}


def _compiled(words: Words) -> dict[str, Any]:
    """Compiled, whatever the strategy says: so are the published steps that predictions are fitted to."""
    strategy = words.strategy
    beside = words.tp > 1 and strategy.overlap != "sync"
    if beside:
        words.cannot(f"overlap.tp = {strategy.overlap} (async tensor parallelism, which needs compile, is nearest)")
    return {"enable": True} | ({"enable_async_tensor_parallel": True} if beside else {})


def _pipeline(words: Words) -> tuple[dict[str, Any], list[int]]:
    """Settings, and the first layer of every stage with the number of layers behind them."""
    found: dict[str, Any] = {"pipeline_parallel_degree": words.section.pp}
    if words.section.pp == 1:
        return found, []
    name = words.schedule("torchtitan", SCHEDULES, NEAREST)
    found |= {"pipeline_parallel_schedule": SCHEDULES[name], "pipeline_parallel_microbatch_size": words.micro}
    return found, list(accumulate((stage.num_layers for stage in words.stages(name)), initial=0))


def _recomputed(words: Words) -> str:
    """The name of a policy; nothing where nothing is recomputed."""
    strategy = words.strategy
    if strategy.recompute != "none" and strategy.recompute_layers is not None:
        words.cannot(f"recompute of {strategy.recompute_layers} layers of every stage (all are recomputed)")
    if strategy.recompute == "selective":
        words.cannot("recompute = selective as ours (theirs also recomputes some matrix products)")
    return {"none": "", "selective": "SelectiveAC", "full": "FullAC", "layer": "FullAC"}[strategy.recompute]
