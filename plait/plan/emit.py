"""A strategy in the words of other frameworks: torchtitan's TOML and Megatron-LM's command line.

Named after torchtitan's ``job_config.py`` and Megatron-LM's ``arguments.py`` of 2025. A framework cannot say
everything that a strategy says: each such thing becomes one line of ``Emitted.unsaid``, and what is said in
its place is the nearest that the framework knows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from plait.core.base.codec.toml_text import to_toml
from plait.core.base.errors import JobError, nearest
from plait.core.job.spec import Job
from plait.core.parallel.strategy import Strategy

TITAN_SCHEDULES = {"gpipe": "GPipe", "1f1b": "1F1B", "interleaved": "Interleaved1F1B", "zb-v": "ZBVZeroBubble"}
"""torchtitan passes the names of torch's schedule classes on."""
TITAN_NEAREST = {"eager-1f1b": "1f1b", "slack-1f1b": "1f1b", "zb-h1": "1f1b", "zb-h2": "1f1b"}
"""torch's InterleavedZeroBubble has several stages a rank, so it is neither ZB-H1 nor ZB-H2."""
TITAN_TYPES = {"bf16-mixed": "bfloat16", "fp32": "float32"}
MEGATRON_SCHEDULES = ("1f1b", "interleaved")


@dataclass
class Emitted:
    """text: a file, or a command line. unsaid: what the framework cannot say, and what stands there
    instead."""

    text: str = ""
    unsaid: list[str] = field(default_factory=list[str])


def check_framework(framework: str) -> None:
    """Raise JobError for a name that ``emit`` does not know."""
    if framework not in FRAMEWORKS:
        raise JobError(
            f"nothing is known of '{framework}'{nearest(framework, FRAMEWORKS)}", key="--show",
            fix=f"Use {' or '.join(FRAMEWORKS)}",
        )  # fmt: skip


def emit(job: Job, framework: str) -> Emitted:
    """A job that leaves nothing open, for ``torchtitan`` or ``megatron``. Raises JobError for other names."""
    check_framework(framework)
    words = _Words(job)
    if len(set(job.degrees)) > 1:
        words.cannot("unequal places of the pipeline (the first place's tp and dp stand for all)")
    return FRAMEWORKS[framework](words)


class _Words:
    """What both need of a job, and what could not be said so far."""

    def __init__(self, job: Job) -> None:
        self.job, self.section, self.strategy = job, job.strategy, job.base_strategy
        self.dp, self.tp = job.degrees[0]
        self.micro = -(-job.micro_batch // self.dp)
        self.sharding = job.sharding(self.dp * job.strategy.cp)
        self.replicas = self.dp * job.strategy.cp
        self.unsaid: list[str] = []

    def cannot(self, what: str) -> None:
        """Name something."""
        self.unsaid.append(what)

    def common(self) -> None:
        """What neither framework has a setting for."""
        strategy, sharding = self.strategy, self.sharding
        if strategy.overlap == "domino" and self.tp > 1 and (strategy.p1, strategy.p2) != (1, 1):
            self.cannot(f"slices {strategy.p1}x{strategy.p2} of Domino (their batch is not sliced)")
        if self.section.stage_layers:
            self.cannot(f"stage_layers = {list(self.section.stage_layers)} (their split is even)")
        if sharding.secondary:
            self.cannot(f"shard.secondary = {sharding.secondary} (no second copy of parameters is kept)")
        if strategy.cuda_graphs:
            self.cannot("cuda_graphs (what they capture are layers or steps, collectives included)")

    def schedule(self, known: Mapping[str, str] | tuple[str, ...], instead: Mapping[str, str]) -> str:
        """The schedule, or the one that stands for it."""
        name = self.section.schedule
        if name in known:
            return name
        other = instead.get(name, "1f1b")
        self.cannot(f"schedule = {name} ({other} stands for it)")
        return other


def _torchtitan(words: _Words) -> Emitted:
    job, section, strategy = words.job, words.section, words.strategy
    words.common()
    parallel: dict[str, Any] = _titan_data_parallel(words)
    parallel |= {"tensor_parallel_degree": words.tp, "pipeline_parallel_degree": section.pp}
    parallel |= {"context_parallel_degree": section.cp}
    if section.cp > 1:
        parallel["context_parallel_rotate_method"] = "alltoall" if strategy.ring > 1 else "allgather"
        if strategy.ring < strategy.cp:
            words.cannot(
                f"cp_comm_type with {strategy.cp // strategy.ring} ranks that exchange heads (all are one ring)"
            )
    if words.tp > 1 and not strategy.sequence_parallel:
        words.cannot("sequence_parallel = false (theirs is always on with tensor parallelism)")
    if words.tp > 1 and strategy.overlap != "sync":
        words.cannot(f"overlap.tp = {strategy.overlap} (async tensor parallelism, which needs compile, is nearest)")
        parallel["enable_async_tensor_parallel"] = True
    if words.strategy.shard_overlap != "both" and words.replicas > 1:
        words.cannot(f"overlap.shard = {strategy.shard_overlap} (FSDP2 always prefetches)")
    local = words.micro
    if section.pp > 1:
        name = words.schedule(TITAN_SCHEDULES, TITAN_NEAREST)
        stages = section.pp * (2 if name == "zb-v" else section.virtual_stages if name == "interleaved" else 1)
        layers = job.model_spec(vocab=1).num_layers
        if layers % stages and not section.stage_layers:
            words.cannot(f"{layers} layers over {stages} stages as equal as can be (theirs may cut elsewhere)")
        parallel |= {
            "pipeline_parallel_schedule": TITAN_SCHEDULES[name],
            "pipeline_parallel_layers_per_stage": -(-layers // stages),
            "pipeline_parallel_microbatch_size": words.micro,
        }
        local = words.micro * job.num_micro_batches
    training: dict[str, Any] = {
        "local_batch_size": local,
        "global_batch_size": job.train.global_batch_size,
        "seq_len": job.data.sequence_length,
    }
    if job.train.precision in TITAN_TYPES:
        training |= {"mixed_precision_param": TITAN_TYPES[job.train.precision], "mixed_precision_reduce": "float32"}
    else:
        words.cannot(f"train.precision = {job.train.precision}")
    tables: dict[str, Any] = {
        "training": training, "parallelism": parallel, "activation_checkpoint": _titan_recompute(words, strategy)
    }  # fmt: skip
    if strategy.compile or parallel.get("enable_async_tensor_parallel"):
        tables["compile"] = {"enable": True}
    words.cannot("the model's shapes (they are a flavor that model.flavor names)")
    return Emitted(to_toml(tables), words.unsaid)


def _titan_data_parallel(words: _Words) -> dict[str, Any]:
    """Context parallel ranks always share out weights; FSDP2 has one factor for parameters, gradients and
    optimizer states."""
    sharding, cp = words.sharding, words.section.cp
    factors = sharding.params, sharding.grads, sharding.optim
    wanted = max(factors)
    shard = max(1, wanted // cp)
    if shard * cp != wanted:
        words.cannot(f"shard.optim = {wanted} (FSDP2 shards over the {cp} ranks of a sequence as well: {shard * cp})")
    if len(set(factors)) > 1 and factors[:2] != (1, wanted):
        told = f"params {factors[0]}, grads {factors[1]}, optim {factors[2]}"
        words.cannot(f"shard factors that differ ({told}; all three become {shard * cp})")
    kept = factors[0] == 1 and wanted > 1
    if kept:
        words.cannot("shard.params = 1 (parameters are gathered in every forward and kept until its backward)")
    found: dict[str, Any] = {
        "data_parallel_replicate_degree": words.dp // shard,
        "data_parallel_shard_degree": shard,
    }
    return found | ({"fsdp_reshard_after_forward": "never" if kept else "always"} if wanted > 1 else {})


def _titan_recompute(words: _Words, strategy: Strategy) -> dict[str, Any]:
    if strategy.recompute != "none" and strategy.recompute_layers is not None:
        words.cannot(f"recompute of {strategy.recompute_layers} layers of every stage (all are recomputed)")
    if strategy.recompute == "selective":
        words.cannot("recompute = selective as ours (theirs also recomputes some matrix products)")
        return {"mode": "selective", "selective_ac_option": "op"}
    return {"mode": strategy.recompute}


def _megatron(words: _Words) -> Emitted:
    job, section, strategy = words.job, words.section, words.strategy
    words.common()
    flags: dict[str, Any] = {
        "tensor-model-parallel-size": words.tp,
        "pipeline-model-parallel-size": section.pp,
        "context-parallel-size": section.cp,
        "micro-batch-size": words.micro,
        "global-batch-size": job.train.global_batch_size,
        "seq-length": job.data.sequence_length,
    }
    flags |= _megatron_context(strategy) | _megatron_tensor(words) | _megatron_sharding(words)
    stages = section.pp
    if section.pp > 1 and words.schedule(MEGATRON_SCHEDULES, {"zb-v": "interleaved"}) == "interleaved":
        chunks = 2 if section.schedule == "zb-v" else section.virtual_stages
        flags["num-virtual-stages-per-pipeline-rank"] = chunks
        stages *= chunks
    if strategy.recompute == "full":
        layers = job.model_spec(vocab=1).num_layers
        of_all = -(-layers // stages)
        some = strategy.recompute_layers
        flags |= {"recompute-granularity": "full", "recompute-method": "block"}
        flags["recompute-num-layers"] = of_all if some is None else some
    elif strategy.recompute == "selective":
        flags |= {"recompute-granularity": "selective", "recompute-modules": "layernorm"}
        words.cannot("recompute = selective of the MLP's activation (only norms are recomputed)")
        if strategy.recompute_layers is not None:
            words.cannot(f"recompute of {strategy.recompute_layers} layers of every stage (all are recomputed)")
    if strategy.compile:
        words.cannot("compile (its own fused kernels stand for it)")
    if job.train.precision == "bf16-mixed":
        flags["bf16"] = True
    elif job.train.precision != "fp32":
        words.cannot(f"train.precision = {job.train.precision}")
    words.cannot("the model's shapes (num-layers, hidden-size and the like are not part of a strategy)")
    lines = [f"--{name}" if value is True else f"--{name} {value}" for name, value in flags.items()]
    return Emitted(" \\\n".join(lines) + "\n", words.unsaid)


def _megatron_context(strategy: Strategy) -> dict[str, Any]:
    if strategy.cp == 1:
        return {}
    ulysses = strategy.cp // strategy.ring
    if 1 in (ulysses, strategy.ring):
        return {"cp-comm-type": "a2a" if strategy.ring == 1 else "p2p"}
    return {"cp-comm-type": "a2a+p2p", "hierarchical-context-parallel-sizes": f"{ulysses} {strategy.ring}"}


def _megatron_tensor(words: _Words) -> dict[str, Any]:
    strategy, found = words.strategy, dict[str, Any]()
    if words.tp == 1:
        return found
    if strategy.sequence_parallel:
        found["sequence-parallel"] = True
    if strategy.overlap == "sync":
        found["no-async-tensor-model-parallel-allreduce"] = True
    elif strategy.overlap == "domino":
        words.cannot("overlap.tp = domino (its own overlap behind weight gradients stands for it)")
    elif strategy.overlap == "no-communication":
        words.cannot("overlap.tp = no-communication")
    return found


def _megatron_sharding(words: _Words) -> dict[str, Any]:
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
        found |= {"use-megatron-fsdp": True, "data-parallel-sharding-strategy": shared}
    for name in ("grads", "params"):
        factor = getattr(sharding, name)
        if factor not in (1, sharding.optim):
            words.cannot(f"shard.{name} = {factor} (it is sharded {sharding.optim} ways, as optimizer states are)")
    return found


FRAMEWORKS: Mapping[str, Callable[[_Words], Emitted]] = {"torchtitan": _torchtitan, "megatron": _megatron}
