"""Keys of a job file as earlier versions and other frameworks call them, and as they are called now."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from plait.core.base.errors import JobError

KEYS = {
    "data.sequence": "data.sequence_length",
    "train.batch": "train.global_batch_size",
    "train.micro_batch": "train.micro_batch_size",
    "train.dtype": "train.precision",
    "train.clip_norm": "train.clip_grad",
    "train.eps": "train.adam_eps",
    "train.betas": "train.adam_betas",
    "strategy.sp": "strategy.cp",
    "strategy.sp_kind": "strategy.cp_comm_type",
    "strategy.cp_kind": "strategy.cp_comm_type",
    "strategy.interleave": "strategy.virtual_stages",
    "strategy.slices.p1": "strategy.slices.batch",
    "strategy.slices.p2": "strategy.slices.columns",
    "strategy.p1": "strategy.slices.batch",
    "strategy.p2": "strategy.slices.columns",
    "slurm.grace": "slurm.signal_time",
    "kubernetes.restarts": "kubernetes.max_restarts",
    "kubernetes.spares": "kubernetes.spare_nodes",
    "kubernetes.queue": "kubernetes.kueue_queue",
    "kubernetes.topology": "kubernetes.kueue_topology",
    "kubernetes.stage_topology": "kubernetes.kueue_stage_topology",
}
"""Of a job file, by tables and name."""
_PEERS = {
    "model.hidden": "hidden_size dim n_embd",
    "model.num_layers": "n_layers num_hidden_layers n_layer",
    "model.num_heads": "n_heads num_attention_heads n_head",
    "model.num_kv_heads": "n_kv_heads num_key_value_heads num_query_groups",
    "model.head_size": "head_dim kv_channels",
    "model.ffn_hidden": "ffn_hidden_size intermediate_size n_inner",
    "model.vocab": "vocab_size",
    "model.max_sequence": "max_position_embeddings max_seq_len n_positions",
    "model.norm_eps": "rms_norm_eps layer_norm_epsilon layernorm_epsilon",
    "data.sequence_length": "seq_len seq_length max_context_length",
    "train.global_batch_size": "train_batch_size batch_size",
    "train.micro_batch_size": "local_batch_size train_micro_batch_size_per_gpu per_device_train_batch_size",
    "train.warmup_steps": "lr_warmup_iters warmup_iters num_warmup_steps",
    "train.lr_decay_style": "lr_scheduler lr_scheduler_type",
    "train.lr_decay_steps": "lr_decay_iters",
    "train.optimizer": "optim optimizer_type",
    "train.precision": "bf16 mixed_precision",
    "train.init_from": "initial_load_path pretrained_checkpoint",
    "train.keep_checkpoints": "keep_latest_k save_total_limit keep_last",
    "train.checkpoint_every": "save_interval save_steps",
    "train.eval_every": "eval_interval eval_steps",
    "train.log_every": "log_interval logging_steps log_freq",
    "train.learning_rate": "lr",
    "train.min_learning_rate": "min_lr",
    "train.steps": "train_iters max_steps",
    "train.clip_grad": "max_norm gradient_clipping max_grad_norm",
    "strategy.tp": "tensor_model_parallel_size tensor_parallel_degree tensor_parallel_size",
    "strategy.pp": "pipeline_model_parallel_size pipeline_parallel_degree pipeline_parallel_size",
    "strategy.dp": "data_parallel_replicate_degree data_parallel_size",
    "strategy.cp": "context_parallel_size context_parallel_degree",
    "strategy.ep": "expert_model_parallel_size expert_parallel_degree",
    "strategy.schedule": "pipeline_parallel_schedule",
    "strategy.virtual_stages": "virtual_pipeline_model_parallel_size",
}
PEERS = {f"{key.partition('.')[0]}.{name}": key for key, names in _PEERS.items() for name in names.split()}
"""Keys as Megatron-LM, torchtitan, DeepSpeed and Hugging Face call them, and as they are called here."""
VALUES = {
    ("strategy.overlap", "none"): "no-communication",
    ("strategy.overlap.tp", "none"): "no-communication",
    ("train.precision", "bf16"): "bf16-mixed",
    ("train.precision", "bfloat16"): "bf16-mixed",
    ("train.precision", "float32"): "fp32",
    ("train.optimizer", "AdamW"): "adamw",
    ("train.optimizer", "adam"): "adamw",
    ("train.optimizer", "Muon"): "muon",
    ("train.lr_decay_style", "WSD"): "wsd",
    ("train.lr_decay_style", "sqrt"): "inverse-square-root",
}
"""Of a job file, by key and value as earlier versions or others have it."""
QUANTITIES = {"p1": "batch_slices", "p2": "column_slices"}
"""Of a strategy, that constraints name."""
HINTS = {
    "train.micro_batch": "It counts the sequences of one data-parallel replica, no longer of all of them",
    "train.dtype": '"bf16" is "bf16-mixed" now: weights are kept in fp32 as well',
    "train.precision=bf16-mixed": 'Write "bf16-mixed": weights, gradients and moments are kept in fp32 as well',
    "strategy.overlap": 'It trains a wrong model, to measure with. Write "off" for communication that nothing hides',
}
"""What else is to be known of a key that was renamed, or of a value."""


def refuse_old_keys(values: Mapping[str, Any]) -> None:
    """Raise JobError for a key or a value of a job file that an earlier version knew, with what it is called
    now.

    >>> refuse_old_keys({"train": {"eps": 1e-8}})
    Traceback (most recent call last):
    plait.core.base.errors.JobError: train.eps: is called train.adam_eps now. Write adam_eps.
    """
    for old, new in KEYS.items():
        if _at(values, old) is not None:
            raise JobError(f"is called {new} now", key=old, fix=HINTS.get(old, f"Write {new.partition('.')[2]}"))
    for other, own in PEERS.items():
        if _at(values, other) is not None:
            raise JobError(f"is called {own} here", key=other, fix=f"Write {own.partition('.')[2]}")
    for (key, old), new in VALUES.items():
        if _at(values, key) == old:
            wrong = new == "no-communication"
            fix = HINTS["strategy.overlap"] if wrong else HINTS.get(f"{key}={new}", f'Write "{new}"')
            raise JobError(f'"{old}" is called "{new}" {"now" if wrong else "here"}', key=key, fix=fix)


def renamed(values: Mapping[str, Any]) -> dict[str, Any]:
    """Plain values of a job that an earlier version wrote, with names as they are now.

    >>> renamed({"train": {"eps": 1e-8}, "strategy": {"cp_kind": "ring", "slices": "auto"}})
    {'train': {'adam_eps': 1e-08}, 'strategy': {'slices': 'auto', 'cp_comm_type': 'ring'}}
    """
    found = _copied(values)
    for old, new in KEYS.items():
        table, _, name = old.rpartition(".")
        if _at(found, old) is not None:
            _put(found, new, _at(found, table).pop(name))
    for (key, old), new in VALUES.items():
        if _at(found, key) == old:
            _put(found, key, new)
    return found


def _copied(values: Any) -> Any:
    """Tables within tables, each another object."""
    if not isinstance(values, Mapping):
        return values
    return {key: _copied(value) for key, value in cast("Mapping[str, Any]", values).items()}


def _at(values: Any, key: str) -> Any:
    """What stands at a key with dots; None where nothing does."""
    for part in key.split("."):
        if not isinstance(values, Mapping):
            return None
        values = cast("Mapping[str, Any]", values).get(part)
    return values


def _put(values: dict[str, Any], key: str, value: Any) -> None:
    *tables, name = key.split(".")
    for table in tables:
        values = values.setdefault(table, {})
    values[name] = value
