"""A strategy as a configuration of DeepSpeed (JSON), and what the program that it starts has to say besides.

The configuration has batches, ZeRO, precision and the optimizer. The model, its pipeline and its
recomputation are the program's: what of them no key says is named.
"""

from __future__ import annotations

import json
from typing import Any

from plait.core.parallel.strategy import SLICED
from plait.plan.emit_words import Emitted, Words

TARGET = "DeepSpeed 0.19.8"


def deepspeed(words: Words) -> Emitted:
    """The configuration, as text."""
    job = words.job
    _unsaid(words)
    settings: dict[str, Any] = {
        "train_batch_size": job.train.global_batch_size,
        "train_micro_batch_size_per_gpu": words.micro,
        "gradient_accumulation_steps": job.num_micro_batches,
        "gradient_clipping": job.train.clip_grad,
    }
    settings |= _precision(words) | _optimizer(words) | {"zero_optimization": _zero(words)}
    settings |= _tensor_parallel(words) | _context_parallel(words) | _pipeline(words) | _recomputed(words)
    return Emitted(json.dumps(settings, indent=2) + "\n", words.unsaid, TARGET)


def _unsaid(words: Words) -> None:
    """Name what no key says."""
    job, strategy, recipe = words.job, words.strategy, words.job.recipe
    words.cannot("the model, its sequences and ranks (the program's, which the prediction takes from the job)")
    if job.train.rampup_batch_size:
        words.cannot("train.rampup_batch_size (its batch has one size)")
    if (strategy.p1, strategy.p2) != (1, 1) and words.tp > 1:
        words.cannot(f"slices {strategy.p1}x{strategy.p2} of Domino (its own Domino is a model's code)")
    if strategy.cuda_graphs:
        words.cannot("cuda_graphs (nothing is captured)")
    if strategy.compile:
        words.cannot("compile (the program calls engine.compile())")
    types = {"train.optimizer_dtype": job.train.optimizer_dtype, "recipe.exp_avg_dtype": recipe.exp_avg_dtype,
             "recipe.exp_avg_sq_dtype": recipe.exp_avg_sq_dtype}  # fmt: skip
    for key, kind in types.items():
        if kind not in ("master", "fp32"):
            words.cannot(f"{key} = {kind} (moments are in fp32)")
    if recipe.activation_offload_fraction:
        words.cannot(f"recipe.activation_offload_fraction = {recipe.activation_offload_fraction} (nothing is moved)")
    if recipe.vocabulary_parallel_stages:
        words.cannot("recipe.vocabulary_parallel_stages (embedding and head stay at the ends)")


def _precision(words: Words) -> dict[str, Any]:
    """Gradients are summed as the model computes."""
    precision = words.job.train.precision
    if precision not in ("fp32", "bf16-mixed"):
        words.cannot(f"train.precision = {precision} (fp32 stands for it)")
    return {"bf16": {"enabled": True}} if precision == "bf16-mixed" else {}


def _optimizer(words: Words) -> dict[str, Any]:
    train = words.job.train
    told: dict[str, Any] = {"lr": train.learning_rate, "weight_decay": train.weight_decay}
    if train.optimizer == "adamw":
        return {
            "optimizer": {"type": "AdamW", "params": told | {"betas": list(train.adam_betas), "eps": train.adam_eps}}
        }
    if train.optimizer == "muon":
        return {"optimizer": {"type": "Muon", "params": told | {"momentum": train.muon.momentum}}}
    sgd = told | {"momentum": train.sgd.momentum, "nesterov": train.sgd.nesterov}
    return {"optimizer": {"type": "SGD", "params": sgd}, "zero_allow_untested_optimizer": True}


def _zero(words: Words) -> dict[str, Any]:
    """The stage that shares out as much as the strategy does."""
    sharding, replicas = words.sharding, words.replicas
    factors = {"params": sharding.params, "grads": sharding.grads, "optim": sharding.optim}
    for name, factor in factors.items():
        if factor not in (1, replicas):
            words.cannot(f"shard.{name} = {factor} (ZeRO shares out over all {replicas} ranks that hold the same)")
    overlap = words.strategy.shard_overlap
    if overlap in ("forward", "backward") and replicas > 1:
        words.cannot(f"overlap.shard = {overlap} (overlap_comm is about both)")
    stage = sum(factor > 1 for factor in factors.values())
    if stage > 1 and words.section.pp > 1:
        words.cannot(f"ZeRO-{stage} within a pipeline (ZeRO-1 stands for it)")
        stage = 1
    found: dict[str, Any] = {"stage": stage, "overlap_comm": overlap != "none"}
    if sharding.secondary and stage == 3:
        found["zero_hpz_partition_size"] = sharding.secondary
    if fraction := words.job.recipe.optimizer_offload_fraction:
        found["offload_optimizer"] = {"device": "cpu"} | ({"ratio": fraction} if stage == 3 else {})
        if stage < 3 and fraction < 1:
            words.cannot(
                f"recipe.optimizer_offload_fraction = {fraction} (before stage 3 all or nothing is on the host)"
            )
        if not stage:
            words.cannot("recipe.optimizer_offload_fraction without sharding (it is ZeRO that offloads)")
    return found


def _tensor_parallel(words: Words) -> dict[str, Any]:
    strategy = words.strategy
    if words.tp == 1:
        return {}
    if strategy.sequence_parallel:
        words.cannot("sequence_parallel (every rank has the whole residual stream)")
    if strategy.overlap in (*SLICED, "no-communication"):
        words.cannot(f"overlap.tp = {strategy.overlap} (tp_overlap_comm stands for it)")
    if words.section.pp > 1:
        words.cannot(
            f"strategy.tp = {words.tp} within a pipeline (the program's mpu; autotp_size is what is read back)"
        )
    return {"tensor_parallel": {"autotp_size": words.tp, "tp_overlap_comm": strategy.overlap != "sync"}}


def _context_parallel(words: Words) -> dict[str, Any]:
    strategy = words.strategy
    if strategy.cp == 1:
        return {}
    if words.section.pp > 1:
        words.cannot(f"cp = {strategy.cp} within a pipeline, which it refuses: say pp = 1")
    if strategy.ring > 1:
        words.cannot(f"cp_comm_type with rings of {strategy.ring} (all exchange heads)")
    return {"sequence_parallel_size": strategy.cp}


def _pipeline(words: Words) -> dict[str, Any]:
    """Stages, and whether each of their layers is computed again."""
    if words.section.pp == 1:
        return {}
    words.schedule("deepspeed", ("1f1b",), {})
    if words.section.stage_layers:
        words.cannot(f"stage_layers = {list(words.section.stage_layers)} (PipelineModule's partition_method says it)")
    again = words.strategy.recompute in ("full", "layer")
    return {"pipeline": {"stages": words.section.pp, "activation_checkpoint_interval": int(again)}}


def _recomputed(words: Words) -> dict[str, Any]:
    """How what is computed again is kept. That it is, a pipeline's key says, and else the model."""
    strategy = words.strategy
    if strategy.recompute == "none":
        return {}
    if strategy.recompute_layers is not None:
        words.cannot(f"recompute of {strategy.recompute_layers} layers of every stage (all are recomputed)")
    if strategy.recompute == "selective":
        words.cannot("recompute = selective (nothing is recomputed)")
        return {}
    if words.section.pp == 1:
        words.cannot("recompute = full (the model's code asks for it, as by gradient_checkpointing_enable(); the "
                     "prediction counts on it)")  # fmt: skip
    return {"activation_checkpointing": {"partition_activations": False, "cpu_checkpointing": False}}
