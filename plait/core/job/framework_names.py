"""Names of a job's keys in other frameworks: one table, for errors, for ``plait job`` and for a
page of the documentation.

Names are those of Megatron-LM at commit d98e8a64 (August 2026, ``megatron/training/arguments.py``),
torchtitan of 2025 and 0.3.0 (``torchtitan/config``, ``torchtitan/models/llama3``), DeepSpeed
(https://www.deepspeed.ai/docs/config-json/) and transformers 5 (``TrainingArguments``,
``config.json``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, cast

from plait.core.base.errors import JobError
from plait.core.model.families import MODEL_TYPES
from plait.core.model.huggingface import without_a_key


class Names(NamedTuple):
    """Names of one key in other frameworks, separated by spaces. other_frameworks: names in NeMo,
    vLLM, nanoGPT and older versions. write: advice on what to write, if it is more than another
    name."""

    megatron: str = ""
    torchtitan: str = ""
    deepspeed: str = ""
    transformers: str = ""
    other_frameworks: str = ""
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
        other_frameworks="n_ctx",
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
    "model.qkv_bias": Names("add-qkv-bias"),
    "model.window": Names(
        "window-size", transformers="sliding_window use_sliding_window layer_types",
        write="Write window = TOKENS, and with full_first and full_every which layers attend to all",
    ),
    "model.full_first": Names(transformers="max_window_layers"),
    "model.experts": Names(
        "num-experts moe-router-topk moe-ffn-hidden-size", "num_experts",
        transformers="num_local_experts n_routed_experts num_experts_per_tok moe_intermediate_size n_shared_experts "
        "shared_expert_intermediate_size first_k_dense_replace decoder_sparse_step mlp_only_layers norm_topk_prob "
        "n_group topk_group routed_scaling_factor router_aux_loss_coef",
        write="Write experts = { count = N, per_token = K, ffn_hidden = SIZE }, and with shared, shared_ffn_hidden, "
        "first_dense, every, score_function, norm_topk_prob and balance_loss what else differs",
    ),
    "data.text": Names("data-path", "dataset_path", write='Write text = "FILE", or sources with weights'),
    "data.tokenizer": Names("tokenizer-model", "hf_assets_path", transformers="tokenizer_name_or_path"),
    "data.sequence_length": Names(
        "seq-length", "seq_len", transformers="max_length", other_frameworks="max_context_length"
    ),
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
    "train.steps": Names("train-iters", transformers="max_steps", other_frameworks="max_iters"),
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
    "train.lr_decay_steps": Names("lr-decay-iters", other_frameworks="lr_decay_iters"),
    "train.lr_wsd_decay_steps": Names("lr-wsd-decay-iters"),
    "train.optimizer": Names("optimizer", transformers="optim", other_frameworks="optimizer_type"),
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
    "train.keep_checkpoints": Names(
        torchtitan="keep_latest_k", transformers="save_total_limit", other_frameworks="keep_last"
    ),
    "train.keep_every": Names("save-retain-interval"),
    "train.keep_best": Names(transformers="load_best_model_at_end"),
    "train.log_every": Names("log-interval", "log_freq", "steps_per_print", "logging_steps"),
    "train.init_from": Names("pretrained-checkpoint", "initial_load_path", transformers="model_name_or_path"),
    "run.folder": Names("save", "dump_folder", transformers="output_dir"),
    "cluster.ranks": Names(deepspeed="num_gpus", other_frameworks="nproc_per_node world_size gpus"),
    "strategy.tp": Names(
        "tensor-model-parallel-size", "tensor_parallel_degree", "autotp_size",
        other_frameworks="tensor_parallel_size tp_size"
    ),
    "strategy.pp": Names(
        "pipeline-model-parallel-size", "pipeline_parallel_degree", other_frameworks="pipeline_parallel_size pp_size"
    ),
    "strategy.dp": Names(
        torchtitan="data_parallel_replicate_degree data_parallel_shard_degree",
        other_frameworks="data_parallel_size dp_size",
        write="Write dp: all replicas; strategy.shard says over how many of them what is sharded",
    ),
    "strategy.shard": Names(
        "use-distributed-optimizer use-megatron-fsdp data-parallel-sharding-strategy", "fsdp_reshard_after_forward",
        "zero_optimization", "fsdp", write='Write shard = "zero1", "zero2" or "fsdp"',
    ),
    "strategy.cp": Names(
        "context-parallel-size", "context_parallel_degree", "sequence_parallel_size", other_frameworks="cp_size"
    ),
    "strategy.cp_comm_type": Names("cp-comm-type"),
    "strategy.ep": Names("expert-model-parallel-size", "expert_parallel_degree", other_frameworks="ep_size"),
    "strategy.sequence_parallel": Names("sequence-parallel"),
    "strategy.schedule": Names(torchtitan="pipeline_parallel_schedule"),
    "strategy.virtual_stages": Names(
        "num-virtual-stages-per-pipeline-rank", other_frameworks="virtual_pipeline_model_parallel_size"
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
"""Names in other frameworks, by key of the job. A name equal to the key's own last part is there
for look-ups; it is no mistake."""
_HALF = ("fp16", "float16", "fp16-mixed", "16-mixed")
"""Precisions with loss scaling, which Plait does not have."""
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
"""Value of a job, by key and the value in other frameworks."""
_PLAIN = {
    name.replace("-", "_"): key for key, row in PEERS.items() for names in row[:-1] for name in names.split()
}  # fmt: skip
"""Key of a job, by another framework's name with ``_`` throughout."""
_OPEN = ("recipe", "slurm", "kubernetes")
"""Sections whose keys have other frameworks' names on purpose."""


def key_of(name: str) -> str | None:
    """Return the key that another framework's name or flag means; None for an unknown name.

    >>> key_of("--tensor-model-parallel-size"), key_of("strategy.tensor_parallel_degree"), key_of("tp")
    ('strategy.tp', 'strategy.tp', None)
    """
    return _PLAIN.get(name.rpartition(".")[2].lstrip("-").replace("-", "_"))


def advice(key: str, section: str = "") -> str:
    """Return what to write for the key ``key``. section: the section in which the user wrote
    another framework's name."""
    table, _, name = key.partition(".")
    said = PEERS[key].write or f"Write {name if table == section else key}"
    return said if table == section or key in said else f"{said}, in [{table}]"


def written(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield other frameworks' names in a job's plain values, in any section or outside of sections,
    with the keys that they mean.

    >>> list(written({"lr": 1, "training": {"seq-len": 2}, "train": {"weight_decay": 0}}))
    [('lr', 'train.learning_rate'), ('training.seq-len', 'data.sequence_length')]
    """
    for section, inner in values.items():
        found = [section]
        if section not in _OPEN and isinstance(inner, Mapping):  # a key says more than its table
            found = [f"{section}.{name}" for name in cast("Mapping[str, Any]", inner)] + found
        for key in found:
            own = key_of(key)
            if own is not None and own != key:
                yield key, own


# ---- refusals ----


def refuse_peers_names(values: Mapping[str, Any]) -> None:
    """Raise JobError for a key or a value of a job file that is another framework's; the error has
    Plait's name.

    >>> refuse_peers_names({"train": {"lr": 1e-8}})
    Traceback (most recent call last):
    plait.core.base.errors.JobError: train.lr: is called train.learning_rate here. Write learning_rate.
    """
    for other, own in written(values):
        fix = advice(own, other.rpartition(".")[0])
        raise JobError(f"is called {own} here", key=other, fix=f"{fix}{_as_a_config(values, other)}")
    model = values.get("model")
    for name in cast("Mapping[str, Any]", model) if isinstance(model, Mapping) else ():
        if why := without_a_key(name):
            fix = f"Leave it out{_as_a_config(values, f'model.{name}')}"
            raise JobError(f"is a key of config.json that {why}", key=f"model.{name}", fix=fix)
    train = values.get("train")
    precision = cast("Mapping[str, Any]", train).get("precision") if isinstance(train, Mapping) else None
    if precision in _HALF:
        problem = f'"{precision}" is not supported: its gradients need loss scaling'
        raise JobError(problem, key="train.precision", fix=_MIXED)
    for (key, theirs), own in VALUES.items():
        section, name = key.split(".")
        table = values.get(section)
        if isinstance(table, Mapping) and cast("Mapping[str, Any]", table).get(name) == theirs:
            fix = _MIXED if own == "bf16-mixed" else f'Write "{own}"'
            raise JobError(f'"{theirs}" is called "{own}" here', key=key, fix=fix)


_MIXED = 'Write "bf16-mixed": weights, gradients and moments are kept in fp32 as well'


def _as_a_config(values: Mapping[str, Any], key: str) -> str:
    """Return advice on reading a whole config.json, if the user wrote one of its keys into [model];
    else an empty text."""
    section, _, name = key.rpartition(".")
    own = key_of(name)
    theirs = without_a_key(name) or (own and name in PEERS[own].transformers.split())
    if section != "model" or not theirs or own == "model.experts" or "huggingface" in values["model"]:
        return ""
    return f'. A whole config.json ({", ".join(MODEL_TYPES)}) is read with huggingface = "FOLDER"'
