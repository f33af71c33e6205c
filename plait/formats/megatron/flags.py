"""Megatron-LM's flags as table rows, shared by reader and writer. A new flag that equals a key of a
job is one more row of ``ROWS``.

Sources: ``megatron/training/arguments.py``, ``megatron/training/config`` and
``megatron/core/transformer/transformer_config.py`` at commit d98e8a64 (22 August 2026), and removed
flags that scripts still use.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from plait.formats.base.parsed_config import ParsedConfig, number, whole_number
from plait.formats.base.rows import ANY, Row, Table, count, part, share, switch

ROPE_ORIGINAL = {"low_freq_factor": 1, "high_freq_factor": 4, "original_max_positions": 8192}
"""Parameters that ``--use-rope-scaling`` assumes."""
LLAMA: Mapping[str, str | bool] = {
    "position-embedding-type": "rope", "normalization": "RMSNorm", "swiglu": True, "disable-bias-linear": True
}  # fmt: skip
"""Flags of the llama family; the gpt family has Megatron-LM's defaults instead."""
LATENT: Mapping[str, str] = {
    "q-lora-rank": "q_lora_rank", "kv-lora-rank": "kv_lora_rank", "qk-pos-emb-head-dim": "qk_rope_head_dim",
    "qk-head-dim": "head_size", "v-head-dim": "head_size",
}  # fmt: skip
"""A model's keys by the flags of multi-latent attention."""
SHARDED = {"optim": "zero1", "optim_grads": "zero2", "optim_grads_params": "fsdp", "no_shard": "ddp"}
"""Shardings by the value of ``--data-parallel-sharding-strategy``."""
TYPES = {
    "fp32": "fp32", "float32": "fp32", "torch.float32": "fp32", "bf16": "bf16", "bfloat16": "bf16", "fp16": "bf16",
    "torch.bfloat16": "bf16", "torch.float16": "bf16", "fp8": "fp8", "uint8": "fp8", "torch.uint8": "fp8",
}  # fmt: skip
"""Plait's dtypes by the dtype flags of the precision-aware optimizer."""
PRECISIONS: Mapping[str, Mapping[str, str | bool]] = {
    "fp32": {}, "bf16-mixed": {"bf16": True},
    "fp8": {"bf16": True, "fp8-format": "hybrid", "fp8-recipe": "delayed"},
    "mxfp8": {"bf16": True, "fp8-format": "hybrid", "fp8-recipe": "mxfp8"},
    "nvfp4": {"bf16": True, "fp4-format": "e2m1"},
}  # fmt: skip
"""Flags by a job's precision."""


def words(_: ParsedConfig, __: str, values: Sequence[str]) -> tuple[str, ...]:
    """Return all values of a flag."""
    return tuple(values)


def numbers(parsed: ParsedConfig, name: str, values: Sequence[str]) -> tuple[int, ...]:
    """Return all values of a flag as whole numbers. Raises JobError for other values."""
    return tuple(whole_number(parsed, name, one) for one in values)


def _switches(names: str, key: str = "") -> Iterator[Row]:
    return (part(name, key, switch, False) for name in names.split())


ROWS = (
    Row("tensor-model-parallel-size", "strategy.tp", count),
    Row("pipeline-model-parallel-size", "strategy.pp", count),
    Row("context-parallel-size", "strategy.cp", count),
    Row("micro-batch-size", "train.micro_batch_size", count),
    Row("global-batch-size", "train.global_batch_size", count),
    Row("seq-length", "data.sequence_length", count),
    Row("num-layers", "model.num_layers", count),
    Row("hidden-size", "model.hidden", count),
    Row("ffn-hidden-size", "model.ffn_hidden", count),
    Row("num-attention-heads", "model.num_heads", count),
    Row("max-position-embeddings", "model.max_sequence", count),
    Row("norm-epsilon", "model.norm_eps", share),
    Row("hidden-dropout", "model.dropout", share, 0.1),
    Row("attention-dropout", "model.attention_dropout", share, 0.1),
    Row("qk-layernorm", "model.qk_norm", switch, False),
    Row("add-qkv-bias", "model.qkv_bias", switch, False),
    Row("untie-embeddings-and-output-weights", "model.tied_embeddings", {True: False}, True),
    Row("num-experts", "model.experts.count", count),
    Row("moe-router-topk", "model.experts.per_token", count),
    Row("moe-ffn-hidden-size", "model.experts.ffn_hidden", count),
    Row("moe-shared-expert-gate", "model.experts.shared_gate", switch, False),
    Row("moe-expert-capacity-factor", "model.experts.capacity", number, 0.0),
    Row("expert-model-parallel-size", "strategy.ep", count, omitted=1),
    part("expert-tensor-parallel-size", "", count),
    Row("overlap-moe-expert-parallel-comm", "recipe.overlap_moe_expert_parallel_comm", switch, False),
    Row("sequence-parallel", "strategy.sequence_parallel", switch, False),
    Row("exp-avg-dtype", "recipe.exp_avg_dtype", TYPES, "fp32"),
    Row("exp-avg-sq-dtype", "recipe.exp_avg_sq_dtype", TYPES, "fp32"),
    Row("", "strategy.cuda_graphs", default=False, refusal="its graphs hold collectives, too"),
    Row("", "strategy.compile", default=False, refusal="its own fused kernels stand for it"),
    Row("", "shard.secondary", default=0, refusal="no second copy of parameters is kept"),
    Row("", "recipe.activation_offload_fraction", default=0.0, refusal="nothing is moved"),
    Row("", "recipe.vocabulary_parallel_stages", default=False, refusal="embedding and head stay at the ends"),
    Row("", "model.parallel_block", default=False, refusal="attention comes before the MLP"),
    Row("", "model.levels", default=0, refusal="its layers all have one length"),
    part("rampup-batch-size", "", numbers),
    part("step-batch-size-schedule"),
    part("kv-channels", "model.head_size", count),
    part("num-query-groups", "model.num_kv_heads", count),
    part("rotary-base", "model.rope_theta", share),
    part("rope-scaling-factor", "", number, 8.0),
    part("vocab-size", "model.vocab", count),
    part("padded-vocab-size", "model.vocab", count),
    part("make-vocab-size-divisible-by", "model.vocab", whole_number, 128),
    part("tokenizer-type", default=""),
    part("vocab-file", default=""),
    part("position-embedding-type", default="learned_absolute"),
    part("normalization", default="LayerNorm"),
    part("rope-type"),
    part("window-size", "model.window", words),
    part("window-attn-skip-freq", "", words, ()),
    part("q-lora-rank", "", whole_number, 0),
    part("kv-lora-rank", "", whole_number, 32),
    part("qk-pos-emb-head-dim", "", whole_number, 64),
    part("qk-head-dim", "", whole_number, 128),
    part("v-head-dim", "", whole_number, 128),
    part("moe-shared-expert-intermediate-size", "", whole_number),
    part("moe-layer-freq", "", words, ("1",)),
    part("moe-token-dispatcher-type", "recipe.moe_token_dispatcher", default="allgather"),
    part("moe-flex-dispatcher-backend"),
    part("cp-comm-type", "strategy.cp_comm_type", words, ("p2p",)),
    part("hierarchical-context-parallel-sizes", "strategy.cp_comm_type", numbers),
    part("ds-sequence-parallel-size", "strategy.cp", whole_number, 1),
    part("zero-stage", "strategy.shard", {"0": "ddp", "1": "zero1", "2": "zero2", "3": "fsdp"}),
    part("data-parallel-sharding-strategy", "strategy.shard", SHARDED),
    part("num-distributed-optimizer-instances", "strategy.shard", whole_number, 1),
    part("num-virtual-stages-per-pipeline-rank", "strategy.virtual_stages", count, 1),
    part("num-layers-per-virtual-pipeline-stage", "strategy.virtual_stages", count),
    part("pipeline-model-parallel-layout", "strategy.virtual_stages"),
    part("decoder-first-pipeline-num-layers", "", whole_number),
    part("decoder-last-pipeline-num-layers", "", whole_number),
    part("recompute-granularity", "strategy.recompute", {"full": "full", "selective": "selective"}, ""),
    part("recompute-method", "strategy.recompute", {"uniform": "uniform", "block": "block"}, ""),
    part("recompute-num-layers", "strategy.recompute", whole_number),
    part("recompute-modules", "strategy.recompute", words, ("core_attn",)),
    part("fp8-format", "train.precision"),
    part("fp8", "train.precision"),
    part("fp8-recipe", "train.precision", default="delayed"),
    part("fp4-format", "train.precision"),
    part("fp4-recipe", "train.precision", default="nvfp4"),
    part("optimizer", default="adam"),
    part("main-grads-dtype", "", TYPES, "fp32"),
    part("main-params-dtype", "", TYPES, "fp32"),
    part("optimizer-offload-fraction", "recipe.optimizer_offload_fraction", number, 1.0),
    part("attention-backend", default="auto"),
    part("transformer-impl", default=""),
    part("cross-entropy-fusion-impl", default="native"),
    part("nproc-per-node"),
    part("nnodes"),
    part("ckpt-format"),
    *_switches("bf16 fp16", "train.precision"),
    *_switches("use-distributed-optimizer use-megatron-fsdp use-torch-fsdp2", "strategy.shard"),
    *_switches("overlap-grad-reduce overlap-param-gather", "strategy.overlap"),
    *_switches("recompute-activations", "strategy.recompute"),
    *_switches("fp8-param-gather", "recipe.fp8_param_gather"),
    *_switches("grad-reduce-in-bf16", "recipe.grad_reduce_in_bf16"),
    *_switches("group-query-attention", "model.num_kv_heads"),
    *_switches(
        "optimizer-cpu-offload moe-enable-deepep swiglu disable-bias-linear use-rope-scaling "
        "accumulate-allreduce-grads-in-fp32 use-flash-attn squared-relu use-rotary-position-embeddings "
        "no-position-embedding no-overlap-p2p-communication account-for-embedding-in-pipeline-split "
        "account-for-loss-in-pipeline-split no-async-tensor-model-parallel-allreduce "
        "use-precision-aware-optimizer apply-layernorm-1p openai-gelu cross-entropy-loss-fusion "
        "decrease-batch-size-if-needed multi-latent-attention checkpoint-activations"
    ),
)
"""A row for each known flag. A flag that equals a key is one row for reader and writer. Other flags
are ``part`` rows, which ``read`` and ``emit`` combine into a key's value."""
_LAUNCH = """
node-rank master-addr master-port rdzv-id rdzv-backend rdzv-endpoint max-restarts tee log-dir role
local-ranks-filter standalone! redirects start-method local-addr monitor-interval no-python
"""
"""torchrun's own flags on the location of ranks."""
_UNMODELLED = """
tp-comm-overlap! tp-comm-overlap-cfg tp-comm-bootstrap-backend moe-permute-fusion!
moe-pad-expert-input-to-capacity! moe-use-legacy-grouped-gemm! moe-shared-expert-overlap! moe-router-fusion!
delay-wgrad-compute! overlap-cpu-optimizer-d2h-h2d use-torch-optimizer-for-cpu-offload cpu-offloading!
cpu-offloading-num-layers fine-grained-activation-offloading! offload-modules+ cuda-graph-impl
cuda-graph-scope+ cuda-graph-modules+ cuda-graph-warmup-steps enable-cuda-graph external-cuda-graph!
use-nccl-ub fsdp-double-buffer! microbatch-group-size-per-virtual-pipeline-stage
overlap-p2p-communication-warmup-flush overlap-param-gather-with-optimizer-step
no-gradient-accumulation-fusion no-bias-swiglu-fusion no-bias-gelu-fusion no-bias-dropout-fusion
no-rope-fusion no-masked-softmax-fusion no-persist-layer-norm fp8-margin fp8-amax-history-len
fp8-amax-compute-algo fp8-wgrad! no-fp8-wgrad fp8-interval first-last-layers-bf16!
num-layers-at-start-in-bf16 num-layers-at-end-in-bf16 reuse-grad-buf-for-mxfp8-param-ag!
outer-dp-sharding-strategy keep-fp8-transpose-cache! use-tp-pp-dp-mapping use-ring-exchange-p2p
cache-mla-latents! fp4-param-gather! muon-* mtp-*
"""
"""Flags that change time or memory, and are not in the prediction. A ``!`` marks flags without
value, a ``+`` flags with several values."""
_STEPS = """
train-iters train-samples train-sync-interval exit-interval exit-duration-in-mins exit-signal-handler!
exit-signal manual-gc! manual-gc-interval manual-gc-eval! empty-unused-memory-level iterations-to-skip+
skip-train! calculate-per-token-loss!
"""
_RATES = """
lr min-lr weight-decay start-weight-decay end-weight-decay weight-decay-incr-style no-weight-decay-cond-type
clip-grad adam-beta1 adam-beta2 adam-eps decoupled-lr decoupled-min-lr override-opt-param-scheduler!
use-checkpoint-opt-param-scheduler seed init-method-std init-method-xavier-uniform! initial-loss-scale
min-loss-scale loss-scale loss-scale-window hysteresis embedding-init-method-std adam-epsilon
no-decay-cond-type
"""
_DATA = """
data-path+ train-data-path+ valid-data-path+ test-data-path+ data-args-path per-split-data-args-path split
merge-file tokenizer-model tiktoken-pattern tiktoken-num-special-tokens tiktoken-special-tokens+
data-cache-path mock-data! num-workers num-dataset-builder-threads dataloader-type no-mmap-bin-files
no-create-attention-mask-in-dataloader create-attention-mask-in-dataloader! reset-position-ids
reset-attention-mask eod-mask-loss! data-impl vocab-extra-ids tokenizer-special-tokens tokenizer-metadata
trust-remote-code! object-storage-cache-path mid-level-dataset-surplus null-tokenizer-eod-id
dataloader-fast-cache-load! dataloader-defer-npy-index-mmap! s3-cache-path sft! no-shared-storage
"""
_LOGS = """
full-validation! log-interval log-params-norm log-throughput log-progress log-timers-to-tensorboard
log-memory-to-tensorboard log-validation-ppl-to-tensorboard log-num-zeros-in-grad
log-loss-scale-to-tensorboard log-learning-rate-to-tensorboard log-batch-size-to-tensorboard
log-world-size-to-tensorboard log-max-attention-logit log-energy log-device-memory-used log-straggler
no-log-loss-scale-to-tensorboard no-log-learning-rate-to-tensorboard log-memory-interval logging-level
timing-log-level timing-log-option no-one-logger profile! profile-step-start profile-step-end profile-ranks+
use-pytorch-profiler record-memory-history! memory-snapshot-path enable-experimental enable-one-logger
app-tag-run-name app-tag-run-version one-logger-async! runtime-time-unit config-logger-dir
"""
_CHECKPOINTS = """
verify-integrity! save load save-interval persistent-save-interval save-retain-interval no-save-optim
no-save-rng no-load-optim no-load-rng finetune! ckpt-fully-parallel-save! ckpt-fully-parallel-load!
no-ckpt-fully-parallel-save use-dist-ckpt async-save! auto-detect-ckpt-format! exit-on-missing-checkpoint!
use-checkpoint-args non-persistent-save-interval non-persistent-ckpt-type ckpt-assume-constant-structure!
use-persistent-ckpt-worker pretrained-checkpoint no-load-strict replication! dist-ckpt-save-pre-mcore-014!
override-ckpt-iteration use-mp-args-from-checkpoint-args no-use-tokenizer-model-from-checkpoint-args
"""
_PROGRAM = """
fsdp-manual-registration! init-model-with-meta-device! use-mcore-models use-legacy-models
distributed-backend distributed-timeout-minutes ddp-bucket-size ddp-num-buckets ddp-average-in-collective!
no-check-for-nan-in-loss-and-grad check-for-nan-in-loss-and-grad check-for-large-grads
overlap-p2p-communication align-param-gather! no-align-param-gather attention-softmax-in-fp32!
apply-query-key-layer-scaling! no-query-key-layer-scaling no-scatter-gather-tensors-in-pipeline local-rank
rank world-size lazy-mpu-init! inference-batch-times-seqlen-threshold deterministic-mode!
use-cpu-initialization perform-initialization! batch-p2p-communication! rotary-percent rotary-interleaved!
no-rope-freq+ no-masked-softmax pipeline-dtype te-rng-tracker! inference-rng-tracker!
distrib-optim-fully-reshardable-mem-efficient! nccl-communicator-config-path high-priority-stream-groups+
sharp-enabled-group rerun-mode error-injection-rate enable-ft-package calc-ft-timeouts!
fake-init-process-group! yaml-cfg ddp-pad-buckets-for-high-nccl-busbw! rotary-scaling-factor mscale
mscale-all-dim gradient-accumulation-fusion! masked-softmax-fusion! bias-swiglu-fusion! bias-gelu-fusion!
bias-dropout-fusion!
"""
_FAMILIES = "fim-* wandb-* tensorboard-* lr-* eval-* dist-ckpt-* ckpt-* ft-* inprocess-* one-logger-*"
_ROUTERS = """
moe-grouped-gemm! moe-router-load-balancing-type+ moe-aux-loss-coeff+ moe-z-loss-coeff
moe-router-score-function moe-router-pre-softmax! moe-router-num-groups moe-router-group-topk
moe-router-topk-scaling-factor moe-router-enable-expert-bias! moe-router-bias-update-rate moe-router-dtype
moe-input-jitter-eps moe-per-layer-logging! moe-router-force-load-balancing! moe-router-padding-for-fp8!
moe-router-padding-for-quantization! moe-token-drop-policy
"""
"""Flags that change a step's time and memory by no more than the prediction can resolve."""
RENAMED = {"layernorm-epsilon": "norm-epsilon", "use-custom-fsdp": "use-megatron-fsdp",
        "model-parallel-size": "tensor-model-parallel-size", "pad-vocab-size-to": "padded-vocab-size",
        "moe-expert-parallel-size": "expert-model-parallel-size"}  # fmt: skip
"""Present names by older names and by Megatron-DeepSpeed's names."""
_HARMLESS = " ".join((_LAUNCH, _STEPS, _RATES, _DATA, _LOGS, _CHECKPOINTS, _PROGRAM, _ROUTERS, _FAMILIES)).split()
SWITCHES = frozenset(row.name for row in ROWS if isinstance(row.default, bool) and row.name)
"""Known flags without a value."""
VALUELESS = SWITCHES | {name[:-1] for name in (*_HARMLESS, *_UNMODELLED.split()) if name.endswith("!")}
SEVERAL = {row.name for row in ROWS if row.kind in (words, numbers)} | {
    name[:-1] for name in (*_HARMLESS, *_UNMODELLED.split()) if name.endswith("+")
}
_ALONE_STARTS = ("no-", "log-", "use-", "overlap-", "enable-", "check-for-", "reset-")
_NOT_ALONE = ("log-dir", "log-interval", "log-memory-interval", "no-decay-cond-type", "no-rope-freq",
              "no-weight-decay-cond-type")  # fmt: skip
FLAGS = Table(
    rows=ROWS, unmodelled={name.rstrip("!+"): ANY for name in _UNMODELLED.split()},
    harmless=frozenset(name.rstrip("!+") for name in _HARMLESS), prefix="--",
)  # fmt: skip


def takes_none(name: str) -> bool:
    """True if a flag takes no value."""
    return name in VALUELESS or (name.startswith(_ALONE_STARTS) and name not in _NOT_ALONE)
