"""What other frameworks call a job's keys: one table, for errors, for ``plait job`` and for a page of the
documents.

Names are Megatron-LM's at commit d98e8a64 (August 2026, ``megatron/training/arguments.py``), torchtitan's of
2025 and 0.3.0 (``torchtitan/config``, ``torchtitan/models/llama3``), DeepSpeed's
(https://www.deepspeed.ai/docs/config-json/) and those of transformers 5 (``TrainingArguments``,
``config.json``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, cast


class Names(NamedTuple):
    """Names of one key, those of a framework with spaces between. others: of NeMo, vLLM, nanoGPT and older
    versions. write: what to write, where it is more than another name."""

    megatron: str = ""
    torchtitan: str = ""
    deepspeed: str = ""
    transformers: str = ""
    others: str = ""
    write: str = ""


PEERS: Mapping[str, Names] = {
    "model.family": Names(transformers="model_type"),
    "model.num_layers": Names("num-layers", "n_layers", transformers="num_hidden_layers n_layer"),
    "model.hidden": Names("hidden-size", "dim", transformers="hidden_size n_embd"),
    "model.num_heads": Names("num-attention-heads", "n_heads", transformers="num_attention_heads n_head"),
    "model.num_kv_heads": Names("num-query-groups", "n_kv_heads", transformers="num_key_value_heads"),
    "model.head_size": Names("kv-channels", transformers="head_dim"),
    "model.ffn_hidden": Names("ffn-hidden-size", "hidden_dim", transformers="intermediate_size n_inner"),
    "model.vocab": Names("vocab-size padded-vocab-size", "vocab_size", transformers="vocab_size"),
    "model.max_sequence": Names(
        "max-position-embeddings", "max_seq_len", transformers="max_position_embeddings n_positions",
        others="n_ctx",
    ),
    "model.norm_eps": Names("norm-epsilon layernorm-epsilon", transformers="rms_norm_eps layer_norm_epsilon"),
    "model.rope_theta": Names(
        "rotary-base", transformers="rope_parameters",
        write="Write rope_theta = BASE, and Llama 3's factors as a table rope_scaling",
    ),
    "model.dropout": Names(
        "hidden-dropout", transformers="resid_pdrop embd_pdrop",
        write="Write dropout: one probability for the residual stream and embeddings",
    ),
    "model.attention_dropout": Names("attention-dropout", transformers="attn_pdrop"),
    "model.tied_embeddings": Names(
        "untie-embeddings-and-output-weights", transformers="tie_word_embeddings",
        write="Write tied_embeddings = true or false",
    ),
    "model.qk_norm": Names("qk-layernorm"),
    "model.window": Names(
        "window-size", transformers="sliding_window use_sliding_window layer_types",
        write="Write window = TOKENS, and with full_first and full_every which layers attend to all",
    ),
    "model.full_first": Names(transformers="max_window_layers"),
    "model.experts": Names(
        "num-experts moe-router-topk moe-ffn-hidden-size", "num_experts",
        transformers="num_local_experts n_routed_experts num_experts_per_tok moe_intermediate_size n_shared_experts "
        "shared_expert_intermediate_size first_k_dense_replace decoder_sparse_step mlp_only_layers",
        write="Write experts = { count = N, per_token = K, ffn_hidden = SIZE }, and with shared, shared_ffn_hidden, "
        "first_dense and every what else differs",
    ),
    "data.text": Names("data-path", "dataset_path", write='Write text = "FILE", or sources with weights'),
    "data.tokenizer": Names("tokenizer-model", "hf_assets_path", transformers="tokenizer_name_or_path"),
    "data.sequence_length": Names("seq-length", "seq_len", transformers="max_length", others="max_context_length"),
    "train.global_batch_size": Names(
        "global-batch-size", "global_batch_size", "train_batch_size",
        "gradient_accumulation_steps", "batch_size total_batch_size",
        "Write global_batch_size: sequences of a step, of all replicas and micro-batches",
    ),
    "train.rampup_batch_size": Names(
        "rampup-batch-size", write="Write rampup_batch_size = { start = N, increment = N, samples = N }"
    ),
    "train.micro_batch_size": Names(
        "micro-batch-size", "local_batch_size", "train_micro_batch_size_per_gpu", "per_device_train_batch_size",
        write="Write micro_batch_size: sequences of one micro-batch of one data-parallel replica",
    ),
    "train.steps": Names("train-iters", transformers="max_steps", others="max_iters"),
    "train.tokens": Names(
        "train-samples", transformers="num_train_epochs", write="Write steps, or tokens: a budget, such as 2G"
    ),
    "train.learning_rate": Names("lr", "lr", "lr", "learning_rate"),
    "train.min_learning_rate": Names(
        "min-lr", "min_lr_factor", write="Write min_learning_rate: a rate, not a share of the highest"
    ),
    "train.warmup_steps": Names("lr-warmup-iters", "warmup_steps", "warmup_num_steps", "warmup_steps",
                                "warmup_iters num_warmup_steps"),
    "train.lr_decay_style": Names("lr-decay-style", "decay_type", "scheduler", "lr_scheduler_type", "lr_scheduler"),
    "train.lr_decay_steps": Names("lr-decay-iters", others="lr_decay_iters"),
    "train.lr_wsd_decay_steps": Names("lr-wsd-decay-iters"),
    "train.optimizer": Names("optimizer", transformers="optim", others="optimizer_type"),
    "train.weight_decay": Names("weight-decay", "weight_decay", "weight_decay", "weight_decay"),
    "train.adam_betas": Names(
        "adam-beta1 adam-beta2", "beta1 beta2", "betas", "adam_beta1 adam_beta2",
        write="Write adam_betas = [BETA1, BETA2]",
    ),
    "train.adam_eps": Names("adam-eps", transformers="adam_epsilon"),
    "train.clip_grad": Names("clip-grad", "max_norm", "gradient_clipping", "max_grad_norm"),
    "train.precision": Names(
        "bf16", "mixed_precision_param", "bf16", "bf16", "mixed_precision torch_dtype dtype",
        'Write precision = "bf16-mixed": weights, gradients and moments are kept in fp32 as well',
    ),
    "train.eval_every": Names("eval-interval", transformers="eval_steps"),
    "train.eval_batches": Names("eval-iters"),
    "train.checkpoint_every": Names("save-interval", transformers="save_steps"),
    "train.keep_checkpoints": Names(torchtitan="keep_latest_k", transformers="save_total_limit", others="keep_last"),
    "train.keep_every": Names("save-retain-interval"),
    "train.keep_best": Names(transformers="load_best_model_at_end"),
    "train.log_every": Names("log-interval", "log_freq", "steps_per_print", "logging_steps"),
    "train.init_from": Names("pretrained-checkpoint", "initial_load_path", transformers="model_name_or_path"),
    "run.folder": Names("save", "dump_folder", transformers="output_dir"),
    "strategy.tp": Names(
        "tensor-model-parallel-size", "tensor_parallel_degree", "autotp_size", others="tensor_parallel_size tp_size"
    ),
    "strategy.pp": Names(
        "pipeline-model-parallel-size", "pipeline_parallel_degree", others="pipeline_parallel_size pp_size"
    ),
    "strategy.dp": Names(
        torchtitan="data_parallel_replicate_degree data_parallel_shard_degree", others="data_parallel_size dp_size",
        write="Write dp: all replicas; strategy.shard says over how many of them what is sharded",
    ),
    "strategy.shard": Names(
        "use-distributed-optimizer use-megatron-fsdp data-parallel-sharding-strategy", "fsdp_reshard_after_forward",
        "zero_optimization", "fsdp", write='Write shard = "zero1", "zero2" or "fsdp"',
    ),
    "strategy.cp": Names(
        "context-parallel-size", "context_parallel_degree", "sequence_parallel_size", others="cp_size"
    ),
    "strategy.cp_comm_type": Names("cp-comm-type"),
    "strategy.ep": Names("expert-model-parallel-size", "expert_parallel_degree", others="ep_size"),
    "strategy.sequence_parallel": Names("sequence-parallel"),
    "strategy.schedule": Names(torchtitan="pipeline_parallel_schedule"),
    "strategy.virtual_stages": Names(
        "num-virtual-stages-per-pipeline-rank", others="virtual_pipeline_model_parallel_size"
    ),
    "strategy.recompute": Names(
        "recompute-granularity recompute-activations", "activation_checkpoint", "activation_checkpointing",
        "gradient_checkpointing", write='Write recompute = "full" or "selective"',
    ),
    "strategy.overlap": Names(
        "overlap-grad-reduce overlap-param-gather tp-comm-overlap", "enable_async_tensor_parallel", "overlap_comm",
        write='Write overlap = "domino", "fixed", "async" or "off", or a table of tp and shard',
    ),
    "strategy.compile": Names(transformers="torch_compile"),
    "strategy.cuda_graphs": Names("cuda-graph-impl enable-cuda-graph"),
    "strategy.reduce_dtype": Names(
        "grad-reduce-in-bf16", "mixed_precision_reduce", "communication_data_type", write='Write reduce_dtype = "bf16"'
    ),
}  # fmt: skip
"""By key. A name that is written as the key's own last part is there to be looked up; it is no mistake."""
VALUES: Mapping[tuple[str, str], str] = {
    ("train.precision", "bf16"): "bf16-mixed",
    ("train.precision", "bfloat16"): "bf16-mixed",
    ("train.precision", "float32"): "fp32",
    ("train.optimizer", "AdamW"): "adamw",
    ("train.optimizer", "adam"): "adamw",
    ("train.optimizer", "Adam"): "adamw",
    ("train.optimizer", "adamw_torch"): "adamw",
    ("train.optimizer", "adamw_torch_fused"): "adamw",
    ("train.optimizer", "Muon"): "muon",
    ("train.optimizer", "SGD"): "sgd",
    ("train.lr_decay_style", "WSD"): "wsd",
    ("train.lr_decay_style", "warmup_stable_decay"): "wsd",
    ("train.lr_decay_style", "constant_with_warmup"): "constant",
    ("train.lr_decay_style", "cosine_with_min_lr"): "cosine",
    ("train.lr_decay_style", "sqrt"): "inverse-square-root",
    ("train.lr_decay_style", "inverse_sqrt"): "inverse-square-root",
    ("train.lr_decay_style", "inverse_square_root"): "inverse-square-root",
}
"""By key and value as others have it."""
_PLAIN = {
    name.replace("-", "_"): key for key, row in PEERS.items() for names in row[:-1] for name in names.split()
}  # fmt: skip
"""Names with ``_`` throughout, and the key each means."""
_OPEN = ("recipe",)
"""Sections whose keys are other frameworks' on purpose."""


def key_of(name: str) -> str | None:
    """The key that another framework's name or flag means; None if it is none.

    >>> key_of("--tensor-model-parallel-size"), key_of("strategy.tensor_parallel_degree"), key_of("tp")
    ('strategy.tp', 'strategy.tp', None)
    """
    return _PLAIN.get(name.rpartition(".")[2].lstrip("-").replace("-", "_"))


def advice(own: str, section: str = "") -> str:
    """What to write for a key, for whoever wrote a peer's name into a section."""
    table, _, name = own.partition(".")
    said = PEERS[own].write or f"Write {name if table == section else own}"
    return said if table == section or own in said else f"{said}, in [{table}]"


def written(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Peers' names in a job's plain values, in whatever section or outside of any, and the keys that they
    mean.

    >>> list(written({"lr": 1, "training": {"seq-len": 2}, "train": {"weight_decay": 0}}))
    [('lr', 'train.learning_rate'), ('training.seq-len', 'data.sequence_length')]
    """
    for section, inner in values.items():
        found = [section]
        if section not in _OPEN and isinstance(inner, Mapping):
            found += [f"{section}.{name}" for name in cast("Mapping[str, Any]", inner)]
        for key in found:
            own = key_of(key)
            if own is not None and own != key:
                yield key, own
