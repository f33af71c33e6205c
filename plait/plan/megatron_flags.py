"""Megatron-LM's flags, as data for both ways: what is emitted and what is read mean the same.

Read off ``megatron/training/arguments.py``, ``megatron/training/config`` and
``megatron/core/transformer/transformer_config.py`` at commit d98e8a64 (22 August 2026), with names that are
gone since and still stand in scripts.
"""

from __future__ import annotations

from collections.abc import Mapping

DEGREES: Mapping[str, str] = {
    "tensor-model-parallel-size": "strategy.tp",
    "pipeline-model-parallel-size": "strategy.pp",
    "context-parallel-size": "strategy.cp",
    "micro-batch-size": "train.micro_batch_size",
    "global-batch-size": "train.global_batch_size",
    "seq-length": "data.sequence_length",
}
"""Flags that are always emitted, and the job's keys that they say."""
SHAPES: Mapping[str, str] = {
    "num-layers": "num_layers", "hidden-size": "hidden", "ffn-hidden-size": "ffn_hidden",
    "num-attention-heads": "num_heads", "max-position-embeddings": "max_sequence", "norm-epsilon": "norm_eps",
    "hidden-dropout": "dropout", "attention-dropout": "attention_dropout",
}  # fmt: skip
"""The same of a model's shapes."""
MORE_SHAPES: Mapping[str, str] = {
    "kv-channels": "head_size", "num-query-groups": "num_kv_heads", "rotary-base": "rope_theta",
    "vocab-size": "vocab", "padded-vocab-size": "vocab",
}  # fmt: skip
"""Flags of shapes that are emitted where they differ from what others say."""
LATENT: Mapping[str, tuple[str, int]] = {
    "q-lora-rank": ("q_lora_rank", 0), "kv-lora-rank": ("kv_lora_rank", 32),
    "qk-pos-emb-head-dim": ("qk_rope_head_dim", 64), "qk-head-dim": ("head_size", 128),
    "v-head-dim": ("head_size", 128),
}  # fmt: skip
"""The same of latent attention, and what stands where they are missing."""
FRACTIONS = frozenset({"norm-epsilon", "hidden-dropout", "attention-dropout", "rotary-base"})
"""Flags whose values need not be whole."""
EXPERTS: Mapping[str, str] = {
    "num-experts": "model.experts.count", "moe-router-topk": "model.experts.per_token",
    "moe-ffn-hidden-size": "model.experts.ffn_hidden", "expert-model-parallel-size": "strategy.ep",
}  # fmt: skip
LLAMA: Mapping[str, str | bool] = {
    "position-embedding-type": "rope", "normalization": "RMSNorm", "swiglu": True, "disable-bias-linear": True
}  # fmt: skip
"""What the llama family says, and the gpt family leaves at Megatron-LM's defaults."""
ROPE_ORIGINAL = {"low_freq_factor": 1, "high_freq_factor": 4, "original_max_positions": 8192}
"""What ``--use-rope-scaling`` takes for granted."""
SHARDED: Mapping[str, str] = {"optim": "zero1", "optim_grads": "zero2", "optim_grads_params": "fsdp", "no_shard": "ddp"}
"""Values of ``--data-parallel-sharding-strategy``, and the sharding that they are."""
SHARDED_BY_STAGE = ("ddp", "zero1", "zero2", "fsdp")
"""The same of ``--zero-stage`` of Megatron-DeepSpeed."""
TYPES = {
    "fp32": "fp32",
    "float32": "fp32",
    "fp16": "bf16",
    "bf16": "bf16",
    "bfloat16": "bf16",
    "fp8": "fp8",
    "uint8": "fp8",
}
"""Types that a precision-aware optimizer is told, and what they are counted as."""
_SWITCHES = """
optimizer-cpu-offload overlap-moe-expert-parallel-comm moe-enable-deepep sequence-parallel
use-distributed-optimizer overlap-grad-reduce overlap-param-gather use-megatron-fsdp use-custom-fsdp
use-torch-fsdp2 bf16 fp16 group-query-attention swiglu untie-embeddings-and-output-weights qk-layernorm
disable-bias-linear use-rope-scaling recompute-activations grad-reduce-in-bf16
accumulate-allreduce-grads-in-fp32 use-flash-attn squared-relu use-rotary-position-embeddings
no-position-embedding no-overlap-p2p-communication account-for-embedding-in-pipeline-split
account-for-loss-in-pipeline-split no-async-tensor-model-parallel-allreduce use-precision-aware-optimizer
apply-layernorm-1p openai-gelu cross-entropy-loss-fusion add-qkv-bias fp8-param-gather decrease-batch-size-if-needed
multi-latent-attention checkpoint-activations
"""
SWITCHES = frozenset(_SWITCHES.split())
"""Flags without a value that are understood."""
_VALUES = """
optimizer step-batch-size-schedule cross-entropy-fusion-impl optimizer-offload-fraction fp4-recipe
moe-expert-capacity-factor moe-flex-dispatcher-backend moe-token-dispatcher-type fp8-recipe fp4-format
cp-comm-type hierarchical-context-parallel-sizes num-distributed-optimizer-instances
data-parallel-sharding-strategy num-virtual-stages-per-pipeline-rank num-layers-per-virtual-pipeline-stage
pipeline-model-parallel-layout recompute-granularity recompute-method recompute-num-layers recompute-modules
position-embedding-type normalization rope-scaling-factor window-size window-attn-skip-freq
decoder-first-pipeline-num-layers decoder-last-pipeline-num-layers attention-backend main-grads-dtype
main-params-dtype exp-avg-dtype exp-avg-sq-dtype fp8-format fp8 make-vocab-size-divisible-by moe-layer-freq
moe-shared-expert-intermediate-size expert-tensor-parallel-size rampup-batch-size vocab-file tokenizer-type
transformer-impl nproc-per-node nnodes layernorm-epsilon ckpt-format rope-type zero-stage
ds-sequence-parallel-size
"""
VALUES = frozenset({*_VALUES.split(), *LATENT})
"""Flags with a value that are understood, beside those of the tables above."""
_LAUNCH = """
node-rank master-addr master-port rdzv-id rdzv-backend rdzv-endpoint max-restarts tee log-dir role
local-ranks-filter standalone redirects start-method local-addr monitor-interval no-python
"""
LAUNCH = frozenset(_LAUNCH.split())
"""torchrun's own, which say where ranks are."""
_UNMODELLED = """
tp-comm-overlap tp-comm-overlap-cfg tp-comm-bootstrap-backend moe-permute-fusion
moe-pad-expert-input-to-capacity moe-use-legacy-grouped-gemm moe-shared-expert-overlap moe-router-fusion
delay-wgrad-compute overlap-cpu-optimizer-d2h-h2d use-torch-optimizer-for-cpu-offload cpu-offloading
cpu-offloading-num-layers fine-grained-activation-offloading offload-modules cuda-graph-impl cuda-graph-scope
cuda-graph-modules cuda-graph-warmup-steps enable-cuda-graph external-cuda-graph use-nccl-ub
fsdp-double-buffer microbatch-group-size-per-virtual-pipeline-stage overlap-p2p-communication-warmup-flush
overlap-param-gather-with-optimizer-step no-gradient-accumulation-fusion no-bias-swiglu-fusion
no-bias-gelu-fusion no-bias-dropout-fusion no-rope-fusion no-masked-softmax-fusion no-persist-layer-norm
fp8-margin fp8-amax-history-len fp8-amax-compute-algo fp8-wgrad no-fp8-wgrad fp8-interval
first-last-layers-bf16 num-layers-at-start-in-bf16 num-layers-at-end-in-bf16 reuse-grad-buf-for-mxfp8-param-ag
outer-dp-sharding-strategy keep-fp8-transpose-cache use-tp-pp-dp-mapping use-ring-exchange-p2p
cache-mla-latents fp4-param-gather
"""
UNMODELLED = frozenset(_UNMODELLED.split())
"""Known to change time or memory, and not in the prediction."""
UNMODELLED_STARTS = ("muon-", "mtp-")
"""Of families of such flags."""
_STEPS = """
train-iters train-samples train-sync-interval exit-interval exit-duration-in-mins exit-signal-handler
exit-signal manual-gc manual-gc-interval manual-gc-eval empty-unused-memory-level iterations-to-skip
skip-train calculate-per-token-loss
"""
_RATES = """
lr min-lr lr-decay-style lr-decay-iters lr-decay-samples lr-warmup-fraction lr-warmup-iters lr-warmup-samples
lr-warmup-init lr-wsd-decay-style lr-wsd-decay-iters lr-wsd-decay-samples weight-decay start-weight-decay
end-weight-decay weight-decay-incr-style no-weight-decay-cond-type clip-grad adam-beta1 adam-beta2 adam-eps
decoupled-lr decoupled-min-lr override-opt-param-scheduler use-checkpoint-opt-param-scheduler seed
init-method-std init-method-xavier-uniform initial-loss-scale min-loss-scale loss-scale loss-scale-window
hysteresis embedding-init-method-std adam-epsilon no-decay-cond-type
"""
_DATA = """
data-path train-data-path valid-data-path test-data-path data-args-path per-split-data-args-path split
merge-file tokenizer-model tiktoken-pattern tiktoken-num-special-tokens tiktoken-special-tokens
data-cache-path mock-data num-workers num-dataset-builder-threads dataloader-type no-mmap-bin-files
no-create-attention-mask-in-dataloader create-attention-mask-in-dataloader reset-position-ids
reset-attention-mask eod-mask-loss data-impl vocab-extra-ids tokenizer-special-tokens tokenizer-metadata
trust-remote-code object-storage-cache-path mid-level-dataset-surplus null-tokenizer-eod-id
dataloader-fast-cache-load dataloader-defer-npy-index-mmap s3-cache-path sft no-shared-storage
"""
_LOGS = """
eval-iters eval-interval full-validation log-interval log-params-norm log-throughput log-progress
log-timers-to-tensorboard log-memory-to-tensorboard log-validation-ppl-to-tensorboard log-num-zeros-in-grad
log-loss-scale-to-tensorboard log-learning-rate-to-tensorboard log-batch-size-to-tensorboard
log-world-size-to-tensorboard log-max-attention-logit log-energy log-device-memory-used log-straggler
no-log-loss-scale-to-tensorboard no-log-learning-rate-to-tensorboard log-memory-interval logging-level
timing-log-level timing-log-option tensorboard-dir tensorboard-log-interval tensorboard-queue-size
wandb-project wandb-exp-name wandb-save-dir wandb-entity one-logger-project one-logger-run-name no-one-logger
profile profile-step-start profile-step-end profile-ranks use-pytorch-profiler record-memory-history
memory-snapshot-path enable-experimental enable-one-logger app-tag-run-name app-tag-run-version
one-logger-async runtime-time-unit config-logger-dir
"""
_CHECKPOINTS = """
verify-integrity save load save-interval persistent-save-interval save-retain-interval no-save-optim
no-save-rng no-load-optim no-load-rng finetune ckpt-step ckpt-fully-parallel-save ckpt-fully-parallel-load
no-ckpt-fully-parallel-save use-dist-ckpt dist-ckpt-format dist-ckpt-strictness dist-ckpt-workers async-save
auto-detect-ckpt-format exit-on-missing-checkpoint use-checkpoint-args non-persistent-save-interval
non-persistent-ckpt-type ckpt-assume-constant-structure ckpt-convert-format ckpt-convert-save
use-persistent-ckpt-worker pretrained-checkpoint no-load-strict replication dist-ckpt-save-pre-mcore-014
override-ckpt-iteration use-mp-args-from-checkpoint-args no-use-tokenizer-model-from-checkpoint-args
"""
_PROGRAM = """
fsdp-manual-registration init-model-with-meta-device use-mcore-models use-legacy-models distributed-backend
distributed-timeout-minutes ddp-bucket-size ddp-num-buckets ddp-average-in-collective
no-check-for-nan-in-loss-and-grad check-for-nan-in-loss-and-grad check-for-large-grads
overlap-p2p-communication align-param-gather no-align-param-gather attention-softmax-in-fp32
apply-query-key-layer-scaling no-query-key-layer-scaling no-scatter-gather-tensors-in-pipeline
local-rank rank world-size lazy-mpu-init inference-batch-times-seqlen-threshold
deterministic-mode use-cpu-initialization perform-initialization batch-p2p-communication rotary-percent
rotary-interleaved no-rope-freq no-masked-softmax pipeline-dtype te-rng-tracker inference-rng-tracker
distrib-optim-fully-reshardable-mem-efficient nccl-communicator-config-path
high-priority-stream-groups sharp-enabled-group rerun-mode error-injection-rate enable-ft-package
calc-ft-timeouts fake-init-process-group yaml-cfg ddp-pad-buckets-for-high-nccl-busbw
rotary-scaling-factor mscale mscale-all-dim
gradient-accumulation-fusion masked-softmax-fusion bias-swiglu-fusion bias-gelu-fusion bias-dropout-fusion
"""
_ROUTERS = """
moe-grouped-gemm moe-router-load-balancing-type moe-aux-loss-coeff moe-z-loss-coeff moe-router-score-function
moe-router-pre-softmax moe-router-num-groups moe-router-group-topk moe-router-topk-scaling-factor
moe-router-enable-expert-bias moe-router-bias-update-rate moe-router-dtype moe-input-jitter-eps
moe-per-layer-logging moe-router-force-load-balancing moe-router-padding-for-fp8
moe-router-padding-for-quantization moe-token-drop-policy
"""
HARMLESS = frozenset(" ".join((_STEPS, _RATES, _DATA, _LOGS, _CHECKPOINTS, _PROGRAM, _ROUTERS)).split())
"""What changes neither a step's time nor its memory by more than the prediction knows."""
HARMLESS_STARTS = (
    "fim-",
    "wandb-",
    "tensorboard-",
    "lr-",
    "eval-",
    "dist-ckpt-",
    "ckpt-",
    "ft-",
    "inprocess-",
    "one-logger-",
)
"""Of families of such flags."""
UNDERSTOOD = frozenset({*DEGREES, *SHAPES, *MORE_SHAPES, *EXPERTS, *SWITCHES, *VALUES})
"""Flags that are read."""
SAME = {"layernorm-epsilon": "norm-epsilon", "use-custom-fsdp": "use-megatron-fsdp",
        "model-parallel-size": "tensor-model-parallel-size", "pad-vocab-size-to": "padded-vocab-size",
        "moe-expert-parallel-size": "expert-model-parallel-size"}  # fmt: skip
"""Older names, and Megatron-DeepSpeed's."""
_ALONE = """
align-param-gather apply-query-key-layer-scaling async-save attention-softmax-in-fp32 auto-detect-ckpt-format
batch-p2p-communication bias-dropout-fusion bias-gelu-fusion bias-swiglu-fusion cache-mla-latents
calc-ft-timeouts calculate-per-token-loss ckpt-assume-constant-structure ckpt-fully-parallel-load
ckpt-fully-parallel-save cpu-offloading create-attention-mask-in-dataloader dataloader-defer-npy-index-mmap
dataloader-fast-cache-load ddp-average-in-collective ddp-pad-buckets-for-high-nccl-busbw delay-wgrad-compute
deterministic-mode dist-ckpt-save-pre-mcore-014 distrib-optim-fully-reshardable-mem-efficient eod-mask-loss
exit-on-missing-checkpoint exit-signal-handler external-cuda-graph fake-init-process-group
fine-grained-activation-offloading finetune first-last-layers-bf16 fp4-param-gather fp8-wgrad
fsdp-double-buffer fsdp-manual-registration full-validation gradient-accumulation-fusion
inference-rng-tracker init-method-xavier-uniform init-model-with-meta-device keep-fp8-transpose-cache
lazy-mpu-init manual-gc manual-gc-eval masked-softmax-fusion mock-data moe-grouped-gemm
moe-pad-expert-input-to-capacity moe-per-layer-logging moe-permute-fusion moe-router-enable-expert-bias
moe-router-force-load-balancing moe-router-fusion moe-router-padding-for-fp8
moe-router-padding-for-quantization moe-router-pre-softmax moe-shared-expert-overlap
moe-use-legacy-grouped-gemm one-logger-async override-opt-param-scheduler perform-initialization profile
record-memory-history replication reuse-grad-buf-for-mxfp8-param-ag rotary-interleaved sft skip-train
standalone te-rng-tracker tp-comm-overlap trust-remote-code verify-integrity
"""
ALONE = SWITCHES | frozenset(_ALONE.split())
_ALONE_STARTS = ("no-", "log-", "use-", "overlap-", "enable-", "check-for-", "reset-")
_NOT_ALONE = ("log-dir", "log-interval", "log-memory-interval", "no-decay-cond-type", "no-rope-freq",
              "no-weight-decay-cond-type")  # fmt: skip
_SEVERAL = """
cp-comm-type cuda-graph-modules cuda-graph-scope data-path train-data-path valid-data-path test-data-path
hierarchical-context-parallel-sizes high-priority-stream-groups iterations-to-skip moe-aux-loss-coeff
moe-layer-freq moe-router-load-balancing-type no-rope-freq offload-modules profile-ranks rampup-batch-size
recompute-modules tiktoken-special-tokens window-attn-skip-freq
"""
SEVERAL = frozenset(_SEVERAL.split())
"""Flags with several values."""


def known_flag(name: str) -> bool:
    """Whether a flag is read, or known not to be."""
    known = UNDERSTOOD | UNMODELLED | HARMLESS | LAUNCH | SAME.keys()
    return name in known or name.startswith((*UNMODELLED_STARTS, *HARMLESS_STARTS))


def takes_none(name: str) -> bool:
    """Whether a flag has no value."""
    return name in ALONE or (name.startswith(_ALONE_STARTS) and name not in _NOT_ALONE)


BRIDGE: Mapping[str, str] = {
    "virtual_pipeline_model_parallel_size": "num-virtual-stages-per-pipeline-rank", "gated_linear_unit": "swiglu",
    "layernorm_epsilon": "norm-epsilon", "seq_length": "seq-length", "rope_scaling": "use-rope-scaling",
    "qk_layernorm": "qk-layernorm", "num_moe_experts": "num-experts",
}  # fmt: skip
"""Names of Megatron-Bridge's recipes that are not a flag's with ``_`` for ``-``."""
PUBLISHED: Mapping[str, str] = {
    "meta-llama/Meta-Llama-3-8B": "llama3-8b", "meta-llama/Llama-3.1-8B": "llama3-8b",
    "meta-llama/Meta-Llama-3.1-8B": "llama3-8b", "meta-llama/Meta-Llama-3-70B": "llama3-70b",
    "meta-llama/Llama-3.1-70B": "llama3-70b", "meta-llama/Meta-Llama-3.1-70B": "llama3-70b",
    "meta-llama/Llama-3.1-405B": "llama3-405b", "meta-llama/Meta-Llama-3.1-405B": "llama3-405b",
    "meta-llama/Llama-2-7b-hf": "llama2-7b", "Qwen/Qwen3-8B": "qwen3-8b", "Qwen/Qwen3-30B-A3B": "qwen3-30b-a3b",
    "Qwen/Qwen3-235B-A22B": "qwen3-235b-a22b", "mistralai/Mixtral-8x7B-v0.1": "mixtral-8x7b",
    "mistralai/Mistral-7B-v0.1": "mistral-7b",
}  # fmt: skip
"""Names on Hugging Face of models that have a preset."""
